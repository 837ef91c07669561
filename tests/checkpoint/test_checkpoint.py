"""Checkpoints are whole or absent: damage is found and named, the previous one is used, a full disk costs nothing."""

import json
import os
import pickle
import resource
import shutil
import subprocess
from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.lib.errors import names, refused
from tests.lib.ranks import in_turn, run_ranks
from tests.lib.training import differences, fit, heard, into, settle, small_run, stopped_at
from verl_ext.checkpoint.identity import Identity, resumed_grouping
from verl_ext.checkpoint.layout import (
    MANIFEST,
    TRACKER,
    Checkpoint,
    Damaged,
    FileFacts,
    Manifest,
    files_of_rank,
    remove_unfinished,
    whole_checkpoints,
)
from verl_ext.checkpoint.state import HostCopies, read_metadata
from verl_ext.files import write_errors

pytestmark = pytest.mark.slow

FILES = {"state/__0_0.distcp": 300, "state/__1_0.distcp": 200, "state/.metadata": 50, "extra.json": 20}


def write_checkpoint(folder: Path, step: int, contents=("model", "optimizer", "extra")) -> Path:
    """Write a checkpoint of random bytes, and its manifest."""
    checkpoint = folder / f"global_step_{step}"
    shutil.rmtree(checkpoint, ignore_errors=True)
    rng = np.random.default_rng(step)
    for name, size in FILES.items():
        (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / name).write_bytes(rng.bytes(size))
    first, second, none = (files_of_rank(checkpoint, rank) for rank in range(3))
    assert (first.keys() | second.keys(), list(second), none) == (FILES.keys(), ["state/__1_0.distcp"], {})
    Manifest(step, 2, contents, {"data.seed": 1}, {}, first | second).write(checkpoint)
    return checkpoint


def damage(folder: Path) -> str | None:
    """Describe a checkpoint's damage by file names and sizes; None if there is none."""
    try:
        Checkpoint.read(folder)
    except Damaged as error:
        return str(error)
    return None


def test_the_files_of_a_rank_reach_the_disk_before_a_manifest_names_them(tmp_path, monkeypatch):
    synced = set()
    monkeypatch.setattr(os, "fsync", lambda file: synced.add(Path(os.readlink(f"/proc/self/fd/{file}"))))
    assert {write_checkpoint(tmp_path, 1) / name for name in FILES} <= synced


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_byte_of_any_file_is_found_and_the_file_named(tmp_path, data):
    checkpoint = write_checkpoint(tmp_path, 1)
    name = data.draw(st.sampled_from([*FILES, MANIFEST]))
    content = bytearray((checkpoint / name).read_bytes())
    before = bytes(content)
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    (checkpoint / name).write_bytes(content)
    wrong = damage(checkpoint)
    found = [wrong] if wrong else [w for rank in range(3) if (w := Checkpoint.read(checkpoint).changed_file(rank, 3))]
    assert found or (name == MANIFEST and json.loads(content) == json.loads(before))  # only white space changed
    assert all(name in wrong for wrong in found)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(list(FILES)), share=st.floats(0, 0.99))
def test_a_truncated_or_missing_file_is_found_by_its_size_alone(tmp_path, name, share):
    checkpoint = write_checkpoint(tmp_path, 1)
    assert damage(checkpoint) is None
    os.truncate(checkpoint / name, int(share * FILES[name]))
    assert names(damage(checkpoint), name, f"{int(share * FILES[name])} bytes", FILES[name])
    (checkpoint / name).unlink()
    assert names(damage(checkpoint), f"no {name}")


def test_a_manifest_that_leads_out_of_its_folder_or_is_of_another_step_is_damage(tmp_path):
    checkpoint = write_checkpoint(tmp_path, 1)
    (tmp_path / "secret").write_bytes(b"secret")
    Manifest(1, 1, ("model",), {}, {}, {"../secret": FileFacts.from_file(tmp_path / "secret")}).write(checkpoint)
    assert damage(checkpoint) == f"its {MANIFEST} names files of other folders"
    checkpoint = write_checkpoint(tmp_path, 1).rename(tmp_path / "global_step_9")
    assert damage(checkpoint) == f"its {MANIFEST} is of step 1"


