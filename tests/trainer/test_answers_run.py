"""Runs that are evaluated by answers: metrics, the table, resumes, and unchanged training."""

import json
import os

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.lib.errors import names
from tests.lib.ranks import in_turn, run_ranks
from tests.lib.tiny_model import VOCABULARY
from tests.lib.tokenized_data import random_documents, write_tokenized
from tests.lib.training import differences, fit, heard, into, metrics, refusals, stopped_at, train_alone

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
def runs(options, tmp_path_factory):
    """Return the folder of a run on two ranks that share every pack, one without answers, and one that resumes it."""
    whole, without, resumed = (tmp_path_factory.mktemp("runs") / name for name in ("whole", "without", "resumed"))
    shared = [*options, "parallel=ulysses2", "trainer.device=cpu"]
    silent = [*(word for word in shared if not word.startswith("eval.")), "trainer.val_before_train=false"]
    shared += ["checkpoint.keep_best=val/answer", "trainer.length_bins=[5,6]"]
    calls = [(train_alone, [*shared, into(whole)]), (train_alone, [*silent, into(without)])]
    run_ranks(in_turn, 2, [*calls, (stopped_at, whole, resumed, 2), (train_alone, [*shared, into(resumed)])])
    return whole, without, resumed


def test_the_checkpoint_of_the_best_score_is_linked_over_a_resume_too(runs):
    scores = {step: score for (step, name), score in metrics(runs[0]).items() if name == "val/answer" and step}
    best = max(scores, key=scores.__getitem__)  # the first of equal ones
    assert os.readlink(runs[0] / "best") == os.readlink(runs[2] / "best") == f"global_step_{best}"


def test_scores_before_training_are_those_of_plain_generation_and_a_validation_comes_then_too(runs):
    found = metrics(runs[0])
    assert found[0, "val/answer/even"] == 1.0
    assert found[0, "val/answer/odd"] == 0.0
    assert found[0, "val/answer"] == pytest.approx(4 / 7)
    assert {step for step, name in found if name == "val/answer"} == {0, 1, 2, 3, 4}
    assert {step for step, name in found if name == "val/loss"} == {0, 2, 4}
    assert {"val/maths_loss", "val/code_loss"} & {name for step, name in found if step == 0}


def test_scores_by_length_are_those_of_the_prompts_of_so_many_tokens(runs, tiny_model):
    """Before training, every second prompt is answered as expected."""
    tokenizer, by_bin = AutoTokenizer.from_pretrained(tiny_model), {"0_5": [], "5_6": [], "6_inf": []}
    for number, question in enumerate(QUESTIONS):
        chat = [{"role": "user", "content": question}]
        length = len(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"])
        by_bin["0_5" if length <= 5 else "5_6" if length <= 6 else "6_inf"].append(number % 2 == 0)
    assert all(by_bin.values())
    found = metrics(runs[0])
    for name, scores in by_bin.items():
        assert found[0, f"val/answer_{name}"] == sum(scores) / len(scores)


def test_the_table_has_a_few_prompts_of_all_parts_of_the_file(runs):
    rows = _rows(runs[0])
    assert [row["step"] for row in rows] == [step for step in range(STEPS + 1) for _ in range(3)]
    first = rows[0]
    assert "w1 w2 w3" in first["prompt"]
    assert (first["answer"], first["score"], first["category"]) == (first["expected"], 1.0, "even")
    assert ["w4 w4" in row["prompt"] for row in rows[:3]] == [False, True, False]


def test_training_is_the_same_to_the_last_bit_without_answers(runs):
    whole, without, _ = runs
    assert not [name for name in differences(without, whole, STEPS) if not name.startswith("val/")]
    assert not (without / "answers.jsonl").exists()


def test_a_resumed_run_gives_the_same_answers_and_repeats_no_line(runs):
    whole, _, resumed = runs
    assert _rows(resumed) == _rows(whole)
    assert not differences(resumed, whole, STEPS)


def _train_and_hear(options, folder):
    """Return rank 0's stderr in a run that writes tensorboard files into a folder."""
    os.environ["TENSORBOARD_DIR"] = str(folder)
    return heard(fit, options)


def _texts(folder):
    """Return the texts in tensorboard's files."""
    events = [event for file in folder.iterdir() for event in EventFileLoader(str(file)).Load()]
    values = [value.tensor for event in events for value in event.summary.value]
    return [text.decode() for value in values for text in value.string_val]


def test_trackers_get_the_table_and_a_scorer_that_fails_is_a_warning(options, tmp_path):
    own = tmp_path / "own.py"
    own.write_text("def picky(record, answer):\n    return len(record['answer']) / (record['question'] != 'w40')\n")
    run = [*options, into(tmp_path / "run"), "eval.freq=null", "trainer.logger=[file,tensorboard]"]
    scored = [*options, into(tmp_path / "scored"), "eval.freq=null", f"eval.score={own}:picky"]
    calls = [(_train_and_hear, given, tmp_path / "tensorboard") for given in (run, scored)]
    (_, of_scored), _ = run_ranks(in_turn, 2, calls)
    assert any("w1 w2 w3" in text for text in _texts(tmp_path / "tensorboard"))
    assert names(of_scored, f"eval.score={own}:picky", "ZeroDivisionError")
    assert not [name for _, name in metrics(tmp_path / "scored") if name.startswith("val/answer")]


def test_a_mistake_ends_the_run_before_the_model_is_loaded(options, tmp_path):
    changes = [["eval.prompts=none.jsonl"], ["eval.max_new_tokens=600"]]
    (of_prompts, of_tokens) = refusals([*options, into(tmp_path)], changes)
    assert names(of_prompts, "eval.prompts", "none.jsonl")
    assert names(of_tokens, "eval.max_new_tokens", 600)
