"""bAbI's own files: the forms of all 20 tasks become samples in the same words; malformed files raise one line."""

import json
import signal
from pathlib import Path

import pytest

from tests.lib.babilong_files import FORMS, byte_tokenizer, write_forms
from tests.lib.babilong_tokenizers import byte_level
from tests.lib.errors import names, refused
from verl_ext.data import BABILongDataset
from verl_ext.data.families.babilong_answers import TASK_LABELS, is_right_answer
from verl_ext.options import UsageError
from verl_ext.tools.babilong import command
from verl_ext.tools.babilong.babi import TASKS, read_samples


@pytest.fixture(autouse=True)
def _in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)


@pytest.mark.parametrize("plain_names", [False, True], ids=["en", "en-valid"])
def test_every_question_is_a_sample_of_the_facts_before_it(tmp_path: Path, plain_names: bool) -> None:
    write_forms(tmp_path, "valid", plain_names)
    for task, form in FORMS.items():
        expected, facts = [], []
        for line in form.split("|"):
            text, *rest = line.split("\t")
            if rest:
                expected.append((facts.copy(), text, rest[0]))
            else:
                facts.append(text)
        assert [tuple(sample) for sample in read_samples(str(tmp_path), task, "valid")] == expected * 2


def test_samples_of_all_tasks_are_written_loaded_and_scored(tmp_path: Path) -> None:
    write_forms(tmp_path / "en")
    tokenizer = byte_level()
    tokenizer.save_pretrained(tmp_path / "model")
    output = tmp_path / "out"
    arguments = [f"output_dir={output}", f"model.path={tmp_path / 'model'}", f"stories={tmp_path / 'en'}", "samples=2"]
    assert command.main([*arguments, f"tasks=[{','.join(TASKS)}]", "sizes=[0k,600]", "num_workers=1"]) == 0
    for task in TASKS:
        known = {(" ".join(facts), *asked) for facts, *asked in read_samples(str(tmp_path / "en"), task, "train")}
        assert {tuple(row.values()) for row in json.loads((output / task / "0k.json").read_text())} <= known
        for row in json.loads((output / task / "600.json").read_text()):
            assert len(tokenizer(row["input"])["input_ids"]) == 300
        for _, question, target in known:
            assert is_right_answer(target, target, question, task) is (target != "none")
            assert is_right_answer(target, target, question, task, words=True)
            assert all(each in TASK_LABELS[task] for each in target.split(",")) or target in TASK_LABELS[task]
    rows = BABILongDataset(str(output), byte_tokenizer(), 800, train_ratio=1.0)
    assert len(rows) == 20 * 2 * 2
    assert {rows.question(number).category for number in range(len(rows))} == {
        f"{task}_{size}" for task in TASKS for size in ("0k", "600")
    }


@pytest.mark.parametrize(
    ("lines", "thing"),
    [
        (["1 A fact.", "3 Another."], "line 2"),
        (["1 A fact.", "No number."], "'No number.'"),
        (["1 Where? \thome\t1"], "line 1"),
        *((["1 A fact.", f"2 {rest}"], "line 2") for rest in ("Where?\t \t1", "Where?\thome\tone", "")),
        *((lines, "questions") for lines in (["1 A fact."], [])),
    ],
)
def test_a_malformed_file_is_one_line_with_its_place(tmp_path: Path, lines: list[str], thing: str) -> None:
    (tmp_path / "qa1_train.txt").write_text("\n".join(lines), encoding="utf-8")
    with refused("stories", tmp_path / "qa1_train.txt", thing, error=UsageError):
        read_samples(str(tmp_path), "qa1", "train")


def test_a_missing_file_two_of_one_task_and_other_encodings_are_refused(tmp_path: Path) -> None:
    with refused("stories", "qa1_*_test.txt", "qa1_test.txt", tmp_path, error=UsageError):
        read_samples(str(tmp_path), "qa1", "test")
    (tmp_path / "qa1_test.txt").write_bytes(b"1 Caf\xe9.")
    with refused(tmp_path / "qa1_test.txt", "byte 5", error=UsageError):
        read_samples(str(tmp_path), "qa1", "test")
    (tmp_path / "qa1_other_test.txt").touch()
    with refused("stories", "qa1_other_test.txt, qa1_test.txt", error=UsageError):
        read_samples(str(tmp_path), "qa1", "test")


def test_more_samples_than_questions_fit_are_refused_before_any_is_written(tmp_path, capsys):
    write_forms(tmp_path / "en")
    byte_level().save_pretrained(tmp_path / "model")
    arguments = [f"output_dir={tmp_path / 'out'}", f"model.path={tmp_path / 'model'}", f"stories={tmp_path / 'en'}"]
    assert command.main([*arguments, "tasks=[qa1,qa4]", "samples=4"]) == 2
    assert names(capsys.readouterr().err.splitlines()[-1], "samples", 2, "qa4's file")
    assert not (tmp_path / "out").exists()