def to_format_1(checkpoint: Path) -> None:
    """Write a manifest as it was before hooks had states: their values among the facts, under `plan`."""
    content = json.loads((checkpoint / MANIFEST).read_text())
    states = content.pop("hooks").values()
    content |= {"format": 1, "plan": content.pop("facts") | {name: s[name] for s in states for name in s}}
    del content["checksum"]
    checksum = xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())
    (checkpoint / MANIFEST).write_text(json.dumps({**content, "checksum": checksum}))


def test_a_checkpoint_of_format_1_has_the_facts_and_states_of_today(tmp_path):
    checkpoint = write_checkpoint(tmp_path, 1)
    best = {"metric": "val/loss", "value": 0.1, "step": 1, "waited": 0}
    hooks = {
        "ProgressHook": {"total_tokens": 5, "total_target_tokens": 4},
        "SpikeHook": {"spikes": 3, "recent_losses": [0.1, 1 / 3]},
        "SkippedStepsHook": {"skipped_steps": 2, "skipped_in_a_row": 1},
        "HighLossHook": {"high_in_a_row": 6},
        "WatchedHook": {"watched": {"checkpoint.keep_best": best}},
    }
    today = replace(Manifest.from_folder(checkpoint), hooks=hooks)
    today.write(checkpoint)
    to_format_1(checkpoint)
    assert Checkpoint.read(checkpoint).manifest == today


def test_the_newest_whole_checkpoint_is_gone_on_from_whatever_the_tracker_says(tmp_path):
    saved = [write_checkpoint(tmp_path, step) for step in (2, 9, 10)]
    read = [Checkpoint.read(path) for path in saved]
    assert whole_checkpoints(tmp_path) == (read[::-1], {})  # killed before the first tracker
    (tmp_path / TRACKER).write_text("9")  # killed between the folder and the tracker
    assert whole_checkpoints(tmp_path)[0][0] == read[2]
    os.truncate(saved[2] / "extra.json", 3)
    assert whole_checkpoints(tmp_path) == ([read[1], read[0]], {saved[2]: "its extra.json has 3 bytes and had 20"})


def test_what_a_killed_run_had_begun_is_removed_and_neither_users_files_nor_those_of_an_evaluation(tmp_path):
    checkpoint = write_checkpoint(tmp_path, 1)
    shutil.copytree(checkpoint, tmp_path / "global_step_2.partial")
    (tmp_path / "final_memory_checkpoint.pt.node-3-4711.partial").touch()
    others = ("thesis.txt", "download.tar.partial", "evaluation.json.node-3-4712.partial")
    for name in others:
        (tmp_path / name).touch()
    remove_unfinished(tmp_path, ("final_memory_checkpoint.pt",))
    assert {path.name for path in tmp_path.iterdir()} == {"global_step_1", *others}
    assert damage(checkpoint) is None


def test_metadata_that_would_run_code_is_refused_and_runs_nothing(tmp_path):
    class Code:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Code()))
    with refused(tmp_path / ".metadata", "torch.distributed.checkpoint"):
        read_metadata(tmp_path)
    assert not (tmp_path / "ran").exists()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200))
def test_metadata_of_any_bytes_is_refused_in_one_line(tmp_path, content):
    (tmp_path / ".metadata").write_bytes(content)
    with refused(tmp_path / ".metadata", "torch.distributed.checkpoint"):
        read_metadata(tmp_path)


class _ByName(pickle.Pickler):
    """Python 3.11.0 to 3.11.3, which pickle a member of an enum as an attribute."""

    attribute: str | None = None

    def reducer_override(self, value):
        return (getattr, (type(value), self.attribute or value.name)) if isinstance(value, Enum) else NotImplemented


def test_metadata_of_a_python_that_pickles_enums_by_name_are_read_and_no_other_attribute(tmp_path):
    dcp.save({"a": torch.zeros(2)}, checkpoint_id=str(tmp_path), no_dist=True)
    path = tmp_path / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.storage_meta = StorageMeta()  # without the path
    for attribute in (None, "mro", "__init__"):
        with path.open("wb") as file:
            pickler = _ByName(file)
            pickler.attribute = attribute
            pickler.dump(metadata)
        if attribute is None:
            assert read_metadata(tmp_path) == metadata
            continue
        with refused(path, "torch.distributed.checkpoint"):
            read_metadata(tmp_path)


SORTED = ({"balance": "sorted", "cost": "flops", "shuffle": True}, {"group_size": 2, "cost": [704, 2, 0, None]})
PLAIN = ({"balance": "none", "cost": "flops", "shuffle": True}, {})


