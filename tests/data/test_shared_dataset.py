"""SFTDataSet with data.share_prefixes: every document whole, whatever its folder, cuts and draws."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.lib.errors import refused
from tests.lib.shared_tries import random_tries
from tests.lib.tokenized_data import write_tokenized
from verl_ext.data import SFTDataSet
from verl_ext.data.tokenized import beginnings
from verl_ext.data.tokenized.ranks import ONE_RANK
from verl_ext.packing import CostModel
from verl_ext.parallel.trees import read_documents, text_rows
from verl_ext.text.arrow_folder import DatasetWriter
from verl_ext.text.tokens.documents import Document, join_documents

LEAST = 3
FEW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write_hashed(folder: Path, texts: list[list[int]]) -> str:
    """Write texts as `verl-ext tokenize` does, with the hashes of their first blocks."""
    folder.mkdir()
    writer = DatasetWriter(folder, first_blocks=True)
    rows = [Document(np.array(ids, np.int32), np.ones(len(ids), np.int8)) for ids in texts]
    writer.add(join_documents(rows, category_id=1, num_bytes=0))
    writer.close()
    return str(folder)


def shared(folder: Any, **options: Any) -> SFTDataSet:
    return SFTDataSet(folder, **{"max_tokens": 64, "share_prefixes": True, "share_least": LEAST, **options})


def pieces(dataset: SFTDataSet, data: list[dict[str, Any]]) -> list[tuple]:
    """Read all documents out of the packs by the positions alone, and check them against the data."""
    found = []
    for pack in range(len(dataset)):
        row = {name: values.numpy() for name, values in dataset[pack].items()}
        texts = text_rows(read_documents(row["position_ids"]))
        assert len(row["input_ids"]) <= dataset.max_tokens
        at = 0
        for text, place in zip(texts, dataset.documents_of(pack), strict=True):
            cut = slice(place.start, place.start + place.tokens)
            mask = np.array(data[place.row]["loss_mask"][cut])
            mask[0] = 0
            assert row["input_ids"][text].tolist() == data[place.row]["input_ids"][cut]
            assert row["loss_mask"][at : at + len(text)].tolist() == mask.tolist()
            categories = np.array(data[place.row]["category_ids"][cut]) * mask
            assert row["category_ids"][at : at + len(text)].tolist() == categories.tolist()
            found.append((place.row, place.start, place.tokens))
            at += len(text)
        assert at == len(row["loss_mask"])
    return sorted(found)


@FEW
@given(st.integers(0, 10_000), st.sampled_from(["best_fit", "sorted_batch"]))
def test_every_document_is_in_one_pack_whole(tmp_path: Path, seed: int, strategy: str) -> None:
    data = random_tries(seed)
    folder = write_tokenized(tmp_path / f"{seed}-{strategy}", data, max_shard_size="5KB")
    dataset = shared(folder, strategy=strategy)
    assert pieces(dataset, data) == [(row, 0, len(document["input_ids"])) for row, document in enumerate(data)]
    facts, plain = dataset.facts(), SFTDataSet(folder, max_tokens=64, strategy=strategy).facts()
    assert facts.document_tokens.sum() == plain.tokens.sum() > facts.tokens.sum()
    assert facts.targets.sum() == plain.targets.sum()
    lengths = [len(dataset[pack]["input_ids"]) for pack in range(len(dataset))]
    assert facts.tokens.tolist() == lengths


@pytest.mark.parametrize("over_length", ["truncate", "split", "drop"])
def test_documents_that_are_cut_share_what_is_left(tmp_path, over_length):
    data = random_tries(1, longest=60)
    folder = write_tokenized(tmp_path / "data", data)
    dataset = shared(folder, max_tokens=48, over_length=over_length)
    plain = SFTDataSet(folder, max_tokens=48, over_length=over_length)
    spans = plain.spans
    assert pieces(dataset, data) == sorted(
        zip(*(x.tolist() for x in (spans.row, spans.start, spans.length)), strict=True)
    )
    assert dataset.facts().shared.sum() > 0


def test_a_mixture_draws_the_same_documents(tmp_path):
    data = random_tries(2, number=200)
    folder = write_tokenized(tmp_path / "data", data)
    tokens = 2.5 * sum(len(document["input_ids"]) for document in data)
    options: dict[str, Any] = {"mixture": {"sources": {"all": {"tokens": tokens}}}}
    for strategy in ("best_fit", "sorted_batch"):
        dataset, plain = shared(folder, strategy=strategy, **options), SFTDataSet(folder, max_tokens=64, **options)
        assert sorted(row for row, *_ in pieces(dataset, data)) == sorted(plain.spans.row[plain.plan().document_index])
        assert dataset.facts().shared.sum() > 0


def test_hashes_in_a_folder_change_no_plan_and_spare_the_reading(tmp_path, monkeypatch):
    rng = np.random.default_rng(3)
    texts = [rng.integers(3, 60, 200).tolist() for _ in range(5)]
    data = [[*texts[n % 5][: 60 + 40 * (n % 3)], *rng.integers(3, 60, 1 + n % 90).tolist()] for n in range(60)]
    hashed = write_hashed(tmp_path / "hashed", data)
    marks = [{"input_ids": d, "loss_mask": [1] * len(d), "category_ids": [1] * len(d)} for d in data]
    plain = write_tokenized(tmp_path / "plain", marks)
    ours, theirs = (shared(folder, max_tokens=512, share_least=64) for folder in (hashed, plain))
    assert ours.facts().shared.sum() > 0
    for one, other in zip(ours.plan(), theirs.plan(), strict=True):
        assert np.array_equal(one, other)
    asked = []
    source = type(ours.packs.documents.source)
    gather = source.gather
    monkeypatch.setattr(source, "gather", lambda self, row, *rest: (asked.extend(row), gather(self, row, *rest)))
    alone = [number for number, document in enumerate(data) if number % 3 == 0]  # 60 tokens of the text: no block
    found = shared(hashed, max_tokens=512, share_least=64)
    assert len(found)
    assert asked
    assert not set(alone) & set(map(int, asked))


def test_a_second_start_reads_no_beginning(tmp_path, monkeypatch):
    folder = write_tokenized(tmp_path / "data", random_tries(4))
    first, again = shared(folder), shared(folder)
    first.read_together(ONE_RANK)
    monkeypatch.setattr(beginnings, "find_shared", None)
    again.read_together(ONE_RANK)
    assert all(np.array_equal(one, other) for one, other in zip(first.plan(), again.plan(), strict=True))
    other = shared(folder, share_least=LEAST + 1)
    with pytest.raises(TypeError):  # another question has no answer yet
        other.read_together(ONE_RANK)


def test_copies_of_a_dataset_in_loader_processes_have_its_packs(tmp_path):
    dataset = shared(write_tokenized(tmp_path / "data", random_tries(5)))
    copy = pickle.loads(pickle.dumps(dataset))
    for pack in range(len(dataset)):
        assert all(torch.equal(values, copy[pack][name]) for name, values in dataset[pack].items())


def test_shared_tokens_cost_nothing_but_the_attention_of_what_follows(tmp_path):
    ids = list(range(3, 13))
    data = [{"input_ids": [*ids, token], "loss_mask": [1] * 11, "category_ids": [1] * 11} for token in (40, 41)]
    facts = shared(write_tokenized(tmp_path / "data", data)).facts(CostModel(linear=10, quadratic=1))
    assert facts.tokens.tolist() == [11 + 2]
    assert facts.shared.tolist() == [9]
    assert facts.costs.tolist() == [10 * 13 + 2 * 11**2 - 9**2]


def test_data_that_begins_alike_is_named_in_the_report(tmp_path):
    ids = list(range(3, 203))
    folder = write_hashed(tmp_path / "data", [[*ids, 210 + number] for number in range(4)])
    assert SFTDataSet(folder, max_tokens=512).report()["share_computed"] == pytest.approx((201 + 3 * 2) / 804)
    assert "share_computed" not in SFTDataSet(folder, max_tokens=512, share_prefixes=True).report()
    assert "share_computed" not in SFTDataSet(folder, max_tokens=512, strategy="none").report()


@pytest.mark.parametrize(
    ("options", "things"),
    [
        ({"strategy": "none"}, ("data.strategy", "best_fit", "sorted_batch", "none")),
        ({"pad_mode": "right"}, ("data.pad_mode", "no_padding", "right")),
    ],
)
def test_options_that_do_not_go_together_are_refused(tmp_path, options, things):
    folder = write_tokenized(tmp_path / "data", random_tries(6))
    with refused(*things, "data.share_prefixes=true"):
        shared(folder, **options)


def test_batches_of_verls_own_trainer_are_refused(tmp_path):
    dataset = shared(write_tokenized(tmp_path / "data", random_tries(7)))
    with refused("data.share_prefixes", True):
        dataset.collate_fn([0])
