"""SFTDataSet: rows written by hand, both constructor forms, over-length policies, workers, and verl's own loader."""

import multiprocessing
import pickle

import numpy as np
import pytest
import torch
from datasets import load_from_disk
from omegaconf import OmegaConf
from torch.utils.data import DataLoader

from tests.lib.errors import refused
from tests.lib.tokenized_data import random_documents, write_tokenized
from verl_ext.data import SFTDataSet
from verl_ext.packing import plan_packs

P = 99  # the padding token of these tests


class Tokenizer:
    pad_token_id = P


@pytest.fixture
def folder(tmp_path):
    documents = random_documents(np.random.default_rng(0), [5, 1, 9, 16, 3, 7, 2, 12, 8, 8], vocab=50, categories=3)
    return write_tokenized(tmp_path / "data", documents, {1: "gsm8k", 2: "code", 3: "chat"}, loss_weight=True)


@pytest.fixture
def drawn(tmp_path):
    """Return the two documents of the drawing in sft.py; A's first and context tokens are marked in vain."""
    documents = [
        {"input_ids": [10, 11, 12], "loss_mask": [1, 0, 1], "category_ids": [1, 1, 1], "loss_weight": [1, 1, 0.5]},
        {"input_ids": [20, 21, 22, 23], "loss_mask": [0, 1, 1, 1], "category_ids": [0, 2, 2, 2]},
    ]
    documents[1]["loss_weight"] = [1, 2, 0, 1]
    return lambda loss_weight=False: write_tokenized(tmp_path / "drawn", documents, loss_weight=loss_weight)


def assert_rows(row, expected):
    assert {name: values.tolist() for name, values in row.items()} == expected


def test_a_pack_is_the_row_that_the_picture_draws(drawn):
    dataset = SFTDataSet(drawn(), max_tokens=9, padding_value=P, strategy="next_fit")
    assert len(dataset) == 1
    assert_rows(
        dataset[0],
        {
            "input_ids": [10, 11, 12, 20, 21, 22, 23],
            "position_ids": [0, 1, 2, 0, 1, 2, 3],
            "loss_mask": [0, 0, 1, 0, 1, 1, 1],
            "category_ids": [0, 0, 1, 0, 2, 2, 2],
        },
    )
    assert {values.dtype for values in dataset[0].values()} == {torch.int64}


def test_padding_is_one_last_pseudo_document(drawn):
    dataset = SFTDataSet(drawn(loss_weight=True), max_tokens=9, padding_value=P, strategy="next_fit", pad_mode="right")
    assert_rows(
        dataset[0],
        {
            "input_ids": [10, 11, 12, 20, 21, 22, 23, P, P],
            "position_ids": [0, 1, 2, 0, 1, 2, 3, 0, 1],
            "loss_mask": [0, 0, 1, 0, 1, 1, 1, 0, 0],
            "category_ids": [0, 0, 1, 0, 2, 2, 2, 0, 0],
            "attention_mask": [1, 1, 1, 1, 1, 1, 1, 0, 0],
            "loss_weight": [1, 1, 0.5, 1, 2, 0, 1, 0, 0],
        },
    )
    assert dataset[0]["loss_weight"].dtype == torch.float32
    assert dataset[0]["attention_mask"].dtype == torch.int64


def test_a_document_of_exactly_max_tokens_needs_no_padding(drawn):
    dataset = SFTDataSet(drawn(), max_tokens=4, padding_value=P, strategy="none", pad_mode="right")
    assert dataset[1]["input_ids"].tolist() == [20, 21, 22, 23]
    assert dataset[1]["attention_mask"].tolist() == [1, 1, 1, 1]


def test_one_token_documents_hold_no_target(tmp_path):
    documents = [
        {"input_ids": [7], "loss_mask": [1], "category_ids": [1]},
        {"input_ids": [8, 9], "loss_mask": [1, 1], "category_ids": [1, 1]},
    ]
    dataset = SFTDataSet(write_tokenized(tmp_path / "data", documents), max_tokens=3, strategy="next_fit")
    assert dataset[0]["position_ids"].tolist() == [0, 0, 1]
    assert dataset[0]["loss_mask"].tolist() == [0, 0, 1]
    assert dataset.facts().targets.tolist() == [1]


