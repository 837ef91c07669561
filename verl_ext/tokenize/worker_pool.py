"""Chunks tokenised by several processes, results in the order of the chunks."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from verl_ext.tokenize.chunks import Chunk
from verl_ext.tokenize.config import TokenizeConfig
from verl_ext.tokenize.errors import DataError
from verl_ext.tokenize.worker import ChunkResult, ChunkTokenizer

CHUNKS_PER_WORKER = 4  # in flight: enough that none waits for the slowest, few enough to bound memory

_config: TokenizeConfig | None = None
_tokenizer: ChunkTokenizer | None = None


def available_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def tokenise_chunks(config: TokenizeConfig, chunks: Iterable[Chunk], num_workers: int) -> Iterator[ChunkResult]:
    """Yield every chunk's result, in order, with the same values for any `num_workers` (1: in this process).

    Raises what the first failing chunk raises, and `DataError` when a worker dies.
    """
    if num_workers == 1:
        tokenizer = ChunkTokenizer(config)
        yield from map(tokenizer.tokenise, chunks)
        return
    pool = ProcessPoolExecutor(num_workers, mp_context=_context(), initializer=_start_worker, initargs=(config,))
    pending: deque[Future[ChunkResult]] = deque()
    try:
        for chunk in chunks:
            pending.append(pool.submit(_tokenise, chunk))
            if len(pending) >= num_workers * CHUNKS_PER_WORKER:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            "a tokenise worker died, perhaps for want of memory; a lower num_workers needs less"
            f" (num_workers={num_workers} here)"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _context() -> multiprocessing.context.BaseContext:
    """A start method that never forks this process, whose libraries may hold threads and locks."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # Imported once in the server, which takes seconds; every worker is a fork of it.
    context.set_forkserver_preload(["verl_ext.tokenize.worker", "transformers.models.auto.tokenization_auto"])
    return context


def _start_worker(config: TokenizeConfig) -> None:
    global _config
    _config = config
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Leave when the parent is gone, killed included: a worker would wait for its next chunk for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _tokenise(chunk: Chunk) -> ChunkResult:
    # Loaded with the first chunk and not at the start: an error then arrives as this chunk's, not as a broken pool.
    global _tokenizer
    if _tokenizer is None:
        assert _config is not None
        _tokenizer = ChunkTokenizer(_config)
    return _tokenizer.tokenise(chunk)
