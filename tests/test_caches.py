"""Caches: entries are made once by one of many processes, whole or not at all; and the families that use them."""

import errno
import json
import logging
import multiprocessing
import os
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.babilong_files import byte_tokenizer, record, records, write_records
from tests.pretrain_files import texts_of, word_tokenizer, write_jsonl
from tests.ranks import run_ranks
from verl_ext.cache import cached_folder, default_root
from verl_ext.data import BABILongDataset, PreTrainDataset
from verl_ext.data.babilong import BABILongEncoder, SampleOptions
from verl_ext.data.babilong import find_task_files as find_babilong_files
from verl_ext.data.pretrain import PreTrainEncoder
from verl_ext.data.stream.megatron.blend import blend_order, megatron_blend_order
from verl_ext.data.stream.megatron.index import IndexWriter, TokenIndex
from verl_ext.data.stream.megatron.samples import build_sample_indices, cached_blend, cached_sample_indices
from verl_ext.text.arrow_folder import DatasetWriter
from verl_ext.text.read.readers import ChunkSize, read_files

_context = multiprocessing.get_context("fork")


def write_two_files(folder: Path) -> None:
    """Make an entry, and count the call in the folder above the root."""
    with open(folder.parent.parent / "calls", "a") as calls:
        calls.write(".")
    (folder / "numbers.npy").write_bytes(b"12345")
    (folder / "inner").mkdir()
    (folder / "inner" / "text").write_text("words")


def calls(tmp_path: Path) -> int:
    """Return the number of calls of `write_two_files` for the root tmp_path/root."""
    return (tmp_path / "calls").stat().st_size


def warnings(caplog):
    return [entry.getMessage() for entry in caplog.records if entry.name == "verl_ext.cache"]


def test_a_folder_is_made_at_the_first_call_and_opened_at_the_next(tmp_path, caplog):
    for _ in range(2):
        folder = cached_folder(tmp_path / "root", "abc", write_two_files)
    assert folder == tmp_path / "root" / "abc"
    assert (folder / "inner" / "text").read_text() == "words"
    assert calls(tmp_path) == 1
    assert warnings(caplog) == []


def test_files_that_others_put_beside_are_no_damage(tmp_path):
    folder = cached_folder(tmp_path / "root", "abc", write_two_files)
    (folder / "memo.npz").write_bytes(b"1")
    cached_folder(tmp_path / "root", "abc", write_two_files)
    assert (folder / "memo.npz").exists()


def _shorten(folder):
    (folder / "numbers.npy").write_bytes(b"123")


def _lose(folder):
    (folder / "inner" / "text").unlink()


def _lose_contents(folder):
    (folder / "contents.json").unlink()


def _garble_contents(folder):
    (folder / "contents.json").write_text('{"sizes": [3]}')


@pytest.mark.parametrize("damage", [_shorten, _lose, _lose_contents, _garble_contents])
def test_a_damaged_folder_is_told_in_one_line_and_made_anew(tmp_path, caplog, damage):
    folder = cached_folder(tmp_path / "root", "abc", write_two_files)
    damage(folder)
    with caplog.at_level(logging.WARNING):
        cached_folder(tmp_path / "root", "abc", write_two_files)
    (line,) = warnings(caplog)
    assert line.startswith(f"{folder} is made anew")
    assert (folder / "numbers.npy").read_bytes() == b"12345"
    assert (folder / "inner" / "text").read_text() == "words"
    assert calls(tmp_path) == 2


