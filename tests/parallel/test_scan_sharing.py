"""The scan over ranks, each with a share of the tokens, and its entries in the cache."""

import itertools
import os
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from datasets import load_from_disk
from hypothesis import given
from hypothesis import strategies as st

from tests.lib.errors import names
from tests.lib.ranks import in_turn, only_rank, run_cases, run_ranks
from tests.lib.tokenized_data import random_documents, write_tokenized
from verl_ext.data import SFTDataSet
from verl_ext.data.tokenized.facts import shares
from verl_ext.text.arrow_folder import DatasetWriter
from verl_ext.text.tokens.documents import Document, join_documents
from verl_ext.trainer.distributed import RunRanks

pytestmark = pytest.mark.slow

LENGTHS = (5, 1, 9, 16, 3, 7, 2, 12, 30, 4)
POLICIES: dict[str, dict[str, Any]] = {
    "error": {},
    **{policy: {"max_tokens": 6, "over_length": policy} for policy in ("drop", "truncate", "split")},
}
OVER = {policy: sum(length for length in LENGTHS if length > 6 and options) for policy, options in POLICIES.items()}


def ten():
    return random_documents(np.random.default_rng(0), LENGTHS, vocab=50, categories=3)


def without_targets(documents):
    return [{**document, "loss_mask": document["loss_mask"] * 0} for document in documents]


def of_ours(folder):
    """Write documents of one category each as `verl-ext tokenize` does, and the same ones by another writer."""
    documents = ten()
    (folder / "ours").mkdir(parents=True)
    writer = DatasetWriter(folder / "ours")
    for number, document in enumerate(documents):
        category = number % 3 + 1
        document["category_ids"] = document["loss_mask"] * np.int32(category)
        ids, mask = document["input_ids"].astype(np.int32), document["loss_mask"].astype(np.int8)
        writer.add(join_documents([Document(ids, mask)], category, 0))
    writer.close()
    return str(folder / "ours"), write_tokenized(folder / "other", documents)


@pytest.fixture
def folder(tmp_path):
    return write_tokenized(tmp_path / "data", ten(), num_shards=3)


def shared_scan(folder, options):
    """Return, on a rank, (scan as a tuple, tokens that this rank read, its output before it left or None).

    Scans are kept in `cache/verl_ext_facts` beside the folder, or beside the first one.
    """
    first = folder if isinstance(folder, str) else folder[0]
    dataset = SFTDataSet(folder, **{"max_tokens": 100, **options})
    errors = StringIO()
    try:
        with redirect_stderr(errors), patch("datasets.config.HF_DATASETS_CACHE", Path(first).parent / "cache"):
            dataset.read_together(RunRanks())
    except SystemExit as left:
        return None, None, (left.code, errors.getvalue())
    return as_tuple(dataset.scan()), dataset.scan().tokens_read, None


def as_tuple(scan):
    return scan.targets.tolist(), scan.min_token_id, scan.max_token_id, scan.category_ids, scan.over_length


def alone(folder, options):
    """Return the scan of this process."""
    return SFTDataSet(folder, **{"max_tokens": 100, **options}).scan()


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    """Return {ranks: {case: (its folder, what each rank found)}}."""
    documents, calls, paths = ten(), {}, {}
    wrong = [*documents[:-1], {**documents[-1], "loss_mask": documents[-1]["loss_mask"] + 6}]
    cases = dict.fromkeys(POLICIES, documents) | {"one": documents[2:3], "wrong": wrong}
    cases |= {"some": [*documents[:5], *without_targets(documents[5:])], "none": without_targets(documents)}
    for ranks in (1, 2, 3):
        root = tmp_path_factory.mktemp("shared")
        folders = {name: write_tokenized(root / name / "data", each, num_shards=1) for name, each in cases.items()}
        paths[ranks] = folders | {f"ours, {policy}": of_ours(root / f"ours_{policy}")[0] for policy in POLICIES}
        for name, path in paths[ranks].items():
            calls[ranks, name] = (ranks, shared_scan, path, POLICIES.get(name.split()[-1], {}))
    found = run_cases(calls)
    return {ranks: {name: (path, found[ranks, name]) for name, path in own.items()} for ranks, own in paths.items()}


@pytest.fixture(params=[1, 2, 3], ids="{} ranks".format)
def shared(request, scans):
    return scans[request.param]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_rank_reads_a_share_and_gets_the_whole_scan(shared, policy):
    folder, results = shared[policy]
    whole = alone(folder, POLICIES[policy])
    assert [scan for scan, _, _ in results] == [as_tuple(whole)] * len(results)
    read = [tokens for _, tokens, _ in results]
    assert sum(count.tokens for count in whole.over_length) == OVER[policy]
    assert sum(read) == sum(LENGTHS)
    assert max(read) <= sum(read) / len(results) + 2 * max(LENGTHS)


@pytest.mark.parametrize("case", ["one", "some"])
def test_a_share_without_a_document_or_without_a_target_is_no_mistake(shared, case):
    folder, results = shared[case]
    assert [scan for scan, _, _ in results] == [as_tuple(alone(folder, {}))] * len(results)


def test_a_mistake_in_any_share_is_told_once_and_nothing_is_kept(shared):
    folder, results = shared["wrong"]
    ((_, _, (code, told)), *others) = results
    assert [code, told.count("\n"), *(left for _, _, left in others)] == [2, 1, *[(2, "")] * len(others)]
    assert names(told, "data.train_dir", "loss_mask", f"6 in row {len(LENGTHS) - 1}")
    assert not [path for path in Path(folder).parent.glob("cache/verl_ext_facts/*") if path.is_dir()]


