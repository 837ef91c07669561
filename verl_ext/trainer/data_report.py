"""What the data became: packs, fill, and every document that over-length handling touched. Printed once, by rank 0."""

from collections.abc import Iterator

import pandas as pd

from verl_ext.data import SFTDataSet


def data_report(name: str, dataset: SFTDataSet) -> Iterator[str]:
    """Lines on one dataset; ``name`` is what to call it."""
    tokens, documents = int(dataset.pack_tokens().sum()), int(dataset.pack_documents().sum())
    fill = tokens / max(len(dataset) * dataset.options.max_tokens, 1)
    yield (
        f"{name}: {documents:,} documents, {tokens:,} tokens ({int(dataset.pack_targets().sum()):,} targets) "
        f"in {len(dataset):,} packs of {dataset.options.max_tokens:,}, {fill:.1%} full"
    )
    rows = [vars(row) for row in dataset.over_length_report]
    if rows:
        yield f"{name}: documents over data.max_tokens={dataset.options.max_tokens}, or without a token:"
        yield pd.DataFrame(rows).to_string(index=False)
