"""The cache of tokenized pretraining text: reused, made anew, shared by ranks; and verl's own trainer on the rows."""

import json
import logging
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from datasets import load_from_disk

from tests.pretrain_files import texts_of, word_tokenizer, write_jsonl
from tests.ranks import run_ranks
from tests.stock_verl import train_with_stock_verl
from verl_ext.data.pretrain import DocumentOptions, PreTrainDataset, PreTrainEncoder, find_files
from verl_ext.text.tokenized import tokenized


@pytest.fixture
def built(monkeypatch):
    """One entry for each time that something is tokenized."""
    calls = []
    original = PreTrainEncoder.encode
    monkeypatch.setattr(PreTrainEncoder, "encode", lambda *arguments: (calls.append(1), original(*arguments))[1])
    return calls


@pytest.fixture
def path(tmp_path):
    return write_jsonl(tmp_path / "data/web.jsonl", texts_of([3, 9, 1, 4]))


def open_files(path, tokenizer=None, max_length=8, **options):
    options = {"cache_dir": str(Path(path).parent.parent / "cache"), **options}
    return PreTrainDataset(tokenizer or word_tokenizer(), path, max_length, **options)


def test_a_full_disk_is_one_line_with_the_key_and_leaves_no_folder(tmp_path, files_end_at):
    path = write_jsonl(tmp_path / "data/web.jsonl", texts_of([9] * 3000))
    told = r"^data\.cache_dir must be a folder that can be written; got \S*cache: .*File too large$"
    with files_end_at(1 << 16), pytest.raises(ValueError, match=told):
        open_files(path)
    assert not any(entry.is_dir() for entry in (tmp_path / "cache").iterdir())
    assert len(open_files(path)) > 0


def test_files_are_tokenized_once_for_every_split_limit_padding_and_packing(path, built):
    first = open_files(path)
    tokenizer = word_tokenizer(pad=None)
    tokenizer("w1 w2 w3 w4", truncation=True, max_length=3)  # a call leaves its limits in the tokenizer
    for dataset in (
        open_files(path, tokenizer, rows="padded"),
        open_files(path, max_tokens=64, strategy="next_fit", seed=3),
        open_files(path, split="val", train_ratio=0.5, max_samples=1),
    ):
        assert dataset.folders == first.folders
    assert len(built) == 1


