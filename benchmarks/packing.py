"""Compare packs, fill, seconds and memory of our packer and others, and the balance of steps over ranks.

    python benchmarks/packing.py --output packing.json

It runs in one process on one core. Peers that are not installed are skipped with a line each:

    pip install lightbinpack trl && pip install --no-deps axolotl nemo-automodel && pip install numba

README.md beside this file explains the comparison; packers.py has the packers, length_distributions.py the lengths.
"""

import argparse
import gc
import json
import multiprocessing
import platform
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # lets the script run by its path

import numpy as np
from tqdm import tqdm

from benchmarks import step_balance
from benchmarks.length_distributions import DISTRIBUTIONS, Distribution
from benchmarks.packers import Lengths, Packer, ours, peers, plan_documents
from verl_ext.packing import plan_packs

SLOW = 3.0  # seconds: a slower packer runs once
FIRST_CALL_DOCUMENTS = 1000
ROW = "{:<32} {:>9} {:>9} {:>8} {:>9} {:>9} {:>11}"


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=1_000_000, help="of the comparison")
    parser.add_argument(
        "--large", type=int, default=10_000_000, help="documents for ours alone, time and memory; 0: none"
    )
    parser.add_argument("--balance-documents", type=int, default=100_000, help="of the step balance")
    parser.add_argument("--repeats", type=int, default=5, help="the best of so many is reported")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="5,000 documents, 20,000 large ones, two repeats")
    parser.add_argument("--output", type=Path, help="JSON file")
    options = parser.parse_args(argv)
    if options.quick:
        options.documents, options.large, options.repeats = 5_000, 20_000, 2
    for name, least in (("documents", 1), ("large", 0), ("balance_documents", 1), ("repeats", 1), ("seed", 0)):
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}; got {getattr(options, name)}")
    return options


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all tables, and return them as one record."""
    found, skipped = peers()
    result: dict[str, Any] = {
        "options": {name: value for name, value in vars(options).items() if name != "output"},
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "skipped": skipped,
        "distributions": {},
    }
    for name, distribution in DISTRIBUTIONS.items():
        result["distributions"][name] = {
            "text": distribution.text,
            "max_tokens": distribution.max_tokens,
            "packers": compare([ours(), *found], distribution, options),
            "large": _in_a_child(name, options.large, options.seed) if options.large else None,
            "balance": step_balance.step_balance(distribution, options.balance_documents, options.seed),
        }
    return result


def compare(packers: list[Packer], distribution: Distribution, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each packer; one that takes fewer documents is compared with ours on as many."""
    rows = []
    sizes = sorted({_documents(packer, options.documents) for packer in packers}, reverse=True)
    for size in sizes:
        lengths = distribution.draw(size, np.random.default_rng(options.seed))
        group = [packer for packer in packers if _documents(packer, options.documents) == size]
        if packers[0] not in group:
            group.insert(0, packers[0])
        records = _in_turn(group, lengths, distribution.max_tokens, options.repeats)
        for record in records:
            rows.append({"documents": size, **record, "ratio": record["seconds"] / records[0]["seconds"]})
    return rows


def _documents(packer: Packer, documents: int) -> int:
    return min(packer.most_documents or documents, documents)


def _in_turn(packers: list[Packer], lengths: Lengths, max_tokens: int, repeats: int) -> list[dict[str, Any]]:
    """Return each packer's packs, fill and best seconds; the first packer rotates."""
    records = [_first_call(packer, lengths, max_tokens) for packer in packers]
    bar = tqdm(total=repeats * len(packers), desc=f"{len(lengths):,} documents", file=sys.stderr)
    for repeat in range(repeats):
        for at in range(len(packers)):
            packer, record = packers[(at + repeat) % len(packers)], records[(at + repeat) % len(packers)]
            bar.set_postfix_str(packer.name)
            if record.get("seconds", 0) < SLOW:
                record.update(_timed(packer, lengths, max_tokens, record))
            bar.update()
    bar.close()
    return records


def _first_call(packer: Packer, lengths: Lengths, max_tokens: int) -> dict[str, Any]:
    given = packer.prepare(lengths[:FIRST_CALL_DOCUMENTS])
    started = time.perf_counter()
    packer.pack(given, max_tokens)
    return {"packer": packer.name, "first_call_seconds": time.perf_counter() - started}


