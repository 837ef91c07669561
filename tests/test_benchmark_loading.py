"""The loading contest is fair: every contestant reads the same tokens and targets; no timing is asserted."""

import json
from pathlib import Path

import numpy as np
import pytest
from datasets import load_from_disk

from benchmarks import loading
from benchmarks.conversations import CHATS, LONG, Kind, write_corpus
from benchmarks.large_dataset import write_large_dataset
from benchmarks.readers import NAMES, build_readers
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

SHORT = Kind("short", ((3, 9),) * 4, 256)
DOCUMENTS = 24


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """Return each reader's sorted documents of one small corpus, and the tokens that the contest counts."""
    return run_ranks(_read, 1, tmp_path_factory.mktemp("corpus") / "short")[0]


def _read(folder: Path):
    corpus = write_corpus(SHORT, DOCUMENTS, folder, seed=0)
    readers, tokens = build_readers(corpus, seed=0)
    documents = {
        name: sorted(document for item in reader.items for document in reader.documents(reader.read(item)))
        for name, reader in readers.items()
    }
    return documents, tokens


@pytest.mark.parametrize("name", NAMES)
def test_every_reader_gives_the_same_tokens_and_targets(read, name):
    documents, tokens = read
    assert documents[name] == documents["templating"]
    assert len(documents[name]) == DOCUMENTS
    assert sum(len(ids) for ids, _ in documents[name]) == tokens
    assert all(0 < len(targets) < len(ids) for ids, targets in documents[name])


def test_the_shapes_are_what_they_are_called():
    words = [sum(low for low, _ in kind.words) for kind in (CHATS, LONG)]
    assert words[0] < 200 < words[1]
    assert LONG.max_tokens > 4 * CHATS.max_tokens - 1


def test_the_large_dataset_is_an_ordinary_one(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.large_dataset.BATCH_DOCUMENTS", 7)
    monkeypatch.setattr("benchmarks.large_dataset.SHARD_BYTES", 2000)
    tokens = write_large_dataset(tmp_path, documents=40, mean_tokens=12, vocabulary=100)
    rows = load_from_disk(str(tmp_path))
    assert len(rows) == 40
    assert len(list(tmp_path.glob("*.arrow"))) > 1
    assert sum(rows["length"]) == tokens
    for row in rows:
        mask = np.asarray(row["loss_mask"])
        assert len(row["input_ids"]) == len(row["category_ids"]) == len(mask) == row["length"]
        assert mask.tolist() == sorted(mask)  # its last tokens
        assert mask.sum() == max(row["length"] // 4, 1)
        assert {*row["category_ids"]} <= {0, max(row["category_ids"])}
        assert ((np.asarray(row["category_ids"]) > 0) == mask).all()


def test_a_start_reports_seconds_and_private_memory(tmp_path):
    options = loading.arguments(["--quick"])
    (row,) = loading.measure_start(options, tmp_path, token_factors=[2])
    for start in row.values():
        assert start["documents"] == options.documents
        assert set(start["seconds"]) == {"open", "plan", "scan"}
        assert set(start["private"]) == {"held", "peak"}
    tokens = row["first"]["tokens"]
    assert abs(tokens / options.documents / options.mean_tokens / 2 - 1) < 0.1
    assert list(tmp_path.iterdir()) == []
    assert f"{tokens:,}" in loading.report({"machine": {}, "reading": [], "start": [row]})


def test_the_reading_table_names_every_reader(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.conversations.CHATS", SHORT)
    options = loading.arguments(["--chats", "8", "--long", "0", "--repeats", "2", "--passes", "1"])
    (row,) = loading.measure_reading(options, tmp_path)
    result = {"machine": {}, "reading": [row], "start": []}
    json.dumps(result)
    text = loading.report(result)
    assert all(name in text for name in NAMES)


def test_refuses_no_repeats(capsys):
    with pytest.raises(SystemExit):
        loading.arguments(["--repeats", "0"])
    assert "--repeats must be at least 1; got 0" in capsys.readouterr().err
