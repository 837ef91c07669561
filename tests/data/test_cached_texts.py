"""Texts that every family tokenizes into the cache: made once, for every use and form of the same tokens."""

import json
import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from verl.utils.dataset.dataset_utils import DatasetPadMode, SFTTensorCollator

from tests.lib.babilong_files import byte_tokenizer, record, records, write_records
from tests.lib.errors import refused
from tests.lib.pretrain_files import texts_of, word_tokenizer, write_jsonl
from tests.lib.ranks import in_turn, run_cases
from verl_ext.data import BABILongDataset, PreTrainDataset, SFTDataSet
from verl_ext.data.families.babilong import BABILongEncoder, SampleOptions
from verl_ext.data.families.babilong import find_task_files as find_babilong_files
from verl_ext.data.families.pretrain import PreTrainEncoder
from verl_ext.losses import LossSpec, category_weight_table
from verl_ext.text.arrow_folder import DatasetWriter
from verl_ext.text.read.readers import ChunkSize, read_files
from verl_ext.trainer.collator import StepCollator
from verl_ext.trainer.distributed import RunRanks


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
        broken=('{"text": 3}', ("web.jsonl:1", "string", "int")),
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
        broken=('[{"input": "a"', ("1k.json", "malformed")),
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
    with refused("data.train_dir"):
        family.opened(path)
    assert not any(entry.is_dir() for entry in (tmp_path / "cache").iterdir())


def test_a_full_disk_is_one_line_with_the_key_and_leaves_no_folder_of_tokens(tmp_path, family, files_end_at):
    path = family.write(tmp_path / "data" / family.name, 400)

    with files_end_at(1 << 12), refused("data.cache_dir", tmp_path / "cache", "File too large"):
        family.opened(path)
    assert not any(entry.is_dir() for entry in (tmp_path / "cache").iterdir())
    assert len(family.opened(path)) > 0