def test_other_options_tokenizers_or_files_are_tokenized_anew(path, built):
    open_files(path)
    open_files(path, max_length=9)
    open_files(path, on_bad_record="skip")
    open_files(path, word_tokenizer(bos=False))
    assert len(built) == 4
    write_jsonl(Path(path), texts_of([3, 9, 1, 4, 5]))
    assert int(open_files(path).pack_documents().sum()) == 5
    status = os.stat(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    open_files(path)
    assert len(built) == 6
    os.rename(path, Path(path).with_name("books.jsonl"))
    assert open_files(str(Path(path).with_name("books.jsonl"))).categories.names == ("books",)


@pytest.mark.parametrize("damage", ["state.json", "data-00000-of-00001.arrow", "report.json"])
def test_a_damaged_folder_is_made_anew(path, built, caplog, damage):
    rows = [row["input_ids"] for row in open_files(path)]
    (folder,) = open_files(path).folders
    (Path(folder) / damage).write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        again = list(open_files(path))
    assert all(torch.equal(row["input_ids"], wanted) for row, wanted in zip(again, rows, strict=True))
    assert len(built) == 2
    assert [entry.getMessage() for entry in caplog.records if f"its {damage} has 0 bytes" in entry.getMessage()]


def test_a_file_that_changes_meanwhile_is_refused(path, monkeypatch):
    original = PreTrainEncoder.encode

    def changes(*arguments):
        yield from original(*arguments)
        write_jsonl(Path(path), texts_of([1]))

    monkeypatch.setattr(PreTrainEncoder, "encode", changes)
    with pytest.raises(ValueError, match=r"^data\.train_dir must not change while it is tokenized"):
        open_files(path)


def _lines_of_opening(path):
    """What a process logs that opens the files twice."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda entry: lines.append(entry.getMessage())
    logging.getLogger("verl_ext.text.tokenized").addHandler(handler)
    open_files(path)
    open_files(path, rows="padded")
    return lines


def test_what_is_cut_is_said_once_in_every_process_that_opens_it(path):
    for _ in range(2):
        assert run_ranks(_lines_of_opening, 1, path) == [
            [
                "1 of 4 documents of data.train_dir are longer than data.max_length=8: 3 tokens in all are cut off "
                "their ends"
            ]
        ]


def test_a_mistake_in_a_file_is_told_without_a_bar(path, capsys):
    open_files(path)
    assert "tokenize: 100%" in capsys.readouterr().err
    Path(path).write_text('{"text": 3}')
    with pytest.raises(ValueError, match="must be a string"):
        open_files(path)
    assert capsys.readouterr().err == ""


def test_the_folder_says_what_it_was_made_of(path):
    (folder,) = open_files(path).folders
    made_of = json.loads((Path(folder) / "report.json").read_text())
    assert made_of["files"] == [path]
    assert made_of["options"]["max_length"] == 8
    assert made_of["total"]["bad_records"] == {}
    assert made_of["categories"]["web"]["documents"] == 4


def test_files_of_several_batches_are_one_dataset(path):
    texts = texts_of([3] * 600)
    write_jsonl(Path(path), texts)
    whole = [row["input_ids"] for row in open_files(path, rows="padded")]
    files, names = find_files([path], "data.train_dir")
    encoder = PreTrainEncoder(word_tokenizer(), DocumentOptions(max_length=8))
    folder = tokenized(files, names, encoder, Path(path).parent / "other", batch_bytes=1)
    other = load_from_disk(str(folder))["input_ids"]
    assert len(whole) == len(other) == 600
    assert all(row == wanted[: len(row)].tolist() for row, wanted in zip(other, whole, strict=True))


def _open_on_a_rank(path):
    """(times that this rank tokenized, the labels of its rows, the targets by the shared scan)"""
    from verl_ext.trainer.distributed import RunRanks

    built = []
    original = PreTrainEncoder.encode
    PreTrainEncoder.encode = lambda *arguments: (built.append(1), original(*arguments))[1]
    dist.barrier()
    dataset = open_files(path, split="train", train_ratio=0.9, max_tokens=30)
    dataset.read_together(RunRanks())
    return len(built), [row["labels"].tolist() for row in dataset], dataset.pack_targets().tolist()


def test_of_two_ranks_one_tokenizes_and_both_have_the_rows_and_the_scan(tmp_path):
    path = write_jsonl(tmp_path / "data/web.jsonl", texts_of(range(1, 51)))
    (first, rows, targets), (second, *others) = run_ranks(_open_on_a_rank, 2, path)
    assert first + second == 1
    assert others == [rows, targets]
    assert targets == [sum(label != -100 for label in labels) for labels in rows]


def test_verls_own_trainer_takes_the_rows(tiny_model, tmp_path):
    path = write_jsonl(tmp_path / "web.jsonl", texts_of([5] * 8))
    output = tmp_path / "out"
    output.mkdir()
    overrides = [f"data.train_files={path}", f"data.val_files={path}", "data.max_length=16", "+data.rows=padded"]
    overrides += [f"+data.cache_dir={output}/cache", "data.custom_cls.path=pkg://verl_ext.data.pretrain"]
    overrides += ["data.micro_batch_size_per_gpu=2", "trainer.total_epochs=2"]
    (losses,) = run_ranks(train_with_stock_verl, 1, "PreTrainDataset", str(tiny_model), str(output), overrides)
    assert len(losses) == 4
    assert losses[-1] < losses[0]
