"""The cache of tokenized BABILong files: reused, made anew, shared by processes, streamed."""

import json
import logging
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.babilong_files import byte_tokenizer, record, records, write_records
from tests.ranks import run_ranks
from verl_ext.data import BABILongDataset
from verl_ext.data.babilong import BABILongEncoder, SampleOptions, find_files


@pytest.fixture
def built(monkeypatch):
    """One entry for each time that something is tokenized."""
    calls = []
    original = BABILongEncoder.encode
    monkeypatch.setattr(BABILongEncoder, "encode", lambda *arguments: (calls.append(1), original(*arguments))[1])
    return calls


@pytest.fixture
def path(tmp_path):
    return write_records(tmp_path / "data/qa1/1k.json", records(4))


def open_files(path, tokenizer=None, max_length=96, **options):
    cache = Path(path).parent / "cache"
    options = {"cache_dir": str(cache), "answer_reserve_tokens": 8, **options}
    return BABILongDataset(path, tokenizer or byte_tokenizer(), max_length, **options)


def test_files_are_tokenized_once_for_every_split_limit_and_padding(path, built):
    first = open_files(path)
    tokenizer = byte_tokenizer(pad=False)
    tokenizer("a call leaves its limits in the tokenizer", truncation=True, max_length=3)
    for dataset in (open_files(path, split="val", seed=3), open_files(path, tokenizer, max_samples=1)):
        assert dataset.folders == first.folders
    assert len(built) == 1


def test_other_options_tokenizers_or_files_are_tokenized_anew(path, built):
    open_files(path)
    open_files(path, max_length=95)
    open_files(path, answer_reserve_tokens=9)
    open_files(path, truncate="right")
    open_files(path, append_eos=True)
    open_files(path, byte_tokenizer(special=False))
    assert len(built) == 6
    write_records(Path(path), records(5))
    assert len(open_files(path)) == 5
    status = os.stat(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    open_files(path)
    assert len(built) == 8


@pytest.mark.parametrize("damage", ["report.json", "data-00000-of-00001.arrow", "contents.json", "state.json"])
def test_a_damaged_folder_is_made_anew(path, built, damage):
    rows = [row["input_ids"] for row in open_files(path)]
    (folder,) = open_files(path).folders
    (Path(folder) / damage).write_bytes(b"")
    assert all(torch.equal(row["input_ids"], wanted) for row, wanted in zip(open_files(path), rows, strict=True))
    assert len(built) == 2


def test_a_run_that_ends_early_leaves_nothing_that_is_used(path, built, monkeypatch):
    original = BABILongEncoder.encode

    def interrupted(*arguments):
        yield from original(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(BABILongEncoder, "encode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            open_files(path)
    cache = Path(path).parent / "cache"
    assert [entry.name for entry in cache.iterdir() if entry.is_dir()] == []
    assert len(open_files(path)) == 4


def _open_on_a_rank(path):
    """(times that this rank tokenized, its rows, the targets by the shared scan)"""
    from verl_ext.trainer.distributed import RunRanks

    built = []
    original = BABILongEncoder.encode
    BABILongEncoder.encode = lambda *arguments: (built.append(1), original(*arguments))[1]
    tokenizer = byte_tokenizer()
    dist.barrier()
    dataset = open_files(path, tokenizer, split="train")
    dataset.read_together(RunRanks())
    return len(built), [row["labels"].tolist() for row in dataset], dataset.scan.targets.tolist()


def test_of_two_ranks_one_tokenizes_and_both_have_the_rows_and_the_scan(tmp_path):
    path = write_records(tmp_path / "1k.json", records(50))
    (first, rows, targets), (second, *others) = run_ranks(_open_on_a_rank, 2, path)
    assert first + second == 1
    assert others == [rows, targets]
    assert targets == [sum(label != -100 for label in labels) for labels in rows]
    assert len(rows) == 45


def test_a_mistake_in_a_file_is_told_without_a_bar(path, capsys):
    open_files(path)
    assert "tokenize: 100%" in capsys.readouterr().err
    Path(path).write_text('[{"input": "a"')
    with pytest.raises(ValueError, match="malformed JSON"):
        open_files(path)
    assert capsys.readouterr().err == ""


def test_a_file_that_changes_meanwhile_is_refused(path, monkeypatch):
    original = BABILongEncoder.encode

    def changes(*arguments):
        yield from original(*arguments)
        write_records(Path(path), records(9))

    monkeypatch.setattr(BABILongEncoder, "encode", changes)
    with pytest.raises(ValueError, match=r"data\.train_dir must not change while it is tokenized"):
        open_files(path)


def test_a_cache_that_cannot_be_written_is_one_line(path, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^data\.cache_dir must be a folder that can be written; got [^\n]*$"):
        open_files(path, cache_dir=str(tmp_path / "file" / "cache"))


def test_the_cache_lies_in_that_of_datasets_unless_told(path, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hf"))
    dataset = open_files(path, cache_dir=None)
    assert Path(dataset.folders[0]).parent == tmp_path / "hf" / "verl_ext_tokenized"


def test_records_are_tokenized_in_batches_of_bounded_size(path):
    write_records(Path(path), records(600))
    files, names = find_files([path], "data.train_dir")
    encoder = BABILongEncoder(byte_tokenizer(), SampleOptions(max_length=96, answer_reserve_tokens=8))
    batches = list(encoder.encode(files, 1))
    assert [len(batch.lengths) for batch in batches] == [256, 256, 88]
    assert names == {1: "qa1_1k"}
    tokens = [row["input_ids"][row["attention_mask"] == 1].tolist() for row in open_files(path)]
    assert [token for row in tokens for token in row] == [
        token for batch in batches for token in batch.input_ids.tolist()
    ]


def test_what_is_cut_is_said_once_in_a_process(path, caplog):
    write_records(Path(path), [record(20), record(1)])
    with caplog.at_level(logging.WARNING):
        dataset = open_files(path)
        open_files(path)
    (line,) = (entry.getMessage() for entry in caplog.records if entry.name == "verl_ext.text.tokenized")
    removed = dataset.over_length_report[0].tokens_removed
    assert line.startswith(f"1 of 2 samples have prompts over 88 tokens: cut by {removed} tokens")


def test_the_folder_says_what_it_was_made_of(path):
    (folder,) = open_files(path).folders
    made_of = json.loads((Path(folder) / "report.json").read_text())
    assert made_of["files"] == [path]
    assert made_of["options"]["max_length"] == 96
