"""Changes of the data between two runs or during one are found and named."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.lib.errors import names, refused
from tests.lib.failing_steps import overrides_of
from tests.lib.ranks import run_cases
from tests.lib.tokenized_data import random_documents, write_tokenized
from tests.lib.training import build, heard
from verl_ext.cache import fingerprint
from verl_ext.checkpoint.layout import saved_folders
from verl_ext.data import SFTDataSet
from verl_ext.data.tokenized.files_in_use import DataFile, DataFiles
from verl_ext.data.tokenized.ranks import ONE_RANK
from verl_ext.files import checksum, combine_checksums
from verl_ext.text.arrow_folder import DatasetWriter
from verl_ext.text.read.shards import read_shards
from verl_ext.text.tokens.documents import Document, join_documents


def written_by_us(folder: Path) -> str:
    """Write a folder with recorded checksums of its shards."""
    folder.mkdir()
    writer = DatasetWriter(folder)
    ids = np.random.default_rng(0).integers(1, 100, (8, 10)).astype(np.int32)
    writer.add(join_documents([Document(each, np.array([0] + [1] * 9, np.int8)) for each in ids], 1, 0))
    writer.close()
    return str(folder)


def written_by_others(folder: Path) -> str:
    return write_tokenized(folder, random_documents(np.random.default_rng(0), [10] * 8, 100, 1))


WRITERS = (written_by_us, written_by_others)


def change_token(folder: str) -> Path:
    """Change one token in place, and keep the file's size and everything else."""
    (path,) = Path(folder).glob("*.arrow")
    content = path.read_bytes()
    row = SFTDataSet(folder, 64, strategy="none")[7]["input_ids"].numpy().astype(np.int32)
    at = content.index(row.tobytes()) + 4  # changes neither the lowest nor the highest id
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([content[at] ^ 1]))
    later = path.stat().st_mtime_ns + 10**9  # file systems' clocks tick in milliseconds
    os.utime(path, ns=(later, later))
    return path


def digest_of(folder: str) -> str:
    return DataFiles(SFTDataSet(folder, 64).data_files, "data.train_dir").digest(ONE_RANK)


@pytest.mark.parametrize("write", WRITERS)
def test_a_copy_has_the_same_digest_whatever_its_times(tmp_path, write):
    folder = write(tmp_path / "data")
    copy = shutil.copytree(folder, tmp_path / "copy")
    for path in Path(copy).iterdir():
        os.utime(path, ns=(0, 1 if path.name == "state.json" else 2))
    assert digest_of(str(copy)) == digest_of(folder)


def test_a_tokenized_folder_whose_content_changed_is_refused(tmp_path):
    folder = written_by_us(tmp_path / "data")
    path = change_token(folder)
    with refused("data.train_dir", path):
        digest_of(folder)
    path.write_bytes(path.read_bytes()[:-8])
    with refused("data.train_dir", path.name, f"{path.stat().st_size:,} bytes"):
        SFTDataSet(folder, 64)


def test_shards_are_recorded_with_the_sizes_and_checksums_of_their_files(tmp_path, monkeypatch):
    monkeypatch.setattr("verl_ext.files.BLOCK", 700)
    writer = DatasetWriter(tmp_path, shard_bytes=900)
    for number in range(6):  # weights come late, so that the first shards are written once more
        ids, mask = np.arange(300, dtype=np.int32), np.ones(300, np.int8)
        weights = np.full(300, 0.5, np.float32) if number == 4 else None
        writer.add(join_documents([Document(ids, mask, weights)], 1, 0))
    writer.close()
    shards = read_shards(tmp_path)
    assert len(shards) == 6
    for shard in shards:
        assert shard.bytes == (tmp_path / shard.name).stat().st_size > 700
        blocks = [checksum(tmp_path / shard.name, begin, 700) for begin in range(0, shard.bytes, 700)]
        assert shard.xxh3_128 == combine_checksums(blocks)


def test_the_checksum_of_a_long_file_is_that_of_its_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("verl_ext.data.tokenized.files_in_use.BLOCK", 100)
    path = tmp_path / "long.bin"
    path.write_bytes(bytes(range(250)))
    blocks = [checksum(path, begin, 100) for begin in (0, 100, 200)]
    assert blocks[2] == checksum(path, 200)
    assert DataFiles([DataFile(str(path))], "data.train_dir").digest(ONE_RANK) == fingerprint(
        [combine_checksums(blocks)]
    )
    path.write_bytes(bytes(range(100, 200)) + bytes(range(100)) + bytes(range(200, 250)))
    assert DataFiles([DataFile(str(path))], "data.train_dir").digest(ONE_RANK) == fingerprint(
        [combine_checksums([*blocks[1::-1], blocks[2]])]
    )


def train_on_changing_data(overrides: list[str], folder: str, how: str) -> list[str]:
    """Train, change the data once the first checkpoint exists, and return the errors that end the run."""

    def run() -> None:
        trainer = build(overrides)
        save = trainer.checkpoints.save

        def save_and_change(step: int, *states: Any) -> None:
            save(step, *states)
            if step == 1 and trainer.is_rank0:
                (path,) = Path(folder).glob("*.arrow")
                if how == "a token":
                    change_token(folder)
                else:
                    os.replace(shutil.copy(path, path.with_suffix(".new")), path)

        trainer.checkpoints.save = save_and_change
        trainer.fit()

    return [line for line in heard(run).splitlines() if line.startswith("error: ")]


@pytest.mark.slow
def test_a_change_under_a_run_ends_it_and_refuses_a_resume_and_the_same_content_does_not(tmp_path, tiny_model):
    folder, run = written_by_others(tmp_path / "data"), tmp_path / "run"
    overrides = overrides_of(folder, tiny_model, run, "trainer.save_freq=1", "trainer.spike_factor=null")
    same, other = written_by_us(tmp_path / "same"), tmp_path / "other"
    more = ["trainer.save_freq=1", "trainer.spike_factor=null", "trainer.total_training_steps=2"]
    copied = overrides_of(same, tiny_model, other, *more)
    later = {
        "resumed": (1, train_on_changing_data, overrides, folder, ""),
        "copied": (1, train_on_changing_data, copied, same, "replaced by a copy"),
    }
    found = run_cases({"changed": (2, train_on_changing_data, overrides, folder, "a token")}, later)
    ((told,), others), ((told_of_resume,),) = found["changed"], found["resumed"]
    assert others == []
    assert names(told, "data.train_dir", next(Path(folder).glob("*.arrow")))
    assert names(told_of_resume, "content", "data.train_dir")
    assert [path.name for path in saved_folders(run)] == ["global_step_1"]
    assert not (run / "spikes.jsonl").exists()
    assert found["copied"] == ([],)
    assert len(saved_folders(other)) == 2