def test_data_without_a_target_in_any_share_is_refused(shared):
    _, results = shared["none"]
    assert [left[0] for _, _, left in results] == [2] * len(results)
    assert names(results[0][2][1], "data.train_dir", "target tokens", "loss_mask")


@pytest.mark.parametrize("policy", POLICIES)
def test_of_our_folders_only_documents_longer_than_a_pack_are_read(shared, policy):
    folder, results = shared[f"ours, {policy}"]
    expected = as_tuple(alone(str(Path(folder).parent / "other"), POLICIES[policy]))
    assert [scan for scan, _, _ in results] == [expected] * len(results)
    assert sum(tokens for _, tokens, _ in results) == OVER[policy]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=50), st.integers(1, 9))
def test_shares_are_contiguous_and_within_a_document_of_even(lengths, ranks):
    edges = shares(np.asarray(lengths, np.int32), ranks)
    assert edges[0] == 0
    assert edges[-1] == len(lengths)
    assert (np.diff(edges) >= 0).all()
    tokens = [sum(lengths[a:b]) for a, b in itertools.pairwise(edges)]
    assert max(tokens) < sum(lengths) / ranks + max(lengths)


# Entries of the cache


def test_a_second_start_reads_no_token(folder):
    calls = [(shared_scan, folder, POLICIES[policy]) for policy in ("error", "drop", "truncate")]
    (first, _), results = (run_ranks(in_turn, 2, calls) for _ in range(2))
    assert results == [[(scan, 0, None) for scan, _, _ in first]] * 2


def read_in_turn(*steps):
    """Take steps in one process, and return (scan, tokens read) of each that is a scan."""
    with only_rank():
        found = in_turn(steps)
    return [result[:2] for (function, *_), result in zip(steps, found, strict=True) if function is shared_scan]


def test_a_kept_scan_of_other_spans_or_folders_is_not_taken(tmp_path, folder):
    of_another = [folder, write_tokenized(tmp_path / "other", ten()[:2])]
    asked: list[tuple[dict[str, Any], bool]] = [  # options, and whether a scan is kept for them
        ({}, False),
        ({"max_tokens": 200}, True),  # the same spans
        ({"max_samples": 9}, False),
        ({"max_tokens": 6, "over_length": "drop"}, False),
        ({"max_tokens": 29, "over_length": "drop"}, False),
        ({"max_tokens": 28, "over_length": "drop"}, False),  # the same spans, counted differently
    ]
    found = read_in_turn(*((shared_scan, folder, options) for options, _ in asked), (shared_scan, of_another, {}))
    assert [tokens == 0 for _, tokens in found] == [*(is_kept for _, is_kept in asked), False]


def test_a_kept_scan_of_data_that_changed_is_not_taken_and_nothing_is_written_beside_the_data(folder):
    names, scan = sorted(os.listdir(folder)), (shared_scan, folder, {})
    shard = next(name for name in names if name.endswith(".arrow"))
    found = read_in_turn(scan, (os.utime, f"{folder}/{shard}"), scan, scan)
    assert [tokens for _, tokens in found] == [sum(LENGTHS), sum(LENGTHS), 0]
    assert sorted(os.listdir(folder)) == names


DAMAGES = {
    "cut": lambda content: content[:-8],
    "flipped": lambda content: content[:-1] + b"\xff",
    "other": lambda _: b"1",
}


def harm(cache, name, damage):
    (file,) = cache.glob(f"*/{name}")
    file.write_bytes(DAMAGES[damage](file.read_bytes()))


def test_a_broken_scan_is_ignored_and_overwritten(folder):
    scan, cache = (shared_scan, folder, {}), Path(folder).parent / "cache" / "verl_ext_facts"
    harms = [(harm, cache, *each) for each in itertools.product(("targets.npy", "arrays.json"), DAMAGES)]
    first, *found = read_in_turn(scan, *(step for each in harms for step in (each, scan, scan)))
    assert found == [first, (first[0], 0)] * len(harms)
    assert first[1] == sum(LENGTHS)


def test_a_scan_that_cannot_be_kept_is_made_again(folder):
    cache = Path(folder).parent / "cache"
    cache.mkdir()
    (cache / "verl_ext_facts").write_text("a file")
    first, second = read_in_turn(*[(shared_scan, folder, {})] * 2)
    assert first == second
    assert first[1] == sum(LENGTHS)


# Folders that verl-ext has written


def test_a_folder_of_ours_and_one_of_another_writer_are_one_dataset(tmp_path):
    ours = of_ours(tmp_path)
    both = SFTDataSet(list(ours), 100, strategy="none")
    other = SFTDataSet([ours[1], ours[1]], 100, strategy="none")
    assert as_tuple(both.scan()) == as_tuple(other.scan())
    assert (both.scan().tokens_read, other.scan().tokens_read) == (sum(LENGTHS), 2 * sum(LENGTHS))


def test_a_folder_that_was_changed_with_datasets_is_read(tmp_path):
    changed = load_from_disk(of_ours(tmp_path)[0]).map(
        lambda row: {"loss_mask": [0] + [1] * (len(row["loss_mask"]) - 1)}
    )
    changed.save_to_disk(str(tmp_path / "changed"))
    scan = SFTDataSet(str(tmp_path / "changed"), 100).scan()
    assert scan.targets.tolist() == [length - 1 for length in LENGTHS]
    assert scan.tokens_read == sum(LENGTHS)