ON_MORE_RANKS = (SORTED[0], {"group_size": 8, "cost": [352, 1, 0, None]})


@pytest.mark.parametrize(
    ("saved", "own", "expected"), [(SORTED, PLAIN, PLAIN), (PLAIN, SORTED, SORTED), (SORTED, ON_MORE_RANKS, SORTED)]
)
def test_packs_stay_grouped_as_they_were_unless_an_option_for_it_changes(saved, own, expected):
    options, grouping = saved
    facts = Identity({f"data.{name}": value for name, value in options.items()}, grouping, "run").saved()
    assert resumed_grouping(*own, facts) == expected[1]


@pytest.mark.parametrize("grouping", [{"foo": 1}, {}, {"group_size": 0, "cost": [1]}, {"group_size": 1, "cost": ["a"]}])
def test_a_forged_grouping_is_refused(grouping):
    with refused(f"grouping={grouping}"):
        resumed_grouping(*SORTED, {"grouping": grouping})


# Whole runs: one start of a rank executes many of them in a row.

STEPS = 4


def assert_same_run(folder: Path, whole: Path) -> None:
    """Assert equal metrics of every step, parameters and optimizer, to the last bit."""
    assert not differences(folder, whole, STEPS)
    assert (folder / TRACKER).read_text() == str(STEPS)


@pytest.fixture(scope="module")
def options(tiny_model, tmp_path_factory):
    """Return the overrides of a run of four steps that saves at each."""
    lengths = np.random.default_rng(0).integers(5, 60, 24).tolist()
    length = ("trainer.save_freq=1", f"trainer.total_training_steps={STEPS}")
    return small_run(tmp_path_factory.mktemp("data"), tiny_model, lengths, *length, categories=2)


@pytest.fixture(scope="module")
def done(options, tmp_path_factory):
    """Execute an uninterrupted run, and copies of it that are damaged or meet a full disk; return their folder, and
    what was heard of them."""
    folder = tmp_path_factory.mktemp("runs")
    calls = [(heard, fit, [*options, into(folder / "whole")]), (damaged_runs, options, folder)]
    calls += [(format_1_run, options, folder)]
    calls += [(full_disk_runs, [*options, f"checkpoint.async_save={later}"], folder, later) for later in LATER]
    ((_, damaged, _, *full),) = run_ranks(in_turn, 1, calls)
    return folder, damaged, dict(zip(LATER, full, strict=True))


LATER = ("false", "true")


def damaged_runs(options, folder):
    """Return the messages about a damaged last checkpoint, by name and by auto, and about having no whole one."""
    words = {}
    for name, harm in (("flipped", flip), ("truncated", lambda file: os.truncate(file, 1000))):
        run = stopped_at(folder / "whole", folder / name, 3)
        harm(run / "global_step_3" / "state" / "__0_0.distcp")
        named = (f"trainer.resume_from_path={run / 'global_step_3'}", "trainer.resume_mode=resume_path")
        words[f"{name} refused"] = heard(settle, [*options, into(run), *named])
        words[name] = heard(fit, [*options, into(run)])
    last = stopped_at(folder / "whole", folder / "none", 1)
    flip(last / "global_step_1" / "state" / "__0_0.distcp")
    return words | {"none refused": heard(settle, [*options, into(last)])}


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_damaged_checkpoint_is_said_and_the_one_before_gives_the_uninterrupted_run(done):
    folder, words, _ = done
    assert names(words["flipped refused"], "global_step_3", "damaged", "state/__0_0.distcp")
    assert names(words["truncated refused"], "state/__0_0.distcp", "1,000 bytes")
    for name in ("flipped", "truncated", "none"):
        assert words[f"{name} refused"].count("error: ") == 1
    for name in ("flipped", "truncated"):
        assert f"warning: going on from {folder / name / 'global_step_2'} in its place" in words[name]
        assert_same_run(folder / name, folder / "whole")
        assert (folder / name / "global_step_3.set_aside").is_dir()


def format_1_run(options, folder):
    run = stopped_at(folder / "whole", folder / "format_1", 2)
    for checkpoint in run.glob("global_step_*"):
        to_format_1(checkpoint)
    assert "warning" not in heard(fit, [*options, into(run)])


