"""Best fit decreasing over the whole set: the longest document first, each into the open pack that it fills best.

Best fit and first fit decreasing are both within 11/9 of the optimum and differ by a pack or two now and then, in about
one of 350 sets of thousands of documents. So where best fit does not reach the lower bound, first fit is tried too and
the smaller plan is returned. Of a set with many distinct lengths, where a second try would add half to the time, first
fit alone is made: the count never exceeds first fit's. A million documents take about 0.1 s.
"""

import numpy as np
from numpy.typing import NDArray

from verl_ext.packing.decreasing import Runs, decreasing
from verl_ext.packing.fit import Placements, earliest_first, fit, fullest_first, plan_from_placements
from verl_ext.packing.lower_bound import fewest_packs
from verl_ext.packing.plan import PackPlan

RUNS_TRIED_TWICE = 2**15  # always; above, where there are DOCUMENTS_PER_RUN on average
DOCUMENTS_PER_RUN = 20


def best_fit(lengths: NDArray[np.int64], max_tokens: int, seed: int) -> PackPlan:
    """Packs in the order in which they were opened, documents in the order in which they were placed (longest
    first); lengths int64[D], each 1..max_tokens. Never more packs than first fit decreasing. Among documents of equal
    length the seed decides, so that packs are not made of neighbours."""
    if len(lengths) == 0:
        return PackPlan(np.zeros(0, np.int32), np.zeros(1, np.int64))
    documents, runs = decreasing(lengths, seed)
    return plan_from_placements(documents, _fewest(runs, max_tokens, len(lengths)))


def _fewest(runs: Runs, max_tokens: int, documents: int) -> Placements:
    if len(runs.lengths) > max(RUNS_TRIED_TWICE, documents // DOCUMENTS_PER_RUN):
        first = fit(runs, max_tokens, earliest_first(), most_packs=documents)
        assert first is not None, "every document fits a pack of its own"
        return first
    best = fit(runs, max_tokens, fullest_first(), most_packs=documents)
    assert best is not None, "every document fits a pack of its own"
    if best.num_packs == fewest_packs(runs, max_tokens):
        return best
    return fit(runs, max_tokens, earliest_first(), most_packs=best.num_packs - 1) or best
