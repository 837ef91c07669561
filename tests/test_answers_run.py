"""Runs that are evaluated by answers: metrics, the table, resumes, a server, and unchanged training."""

import contextlib
import io
import json
import os

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.answer_server import answer_server
from tests.ranks import run_ranks
from tests.tiny_model import VOCABULARY
from tests.tokenized_data import random_documents, write_tokenized
from tests.training import build, differences, metrics, stopped_at, train_alone
from verl_ext.config import compose
from verl_ext.trainer.setup import prepare

pytestmark = pytest.mark.slow

STEPS = 4
QUESTIONS = ("w1 w2 w3", "w9", "w4 w4 w4 w4 w4", "w7 w8", "w30 w31", "w40", "w50 w51 w52")


def _plain_answer(folder, question):
    """Return plain transformers' answer to a question."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chat = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    given = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0, "do_sample": False, "max_new_tokens": 5}
    output = model.generate(**ids, **given)[0, ids["input_ids"].shape[1] :]
    return tokenizer.decode(output, skip_special_tokens=True)


@pytest.fixture(scope="module")
def options(tiny_model, tmp_path_factory):
    """Return overrides of a run with prompts, every second of which expects the untrained model's own answer."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    write_tokenized(folder / "train", random_documents(rng, [40] * 16, VOCABULARY, 2), {1: "maths", 2: "code"})
    write_tokenized(folder / "val", random_documents(rng, [20] * 5, VOCABULARY, 2), {1: "maths", 2: "code"})
    lines = []
    for number, question in enumerate(QUESTIONS):
        answer = "w0" if number % 2 else _plain_answer(tiny_model, question) or "w0"
        record = {"question": question, "answer": answer, "kind": "even" if number % 2 == 0 else "odd"}
        lines.append(json.dumps(record))
    (folder / "asked.jsonl").write_text("\n".join(lines))
    return [
        *(f"data.train_dir={folder / 'train'}", f"data.val_dir={folder / 'val'}", f"model.path={tiny_model}"),
        *(f"trainer.total_training_steps={STEPS}", "trainer.total_epochs=9", "trainer.save_freq=2"),
        *("trainer.test_freq=2", "trainer.max_ckpt_to_keep=null"),
        *(f"eval.prompts={folder / 'asked.jsonl'}", "eval.category_field=kind", "eval.freq=1"),
        *("eval.max_new_tokens=5", "eval.batch_size=2", "eval.table_rows=3"),
    ]


def _rows(folder):
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(options, tmp_path_factory):
    """Return the folder of a run on two ranks that share every pack."""
    folder = tmp_path_factory.mktemp("whole")
    run_ranks(
        train_alone, 2, [*options, f"trainer.default_local_dir={folder}", "parallel=ulysses2", "trainer.device=cpu"]
    )
    return folder


def test_scores_before_training_are_those_of_plain_generation(whole):
    found = metrics(whole)
    assert found[0, "val/answer/even"] == 1.0
    assert found[0, "val/answer/odd"] == 0.0
    assert found[0, "val/answer"] == pytest.approx(4 / 7)
    assert {step for step, name in found if name == "val/answer"} == {0, 1, 2, 3, 4}


def test_a_validation_comes_before_the_first_step(whole):
    found = metrics(whole)
    assert {step for step, name in found if name == "val/loss"} == {0, 2, 4}
    assert {"val/maths_loss", "val/code_loss"} & {name for step, name in found if step == 0}


def test_the_table_has_a_few_prompts_of_all_parts_of_the_file(whole):
    rows = _rows(whole)
    assert [row["step"] for row in rows] == [step for step in range(STEPS + 1) for _ in range(3)]
    first = rows[0]
    assert "w1 w2 w3" in first["prompt"]
    assert (first["answer"], first["score"], first["category"]) == (first["expected"], 1.0, "even")
    assert ["w4 w4" in row["prompt"] for row in rows[:3]] == [False, True, False]