def test_two_categories_in_one_document_keep_their_tokens(tmp_path):
    documents = [{"input_ids": [1, 2, 3, 4], "loss_mask": [0, 1, 0, 1], "category_ids": [0, 5, 5, 3]}]
    dataset = SFTDataSet(write_tokenized(tmp_path / "data", documents), max_tokens=4)
    assert dataset[0]["category_ids"].tolist() == [0, 5, 0, 3]
    assert dataset.categories.ids == (3, 5)


@pytest.mark.parametrize("strategy", ["best_fit", "next_fit", "none"])
def test_every_document_is_whole_in_one_pack_and_the_counts_agree(folder, strategy):
    dataset = SFTDataSet(folder, max_tokens=20, strategy=strategy)
    documents = []
    for row in dataset:
        begins = np.flatnonzero(row["position_ids"].numpy() == 0)[1:]
        documents += [part.tolist() for part in np.split(row["input_ids"].numpy(), begins)]
        assert len(row["input_ids"]) <= 20
    assert sorted(documents) == sorted(load_from_disk(folder)["input_ids"])
    assert dataset.facts().tokens.tolist() == [len(row["input_ids"]) for row in dataset]
    assert dataset.facts().targets.tolist() == [int(row["loss_mask"].sum()) for row in dataset]
    assert dataset.facts().documents.tolist() == [int((row["position_ids"] == 0).sum()) for row in dataset]


def test_the_plan_is_plan_packs_of_the_lengths(folder):
    dataset = SFTDataSet(folder, max_tokens=20, seed=5)
    plan = plan_packs(load_from_disk(folder)["length"][:], 20, "best_fit", 5)
    assert dataset.plan().document_index.tolist() == plan.document_index.tolist()
    assert dataset.plan().pack_offsets.tolist() == plan.pack_offsets.tolist()


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"strategy": "next_fit", "pad_mode": "right"}, {"seed": 7, "over_length": "split", "max_tokens": 6}]
)
def test_both_constructor_forms_give_the_same_rows(folder, as_list, options):
    options = {"max_tokens": 20, **options}
    config = OmegaConf.create({"train_batch_size": 4, "train_dir": "???", "seed": None, **options})
    OmegaConf.set_struct(config, True)
    files = OmegaConf.create([folder]) if as_list else folder
    verls = SFTDataSet(parquet_files=files, tokenizer=Tokenizer(), config=config, processor=None, max_samples=-1)
    seeds = SFTDataSet(train_dir=folder, padding_value=P, **options)
    assert len(verls) == len(seeds) > 1
    for left, right in zip(verls, seeds, strict=True):
        assert_rows(left, {name: values.tolist() for name, values in right.items()})


def test_max_samples_takes_the_first_documents(folder):
    dataset = SFTDataSet(parquet_files=folder, config={"max_tokens": 20, "strategy": "none"}, max_samples=3)
    assert [len(row["input_ids"]) for row in dataset] == [5, 1, 9]
    assert len(dataset.scan().targets) == 3


def test_packs_are_numbered_like_a_list(folder):
    dataset = SFTDataSet(folder, max_tokens=20)
    assert torch.equal(dataset[-1]["input_ids"], dataset[len(dataset) - 1]["input_ids"])
    with pytest.raises(IndexError):
        dataset[len(dataset)]


# Over-length documents


@pytest.fixture
def over_length(tmp_path):
    """Row 0 fits in 4 tokens; a cut takes row 1's last target, row 2's only one, and none of row 3; row 4 is empty."""
    masks = [[0, 1, 1], [0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1], [0, 1, 0, 0, 0], []]
    categories = [1, 2, 2, 0, 1]
    documents = [
        {
            "input_ids": [10 * row + at for at in range(len(mask))],
            "loss_mask": mask,
            "category_ids": [category] * len(mask),
        }
        for row, (mask, category) in enumerate(zip(masks, categories, strict=True))
    ]
    return write_tokenized(tmp_path / "over", documents, {1: "short", 2: "long"})


