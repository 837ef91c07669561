"""Sample and blend indices kept as .npy files: built by one process, once, and memory-mapped by all.

    ROOT/samples-<fingerprint>/    document_index.npy, sample_index.npy, shuffle_index.npy
    ROOT/blend-<fingerprint>/      source.npy, sample.npy

A fingerprint is of everything that the arrays follow from; `cached_folder` keeps the folders whole.
"""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_ext.data.cached_folder import cached_folder
from verl_ext.data.fingerprint import digest, file_facts
from verl_ext.data.megatron.blend import Order, blend_order, check_weights, megatron_blend_order
from verl_ext.data.megatron.sample_index import (
    SampleIndices,
    build_sample_indices,
    count_tokens,
    plan_epochs,
    sample_dtype,
    shuffle_dtype,
)
from verl_ext.data.megatron.token_index import TokenIndex

FORMAT = 1  # to be raised when the same input gives other arrays
BLEND_RULES = {"tijdeman": blend_order, "megatron": megatron_blend_order}
SAMPLE_ARRAYS = ("document_index", "sample_index", "shuffle_index")
BLEND_ARRAYS = ("source", "sample")
KEY = "data.cache_dir"


class CachedSampleIndices(SampleIndices):
    """SampleIndices of a folder's memory-mapped arrays, which it pickles as."""

    def __init__(self, folder: Path, index: TokenIndex) -> None:
        document_index, sample_index, shuffle_index = (_mapped(folder, name) for name in SAMPLE_ARRAYS)
        super().__init__(document_index, sample_index, shuffle_index, index.lengths)
        self._folder, self._index = folder, index

    def __reduce__(self) -> tuple[Any, ...]:
        return CachedSampleIndices, (self._folder, self._index)


def cached_sample_indices(
    root: Path,
    index: TokenIndex,
    documents: NDArray[Any] | None,
    seq_len: int,
    num_samples: int | None,
    seed: int,
) -> SampleIndices:
    """`build_sample_indices` of `documents` of `index` (None: all), kept in a folder of `root`.

    Raises:
        ValueError: a corpus shorter than one sample (names index.key); a root that cannot be written, arrays that are
            not what they were (name data.cache_dir).
    """
    num_documents = index.num_documents if documents is None else len(documents)
    num_tokens = index.num_tokens if documents is None else count_tokens(index.lengths, documents)
    plan = plan_epochs(num_tokens, seq_len, num_samples, index.key)
    facts = [file_facts(index.files), index.digest, _digest(documents), seq_len, num_samples, seed]

    def make(folder: Path) -> None:
        def on_disk(shape: tuple[int, ...], dtype: Any, blocks: Iterable[NDArray[Any]]) -> NDArray[Any]:
            _save(folder, "sample_index", shape, dtype, blocks)
            return _mapped(folder, "sample_index")

        built = build_sample_indices(index.lengths, documents, seq_len, num_samples, seed, index.key, on_disk)
        for name in ("document_index", "shuffle_index"):
            array = getattr(built, name)
            _save(folder, name, array.shape, array.dtype, [array])

    folder = cached_folder(root, f"samples-{_fingerprint(facts)}", make, key=KEY)
    indices = CachedSampleIndices(folder, index)
    widest = max(plan.epochs * num_documents, int(index.lengths.max()))
    _check(folder, "document_index", indices.document_index, (plan.epochs * num_documents,), np.int32)
    _check(folder, "sample_index", indices.sample_index, (plan.samples + 1, 2), sample_dtype(widest))
    _check(folder, "shuffle_index", indices.shuffle_index, (plan.samples,), shuffle_dtype(plan.samples))
    return indices


def cached_blend(
    root: Path, weights: Sequence[float], n: int, rule: str = "tijdeman", key: str = "data.blend"
) -> Order:
    """`blend_order` (rule `tijdeman`) or `megatron_blend_order` (`megatron`) of n samples, kept in a folder of `root`.

    Raises:
        ValueError: weights that cannot be used (names `key`); a root that cannot be written, arrays that are not what
            they were (name data.cache_dir).
    """
    check_weights(weights, key)

    def make(folder: Path) -> None:
        arrays: tuple[NDArray[Any], ...] = BLEND_RULES[rule](weights, n, key)
        for name, array in zip(BLEND_ARRAYS, arrays, strict=True):
            _save(folder, name, array.shape, array.dtype, [array])

    facts = [[float(weight) for weight in weights], n, rule]
    folder = cached_folder(root, f"blend-{_fingerprint(facts)}", make, key=KEY)
    source, sample = (_mapped(folder, name) for name in BLEND_ARRAYS)
    _check(folder, "source", source, (n,), np.int16)
    _check(folder, "sample", sample, (n,), np.int64)
    return source, sample


def _fingerprint(facts: list[Any]) -> str:
    return digest([FORMAT, *facts])


def _digest(documents: NDArray[Any] | None) -> str | None:
    if documents is None:
        return None
    return hashlib.sha256(np.ascontiguousarray(documents, np.int32).data).hexdigest()


def _save(folder: Path, name: str, shape: tuple[int, ...], dtype: Any, blocks: Iterable[NDArray[Any]]) -> None:
    """Write the .npy of an array that is given in blocks of rows. By writes alone: on a full disk they are an OSError
    with its number, where np.save has none and a memory map ends the process."""
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
    with open(folder / f"{name}.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for block in blocks:
            file.write(np.ascontiguousarray(block).data)


def _mapped(folder: Path, name: str) -> NDArray[Any]:
    """An array of a folder, read-only, as a plain array: np.memmap costs more at every access."""
    path = folder / f"{name}.npy"
    try:
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{KEY} must hold the indices that were written there; {path}: {reason}") from error


def _check(folder: Path, name: str, array: NDArray[Any], shape: tuple[int, ...], dtype: Any) -> None:
    if array.shape != shape or array.dtype != np.dtype(dtype):
        raise ValueError(
            f"{KEY} must hold the indices that were written there, {name} of {np.dtype(dtype).name}{list(shape)}; "
            f"got {array.dtype.name}{list(array.shape)} in {folder}: remove it"
        )
