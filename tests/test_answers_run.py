"""Runs that are evaluated by answers: metrics, the table, resumes, a server, and a training that stays as it is."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.answer_server import answer_server
from tests.ranks import run_ranks
from tests.tiny_model import VOCABULARY
from tests.tokenized_data import random_documents, write_tokenized
from tests.training import differences, metrics, stopped_at, train_alone
from verl_ext.config import compose
from verl_ext.trainer.setup import prepare

pytestmark = pytest.mark.slow

STEPS = 4
QUESTIONS = ("w1 w2 w3", "w9", "w4 w4 w4 w4 w4", "w7 w8", "w30 w31", "w40", "w50 w51 w52")


def _plain_answer(folder, question):
    """What plain transformers says to a question."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chat = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    given = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0, "do_sample": False, "max_new_tokens": 5}
    output = model.generate(**ids, **given)[0, ids["input_ids"].shape[1] :]
    return tokenizer.decode(output, skip_special_tokens=True)


@pytest.fixture(scope="module")
def options(tiny_model, tmp_path_factory):
    """Overrides of a run with prompts, of which every second has the untrained model's own answer."""
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
    """The folder of a run on two ranks that share every pack."""
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


def test_a_server_answers_in_the_models_place_and_its_end_is_a_warning(options, tmp_path, capfd):
    asked = []

    def answer(body):
        asked.append(body["messages"][-1]["content"])
        return "w0"

    with answer_server(answer, ("small",)) as (url, _):
        given = [*options, f"trainer.default_local_dir={tmp_path}", f"eval.base_url={url}", "eval.freq=null"]
        run_ranks(train_alone, 2, [*given, "trainer.logger=[file,tensorboard]"])
    found = metrics(tmp_path)
    assert found[STEPS, "val/answer/odd"] == 1.0
    assert sorted(asked) == sorted(2 * QUESTIONS)  # before step 1 and at the end


def _refusal(options):
    try:
        prepare(compose(["parallel=cpu", *options]))
    except SystemExit:
        return "ended"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("eval.prompts=none.jsonl", "eval.prompts must name files that exist"),
        ("eval.max_new_tokens=600", "eval.max_new_tokens must be at most"),
        ("eval.base_url=http://127.0.0.1:9/v1", "eval.base_url must be a server that answers"),
    ],
)
def test_a_mistake_ends_the_run_before_the_model_is_loaded(given, line, options, tmp_path, capfd):
    wrong = [*options, f"trainer.default_local_dir={tmp_path}", given]
    assert run_ranks(_refusal, 1, wrong) == ["ended"]
    assert line in capfd.readouterr().err
