"""Corpora for hypothesis, as lengths of documents."""

import numpy as np
from hypothesis import strategies as st

LONGEST = 2**31 - 1


@st.composite
def corpora(draw):
    """Draw (lengths, documents or None, seq_len), with documents of no token, one token and exactly seq_len tokens."""
    seq_len = draw(st.integers(1, 12))
    some = st.one_of(st.integers(0, 20), st.sampled_from([0, 1, seq_len, seq_len + 1]))
    lengths = np.array(draw(st.lists(some, min_size=1, max_size=30)), np.int32)
    subset = st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=30)
    documents = draw(st.none() | subset.map(lambda chosen: np.array(chosen, np.int64)))
    return lengths, documents, seq_len
