"""A user's class of packs with a `collate_fn`, and SFTDataSet used as such a class, in the packs of verl's recipe."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from tests.lib.errors import refused
from tests.lib.ranks import in_turn, run_ranks
from tests.lib.seed import SEED_CLASS
from tests.lib.tokenized_data import random_documents, write_tokenized
from tests.lib.training import into, metrics, train_alone
from verl_ext.config.run import dataset_class
from verl_ext.data import SFTDataSet
from verl_ext.data.families.collated import CollatedDataset
from verl_ext.data.tokenized.ranks import Ranks
from verl_ext.packing import TOKENS

FILE = f"""{SEED_CLASS}

class NoMask(SFTDataSet):
    def collate_fn(self, items):
        return {{"input_ids": torch.zeros(1, 4)}}


class Asks(SFTDataSet):
    def __init__(self, folder):
        pass
"""
TENSORS = {"input_ids", "position_ids", "loss_mask", "category_ids", "attention_mask"}
LENGTHS = [9, 40, 3, 64, 30, 17, 23, 31, 8, 12, 50, 28, 5, 5, 44]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    documents = random_documents(np.random.default_rng(3), LENGTHS, 100, 2)
    for document in documents:  # as data is made: a first token is no target, and what is no target has no category
        document["loss_mask"][0] = document["category_ids"][0] = 0
        document["category_ids"] = document["category_ids"] * document["loss_mask"]
    return str(write_tokenized(tmp_path / "data", documents))


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "packer.py").write_text(FILE)
    return {"path": str(tmp_path / "packer.py"), "name": "SFTDataSet"}


@pytest.fixture
def tokenizer(tiny_model: str) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


def opened(folder: str, tokenizer: Any, keys: dict[str, str], **options: Any) -> CollatedDataset:
    node = OmegaConf.create({"max_tokens": 64, "custom_cls": keys, **options})
    family: Any = dataset_class({"data": {"custom_cls": keys}})
    return family(folder, tokenizer=tokenizer, config=node)


def test_packs_are_those_of_the_class_without_padding(folder: str, keys: dict[str, str], tokenizer: Any) -> None:
    dataset = opened(folder, tokenizer, keys)
    own = dataset._own
    assert len(dataset) == len(own)
    for pack in range(len(dataset)):
        row, expected = dataset[pack], own.collate_fn([own[pack]])
        tokens = int(expected["attention_mask"].sum())
        assert row.keys() == TENSORS - {"attention_mask"}
        for name, values in row.items():
            assert torch.equal(values, expected[name][0, :tokens])
            assert not expected["loss_mask"][0, tokens:].any()
        assert dataset.facts().tokens[pack] == tokens
        assert dataset.facts().targets[pack] == int(row["loss_mask"].sum())
        lengths = [own.dataframe[number]["length"] for number in own[pack]]
        assert dataset.facts().documents[pack] == len(lengths)
        assert dataset.facts(TOKENS).costs[pack] == sum(lengths)
    assert dataset.facts().longest_document == max(LENGTHS)
    assert dataset.categories.ids == (1, 2)


class Rank(Ranks):
    """One of three ranks, whose `gather` returns the shares of all; without them it ends the reading with its own."""

    def __init__(self, rank: int, shares: list[Any] | None = None) -> None:
        self.rank, self.size, self.shares = rank, 3, shares

    def gather(self, value: Any) -> list[Any]:
        if self.shares is None:
            raise StopIteration(value)
        assert repr(self.shares[self.rank]) == repr(value)
        return self.shares


def test_the_facts_are_those_of_any_number_of_ranks(folder: str, keys: dict[str, str], tokenizer: Any) -> None:
    alone, shares = opened(folder, tokenizer, keys), []
    for rank in range(3):
        with pytest.raises(StopIteration) as share:
            opened(folder, tokenizer, keys).read_together(Rank(rank))
        shares.append(share.value.value)
    for rank in range(3):
        dataset = opened(folder, tokenizer, keys)
        dataset.read_together(Rank(rank, shares))
        assert (dataset.digest, dataset.facts().token_range) == (alone.digest, alone.facts().token_range)
        assert dataset.facts().tokens.tolist() == alone.facts().tokens.tolist()


@pytest.mark.parametrize(
    ("name", "options", "things"),
    [
        ("NoMask", {}, ("data.custom_cls.name", "input_ids, position_ids, loss_mask", "input_ids of 4")),
        ("Asks", {}, ("data.custom_cls.name", "Asks(folder)")),
        ("SFTDataSet", {"strategy": "next_fit"}, ("data.strategy", "best_fit", "collate_fn", "next_fit")),
        ("np", {}, ("data.custom_cls.name", "collate_fn", "np")),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_in_one_line(
    folder: str, keys: dict[str, str], tokenizer: Any, name: str, options: dict[str, Any], things: tuple[str, ...]
) -> None:
    with refused(*things):
        opened(folder, tokenizer, {**keys, "name": name}, **options).read_together(Ranks())


def test_sft_dataset_collates_the_tensors_of_the_class_in_its_packs(folder: str, keys: dict[str, str]) -> None:
    own = opened(folder, None, keys)._own
    ours = SFTDataSet(
        train_dir=folder, max_tokens=64, padding_value=0, strategy="next_fit", shuffle_documents=True, seed=42
    )
    assert len(ours) == len(own)
    loaders = [DataLoader(each, batch_size=1, num_workers=0, collate_fn=each.collate_fn) for each in (ours, own)]
    for batch, expected in zip(*loaders, strict=True):
        assert batch.keys() == expected.keys() == TENSORS
        for name, values in expected.items():
            assert torch.equal(batch[name], values), name
    two = ours.collate_fn([0, ours[1]])
    assert [values.shape for values in two.values()] == [(2, 64)] * 5
    padded = SFTDataSet(folder, 64, 0, strategy="next_fit", shuffle_documents=True, pad_mode="right")
    for name, values in padded.collate_fn([padded[0], 1]).items():
        assert torch.equal(values, two[name])


def test_documents_are_shuffled_whole_and_only_where_their_order_decides(folder: str) -> None:
    plain, shuffled = (
        SFTDataSet(folder, 16, strategy="none", over_length="split", shuffle_documents=shuffle)
        for shuffle in (False, True)
    )
    places = [[shuffled.documents_of(pack)[0][1:] for pack in range(len(shuffled))] for shuffled in (plain, shuffled)]
    assert sorted(places[1]) == sorted(places[0]) != places[1]
    rows = [row for row, start, _ in places[1] if start == 0]
    assert places[1] == [place for row in rows for place in places[0] if place[0] == row]
    for options in ({"strategy": "best_fit"}, {"strategy": "sorted_batch"}):
        with refused("data.strategy", "next_fit", "data.shuffle_documents=true", options["strategy"]):
            SFTDataSet(folder, 64, shuffle_documents=True, **options)


def test_names_of_categories_are_an_option_before_those_of_the_folder(folder: str) -> None:
    (Path(folder) / "categories.json").write_text('{"1": "one", "2": "two", "5": "five"}')
    names = {1: "gsm8k", "2": "code"}
    assert SFTDataSet(folder, 64, category_names=names).categories.names == ("gsm8k", "code", "five")
    for wrong, things in (
        ({1: "five"}, ("'five'", "1 and 5")),
        ({0: "none"}, ("data.category_names", "'0'")),
        (["a"], ("data.category_names", "object", "['a']")),
        ({1: ""}, ("data.category_names", "category 1", "''")),
    ):
        with refused(*things):
            _ = SFTDataSet(folder, 64, category_names=wrong).categories


@pytest.mark.slow
def test_a_class_with_a_collate_fn_trains_as_the_same_packs_of_ours(
    folder: str, keys: dict[str, str], tiny_model: str, tmp_path: Path
) -> None:
    usual = [f"data.train_dir={folder}", f"data.val_dir={folder}", "data.max_tokens=64", f"model.path={tiny_model}"]
    own = [f"data.custom_cls.path={keys['path']}", f"data.custom_cls.name={keys['name']}"]
    ours = ["data.strategy=next_fit", "data.shuffle_documents=true"]
    calls = [(train_alone, [*usual, *more, into(tmp_path / name)]) for name, more in (("own", own), ("ours", ours))]
    run_ranks(in_turn, 1, calls)
    logged, expected = metrics(tmp_path / "own"), metrics(tmp_path / "ours")
    losses = [key for key in expected if key[1].endswith(("loss", "_tokens"))]
    assert {"train/1_loss", "train/2_loss", "val/loss"} <= {name for _, name in losses}
    for key in losses:
        assert logged[key] == pytest.approx(expected[key], rel=1e-6), key
