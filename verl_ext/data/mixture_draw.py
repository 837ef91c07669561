"""From data.mixture and tokenised folders to the documents of an epoch: which spans each source draws."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from verl_ext.data.mixture_options import MixtureOptions
from verl_ext.data.mixture_report import MixtureRow, mixture_report
from verl_ext.packing import Spans
from verl_ext.packing.mixture import draw_mixture


def draw_spans(
    mixture: MixtureOptions,
    spans: Spans,
    folders: Sequence[str],
    first_rows: NDArray[np.int64],
    train_dir: Sequence[str],
    seed: int,
) -> tuple[NDArray[np.int64], list[MixtureRow]]:
    """(int64[D]: the spans of an epoch, one as often as it is drawn; a row of the report for each interval).

    Folder f of `folders` holds the rows first_rows[f]..first_rows[f+1]-1; `train_dir`: those of data.train_dir, which
    a source without folders of its own draws from. The draw is the same in every epoch.

    Raises:
        ValueError: a source or interval without a document, or a budget that cannot be met at all.
    """
    span_edges = np.searchsorted(spans.row, first_rows)
    members = [
        np.concatenate([np.arange(*span_edges[f : f + 2]) for f in sorted({folders.index(folder) for folder in own})])
        for own in (train_dir if own is None else own for own in mixture.folders)
    ]
    draws = draw_mixture(spans.length, mixture.sources, members, seed, mixture.scale, mixture.total_tokens)
    return np.concatenate([draw.documents for draw in draws]), mixture_report(draws, spans, folders, first_rows)