def _timed(packer: Packer, lengths: Lengths, max_tokens: int, record: dict[str, Any]) -> dict[str, Any]:
    given = packer.prepare(lengths)
    gc.collect()
    gc.freeze()  # keeps objects of the peers' imports out of garbage collections while a packer makes its lists
    started = time.perf_counter()
    packed = packer.pack(given, max_tokens)
    seconds = time.perf_counter() - started
    if "packs" in record:
        return {"seconds": min(seconds, record["seconds"])}
    packs = packer.documents(packed)
    check_packs(packer.name, packs, lengths, max_tokens)
    return {"seconds": seconds, "packs": len(packs), "fill": float(lengths.sum() / (len(packs) * max_tokens))}


def check_packs(name: str, packs: Sequence[Any], lengths: Lengths, max_tokens: int) -> None:
    """Raise RuntimeError unless every document lies in one pack and no pack is over its budget."""
    documents = np.concatenate([np.asarray(pack, np.int64) for pack in packs])
    if not np.array_equal(np.bincount(documents, minlength=len(lengths)), np.ones(len(lengths), np.int64)):
        raise RuntimeError(f"{name} lost or repeated documents")
    starts = np.cumsum([0] + [len(pack) for pack in packs[:-1]])
    if np.add.reduceat(lengths[documents], starts).max() > max_tokens:
        raise RuntimeError(f"{name} went over the budget")


def _in_a_child(name: str, documents: int, seed: int) -> dict[str, Any]:
    """Measure ours alone in a process of its own, so that nothing else is counted."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(large_plan, (name, documents, seed))


def large_plan(name: str, documents: int, seed: int) -> dict[str, Any]:
    """Return one plan's processor seconds, packs, fill, and peak memory above the input in MiB."""
    distribution = DISTRIBUTIONS[name]
    lengths = distribution.draw(documents, np.random.default_rng(seed))
    gc.collect()
    before = _resident(reset=True)
    started = time.process_time()
    plan = plan_packs(lengths, distribution.max_tokens)
    seconds = time.process_time() - started
    peak = _resident()
    check_packs("verl_ext", plan_documents(plan), lengths, distribution.max_tokens)
    return {
        "documents": documents,
        "packs": plan.num_packs,
        "fill": float(lengths.sum() / (plan.num_packs * distribution.max_tokens)),
        "seconds": seconds,
        "peak_mib": (peak - before) / 2**20,
    }


def _resident(reset: bool = False) -> float:
    """Return the process's peak resident bytes; `reset` sets the peak to the present value, and returns that."""
    status = Path("/proc/self/status")
    if not status.exists():  # macOS reports bytes and has no reset
        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return float(fields["VmRSS" if reset else "VmHWM"].split()[0]) * 1024


def report(result: dict[str, Any]) -> str:
    """Format all tables as text."""
    lines = list(result["skipped"])
    for name, found in result["distributions"].items():
        lines += ["", f"{name}: {found['text']}; packs of {found['max_tokens']:,} tokens", ""]
        lines.append(ROW.format("packer", "documents", "packs", "fill", "seconds", "to ours", "first call"))
        lines += [_packer_line(row) for row in found["packers"]]
        if found["large"]:
            large = found["large"]
            lines.append(
                f"\nverl_ext best_fit, {large['documents']:,} documents: {large['seconds']:.2f} s of one core, peak "
                f"{large['peak_mib']:.0f} MiB above the input, {large['packs']:,} packs, {large['fill']:.2%} full"
            )
        documents, accumulation = result["options"]["balance_documents"], step_balance.ACCUMULATION
        lines.append(f"\nstep cost over ideal, {documents:,} documents, {accumulation} groups of packs a step")
        lines.append(step_balance.table(found["balance"]))
    return "\n".join(lines)


def _packer_line(row: dict[str, Any]) -> str:
    return ROW.format(
        row["packer"],
        f"{row['documents']:,}",
        f"{row['packs']:,}",
        f"{row['fill']:.2%}",
        f"{row['seconds']:.3f}",
        f"{row['ratio']:.1f} ×",
        f"{row['first_call_seconds']:.3f} s",
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write the tables."""
    options = arguments(argv)
    result = measure(options)
    print(report(result))
    if options.output:
        options.output.write_text(json.dumps(result, indent=1, default=float))


if __name__ == "__main__":
    main()