def report_of(dataset):
    return [
        (row.category, row.reason, row.documents, row.tokens, row.tokens_kept, row.tokens_removed)
        for row in dataset.omitted_documents()
    ]


def test_over_length_documents_are_an_error_by_default(over_length):
    with refused("data.max_tokens", "3 of 5", "6 tokens"):
        SFTDataSet(over_length, max_tokens=4)


def test_dropped_documents_are_reported_by_category(over_length):
    dataset = SFTDataSet(over_length, max_tokens=4, over_length="drop")
    assert [row["input_ids"].tolist() for row in dataset] == [[0, 1, 2]]
    assert report_of(dataset) == [
        ("long", "drop", 2, 11, 0, 11),
        ("(none)", "drop", 1, 5, 0, 5),
        ("(none)", "empty", 1, 0, 0, 0),
    ]


def test_truncated_documents_are_counted(over_length):
    dataset = SFTDataSet(over_length, max_tokens=4, over_length="truncate", strategy="none")
    assert [row["input_ids"].tolist() for row in dataset] == [[0, 1, 2]] + [
        [n, n + 1, n + 2, n + 3] for n in (10, 20, 30)
    ]
    assert report_of(dataset)[:2] == [("long", "truncate", 2, 11, 8, 3), ("(none)", "truncate", 1, 5, 4, 1)]


def test_split_documents_keep_every_token_and_restart_positions(over_length):
    dataset = SFTDataSet(over_length, max_tokens=4, over_length="split", strategy="none")
    pieces = [(row["input_ids"].tolist(), row["loss_mask"].tolist()) for row in dataset]
    assert pieces[1:3] == [([10, 11, 12, 13], [0, 1, 1, 1]), ([14, 15], [0, 1])]
    assert pieces[4] == ([24], [0])
    assert dataset[2]["position_ids"].tolist() == [0, 1]
    assert dataset.scan().targets.tolist() == [2, 3, 1, 0, 0, 1, 0]
    long = dataset.omitted_documents()[0]
    assert (long.tokens_kept, long.tokens_removed) == (11, 0)


# Options


@pytest.mark.parametrize(
    ("options", "things"),
    [
        ({"max_tokens": None}, ("data.max_tokens",)),
        ({"pad_mode": "right", "padding_value": None}, ("padding_value", None)),
        ({"parquet_files": "x"}, ("data.train_dir", "once", "parquet_files=x")),
        ({"train_dir": None}, ("data.train_dir", "folder", None)),
        ({"train_dir": []}, ("data.train_dir", "folder", "[]")),
    ],
)
def test_a_wrong_option_is_answered_with_its_key(folder, options, things):
    with refused(*things):
        SFTDataSet(**{"train_dir": folder, "max_tokens": 20, **options})


# Scan, categories, workers


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_loader_workers_give_the_same_packs(folder, start):
    dataset = SFTDataSet(folder, max_tokens=20)
    assert dataset[0] is not None  # opens views in the parent
    loader = DataLoader(
        dataset, batch_size=None, num_workers=1, multiprocessing_context=multiprocessing.get_context(start)
    )
    for ours, theirs in zip(loader, dataset, strict=True):
        assert_rows(ours, {name: values.tolist() for name, values in theirs.items()})


def test_a_dataset_pickles_without_its_tokens(tmp_path):
    documents = random_documents(np.random.default_rng(0), [5000] * 20, vocab=50, categories=1)
    dataset = SFTDataSet(write_tokenized(tmp_path / "data", documents), max_tokens=20_000)
    assert dataset.scan() is not None
    text = pickle.dumps(dataset)
    assert len(text) < 10_000
    assert torch.equal(pickle.loads(text)[2]["input_ids"], dataset[2]["input_ids"])


def test_the_category_of_a_first_token_is_not_that_of_a_target(tmp_path):
    document = {"input_ids": [1, 2, 3], "loss_mask": [1, 0, 1], "category_ids": [2, 0, 1]}
    assert SFTDataSet(write_tokenized(tmp_path / "data", [document]), 8).scan().category_ids == (1,)
