"""What upstream prints and nobody reads here: progress bars, and the reports of an engine being built."""

import contextlib
import logging
import os
from collections.abc import Iterator

import datasets
import transformers


def no_progress_bars() -> None:
    """Of transformers and datasets, from now on."""
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """verl and transformers report sizes, NUMA and their progress while an engine is built."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            yield
    finally:
        logging.disable(before)
