"""Samples of a stream of documents: Megatron's indices, random and ordered windows. Pure functions."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.corpora import LONGEST, corpora
from tests.lib.errors import refused
from verl_ext.data.stream.megatron.samples import build_sample_indices, epochs_needed
from verl_ext.data.stream.plans import TokenStream, WindowPlan, random_starts


def tokens_of(lengths, documents):
    """Return (document, offset) of every token in order."""
    return [(int(document), offset) for document in documents for offset in range(lengths[document])]


def source_of(lengths, documents=None):
    """Make a source with the attributes that a plan needs."""
    return SimpleNamespace(index=SimpleNamespace(lengths=lengths), documents=documents, key="data.train_dir")


def tokens_in(pieces):
    assert all(array.dtype == np.int64 for array in pieces)
    return [(document, offset) for document, start, stop in zip(*pieces, strict=True) for offset in range(start, stop)]


@settings(deadline=None)
@given(corpora(), st.none() | st.integers(1, 40), st.integers(0, 9), st.integers(1, 7))
def test_samples_are_the_shuffled_stream_cut_every_seq_len_tokens(corpus, num_samples, seed, block):
    lengths, documents, seq_len = corpus
    chosen = np.arange(len(lengths)) if documents is None else documents
    num_tokens = int(lengths[chosen].sum())
    if num_tokens < seq_len + 1:
        with refused("data.val_dir", f"{seq_len + 1} tokens", f"{num_tokens} tokens"):
            build_sample_indices(lengths, documents, seq_len, num_samples, seed, "data.val_dir")
        return
    indices = build_sample_indices(lengths, documents, seq_len, num_samples, seed, block=block)
    counts = indices.piece_counts(block)
    epochs = epochs_needed(num_tokens, seq_len, num_samples)
    assert sorted(indices.document_index.tolist()) == sorted(chosen.tolist() * epochs)
    assert len(indices) == (epochs * num_tokens - 1) // seq_len >= (num_samples or 1)
    assert sorted(indices.shuffle_index.tolist()) == list(range(len(indices)))
    stream = tokens_of(lengths, indices.document_index)
    for k in range(len(indices)):
        row, pieces = int(indices.shuffle_index[k]), indices.pieces(k)
        assert tokens_in(pieces) == stream[row * seq_len : row * seq_len + seq_len + 1]
        assert (pieces[2] > pieces[1]).all()
        assert counts[k] == len(pieces[0])


def test_epochs_are_as_few_as_give_the_samples():
    assert epochs_needed(101, 10, None) == 1
    assert epochs_needed(101, 10, 10) == 1
    assert epochs_needed(100, 10, 10) == 2  # the last target needs one more token
    assert epochs_needed(10**12, 4096, 10**9) == 5


def test_a_last_epoch_under_80_percent_stays_last():
    lengths = np.full(20, 5, np.int32)  # 100 tokens: 9 samples of 11 tokens an epoch
    for num_samples, separate in ((16, False), (15, True), (11, True)):
        indices = build_sample_indices(lengths, None, 10, num_samples, seed=3)
        assert (sorted(indices.document_index[:20]) == list(range(20))) == separate
        assert (sorted(indices.shuffle_index[:9]) == list(range(9))) == separate


def test_positions_are_exact_beyond_2_to_the_40():
    seq_len = 2**22
    lengths = np.full(600, LONGEST, np.int32)
    indices = build_sample_indices(lengths, None, seq_len, None, seed=0)
    assert len(indices) == (600 * LONGEST - 1) // seq_len
    rows = np.arange(len(indices) + 1).tolist()
    expected = [divmod(row * seq_len, LONGEST) for row in rows]
    assert indices.sample_index.tolist() == [list(pair) for pair in expected]
    document, start, stop = indices.pieces(int(np.flatnonzero(indices.shuffle_index == len(indices) - 1)[0]))
    assert int((stop - start).sum()) == seq_len + 1
    assert document[-1] == indices.document_index[-1]


@settings(deadline=None)
@given(corpora(), st.randoms(use_true_random=False))
def test_a_stream_cuts_pieces_of_its_documents(corpus, random):
    lengths, documents, _ = corpus
    stream = TokenStream(lengths, documents)
    tokens = tokens_of(lengths, np.arange(len(lengths)) if documents is None else documents)
    assert stream.num_tokens == len(tokens)
    if not tokens:
        return
    start = random.randrange(len(tokens))
    stop = random.randrange(start, len(tokens)) + 1
    pieces = stream.pieces(start, stop)
    assert tokens_in(pieces) == tokens[start:stop]
    assert (pieces[2] > pieces[1]).all()
    assert stream.piece_counts(np.array([start]), np.array([stop])).tolist() == [len(pieces[0])]


def test_a_stream_is_exact_beyond_2_to_the_40():
    stream = TokenStream(np.array([LONGEST] * 600, np.int32), np.arange(599, -1, -1))
    assert stream.num_tokens == 600 * LONGEST
    for position in (2**31 - 2, 2**31 - 1, 2**32, 2**40, 600 * LONGEST - 1):
        [document], [start], _ = stream.pieces(position, position + 1)
        assert (599 - document, start) == divmod(position, LONGEST)
    document, start, stop = stream.pieces(512 * LONGEST - 2, 512 * LONGEST + 3)
    assert document.tolist() == [88, 87]
    assert start.tolist() == [LONGEST - 2, 0]
    assert stop.tolist() == [LONGEST, 3]


@settings(deadline=None)
@given(corpora())
def test_windows_in_order_hold_every_token_once_and_the_last_is_partial(corpus):
    lengths, documents, seq_len = corpus
    expected = tokens_of(lengths, np.arange(len(lengths)) if documents is None else documents)
    if len(expected) < 2:
        return
    plan = WindowPlan("in_order", [source_of(lengths, documents)] * 2, seq_len, seed=0)
    assert plan.source_counts(len(plan)).tolist() == [len(plan) // 2] * 2
    counts, pieces = plan.token_counts().tolist(), [plan.pieces(k) for k in range(len(plan))]
    assert plan.piece_counts().tolist() == [len(part[0]) for _, part in pieces]
    for source in range(2):
        samples = [tokens_in(part) for of, part in pieces if of == source]
        assert samples[0][:1] + [token for sample in samples for token in sample[1:]] == expected
        assert [sample[-1:] for sample in samples[:-1]] == [sample[:1] for sample in samples[1:]]
        read = counts[source * len(samples) : (source + 1) * len(samples)]
        assert read == [len(sample) - 1 for sample in samples]
        assert set(read[:-1]) <= {seq_len}


@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 5))
def test_random_starts_are_different_places_where_a_sample_fits(num_tokens, seq_len, seed):
    if num_tokens < seq_len:
        with refused("data.train_dir", f"{seq_len} tokens", f"{num_tokens} tokens"):
            random_starts(num_tokens, seq_len, seed)
        return
    starts = random_starts(num_tokens, seq_len, seed)
    assert starts.dtype == np.int64
    assert len(starts) == len(set(starts.tolist())) == num_tokens // seq_len
    assert starts.min() >= 0
    assert starts.max() <= num_tokens - seq_len
    assert starts.tolist() == random_starts(num_tokens, seq_len, seed).tolist()


def test_a_stream_of_one_sample_has_one_start():
    assert random_starts(4096, 4096, seed=7).tolist() == [0]


@pytest.mark.parametrize(("num_tokens", "seq_len"), [(12, 2), (30, 10)])  # shuffled as a whole; drawn
def test_every_place_is_a_start_as_often_as_any_other_in_any_order(num_tokens, seq_len):
    drawn = np.array([random_starts(num_tokens, seq_len, seed) for seed in range(4000)])
    candidates = num_tokens - seq_len + 1
    for column in drawn.T:  # the first start, the second start, …
        counts = np.bincount(column, minlength=candidates)
        assert len(counts) == candidates
        assert abs(counts - 4000 / candidates).max() < 6 * (4000 / candidates) ** 0.5


def test_random_starts_cost_memory_by_their_number():
    starts = random_starts(10**17, 10**13, seed=0)
    assert len(set(starts.tolist())) == 10**4
    assert starts.max() > 2**56
    plan = WindowPlan("random_starts", [source_of(np.full(10**4, LONGEST, np.int32))], 2**30, seed=1)
    assert (plan.token_counts() == 2**30).all()
    assert set(plan.piece_counts().tolist()) == {1, 2}