def test_a_maker_that_fails_or_is_interrupted_leaves_no_folder_and_is_called_again(tmp_path):
    def fails(folder):
        (folder / "half").write_text("half")
        raise error

    for error in (ValueError("the line that says why"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            cached_folder(tmp_path / "root", "abc", fails)
        assert [entry.name for entry in (tmp_path / "root").iterdir() if entry.is_dir()] == []
    cached_folder(tmp_path / "root", "abc", write_two_files)
    assert not (tmp_path / "root" / "abc.failed").exists()


def _open_after(root: Path, asked, make, answers) -> None:
    """Open the folder in a process of its own, which sets `asked` when it asks for the lock."""

    class Announced(filelock.FileLock):
        def acquire(self, *arguments, **options):
            asked.set()
            return super().acquire(*arguments, **options)

    filelock.FileLock = Announced
    try:
        answers.put(str(cached_folder(root, "abc", make)))
    except ValueError as error:
        answers.put(f"{type(error).__name__}: {error}")


def _with_one_that_waits(root: Path, make, waiting_make):
    """Return (this process's result, the result of a process that asked while `make` was at work here)."""
    asked, answers = _context.Event(), _context.Queue()
    other = _context.Process(target=_open_after, args=(root, asked, waiting_make, answers), daemon=True)

    def make_beside(folder):
        other.start()
        assert asked.wait(30)
        make(folder)

    try:
        here = str(cached_folder(root, "abc", make_beside))
    except ValueError as error:
        here = f"{type(error).__name__}: {error}"
    there = answers.get(timeout=30)
    other.join()
    return here, there


def _never(folder):
    raise AssertionError("it was made twice")


def test_of_two_processes_one_makes_the_folder_and_the_other_opens_it(tmp_path):
    here, there = _with_one_that_waits(tmp_path / "root", write_two_files, _never)
    assert here == there == str(tmp_path / "root" / "abc")
    assert calls(tmp_path) == 1


def test_a_process_that_waited_for_one_that_failed_raises_the_same(tmp_path):
    def fails(folder):
        raise ValueError("data.train_dir must hold records; got none")

    here, there = _with_one_that_waits(tmp_path / "root", fails, _never)
    assert here == there == "ValueError: data.train_dir must hold records; got none"


def test_a_process_that_waited_for_one_that_was_interrupted_makes_the_folder(tmp_path):
    asked, answers = _context.Event(), _context.Queue()
    other = _context.Process(target=_open_after, args=(tmp_path / "root", asked, write_two_files, answers), daemon=True)

    def interrupted(folder):
        other.start()
        assert asked.wait(30)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_folder(tmp_path / "root", "abc", interrupted)
    assert answers.get(timeout=30) == str(tmp_path / "root" / "abc")
    other.join()


def test_what_cannot_be_written_is_one_line_with_the_key(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^data\.cache_dir must be a folder that can be written; got [^\n]*$"):
        cached_folder(tmp_path / "file" / "cache", "abc", write_two_files)


def test_a_file_that_make_cannot_read_is_named_and_the_cache_is_not(tmp_path):
    def reads(folder):
        (folder / "half").write_text("half")
        (tmp_path / "none.jsonl").read_text()

    told = f"{tmp_path / 'none.jsonl'}: No such file or directory"
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
            cached_folder(tmp_path / "root", "abc", reads)
    assert _with_one_that_waits(tmp_path / "root", reads, _never) == (f"ValueError: {told}",) * 2


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.EIO, "Input/output error"), "{root}/abc cannot be made: Input/output error"),
        (OSError("broken\nmore of it"), "{root}/abc cannot be made: broken"),
        (PermissionError(errno.EACCES, "Permission denied", "/b.txt"), "/b.txt: Permission denied"),
        (OSError(errno.ENOSPC, "Full", "/full/b"), "/full/b: Full"),
        (OSError(errno.ENOSPC, "Full"), "data.cache_dir must be a folder that can be written; got {root}: Full"),
        (
            OSError(errno.EFBIG, "Too large"),
            "data.cache_dir must be a folder that can be written; got {root}: Too large",
        ),
    ],
)
def test_an_os_error_of_make_is_told_as_what_it_is(tmp_path, error, told):
    def fails(folder):
        raise error

    told = told.format(root=tmp_path / "root")
    with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
        cached_folder(tmp_path / "root", "abc", fails)


def test_a_process_that_waited_for_one_that_filled_the_disk_raises_the_same(tmp_path):
    def fills(folder):
        raise OSError(errno.ENOSPC, "Full")

    told = f": data.cache_dir must be a folder that can be written; got {tmp_path / 'root'}: Full"
    assert all(said.endswith(told) for said in _with_one_that_waits(tmp_path / "root", fills, _never))


