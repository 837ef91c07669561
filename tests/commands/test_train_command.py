"""`verl-ext train` tokenizes once into a cache, keeps the trainer's overrides, and finds mistakes before long work."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lib.errors import names
from tests.lib.ranks import run_ranks
from tests.lib.tiny_model import init_model
from tests.lib.training import metrics, train_as_programs
from verl_ext.__main__ import main
from verl_ext.commands import train
from verl_ext.launch.run import run_torchrun
from verl_ext.overrides import Item

pytestmark = pytest.mark.slow

SMALL = ("parallel=cpu", "data.max_tokens=64", "data.over_length=split", "data.train_batch_size=2")
SMALL += ("data.num_workers=0", "optim.lr=1e-3")
SHORT = ("trainer.total_training_steps=2", "trainer.default_local_dir=run", "trainer.logger=[console,file]")
SOURCES = "data.sources={gsm8k:train.jsonl,code:code.json}"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with train.jsonl, code.json and MODEL, whose tokenizer is trained on them."""
    folder = tmp_path_factory.mktemp("train")
    sums = [{"question": f"What is {i} + {i}?", "answer": f"It is {2 * i}."} for i in range(40)]
    (folder / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in sums))
    (folder / "code.json").write_text(json.dumps([{"text": f"print({i})"} for i in range(30)]))
    init_model(folder, map(str, sums))
    return folder