def test_the_cache_lies_in_that_of_datasets_unless_told(family, path, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hf"))
    (folder,) = family.opened(path, cache_dir=None).folders
    assert Path(folder).parent == tmp_path / "hf" / "verl_ext_tokenized"


def _lines_of_opening(name, path):
    """Return the log of this rank, which opens the files twice; one rank does after the other."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda entry: lines.append(entry.getMessage())
    logging.getLogger("verl_ext.data.families.texts").handlers = [handler]
    for rank in range(dist.get_world_size()):
        if rank == dist.get_rank():
            FAMILIES[name].opened(path)
            FAMILIES[name].opened(path, **FAMILIES[name].free[0])
        dist.barrier()
    return [*lines]  # the handler stays


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    """Return by function what each rank found of each family."""
    folder, cases = tmp_path_factory.mktemp("texts"), {}
    for function, count in ((_lines_of_opening, 4), (_open_on_a_rank, 50)):
        paths = {
            name: family.write(folder / str(count) / name / family.name, count) for name, family in FAMILIES.items()
        }
        cases[function] = (2, in_turn, [(function, *each) for each in paths.items()])
    return run_cases(cases)


def test_what_is_cut_is_said_once_in_every_process_that_opens_it(on_two_ranks):
    for told in on_two_ranks[_lines_of_opening]:
        assert len(told) == len(FAMILIES)
        assert all(re.match("1 of 4 ", line) for (line,) in told)


def test_a_mistake_in_a_file_is_told_without_a_bar(family, path, capsys):
    family.opened(path)
    assert "tokenize: 100%" in capsys.readouterr().err
    content, things = family.broken
    Path(path).write_text(content)
    with refused(*things):
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
    family, made = FAMILIES[name], []
    original = family.encoder.encode
    family.encoder.encode = lambda *arguments: (made.append(1), original(*arguments))[1]
    dist.barrier()
    dataset = family.opened(path, split="train", train_ratio=0.9)
    dataset.read_together(RunRanks())
    return len(made), [row["labels"].tolist() for row in dataset], dataset.facts().targets.tolist()


def test_of_two_ranks_one_tokenizes_and_both_have_the_rows_and_the_scan(on_two_ranks):
    for of_ranks in zip(*on_two_ranks[_open_on_a_rank], strict=True):
        (first, rows, targets), (second, *others) = of_ranks
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


FORMS = [  # of rows
    ("babilong", {"answer_reserve_tokens": 8, "append_eos": True}),
    ("pretrain", {"rows": "packed", "max_tokens": 20}),
    ("pretrain", {"rows": "padded", "max_tokens": 20}),
]


@pytest.mark.parametrize(("name", "options"), FORMS)
def test_both_constructor_forms_give_the_same_rows(name, options, tmp_path):
    family, cache = FAMILIES[name], str(tmp_path / "cache")
    path = family.write(tmp_path / "data" / family.name, 14)
    options = {**options, "seed": 7, "train_ratio": 0.5, "cache_dir": cache}
    others = {"truncation": "error", "pad_mode": "no_padding", "custom_cls": {"path": None}}
    config = OmegaConf.create({**options, **others, "max_length": family.max_length})
    OmegaConf.set_struct(config, True)
    ours = family.opened(path, split="val", **options)
    form = {"parquet_files": OmegaConf.create([path]), "tokenizer": family.tokenizer(), "config": config}
    theirs = type(ours)(**form, processor=None, split="val")
    assert len(ours) == len(theirs)
    for row, other in zip(ours, theirs, strict=True):
        assert row.keys() == other.keys()
        assert all(torch.equal(row[name], other[name]) for name in row)


def test_an_argument_wins_over_the_config(family, path):
    config = {"max_length": 64, "max_tokens": 64, "seed": 5, "train_ratio": 0.5}
    options = family.opened(path, config=config, seed=1).options
    assert (options.max_length, options.seed, options.train_ratio) == (family.max_length, 1, 0.5)


@pytest.mark.parametrize(("name", "options"), FORMS)
def test_our_collator_and_verls_take_the_rows(name, options, tmp_path):
    family = FAMILIES[name]
    dataset = family.opened(family.write(tmp_path / "data" / family.name, 14), **options)
    weights = category_weight_table(None, dataset.categories.names)
    items = [dataset[0], dataset[1]]
    batch = StepCollator(LossSpec("token", weights), dataset.categories)(items)
    assert batch.input_ids.tolist() == torch.cat([item["input_ids"] for item in items]).tolist()
    targets = int(dataset.facts().targets[:2].sum())
    assert batch.counts["target_tokens"] == targets == int((batch.targets["coefficient"] > 0).sum())
    nested = SFTTensorCollator(DatasetPadMode.NO_PADDING)(items)
    assert nested["labels"].is_nested
    assert nested["labels"].offsets().diff().tolist() == [len(item["labels"]) for item in items]
    if "attention_mask" in items[0]:
        padded = SFTTensorCollator(DatasetPadMode.RIGHT)(items)
        assert padded["labels"].shape == padded["attention_mask"].shape == (2, family.max_length)


def test_the_scan_needs_no_token_and_is_that_of_a_tokenized_folder(family, tmp_path):
    path = family.write(tmp_path / "data" / family.name, 10)
    whole, dataset = family.opened(path), family.opened(path, split="train", train_ratio=0.8)
    (folder,) = dataset.folders
    read = SFTDataSet(folder, max_tokens=family.max_length, strategy="none")
    assert dataset.scan().targets.tolist() == read.scan().targets[dataset.spans.row].tolist()
    assert dataset.scan().category_ids == read.scan().category_ids
    assert whole.facts().token_range == read.facts().token_range
    for each in (whole, dataset):
        assert each.facts().targets.tolist() == [int(row["loss_mask"].sum()) for row in each]
        tokens = [int(row.get("attention_mask", torch.ones_like(row["input_ids"])).sum()) for row in each]
        assert each.facts().tokens.tolist() == tokens
