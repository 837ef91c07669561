"""A longer stream of documents continues a shorter one if, and only if, the samples seen stay the same."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.lib.document_texts import random_words, write_jsonl
from verl_ext.data import MultiDocDataset

SEQ_LEN = 16
DIGEST = "the digest of the documents in data.train_dir"


@pytest.fixture(scope="module")
def stream(tiny_model, tmp_path_factory):
    """Make a stream of a number of samples, from one source or a blend of two."""
    folder = tmp_path_factory.mktemp("texts")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    a = write_jsonl(folder / "a.jsonl", random_words((7, 1, 30, 12, 15, 16, 40, 3, 9) * 3, seed=1))
    b = write_jsonl(folder / "b.jsonl", random_words((5, 20, 2, 33, 16, 1) * 2, seed=2))
    common = {"tokenizer": tokenizer, "seq_len": SEQ_LEN, "cache_dir": folder / "cache", "sampling": "document_stream"}

    def of(samples: int, blends: bool, **more: object) -> MultiDocDataset:
        source = {"blend": [[0.7, a], [0.3, b]]} if blends else {"file_paths": a}
        return MultiDocDataset(num_samples=samples, **source, **common, **more)

    return of


def saved(dataset: MultiDocDataset) -> dict:
    """Return its entry in a checkpoint."""
    return {**dataset.plan_options(), DIGEST: dataset.digest}


def tokens(dataset: MultiDocDataset, count: int) -> torch.Tensor:
    return torch.stack([dataset[k]["input_ids"] for k in range(count)])


@settings(max_examples=30)
@given(short=st.integers(1, 40), more=st.integers(1, 80), share=st.floats(0, 1), blends=st.booleans())
def test_what_is_extended_has_the_same_samples_seen(stream, short, more, share, blends):
    before, longer, seen = stream(short, blends), stream(short + more, blends), int(share * short)
    if longer.extends(saved(before), seen):
        assert torch.equal(tokens(longer, seen), tokens(before, seen)) if seen else True
    elif seen:
        assert short + more > 20, "within an epoch the order never changes"


def test_a_stream_that_ends_early_goes_on_from_a_longer_one(stream):
    before = stream(8, True)
    assert stream(6, True).extends(saved(before), 6)
    assert torch.equal(tokens(stream(6, True), 6), tokens(before, 6))
    assert not stream(6, True).extends(saved(before), 7)


def test_other_data_or_more_seen_than_there_was_extend_nothing(stream):
    before = stream(8, True)
    assert stream(12, True).extends(saved(before), 8)
    assert not stream(12, True).extends({**saved(before), DIGEST: "of other documents"}, 8)
    assert not stream(12, False).extends(saved(before), 8)
    assert not stream(12, True, seed=7).extends(saved(before), 8)
    assert not stream(12, True).extends(saved(before), 9)