@pytest.fixture
def folder(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a copy of the inputs, and enter it."""
    shutil.copytree(inputs, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return a list of torchrun's arguments for each run, which trains nothing."""
    lines: list[list[str]] = []

    def run_torchrun(arguments: Sequence[str], work: Callable[[], None], **_: Sequence[str]) -> int:
        work()
        lines.append(list(arguments))
        return 0

    monkeypatch.setattr(train, "run_torchrun", run_torchrun)
    return lines


def value_of(key: str, line: list[str]) -> str:
    (found,) = [word.partition("=")[2] for word in line if word.startswith(f"{key}=")]
    return found


def written(folder: Path) -> set[Path]:
    return set((folder / "cache").iterdir()) if (folder / "cache").is_dir() else set()


def error_of(capfd: pytest.CaptureFixture[str]) -> str:
    """Return the only line of an error."""
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


COMMAND = ("train", SOURCES, "model.path=MODEL", "data.cache_dir=cache", "num_workers=1", "nproc=1", *SMALL, *SHORT)


def test_a_second_run_tokenizes_nothing_until_a_file_or_an_option_changes(folder, started, monkeypatch):
    assert main(COMMAND) == 0
    files = written(folder)
    with monkeypatch.context() as patch:
        patch.setattr(train, "write_dataset", None)  # fails if anything is tokenized
        assert main([*COMMAND, "data.strategy=none"]) == 0
    assert written(folder) == files
    first, second = (value_of("data.train_dir", line) for line in started)
    assert first == second
    assert json.loads(Path(first, "categories.json").read_text()) == {"1": "gsm8k", "2": "code"}
    assert main([*COMMAND, "turns=last"]) == 0
    (folder / "code.json").write_text(json.dumps([{"text": "print()"}]))
    assert main(COMMAND) == 0
    names = [value_of("data.train_dir", line) for line in started]
    assert len({*names}) == 3
    report = json.loads(Path(names[-1], "report.json").read_text())
    assert report["categories"]["code"]["documents"] == 1
    assert "output_dir" not in report["options"]  # equal data has equal reports


def test_overrides_reach_the_trainer_word_for_word_and_those_of_tokenize_do_not(folder, started):
    own = ["loss=sequence", "optim.lr=1e-3", "loss.category_weights={code: 2}"]
    validation = ["data.val_sources={gsm8k:train.jsonl}", "sample=10", "trainer.test_freq=1"]
    assert main([*COMMAND, *own, *validation]) == 0
    ((*torchrun, train_dir, val_dir), overrides) = started[0][:7], started[0][7:]
    assert torchrun == [*torchrun[:2], "--nproc_per_node=1", "-m", "verl_ext.fsdp_sft_trainer"]
    assert (train_dir.partition("=")[0], val_dir.partition("=")[0]) == ("data.train_dir", "data.val_dir")
    assert overrides == ["model.path=MODEL", *SMALL, *SHORT, *own, "trainer.test_freq=1"]
    reports = [json.loads(Path(word.partition("=")[2], "report.json").read_text()) for word in (train_dir, val_dir)]
    assert [report["total"]["records"] for report in reports] == [20, 40]  # samples come from the training data


def test_a_folder_with_a_comma_is_one_value_of_every_command(folder, started, capfd):
    words = [word for word in COMMAND if not word.startswith("data.cache_dir")]
    assert main([*words, "data.cache_dir='ca,che'"]) == 0
    (word,) = [word for word in started[0] if word.startswith("data.train_dir")]
    place = Item.read(word).parsed()
    assert Path(place).parent.name == "ca,che"
    assert Path(place, "report.json").is_file()
    (command,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("  verl-ext tokenize")]
    assert place in [item.parsed() for item in map(Item.read, shlex.split(command)[2:])]


def test_a_share_of_the_sources_is_the_validation_data(folder, started, monkeypatch):
    assert main([*COMMAND, "data.val_share=0.2", "trainer.test_freq=1"]) == 0
    train_dir, val_dir = (Path(value_of(key, started[0])) for key in ("data.train_dir", "data.val_dir"))
    assert (train_dir.name, val_dir.name, train_dir.parent) == ("train", "val", val_dir.parent)
    reports = [json.loads((each / "report.json").read_text())["total"]["records"] for each in (train_dir, val_dir)]
    assert sum(reports) == 70
    assert reports[1] > 0
    assert not [word for word in started[0] if "val_share" in word]
    # The option by the name that `tokenize` gives it is the same one; another share is another folder.
    with monkeypatch.context() as patch:
        patch.setattr(train, "write_dataset", None)  # fails if anything is tokenized
        assert main([*COMMAND, "val_share=0.2"]) == 0
    assert main([*COMMAND, "data.val_share=0.3"]) == 0
    assert main([*COMMAND, "data.val_share=0.3", "deduplicate=true"]) == 0
    assert main([*COMMAND, "data.val_share=null"]) == 0
    places = [value_of("data.train_dir", line) for line in started]
    assert places[0] == places[1]
    assert len({*places}) == 4
    assert "data.val_dir" not in str(started[-1])


def test_a_system_prompt_by_category_serves_validation_sources_of_fewer_categories(folder, started):
    texts = ["system={gsm8k: 'It is \"one\"', code: two}", "data.val_sources={gsm8k: train.jsonl}"]
    assert main([*COMMAND, *texts]) == 0
    report = json.loads(Path(value_of("data.val_dir", started[0]), "report.json").read_text())
    assert report["options"]["system"] == {"gsm8k": 'It is "one"'}
    assert report["total"]["default_system"] == 40


def test_training_data_alone_is_trained_on_as_it_is(folder: Path, started: list[list[str]]) -> None:
    given = ["data.train_dir=data/train", "data.cache_dir=cache", "model.path=MODEL", "optim.lr=1e-3"]
    assert main(["train", "nproc=2", *given]) == 0
    assert "--nproc_per_node=2" in started[0]
    assert started[0][-4:] == given


@pytest.mark.parametrize(
    ("words", "things"),
    [
        (["data.sources={gsm8k:none.jsonl}"], ["data.sources.gsm8k", "none.jsonl"]),
        (["data.val_sources={gsm8k:none.jsonl}"], ["data.val_sources.gsm8k", "none.jsonl"]),
        (["data.sources=train.jsonl"], ["data.sources={train:train.jsonl}", "got train.jsonl"]),
        (["turns=lst"], ["turns", "nearest: last"]),
        (["max_tokens=8"], ["max_tokens", "data.max_tokens and data.over_length"]),
        (["sample={cod: 3}"], ["sample.cod", "gsm8k, code"]),
        (["data.train_dir=data/train"], ["data.train_dir", "data.sources"]),
        (["backend=ray"], ["backend", "local", "got ray"]),
        (["data.val_share=1.5"], ["data.val_share", 1.5]),
        (["val_share=0"], ["data.val_share", "got 0"]),
        (["data.val_share=0.1", "data.val_dir=data/val"], ["data.val_dir", "data.val_share", "data.val_dir=data/val"]),
        (["data.val_share=0.1", "data.val_sources={a:b.jsonl}"], ["data.val_sources", "data.val_share", "b.jsonl"]),
        (["system={cod: x}"], ["system.cod", "gsm8k, code"]),
        (["model.path="], ["model.path", "got nothing"]),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_tokenized(folder, started, capfd, words, things):
    given = {word.partition("=")[0] for word in words}
    kept = [word for word in COMMAND if word.partition("=")[0] not in given]
    assert main([*kept, *words]) == 2
    assert names(error := error_of(capfd), *things), error
    assert not started
    assert not written(folder)


def test_a_share_without_sources_is_refused(folder, started, capfd):
    words = ["data.train_dir=data/train", "data.val_share=0.1", "model.path=MODEL", "optim.lr=1"]
    assert main(["train", "nproc=1", *words]) == 2
    assert names(error_of(capfd), "data.val_share", "data.sources", 0.1)
    assert not started


def test_a_share_that_holds_out_nothing_ends_the_run_before_a_model_is_loaded(folder, started, capfd):
    assert main([*COMMAND, "data.val_share=1e-9"]) == 1
    assert names(error_of(capfd), "data.val_share", 1e-9, "0 of 70")
    assert not started
    assert not [path for path in written(folder) if path.is_dir()]


def test_a_run_validates_on_the_records_that_were_held_out(folder: Path, started: list[list[str]]) -> None:
    place = f"trainer.default_local_dir={folder / 'run'}", f"model.path={folder / 'MODEL'}", f"data.cache_dir={folder}"
    assert main([*COMMAND, "data.val_share=0.2", "trainer.test_freq=1", *place]) == 0
    run_ranks(train_as_programs, 1, started)
    found = metrics(folder / "run")
    assert {(2, "val/loss"), (2, "val/gsm8k_loss"), (2, "val/code_loss")} <= found.keys()


@pytest.mark.parametrize(
    ("words", "things"),
    [
        (["loss.category_weights={cod: 2}", "nproc=2"], ["loss.category_weights", "nearest: code"]),
        (["data=pretrain"], ["data.sources", "text records"]),
    ],
)
def test_a_mistake_that_the_ranks_find_interrupts_the_tokenizing(folder, capfd, monkeypatch, words, things):
    def endless(*_: Any) -> None:
        for _ in range(1800):
            time.sleep(0.1)
        pytest.fail("not interrupted")

    monkeypatch.setattr(train, "write_dataset", endless)
    given = {word.partition("=")[0] for word in words}
    with pytest.raises(SystemExit) as ended:
        main([*(word for word in COMMAND if word.partition("=")[0] not in given), *words])
    assert ended.value.code == 2
    assert names(error := error_of(capfd), *things), error
    assert not [path for path in written(folder) if path.is_dir()]


def test_ranks_that_wait_for_data_end_silently_with_a_mistake_in_it(folder, capfd):
    (folder / "train.jsonl").write_text("{}\n")
    assert main(COMMAND) == 1
    heard = capfd.readouterr()
    assert [line for line in heard.err.splitlines() if "Traceback" in line or "SIG" in line] == []
    (error,) = [line for line in heard.err.splitlines() if line.startswith("error: ")]
    assert "train.jsonl" in error
    assert "step 1/" not in heard.out
    assert not Path("run").exists()


@pytest.mark.parametrize("how", ["sources change", "interrupted"])
def test_changed_sources_are_refused_and_an_interrupted_tokenization_leaves_nothing(
    folder, started, monkeypatch, capfd, how
):
    original = train.write_dataset

    def changes(*arguments: Any) -> Any:
        report = original(*arguments)
        (folder / "code.json").write_text(json.dumps([{"text": "print()"}]))
        return report

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    if how == "interrupted":
        monkeypatch.setattr("verl_ext.commands.tokenize.Report.as_dict", interrupted)  # after the shards
    else:
        monkeypatch.setattr(train, "write_dataset", changes)
    assert main(COMMAND) == (130 if how == "interrupted" else 1)
    assert how == "interrupted" or names(error_of(capfd), "data.sources", "change")
    assert not [path for path in written(folder) if path.is_dir()]
    assert not started


def test_the_printed_commands_and_the_runs_own_file_give_the_run_that_it_trains(folder: Path) -> None:
    binaries = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    line = [sys.executable, "-m", "verl_ext", *COMMAND]
    done = subprocess.run(line, env=binaries, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    commands = [text.strip() for text in done.stdout.splitlines() if text.startswith(("  verl-ext", "  torchrun"))]
    assert [shlex.split(command)[0] for command in commands] == ["verl-ext", "torchrun"]
    shutil.move("run", "whole")
    for command in commands:
        subprocess.run(shlex.split(command), env=binaries, check=True, capture_output=True, timeout=400)
    shutil.move("run", "by_commands")
    (folder.parent / "elsewhere").mkdir()
    again = [sys.executable, "-m", "verl_ext", "train", str(folder / "whole" / "run.yaml")]
    subprocess.run(again, env=binaries, check=True, capture_output=True, timeout=400, cwd=folder.parent / "elsewhere")
    runs = [
        {key: value for key, value in metrics(Path(name)).items() if key[1].endswith("loss")}
        for name in ("whole", "by_commands", "run")
    ]
    assert (2, "train/code_loss") in runs[0]
    assert runs[0] == runs[1] == runs[2]
    files = [yaml.safe_load(Path(name, "run.yaml").read_text()) for name in ("whole", "run", "by_commands")]
    assert files[0] == files[1]
    assert "sources" not in files[2]["data"]


def test_a_dry_run_prints_commands_and_the_whole_configuration_and_starts_nothing(folder, started, capsys):
    assert main([*COMMAND, "nproc=2", "optim.lr=3e-5", "dry_run=true"]) == 0
    printed = capsys.readouterr().out
    config = yaml.safe_load(printed.partition("\n")[2].partition("Nothing was started")[0])
    assert (config["data"]["max_tokens"], float(config["optim"]["lr"])) == (64, 3e-5)
    assert "  torchrun --standalone --local_addr=127.0.0.1 --nproc_per_node=2" in printed
    assert main([*COMMAND, "optim.lrr=1", "dry_run=true"]) == 2
    assert names(capsys.readouterr().err, "optim.lrr")
    assert not started
    assert not written(folder)


RANK = """
import json, os, signal, sys, time
from pathlib import Path
launcher = json.loads(os.environ["VERL_EXT_LAUNCHER"])
folder = Path(launcher["folder"])
if sys.argv[1] == "code":
    sys.exit(int(sys.argv[2]) if os.environ["RANK"] == "1" else 0)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if os.environ["RANK"] == "0":
    os.kill(launcher["pid"], signal.SIGINT)
while not (folder / "stop").exists():
    time.sleep(0.05)
(folder / "unfinished").touch()
"""


@pytest.mark.parametrize(
    ("words", "code", "said"), [(["code", "2"], 2, None), (["killed"], 137, "SIGKILL"), (["stopped"], 75, "SIGINT")]
)
def test_torchrun_ends_with_the_code_of_its_ranks_and_without_a_report(tmp_path, capfd, words, code, said):
    """A rank's code is passed on; a killed rank is named; a request reaches the ranks by their file."""
    (tmp_path / "rank.py").write_text(RANK)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        line = ["--standalone", "--local_addr=127.0.0.1", "--nproc_per_node=2", str(tmp_path / "rank.py"), *words]
        assert run_torchrun(line, lambda: None) == code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    error = capfd.readouterr().err
    assert "Traceback" not in error
    assert "ChildFailedError" not in error
    assert said is None or said in error