def test_a_resume_of_a_checkpoint_of_format_1_gives_the_uninterrupted_run(done):
    folder, _, _ = done
    assert_same_run(folder / "format_1", folder / "whole")
    assert json.loads((folder / "format_1" / "global_step_2" / MANIFEST).read_text())["format"] == 1


def full_disk_runs(options, folder, later):
    """Return the messages of a run whose disk is full from step 2 on, what it leaves, and the messages of the same
    command with room again."""
    run = stopped_at(folder / "whole", folder / f"full_{later}", 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # metrics fit, a checkpoint does not
    try:
        full = heard(fit, [*options, into(run)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    left = sorted(path.name for path in run.iterdir() if path.name.startswith("global"))
    return full, left, heard(fit, [*options, into(run)])


@pytest.mark.parametrize("later", LATER)
def test_on_a_full_disk_a_run_goes_on_and_its_last_step_ends_it_with_the_old_checkpoint_whole(later, done):
    folder, _, runs = done
    full, left, roomy = runs[later]
    for step in (2, 3):
        checkpoint = folder / f"full_{later}" / f"global_step_{step}"
        assert names(full, f"without a checkpoint: {checkpoint}", "rank 0: File too large")
    assert names(full, "error", "not saved")
    assert left == ["global_step_1"]
    assert "warning" not in roomy
    assert_same_run(folder / f"full_{later}", folder / "whole")


def save_on_a_full_disk(overrides, disk):
    """Return the errors of one-step runs with checkpoints on an almost full disk of 1 MiB, for three sizes of room."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], check=True)
    words = []
    try:
        for room in (0, 150_000, 350_000):  # too little for the state, again for the state, then for the export
            (disk / "fill").write_bytes(bytes(2**20 - room - 2**16))
            shutil.rmtree(disk / "run", ignore_errors=True)
            words.append(heard(fit, [*overrides, into(disk / "run")]).splitlines()[-1])
            (disk / "fill").unlink()
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
    return words


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="mounts a small disk")
def test_a_full_disk_is_named_whichever_library_fills_it(options, tmp_path):
    (tmp_path / "disk").mkdir()
    contents = "checkpoint.save_contents=[model,optimizer,extra,hf_model]"
    asked = [*options, contents, "trainer.total_training_steps=1"]
    calls = [(save_on_a_full_disk, [*asked, f"checkpoint.async_save={x}"], tmp_path / "disk") for x in LATER]
    path = tmp_path / "disk" / "run" / "global_step_1"
    ((first, later),) = run_ranks(in_turn, 1, calls)
    for line in (*first, *later):
        assert names(line, "error", "not saved", path, "rank 0: No space left on device")


@pytest.mark.parametrize(
    "error", ["(os error 28)", "os error", "[enforce fail at inline_container.cc:672] . unexpected"]
)
def test_a_write_error_of_a_library_has_its_reason(error, tmp_path, monkeypatch):
    free = 0 if "inline" in error else 2**30
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    reason = error if error == "os error" else "No space left on device"
    with refused(reason, error=OSError) as raised, write_errors(tmp_path):
        raise RuntimeError(error)
    assert raised.value.filename == str(tmp_path)
    with pytest.raises(RuntimeError, match="a mistake"), write_errors(tmp_path):
        raise RuntimeError("a mistake")


def copies_of_a_step_and_the_next() -> bool:
    mesh = dist.init_device_mesh("cpu", (2,))
    state = {"weight": distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]), "step": torch.tensor(3.0)}
    copies = HostCopies()
    first = copies.copy(state)
    copies.wait()
    copies.hold_device()
    state["weight"].to_local().add_(1)
    state["step"].add_(1)
    assert isinstance(first["weight"], DTensor)
    assert first["weight"].full_tensor().tolist() == [0, 1, 2, 3, 4]  # not the value after the optimizer's step
    assert first["step"] == 3
    places = {"weight": first["weight"].to_local().data_ptr(), "step": first["step"].data_ptr()}
    second = copies.copy(state)
    assert second["weight"].full_tensor().tolist() == [1, 2, 3, 4, 5]
    assert second["step"] == 4
    assert places == {"weight": second["weight"].to_local().data_ptr(), "step": second["step"].data_ptr()}
    assert copies.copy({"step": torch.ones(3)})["step"].tolist() == [1, 1, 1]  # of another shape: memory of its own
    return True


def test_host_copies_stay_as_made():
    assert run_ranks(copies_of_a_step_and_the_next, 2) == [True, True]