def test_a_process_that_waited_for_one_that_could_not_leave_a_note_makes_the_folder(tmp_path, monkeypatch):
    def fills(folder):
        write_text = Path.write_text

        def full(path, text, **options):
            write_text(path, "", **options)
            raise OSError(errno.ENOSPC, "Full")

        monkeypatch.setattr(Path, "write_text", full)  # the other process has started
        raise OSError(errno.ENOSPC, "Full")

    here, there = _with_one_that_waits(tmp_path / "root", fills, write_two_files)
    assert here.endswith(": Full")
    assert there == str(tmp_path / "root" / "abc")


def test_an_error_of_make_in_its_own_folder_is_the_caches(tmp_path):
    def writes(folder):
        (folder / "none" / "file").write_text("")

    with pytest.raises(ValueError, match=r"^data\.cache_dir must be a folder that can be written; got \S+/root: No"):
        cached_folder(tmp_path / "root", "abc", writes)


def test_the_root_is_the_folder_given_or_one_in_the_cache_of_datasets(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hf"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_root("verl_ext_index", None) == tmp_path / "hf" / "verl_ext_index"
    assert default_root("verl_ext_index", "~/mine") == tmp_path / "mine"


# Texts that every family tokenizes into the cache


@dataclass(frozen=True)
class Family:
    """Files of `count` documents, and the way to open them.

    encoder: its class; others: options that change the tokens; other: a tokenizer that gives different tokens; free:
    options that change no token; broken: the content of a file with a mistake, and the error.
    """

    encoder: Any
    name: str
    write: Callable[[Path, int], str]
    open: Callable[..., Any]
    tokenizer: Callable[[], Any]
    other: Callable[[], Any]
    max_length: int
    others: tuple[dict[str, Any], ...]
    free: tuple[dict[str, Any], ...]
    broken: tuple[str, str]

    def opened(self, path: str, tokenizer: Any = None, **options: Any) -> Any:
        given = {"cache_dir": str(Path(path).parent.parent / "cache"), "max_length": self.max_length, **options}
        return self.open(path, tokenizer or self.tokenizer(), **given)


def _open_babilong(path, tokenizer, **options):
    return BABILongDataset(path, tokenizer, **{"answer_reserve_tokens": 8, **options})


FAMILIES = {
    "pretrain": Family(
        encoder=PreTrainEncoder,
        name="web.jsonl",
        write=lambda path, count: write_jsonl(path, texts_of([9, *range(1, count)])),
        open=lambda path, tokenizer, **options: PreTrainDataset(tokenizer, path, **options),
        tokenizer=word_tokenizer,
        other=lambda: word_tokenizer(bos=False),
        max_length=8,
        others=({"max_length": 9}, {"on_bad_record": "skip"}),
        free=(
            {"rows": "padded"},
            {"max_tokens": 64, "strategy": "next_fit", "seed": 3},
            {"split": "val", "train_ratio": 0.5, "max_samples": 1},
        ),
        broken=('{"text": 3}', "must be a string"),
    ),
    "babilong": Family(
        encoder=BABILongEncoder,
        name="1k.json",
        write=lambda path, count: write_records(path, [record(20), *records(count - 1)]),
        open=_open_babilong,
        tokenizer=byte_tokenizer,
        other=lambda: byte_tokenizer(special=False),
        max_length=96,
        others=({"max_length": 95}, {"answer_reserve_tokens": 9}, {"truncate": "right"}, {"append_eos": True}),
        free=({"split": "val", "seed": 3, "train_ratio": 0.5}, {"max_samples": 1}),
        broken=('[{"input": "a"', "malformed JSON"),
    ),
}


@pytest.fixture(params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


@pytest.fixture
def path(family, tmp_path):
    return family.write(tmp_path / "data" / family.name, 4)


@pytest.fixture
def built(family, monkeypatch):
    """Return a list that gets an entry for each tokenization."""
    made, original = [], family.encoder.encode
    monkeypatch.setattr(family.encoder, "encode", lambda *arguments: (made.append(1), original(*arguments))[1])
    return made


def _documents(dataset):
    return int(dataset.facts().documents.sum())


def test_files_are_tokenized_once_for_every_split_limit_padding_and_packing(family, path, built):
    first = family.opened(path)
    tokenizer = family.tokenizer()
    tokenizer("w1 w2 w3 w4", truncation=True, max_length=3)  # the call leaves its limits in the tokenizer
    tokenizer.pad_token = tokenizer.eos_token
    assert {family.opened(path, tokenizer).folders, *(family.opened(path, **free).folders for free in family.free)} == {
        first.folders
    }
    assert len(built) == 1


def test_other_options_tokenizers_or_files_are_tokenized_anew(family, path, built):
    family.opened(path)
    for options in family.others:
        family.opened(path, **options)
    family.opened(path, family.other())
    count = len(family.others) + 2
    assert len(built) == count
    family.write(Path(path), 5)
    assert _documents(family.opened(path)) == 5
    status = os.stat(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    family.opened(path)
    assert len(built) == count + 2
    renamed = Path(path).with_name(f"books{Path(path).suffix}")
    os.rename(path, renamed)
    assert family.opened(str(renamed)).categories.names == ("books",)


@pytest.mark.parametrize("damage", ["state.json", "data-00000-of-00001.arrow", "report.json", "contents.json"])
def test_a_damaged_folder_of_tokens_is_made_anew(family, path, built, damage):
    rows = [row["input_ids"] for row in family.opened(path)]
    (folder,) = family.opened(path).folders
    (Path(folder) / damage).write_bytes(b"")
    again = list(family.opened(path))
    assert all(torch.equal(row["input_ids"], wanted) for row, wanted in zip(again, rows, strict=True))
    assert len(built) == 2


def test_a_file_that_changes_meanwhile_is_refused_and_leaves_no_folder_of_tokens(family, path, tmp_path, monkeypatch):
    original = DatasetWriter.close

    def changes(writer):
        original(writer)
        family.write(Path(path), 9)

    monkeypatch.setattr(DatasetWriter, "close", changes)
    with pytest.raises(ValueError, match=r"^the files of data\.train_dir must not change while they are tokenized"):
        family.opened(path)
    assert not any(entry.is_dir() for entry in (tmp_path / "cache").iterdir())


def test_a_full_disk_is_one_line_with_the_key_and_leaves_no_folder_of_tokens(tmp_path, family, files_end_at):
    path = family.write(tmp_path / "data" / family.name, 400)
    told = r"^data\.cache_dir must be a folder that can be written; got \S*cache: .*File too large$"
    with files_end_at(1 << 12), pytest.raises(ValueError, match=told):
        family.opened(path)
    assert not any(entry.is_dir() for entry in (tmp_path / "cache").iterdir())
    assert len(family.opened(path)) > 0


def test_the_cache_lies_in_that_of_datasets_unless_told(family, path, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hf"))
    (folder,) = family.opened(path, cache_dir=None).folders
    assert Path(folder).parent == tmp_path / "hf" / "verl_ext_tokenized"


def _lines_of_opening(name, path):
    """Return the log of a process that opens the files twice."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda entry: lines.append(entry.getMessage())
    logging.getLogger("verl_ext.data.text_set").addHandler(handler)
    FAMILIES[name].opened(path)
    FAMILIES[name].opened(path, **FAMILIES[name].free[0])
    return lines


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_cut_is_said_once_in_every_process_that_opens_it(tmp_path, name):
    path = FAMILIES[name].write(tmp_path / "data" / FAMILIES[name].name, 4)
    for _ in range(2):
        ((line,),) = run_ranks(_lines_of_opening, 1, name, path)
        assert line.startswith("1 of 4 ")


def test_a_mistake_in_a_file_is_told_without_a_bar(family, path, capsys):
    family.opened(path)
    assert "tokenize: 100%" in capsys.readouterr().err
    content, told = family.broken
    Path(path).write_text(content)
    with pytest.raises(ValueError, match=told):
        family.opened(path)
    assert capsys.readouterr().err == ""


def test_the_folder_says_what_it_was_made_of(family, path):
    (folder,) = family.opened(path).folders
    made_of = json.loads((Path(folder) / "report.json").read_text())
    assert made_of["files"] == [path]
    assert made_of["options"]["max_length"] == family.max_length
    (category,) = made_of["categories"].values()
    assert category["documents"] == 4


def _open_on_a_rank(name, path):
    """Return (the number of this rank's tokenizations, its rows' labels, the targets by the shared scan)."""
    from verl_ext.trainer.distributed import RunRanks

    family, made = FAMILIES[name], []
    original = family.encoder.encode
    family.encoder.encode = lambda *arguments: (made.append(1), original(*arguments))[1]
    dist.barrier()
    dataset = family.opened(path, split="train", train_ratio=0.9)
    dataset.read_together(RunRanks())
    return len(made), [row["labels"].tolist() for row in dataset], dataset.facts().targets.tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_of_two_ranks_one_tokenizes_and_both_have_the_rows_and_the_scan(tmp_path, name):
    path = FAMILIES[name].write(tmp_path / "data" / FAMILIES[name].name, 50)
    (first, rows, targets), (second, *others) = run_ranks(_open_on_a_rank, 2, name, path)
    assert first + second == 1
    assert others == [rows, targets]
    assert targets == [sum(label != -100 for label in labels) for labels in rows]


def test_texts_of_several_chunks_are_one_dataset(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "data/web.jsonl", texts_of([3] * 600))
    whole = [row["input_ids"] for row in FAMILIES["pretrain"].opened(path, rows="padded")]
    monkeypatch.setattr("verl_ext.text.tokenizing.THREADS_CHUNK", ChunkSize(7))
    other = FAMILIES["pretrain"].opened(path, rows="padded", cache_dir=str(tmp_path / "other"))
    assert len(whole) == len(other) == 600
    assert all(torch.equal(row["input_ids"], wanted) for row, wanted in zip(other, whole, strict=True))


def test_samples_are_tokenized_in_chunks_of_bounded_size(tmp_path):
    path = write_records(tmp_path / "data/qa1/1k.json", records(600))
    ((file, category),) = find_babilong_files([path], "data.train_dir")
    encoder = BABILongEncoder(SampleOptions(max_length=96, answer_reserve_tokens=8), byte_tokenizer())
    chunks = [encoder.encode(chunk) for chunk in read_files([file], read=encoder.read)]
    assert [len(chunk.lengths) for chunk in chunks] == [256, 256, 88]
    assert category == "qa1_1k"
    tokens = [row["input_ids"][row["attention_mask"] == 1].tolist() for row in FAMILIES["babilong"].opened(path)]
    assert [token for row in tokens for token in row] == [
        token for chunk in chunks for token in chunk.input_ids.tolist()
    ]


# Megatron's sample indices and blends


ARRAYS = ("document_index", "sample_index", "shuffle_index")


@pytest.fixture
def index(tmp_path):
    lengths = np.array([3, 0, 9, 4, 30, 1])
    writer = IndexWriter(tmp_path / "corpus", np.uint16)
    writer.add(np.arange(lengths.sum()), lengths)
    writer.close()
    return TokenIndex(tmp_path / "corpus", "data.val_dir")


def made(root):
    """Return the folders of a cache, each with a mark that a new folder would not have."""
    return {path.name: path.stat().st_ino for path in root.iterdir() if path.is_dir()}


@pytest.mark.parametrize("documents", [None, np.array([4, 0, 2])])
def test_cached_indices_are_those_that_are_built(tmp_path, index, documents):
    expected = build_sample_indices(index.lengths, documents, 4, 25, seed=1)
    folders = []
    for _ in range(2):
        cached = cached_sample_indices(tmp_path / "cache", index, documents, 4, 25, seed=1)
        for name in ARRAYS:
            array = getattr(cached, name)
            np.testing.assert_array_equal(array, getattr(expected, name), strict=True)
            assert not array.flags.writeable
        assert [piece.tolist() for piece in cached.pieces(7)] == [piece.tolist() for piece in expected.pieces(7)]
        folders.append(made(tmp_path / "cache"))
    assert folders[0] == folders[1]


def test_cached_indices_pickle_as_their_folder(tmp_path, index):
    cached = cached_sample_indices(tmp_path / "cache", index, None, 2, 5000, seed=1)
    pickled = pickle.dumps(cached)
    assert len(pickled) < 2000
    again = pickle.loads(pickled)
    assert again.sample_index.tolist() == cached.sample_index.tolist()
    assert [piece.tolist() for piece in again.pieces(9)] == [piece.tolist() for piece in cached.pieces(9)]


def test_everything_that_indices_follow_from_makes_others(tmp_path, index):
    root = tmp_path / "cache"
    usual = {"documents": None, "seq_len": 4, "num_samples": 25, "seed": 1}
    cached_sample_indices(root, index, **usual)
    others = [
        {"documents": np.arange(6)[::-1]},
        {"documents": np.array([2, 4])},
        {"seq_len": 5},
        {"num_samples": None},
        {"seed": 2},
    ]
    for count, change in enumerate(others, 2):
        cached_sample_indices(root, index, **{**usual, **change})
        assert len(made(root)) == count


def test_a_corpus_that_changed_has_other_indices(tmp_path, index):
    cached_sample_indices(tmp_path / "cache", index, None, 4, 25, seed=1)
    changed = os.stat(index.files[0]).st_mtime_ns + 10**9
    os.utime(index.files[0], ns=(changed, changed))
    cached_sample_indices(tmp_path / "cache", index, None, 4, 25, seed=1)
    assert len(made(tmp_path / "cache")) == 2


@pytest.mark.parametrize(("old", "new"), [(b"'<i4'", b"'<f4'"), (b"(36, 2)", b"(2, 36)"), (b"NUMPY", b"NUMPX")])
def test_an_array_of_another_shape_or_dtype_is_refused_in_one_line(tmp_path, index, old, new):
    cached_sample_indices(tmp_path / "cache", index, None, 4, 30, seed=1)
    [path] = (tmp_path / "cache").glob("samples-*/sample_index.npy")
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))
    with pytest.raises(ValueError, match=r"^data\.cache_dir must hold the arrays that were written there.*samples-.*$"):
        cached_sample_indices(tmp_path / "cache", index, None, 4, 30, seed=1)


def test_a_corpus_shorter_than_a_sample_is_refused_before_anything_is_written(tmp_path, index):
    with pytest.raises(ValueError, match=r"^data\.val_dir must have the 48 tokens .*; got 47 tokens$"):
        cached_sample_indices(tmp_path / "cache", index, None, 47, None, seed=1)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(("rule", "order"), [("tijdeman", blend_order), ("megatron", megatron_blend_order)])
def test_a_cached_blend_is_the_rules_order(tmp_path, rule, order):
    expected = order([0.5, 0.2, 0.3], 50)
    folders = []
    for _ in range(2):
        for found, wanted in zip(cached_blend(tmp_path, [0.5, 0.2, 0.3], 50, rule), expected, strict=True):
            np.testing.assert_array_equal(found, wanted, strict=True)
        folders.append(made(tmp_path))
    assert folders[0] == folders[1]
    assert len(list(tmp_path.glob("blend-*/source.npy"))) == 1


def test_a_blend_of_other_weights_is_another_one(tmp_path):
    assert cached_blend(tmp_path, [1, 1], 4)[0].tolist() != cached_blend(tmp_path, [3, 1], 4)[0].tolist()
    with pytest.raises(ValueError, match=r"^data\.val_blend "):
        cached_blend(tmp_path, [1, -1], 4, key="data.val_blend")


def test_a_full_disk_is_one_line_with_the_key_and_leaves_no_folder_of_arrays(tmp_path, index, files_end_at):
    root = tmp_path / "cache"
    of_samples = {"root": root, "index": index, "documents": None, "seed": 1}
    of_each = {
        "sample_index": lambda: cached_sample_indices(**of_samples, seq_len=1, num_samples=9000),
        "document_index": lambda: cached_sample_indices(**of_samples, seq_len=40, num_samples=4000),
        "source": lambda: cached_blend(root, [0.5, 0.5], 40_000),
        "sample": lambda: cached_blend(root, [0.5, 0.5], 10_000),
    }
    told = r"^data\.cache_dir must be a folder that can be written; got \S+cache: File too large$"
    root.mkdir()

    for name, make in of_each.items():
        before = made(root)
        with files_end_at(1 << 16), pytest.raises(ValueError, match=told):
            make()
        assert made(root) == before
        make()
        assert max(path.stat().st_size for path in root.glob(f"*/{name}.npy")) > 1 << 16
