"""The text of a plan: the memory and time of a step."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl_ext.progress import four_digits
from verl_ext.tables import aligned
from verl_ext.tools.plan.traffic import GATHERED, REDUCED, TOKENS

Facts = Mapping[str, Any]
_GIB = 2**30
_MIB = 2**20


def plan_lines(facts: Facts) -> Iterator[str]:
    """Yield all lines about a plan's memory and time; none for {}."""
    if facts:
        yield from memory_lines(facts)
    if "time" in facts:
        yield from time_lines(facts["time"])
    if facts.get("sizes"):
        yield from size_lines(facts["sizes"])
    if facts.get("experts"):
        yield from expert_lines(facts["experts"])
    yield from map(remedy_line, facts.get("remedies", ()))


def memory_lines(facts: Facts) -> Iterator[str]:
    """Yield the memory table of the run as it is configured."""
    if "failed" in facts:
        yield f"memory: not predicted: {facts['failed']}"
        return
    sp_rank = facts["sequence_parallel_rank"]
    who = "every rank" if sp_rank == 0 else f"rank {sp_rank} of those that share a pack, which holds the most targets"
    yield (
        f"memory: a step of {facts['world_size']} rank{'s' * (facts['world_size'] > 1)} on a fake GPU; {who}; "
        f"a micro-batch of {facts['micro_batch_tokens']:,} tokens; GiB:"
    )
    rows = {kind: f"{size / _GIB:9.2f}" for kind, size in {**facts["kinds"], "peak": facts["peak"]}.items()}
    # Memory of the host is shown only where it can decide: from 1 MiB, or any of it under a given limit.
    host, ranks, given = facts["host"], facts["ranks_of_node"], facts["host_memory"]
    if host >= (_MIB if given is None else 1):
        compared = "" if given is None else f" of {given / _GIB:.2f} (plan.host_memory)"
        over = ", which does not fit" if given is not None and host * ranks > given else ""
        rows["on the host"] = f"{host / _GIB:9.2f}"
        rows["of a node"] = f"{host * ranks / _GIB:9.2f}{compared}, its {ranks} ranks'{over}"
    width = max(map(len, facts["kinds"]))
    yield from (f"  {name:<{width}} {row}" for name, row in rows.items())
    # Both kinds of allocator stand side by side, because fragments alone can end a run that fits.
    expandable, fixed = (
        f"{size / _GIB:.2f} ({size / facts['peak']:.3f} ×)" for size in facts["reserved_by_allocator"].values()
    )
    yield (
        f"memory: over {facts['replayed_steps']} steps, the heaviest and others in random order, PyTorch's "
        f"allocator reserves {expandable} with expandable segments, {fixed} with segments of fixed size"
    )
    needed = facts.get("needed", facts["peak"] + facts["reserve"])  # reports of earlier versions lack it
    left, outside = (facts["gpu_memory"] - needed) / _GIB, facts["reserve"] / _GIB
    verdict = "fits" if facts["fits"] else "does not fit"
    yield (
        f"memory: it {verdict}, {abs(left):.2f} {'left' if left >= 0 else 'over'} of {facts['gpu_memory'] / _GIB:.2f}: "
        f"the allocator's {needed / _GIB - outside:.2f} and {outside:.2f} outside PyTorch (plan.reserve)"
    )


