"""Our packer and those of other projects behind one signature; each peer is optional.

A peer is imported as narrowly as possible: the one file that holds its packer or, if that fails, its package. It gets
lengths in the form that it takes (made outside the timed part) and returns packs in its own form; only ours makes the
CSR index that a dataset reads.
"""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_ext.options import first_line
from verl_ext.packing import PackPlan, plan_packs

Lengths = NDArray[np.int64]


@dataclass(frozen=True)
class Packer:
    """A packer: pack(prepare(lengths), max_tokens), of which pack is timed; documents(result) gives each pack's
    document numbers, to check that none is missing; most_documents limits its input."""

    name: str
    pack: Callable[[Any, int], Any]
    prepare: Callable[[Lengths], Any]
    documents: Callable[[Any], Sequence[Any]]
    most_documents: int | None = None


def ours() -> Packer:
    """Return best_fit, which makes a plan in CSR form."""
    return Packer("verl-ext best_fit", plan_packs, _as_it_is, plan_documents)


def plan_documents(plan: PackPlan) -> Sequence[Any]:
    """Return the documents of each pack."""
    return np.split(plan.document_index, plan.pack_offsets[1:-1])


def peers() -> tuple[list[Packer], dict[str, str]]:
    """Return the packers that could be imported, and why each of the others could not."""
    found, absent = [], {}
    for name, load in PEERS.items():
        try:
            found += load()
        except Exception as error:  # a foreign import may raise anything
            absent[name] = first_line(error)
    return found, absent


def _lightbinpack() -> list[Packer]:
    obfd = importlib.import_module("lightbinpack").obfd
    return [
        Packer("lightbinpack.obfd (list)", obfd, np.ndarray.tolist, _as_it_is),
        Packer("lightbinpack.obfd (int32 array)", obfd, lambda lengths: lengths.astype(np.int32), _as_it_is),
    ]


def _axolotl() -> list[Packer]:
    pack_parallel = _from_file("axolotl", "utils/samplers/multipack.py", "pack_parallel")

    def pack(lengths: NDArray[np.int32], max_tokens: int) -> Any:
        # its sampler's defaults: groups of 100,000; at most 200 documents a pack; documents in the given order
        return pack_parallel(lengths, max_tokens, group_size=100_000, bin_size=200, num_processes=1)

    prepare: Callable[[Lengths], Any] = lambda lengths: lengths.astype(np.int32)  # noqa: E731
    return [Packer("axolotl pack_parallel", pack, prepare, _as_it_is)]


def _nemo_automodel() -> list[Packer]:
    greedy_knapsack = _from_file("nemo_automodel", "components/datasets/llm/neat_packing.py", "greedy_knapsack")
    return [Packer("NeMo Automodel greedy_knapsack", greedy_knapsack, np.ndarray.tolist, _as_it_is)]


def _trl() -> list[Packer]:
    """Return pack_dataset's packing function; it moves tokens too, so it gets few documents, without other columns."""
    import pyarrow

    pack = _from_file("trl", "data_utils.py", "_pack_bfd")

    def table(lengths: Lengths) -> Any:
        offsets = pyarrow.array(np.concatenate([[0], np.cumsum(lengths)]))
        numbers = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        return pyarrow.table({"input_ids": pyarrow.LargeListArray.from_arrays(offsets, pyarrow.array(numbers))})

    def documents(packed: Any) -> Sequence[Any]:
        return [np.unique(np.asarray(row.values)) for row in packed["input_ids"]]

    return [Packer("TRL bfd (tokens moved too)", pack, table, documents, most_documents=5_000)]


def _verl() -> list[Packer]:
    """Return a search for the fewest packs that fit: Karmarkar–Karp shares documents over a given number of packs."""
    partitions = _from_file("verl", "utils/seqlen_balancing.py", "get_seqlen_balanced_partitions")

    def pack(lengths: list[int], max_tokens: int) -> Any:
        num_packs = -(-sum(lengths) // max_tokens)
        while True:
            packs = partitions(lengths, num_packs, equal_size=False)
            if max(sum(lengths[i] for i in pack) for pack in packs) <= max_tokens:
                return packs
            num_packs += max(num_packs // 200, 1)

    return [Packer("verl Karmarkar–Karp", pack, np.ndarray.tolist, _as_it_is, most_documents=300)]


PEERS: dict[str, Callable[[], list[Packer]]] = {
    "lightbinpack": _lightbinpack,
    "NeMo Automodel": _nemo_automodel,
    "axolotl": _axolotl,
    "TRL": _trl,
    "verl": _verl,
}


def _as_it_is(value: Any) -> Any:
    return value


def _from_file(package: str, path: str, name: str) -> Callable[..., Any]:
    """Import `name` from one file of an installed package, without importing the package if the file does not need it.

    Raises:
        ImportError: If the package is not installed, or neither way of importing works.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named {package}")
    file = Path(spec.submodule_search_locations[0]) / path
    try:
        module_spec = importlib.util.spec_from_file_location(f"_packer_of_{package}", file)
        assert module_spec is not None
        assert module_spec.loader is not None
        module = importlib.util.module_from_spec(module_spec)
        module_spec.loader.exec_module(module)
    except Exception:
        module = importlib.import_module(f"{package}.{path.removesuffix('.py').replace('/', '.')}")
    return getattr(module, name)
