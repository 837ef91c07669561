"""Training from Python: in processes of their own, with metrics as in the file, and errors in one line."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import verl_ext
from tests.lib.errors import refused
from tests.lib.training import SMALL, metrics, small_run, wait_for
from verl_ext.checkpoint.layout import EXPORT_MARKER

pytestmark = pytest.mark.slow


@pytest.fixture
def options(tiny_model, tmp_path, monkeypatch):
    """Return the options of a small run, and enter a folder that holds neither its data nor the package."""
    words = small_run(tmp_path, tiny_model, [20, 30, 40, 50] * 4, *SMALL)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("PYTHONPATH", str(Path(verl_ext.__file__).parent.parent))
    given = dict(word.split("=", 1) for word in words)
    data = {"train_dir": given.pop("data.train_dir"), "max_tokens": 64, "train_batch_size": 4, "num_workers": 0}
    trainer = {"default_local_dir": Path("run"), "total_training_steps": 3, "save_freq": 2}
    return {"data": data, "model.path": tiny_model, "parallel": "cpu", "nproc": 1, "trainer": trainer, "optim.lr": 1e-2}


def test_a_run_has_the_metrics_of_its_file_and_its_checkpoints_and_exports_them(options, monkeypatch, capfd):
    best = {"data.val_dir": options["data"]["train_dir"], "checkpoint.keep_best": "val/loss", "trainer.test_freq": 2}
    run = verl_ext.train({**options, **best, "nproc": 2})  # the next test trains on one rank
    folder = Path("run").absolute()
    printed = capfd.readouterr().out
    assert "2 × CPU" in printed
    assert "step 3/3" in printed  # the console, beside the file
    logged = metrics(folder)
    assert {(step, name): value for (name, step), value in run.metrics.unstack().dropna().items()} == logged
    assert run.metrics.index.tolist() == sorted({step for step, _ in logged})
    assert [path.name for path in run.checkpoints] == ["global_step_2", "global_step_3"]
    assert run.newest == folder / "global_step_3"
    assert run.best == (folder / "best").resolve()
    monkeypatch.chdir("/")  # the run is found from any folder
    assert verl_ext.TrainedRun(run.folder).metrics.equals(run.metrics)
    exported = run.export(folder.parent / "exported", checkpoint=run.checkpoints[0], dtype="bfloat16")
    assert "step 2: " in capfd.readouterr().out
    assert (exported / EXPORT_MARKER).is_file()


SCRIPT = """
import json, os, signal, sys, threading, verl_ext
options = json.load(sys.stdin)
def state():
    return [signal.getsignal(number) for number in signal.valid_signals()], os.getcwd(), dict(os.environ)
before = state()
try:
    verl_ext.train(options)
except KeyboardInterrupt:
    print("interrupted")
assert state() == before
assert threading.active_count() == 1
assert not {"torch", "verl", "transformers"} & sys.modules.keys()
"""


def test_an_interrupt_of_the_callers_group_saves_and_ends_the_ranks_and_the_caller_stays_as_it_was(options, tmp_path):
    options["trainer"] |= {"total_training_steps": 100_000, "save_freq": -1, "default_local_dir": "run"}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    process.stdin.write(json.dumps(options, default=str))
    process.stdin.close()
    wait_for(lambda: Path("run/metrics.jsonl").is_file() and metrics(Path("run")))
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(200) == 0, process.stderr.read()
    assert process.stdout.read().splitlines()[-1] == "interrupted"
    (checkpoint,) = verl_ext.TrainedRun("run").checkpoints
    steps = verl_ext.TrainedRun("run").metrics.index
    assert checkpoint.name == f"global_step_{steps[-1]}"
    assert steps[-1] < 100_000


@pytest.mark.parametrize(
    ("key", "value", "things"),
    [
        ("optim.lrr", 1, ["optim.lrr", "nearest: optim.lr"]),  # the trainer's line
        ("data.max_tokens", 32, ["data.max_tokens", "nested", "dotted"]),
        ("optim.lr", object(), ["optim.lr", "got object"]),
        ("optim lr", 1, ["dotted names", "optim lr"]),
    ],
)
def test_a_mistake_in_the_options_raises_its_line_alone(options, key, value, things):
    with refused(*things) as raised:
        verl_ext.train({**options, key: value})

    assert isinstance(raised.value, verl_ext.CommandError)
    assert raised.value.code == 2
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__ or raised.value.__context__ is None
    assert not Path("run").exists()


def test_a_run_without_metrics_and_a_failed_export_say_so_in_one_line(tmp_path):
    run = verl_ext.TrainedRun(tmp_path)
    assert (run.checkpoints, run.newest, run.best) == ([], None, None)
    with refused(run.folder, "metrics.jsonl", "trainer.logger=[file]"):
        run.metrics  # noqa: B018
    with refused("checkpoint", tmp_path, error=verl_ext.CommandError) as raised:
        run.export(tmp_path / "out")
    assert raised.value.code == 1


def test_the_package_is_imported_without_what_takes_long():
    heavy = "{'torch', 'verl', 'transformers', 'pandas', 'numpy', 'hydra', 'subprocess'}"
    code = f"import verl_ext, sys; print({heavy} & sys.modules.keys()); verl_ext.train; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["set()", "False"]