def time_lines(facts: Facts) -> Iterator[str]:
    """Yield a step's computation, communication and times, or why not."""
    if "failed" in facts:
        yield f"time: not planned: {facts['failed']}"
        return
    more = facts["computed_flops"] / facts["model_flops"] - 1
    again = f", {more:.0%} more computed (recomputation, zero heads)" if more > 0.005 else ""
    yield (
        f"time: a mean step is {facts['tokens']:,.0f} tokens, {four_digits(facts['model_flops'] / 1e15)} PFLOP by the "
        f"lengths of documents{again}; {facts['efficiency']:.0%} (plan.efficiency) of the "
        f"{facts['peak_flops'] / 1e12:,.0f} TFLOP/s of {facts['gpu']}"
    )
    received = {name: size for name, size in facts["received"].items() if size}
    if received:
        listed = ", ".join(f"{four_digits(size / _GIB)} GiB of {name}" for name, size in received.items())
        yield f"time: each rank receives {listed}"
    parts = [
        f"{four_digits(facts['seconds'][name])} {name}" for name in facts["seconds"] if facts["seconds"][name] > 1e-6
    ]
    yield (
        f"time: {four_digits(facts['step_seconds'])} s a step ({', '.join(parts)}): "
        f"{four_digits(facts['tokens_per_second'])} tokens/s of a rank, an MFU of {facts['mfu']:.1%}"
    )
    left_out = ", ".join(["start, optimizer, validation, checkpoints, jitter", *facts.get("left_out", ())])
    yield (
        f"time: {facts['steps']:,} steps, {four_digits(facts['hours'])} hours, {four_digits(facts['gpu_hours'])} GPU "
        f"hours; not in them: {left_out}"
    )


def size_lines(sizes: Sequence[Facts]) -> Iterator[str]:
    """Yield a table of ranks that share a pack, best first."""
    yield "time: ranks that share a pack, those that fit first, the cheapest at the top:"
    rows = []
    for size in sizes:
        row = {"ulysses": str(size["ulysses"]), "context": str(size["context"]), "peak GiB": "", "fits": "", "s": ""}
        if "failed" not in size:
            row |= {"peak GiB": f"{size['peak'] / _GIB:.2f}", "fits": "yes" if size["fits"] else "no"}
            row["s"] = four_digits(size["step_seconds"])
        rows.append({**row, "": "this run" if size["own"] else size.get("failed", "")})
    yield aligned([{("s a step" if key == "s" else key): cell for key, cell in row.items()} for row in rows], left=[""])


def expert_lines(facts: Facts) -> Iterator[str]:
    """Yield a table of ranks that share experts or gather all, and what the former costs or saves."""
    more, than = ("more", "more than") if facts["tokens"] > facts["even_at"] else ("fewer", "at most")
    yield (
        f"experts: a rank's micro-batch has {facts['tokens']:,} tokens, {than} {facts['even_at']:,}: moving them takes "
        f"{more} bytes than gathering weights of experts (plan.expert_imbalance={facts['imbalance']:g})"
    )
    rows = []
    for size in facts["rows"]:
        row = {"parallel.expert_parallel": str(size["ranks"])}
        if "failed" in size:
            rows.append({**row, "peak GiB": "", "fits": "", "s a step": "", "GiB of weights": "", "GiB of tokens": ""})
            continue
        gib = [size["received"][name] / _GIB for name in (GATHERED, REDUCED, TOKENS)]
        row |= {"peak GiB": f"{size['peak'] / _GIB:.2f}", "fits": "yes" if size["fits"] else "no"}
        row |= {"s a step": four_digits(size["step_seconds"]), "GiB of weights": four_digits(gib[0] + gib[1])}
        rows.append({**row, "GiB of tokens": four_digits(gib[2])})
    yield aligned(rows)
    if any("failed" in size for size in facts["rows"]):
        yield from (f"experts: not predicted: {size['failed']}" for size in facts["rows"] if "failed" in size)
        return
    whole, shared = facts["rows"]
    memory, seconds = (whole["peak"] - shared["peak"]) / _GIB, shared["step_seconds"] - whole["step_seconds"]
    yield (
        f"experts: parallel.expert_parallel={shared['ranks']} {'saves' if memory >= 0 else 'costs'} {abs(memory):.2f} "
        f"GiB and {'costs' if seconds >= 0 else 'saves'} {four_digits(abs(seconds))} s a step"
    )


def remedy_line(remedy: Facts) -> str:
    """Return the line about a remedy that was tried."""
    if "failed" in remedy:
        return f"memory: {remedy['override']} is not predicted: {remedy['failed']}"
    fits = "fits" if remedy["fits"] else "does not fit"
    return f"memory: {remedy['override']} {fits}: peak {remedy['peak'] / _GIB:.2f}; costs {remedy['costs']}"
