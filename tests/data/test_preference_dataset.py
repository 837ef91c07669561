"""PreferenceDataSet: units stay whole in packs, shared or not, and what cannot be packed is refused."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.errors import refused
from tests.lib.tokenized_data import random_units, write_tokenized, write_units
from verl_ext.data.families.preference import PreferenceDataSet
from verl_ext.data.packs.sft_options import FREE_STRATEGIES
from verl_ext.losses import PreferenceOptions
from verl_ext.packing import STRATEGIES
from verl_ext.trainer.objective import objective_of

SIZES = (2, 1, 3, 2, 2, 4, 1, 2, 2, 3)


@pytest.fixture(scope="module")
def documents():
    return random_units(np.random.default_rng(4), SIZES)


@pytest.fixture(scope="module")
def folder(documents, tmp_path_factory):
    return write_units(tmp_path_factory.mktemp("units") / "data", documents, {1: "chat", 2: "code"})


def opened(folder, **options):
    dataset = PreferenceDataSet(train_dir=folder, max_tokens=options.pop("max_tokens", 64), **options)
    dataset.reference = np.arange(float(sum(SIZES)))
    return dataset


def texts(pack):
    """Return the whole texts of a pack's documents, by their positions."""
    found, before = [], []
    starts = [0, *(np.flatnonzero(np.diff(pack["position_ids"].numpy()) != 1) + 1), len(pack["input_ids"])]
    for start, end in pairwise(starts):
        before = before[: int(pack["position_ids"][start])] + pack["input_ids"][start:end].tolist()
        found.append(before)
    return found


PACKED = [(strategy, False) for strategy in STRATEGIES] + [(strategy, True) for strategy in FREE_STRATEGIES]


@pytest.mark.parametrize(("strategy", "shares"), PACKED)
def test_every_unit_lies_whole_in_one_pack(folder, documents, strategy, shares):
    dataset, seen = opened(folder, strategy=strategy, share_prefixes=shares, share_least=2), []
    for number in range(len(dataset)):
        pack, rows = dataset[number], dataset.rows_of(number).tolist()
        seen += rows
        assert len(pack["input_ids"]) <= 64
        assert texts(pack) == [documents[row]["input_ids"].tolist() for row in rows]
        for name in ("unit", "answer", "pair_weight"):
            assert pack[name].tolist() == [documents[row][name] for row in rows]
        assert pack["reference"].tolist() == rows
        assert rows[0] + len(rows) - 1 == rows[-1] or strategy != "next_fit"
    assert sorted(seen) == list(range(len(documents)))
    tokens = sum(len(document["input_ids"]) for document in documents)
    facts = dataset.facts()
    assert facts.document_tokens.sum() == tokens
    assert (facts.tokens.sum() < tokens) == shares


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(1, 5), min_size=1, max_size=12), st.sampled_from([2, 5, 100]))
def test_shared_packs_hold_the_texts_of_whole_ones(tmp_path_factory, seed, sizes, least):
    documents = random_units(np.random.default_rng(seed), [2, *sizes], vocab=7)
    folder = write_units(tmp_path_factory.mktemp("units") / "data", documents)
    dataset = PreferenceDataSet(train_dir=folder, max_tokens=200, share_prefixes=True, share_least=least)
    for number in range(len(dataset)):
        rows = dataset.rows_of(number).tolist()
        assert texts(dataset[number]) == [documents[row]["input_ids"].tolist() for row in rows]


def test_sharing_lets_a_pack_hold_a_longer_unit(folder, documents):
    starts = np.flatnonzero([document["unit"] for document in documents])
    lengths = np.array([len(document["input_ids"]) for document in documents])
    longest = int(np.add.reduceat(lengths, starts).max())
    with refused("data.max_tokens", longest - 1, "1 of 10"):
        opened(folder, max_tokens=longest - 1)
    assert len(opened(folder, max_tokens=longest - 1, share_prefixes=True, share_least=2)) > 1


def test_long_units_are_left_out_whole_and_reported(folder, documents):
    dataset = opened(folder, max_tokens=30, over_length="drop")
    kept = sorted(row for number in range(len(dataset)) for row in dataset.rows_of(number).tolist())
    starts = np.flatnonzero([document["unit"] for document in documents])
    lengths = np.array([len(document["input_ids"]) for document in documents])
    fits = np.add.reduceat(lengths, starts) <= 30
    of_units = [range(start, start + size) for start, size in zip(starts, SIZES, strict=True)]
    expected = [row for rows, fit in zip(of_units, fits, strict=True) if fit for row in rows]
    assert kept == expected
    assert len(expected) < len(documents)
    dropped = [row for row in dataset.report()["omitted_documents"] if row["reason"] == "drop"]
    assert sum(row["documents"] for row in dropped) == len(documents) - len(expected)
    assert dataset.report()["units"] == int(fits.sum())


def test_max_samples_counts_units_and_a_mixture_draws_them(folder, documents):
    dataset = opened(folder, max_samples=3)
    assert sorted(row for number in range(len(dataset)) for row in dataset.rows_of(number).tolist()) == list(range(6))
    mixed = PreferenceDataSet(train_dir=folder, max_tokens=64, mixture={"sources": {"all": {"tokens": 700}}})
    for number in range(len(mixed)):
        rows = mixed.rows_of(number).tolist()
        units = [row for row in rows if documents[row]["unit"]]
        assert sum(documents[row]["unit"] for row in units) == len(rows)


@pytest.mark.parametrize("max_tokens", [40, 64, 200])
def test_packs_without_a_baseline_are_counted(folder, documents, max_tokens):
    dataset, alone = opened(folder, max_tokens=max_tokens), 0
    for number in range(len(dataset)):
        answered = [
            row for row in dataset.rows_of(number).tolist() if documents[row]["unit"] and documents[row]["answer"]
        ]
        alone += len(answered) < 2
    told = list(objective_of(PreferenceOptions("kto")).data_notices(dataset))
    assert not list(objective_of(PreferenceOptions("dpo")).data_notices(dataset))
    assert [line.split(" packs")[0] for line in told] == ([f"{alone} of {len(dataset)}"] if alone else [])
    assert bool(alone) == (max_tokens < 200)


def test_the_digest_depends_on_sides_and_weights(folder, documents, tmp_path):
    changed = [dict(document) for document in documents]
    changed[0]["pair_weight"] = changed[1]["pair_weight"] = 3.0
    other = write_units(tmp_path / "other", changed, {1: "chat", 2: "code"})
    assert opened(folder).digest == opened(folder).digest != opened(other).digest


def test_what_is_no_preference_is_refused(tmp_path, folder):
    plain = write_tokenized(tmp_path / "plain", [{"input_ids": [1, 2], "loss_mask": [0, 1], "category_ids": [0, 0]}])
    with refused("data.train_dir", "preferences", "loss=token"):
        opened(plain)
    assert len(opened([folder, plain])) > 0  # a document beside preferences is learnt by its likelihood
    with refused("data.pad_mode", "no_padding", "right"):
        opened(folder, pad_mode="right")
    for policy in ("truncate", "split"):
        with refused("data.over_length", "error, drop", policy):
            opened(folder, over_length=policy)
