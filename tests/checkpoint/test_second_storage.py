"""`trainer.default_hdfs_dir`: a copy of each checkpoint in its own folder, and what happens where it cannot be made."""

import os
import stat
from pathlib import Path

import fsspec
import pytest

from tests.lib.errors import names, refused
from tests.lib.ranks import in_turn, run_ranks
from tests.lib.training import fit, heard, into, small_run
from verl_ext.checkpoint.copies import SecondStorage
from verl_ext.checkpoint.layout import Checkpoint

CLIENT = """#!/bin/sh
echo "$@" >> {log}
test "$2" = "{failing}" && echo "WARN native library" >&2 && echo "mkdir: Permission denied: user=me" >&2 && exit 1
folder=$(echo "$4" | sed 's|hdfs://host||')
case "$2" in
    -mkdir) mkdir -p "{root}$folder";;
    -test) test $3 = -e -a -e "{root}$folder" -o $3 = -w;;
    -rm) rm -r "{root}$folder";;
    -put) cp -r "$4" "{root}$(echo "$5" | sed 's|hdfs://host||')/";;
esac
"""


def checkpoint(folder: Path, step: int, *names: str) -> Path:
    path = folder / f"global_step_{step}"
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(f"{name} of {step}")
    return path


@pytest.fixture
def client(tmp_path, monkeypatch):
    """Return a function that puts a client of Hadoop on PATH, for a store below tmp_path/store."""

    def install(failing: str = "nothing") -> Path:
        path = tmp_path / "bin" / "hdfs"
        path.parent.mkdir(exist_ok=True)
        path.write_text(CLIENT.format(log=tmp_path / "log", failing=failing, root=tmp_path / "store"))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
        return tmp_path / "store"

    return install


@pytest.mark.parametrize("kind", ["path", "file", "hdfs", "memory"])
def test_each_checkpoint_is_copied_into_its_own_folder_and_again_without_old_files(kind, client, tmp_path):
    store = client()
    place = {"path": str(store / "a" / "b"), "file": f"file://{store}/a/b", "hdfs": "hdfs://host/a/b/"}.get(
        kind, f"memory://{tmp_path}/a/b"
    )
    storage = SecondStorage(place)
    storage.check(tmp_path / "run")
    own = tmp_path / "run"
    storage.put(checkpoint(own, 1, "manifest.json", "state/old"))
    storage.put(checkpoint(own, 2, "manifest.json"))
    (own / "global_step_1" / "state" / "old").unlink()
    storage.put(checkpoint(own, 1, "manifest.json", "state/new"))
    if kind == "memory":
        system = fsspec.filesystem("memory")
        found = {path.partition("/a/b/")[2]: system.cat(path).decode() for path in system.find(f"{tmp_path}/a/b")}
    else:
        paths = (path for path in (store / "a" / "b").rglob("*") if path.is_file())
        found = {path.relative_to(store / "a" / "b").as_posix(): path.read_text() for path in paths}
    assert found == {
        "global_step_1/manifest.json": "manifest.json of 1",
        "global_step_1/state/new": "state/new of 1",
        "global_step_2/manifest.json": "manifest.json of 2",
    }


@pytest.mark.parametrize("failing", ["-mkdir", "-test"])
def test_a_client_that_may_not_write_is_refused_before_training(failing, client, tmp_path):
    client(failing)
    with refused("trainer.default_hdfs_dir", "hdfs://host/a", "mkdir: Permission denied"):
        SecondStorage("hdfs://host/a").check(tmp_path)


def test_a_failed_copy_has_its_reason(client, tmp_path):
    client("-put")
    (tmp_path / "file").touch()
    for place, reason in (("hdfs://host/a", "Permission denied: user=me"), (f"{tmp_path}/file", "Not a directory")):
        with refused(reason, error=OSError):
            SecondStorage(place).put(checkpoint(tmp_path, 1, "manifest.json"))


def test_places_that_cannot_be_written_are_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "file").touch()
    wrong = {
        "hdfs://host/a": "PATH",
        "/proc/a": "/proc",
        f"{tmp_path}/file": "a file",
        f"{tmp_path}/../{tmp_path.name}": "trainer.default_local_dir",
        "nosuch://bucket/a": "nosuch",
    }
    for place, thing in wrong.items():
        with refused("trainer.default_hdfs_dir", thing):
            SecondStorage(place).check(tmp_path)


def failed_copies(overrides: list[str], path: str) -> str:
    """Run with PATH; return the stderr, with the error that ends the run."""
    os.environ["PATH"] = path
    return heard(fit, overrides)


@pytest.mark.slow
def test_a_run_goes_on_without_its_copies_says_so_at_once_and_fails_at_its_end(client, tiny_model, tmp_path):
    store = client("-put")
    own = ("trainer.default_hdfs_dir=hdfs://host/copies", "trainer.save_freq=1", "trainer.total_training_steps=2")
    asked = small_run(tmp_path, tiny_model, [20, 30, 40, 50] * 4, *own, categories=2)
    runs = {later: tmp_path / f"run_{later}" for later in ("false", "true")}
    calls = [
        (failed_copies, [*asked, into(run), f"checkpoint.async_save={later}"], os.environ["PATH"])
        for later, run in runs.items()
    ]
    for run, *words in zip(runs.values(), *run_ranks(in_turn, 2, calls), strict=True):
        for step in (1, 2):
            saved = run / f"global_step_{step}"
            told = f"warning: {saved} is not copied to trainer.default_hdfs_dir=hdfs://host/copies: rank 0: mkdir: Perm"
            assert told in words[0]
            assert Checkpoint.read(saved)
        assert "warning: " not in words[1]
        (end, other_end) = (each.splitlines()[-1] for each in words)
        assert end == other_end
        assert names(end, "error", "trainer.default_hdfs_dir=hdfs://host/copies", "global_step_1, global_step_2")
    assert list((store / "copies").iterdir()) == []
