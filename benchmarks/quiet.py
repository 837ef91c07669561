"""Silence upstream's output that is of no use here: progress bars, and reports while an engine is built."""

import contextlib
import logging
import os
from collections.abc import Iterator

import datasets
import transformers


def no_progress_bars() -> None:
    """Turn off the progress bars of transformers and datasets from now on."""
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence verl's and transformers' reports of sizes, NUMA and progress while an engine is built."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            yield
    finally:
        logging.disable(before)