def test_training_is_the_same_to_the_last_bit_without_answers(options, whole, tmp_path):
    run_ranks(
        train_alone,
        2,
        [
            *(option for option in options if not option.startswith("eval.")),
            *(f"trainer.default_local_dir={tmp_path}", "parallel=ulysses2", "trainer.device=cpu"),
            "trainer.val_before_train=false",
        ],
    )
    differing = [name for name in differences(tmp_path, whole, STEPS) if not name.startswith("val/")]
    assert not differing
    assert not (tmp_path / "answers.jsonl").exists()


def test_a_resumed_run_gives_the_same_answers_and_repeats_no_line(options, whole, tmp_path):
    stopped = stopped_at(whole, tmp_path / "stopped", 2)
    again = [*options, f"trainer.default_local_dir={stopped}", "parallel=ulysses2", "trainer.device=cpu"]
    run_ranks(train_alone, 2, again)
    assert _rows(stopped) == _rows(whole)
    assert not differences(stopped, whole, STEPS)


def _train_and_hear(options, folder):
    """Return rank 0's stderr in a run that writes tensorboard files into a folder."""
    os.environ["TENSORBOARD_DIR"] = str(folder)
    with contextlib.redirect_stderr(io.StringIO()) as heard:
        trainer = build(options)
        trainer.resume()
        trainer.fit()
    return heard.getvalue()


def _texts(folder):
    """Return the texts in tensorboard's files."""
    events = [event for file in folder.iterdir() for event in EventFileLoader(str(file)).Load()]
    values = [value.tensor for event in events for value in event.summary.value]
    return [text.decode() for value in values for text in value.string_val]


def test_a_server_answers_in_the_models_place_and_its_failure_is_a_warning(options, tmp_path):
    asked = []

    def answer(body):
        asked.append(body["messages"][-1]["content"])
        if len(asked) == len(QUESTIONS):
            served.clear()
        return "w0"

    served = ["small"]
    with answer_server(answer, served) as (url, _):
        given = [*options, f"trainer.default_local_dir={tmp_path / 'run'}", f"eval.base_url={url}", "eval.freq=null"]
        given += ["trainer.logger=[file,tensorboard]", "parallel=cpu"]
        heard, _ = run_ranks(_train_and_hear, 2, given, tmp_path / "tensorboard")
    assert sorted(asked) == sorted(QUESTIONS)
    found = metrics(tmp_path / "run")
    assert found[0, "val/answer/odd"] == 1.0
    assert (STEPS, "val/answer") not in found
    assert f"warning: step {STEPS} has no val/answer: eval.model must be a model of the server" in heard
    assert any("w1 w2 w3" in text and "w0" in text for text in _texts(tmp_path / "tensorboard"))


def test_a_scorer_that_fails_on_one_rank_is_a_warning(options, tmp_path):
    (tmp_path / "own.py").write_text(
        "def picky(record, answer):\n    return len(record['answer']) / (record['question'] != 'w40')\n"
    )
    given = [*options, f"trainer.default_local_dir={tmp_path / 'run'}", f"eval.score={tmp_path / 'own.py'}:picky"]
    heard, _ = run_ranks(_train_and_hear, 2, [*given, "eval.freq=null"], tmp_path)
    assert "picky must give a number; got ZeroDivisionError" in heard
    assert not [name for _, name in metrics(tmp_path / "run") if name.startswith("val/answer")]


def _refusal(options):
    """Return the stderr of a run that ends while it is prepared."""
    with contextlib.redirect_stderr(io.StringIO()) as heard, pytest.raises(SystemExit):
        prepare(compose(["parallel=cpu", *options]))
    return heard.getvalue()


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("eval.prompts=none.jsonl", "eval.prompts must name files that exist"),
        ("eval.max_new_tokens=600", "eval.max_new_tokens must be at most"),
        ("eval.base_url=http://127.0.0.1:9/v1", "eval.base_url must be a server that answers"),
    ],
)
def test_a_mistake_ends_the_run_before_the_model_is_loaded(given, line, options, tmp_path):
    (heard,) = run_ranks(_refusal, 1, [*options, f"trainer.default_local_dir={tmp_path}", *given.split()])
    assert line in heard
