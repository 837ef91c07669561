"""The text of a run's data_report.json: its data and steps."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl_ext.data.packs.mixture import mixture_table
from verl_ext.tables import aligned

Facts = Mapping[str, Any]


def report_lines(report: Mapping[str, Facts]) -> Iterator[str]:
    """Yield the lines about {"new_tokens": facts, "train": facts, "val": facts, "steps": facts}."""
    if new := report.get("new_tokens"):
        grown = f"embeddings and head grow from {new['rows']:,} to {new['rows_with']:,} rows"
        free = f"in free rows of {new['rows']:,}"
        yield f"model: new tokens: {new['tokens']:,}; {grown if new['rows_with'] > new['rows'] else free}"
    for name in ("train", "val"):
        if name in report:
            yield from _data_lines(name, report[name])
    if "steps" in report:
        yield from _step_lines(report["steps"])


def _data_lines(name: str, facts: Facts) -> Iterator[str]:
    documents = f"{facts['documents']:,} documents"
    if "samples" in facts:  # of a stream
        documents = f"{facts['samples']:,} samples of {documents}"
    tokens = f"{facts['tokens']:,} tokens"
    if "computed_tokens" in facts:
        tokens += f", {facts['computed_tokens'] / max(facts['tokens'], 1):.1%} of them computed"
    yield (
        f"{name}: {documents}, {tokens} ({facts['target_tokens']:,} targets) "
        f"in {facts['packs']:,} packs of {facts['max_tokens']:,}, {facts['fill']:.1%} full"
    )
    if "units" in facts:
        named = {
            "pairs": "pairs",
            "labels": "answers with a label",
            "documents_alone": "documents that are not answers",
        }
        counted = ", ".join(f"{facts[key]:,} {what}" for key, what in named.items() if facts[key])
        learnt = ", which are learnt like those of SFT (loss.sft_weight)" if facts["documents_alone"] else ""
        yield f"{name}: {facts['units']:,} units: {counted}{learnt}"
    if facts.get("computed_tokens") == facts["tokens"]:
        yield (
            f"{name}: data.share_prefixes=true shares nothing: no documents of a pack begin with the same "
            "data.share_least tokens; a smaller number shares shorter beginnings"
        )
    if "share_computed" in facts:
        share = f"{facts['share_computed']:.0%} of its tokens"
        yield f"{name}: documents begin alike: data.share_prefixes=true would compute about {share}"
    if facts["mixture"]:
        yield f"{name}: the mixture:"
        yield mixture_table(facts["mixture"])
    if len(facts.get("use", ())) > 1:
        yield f"{name}: tokens of an epoch, and epochs of the run, by source and length:"
        yield _table(facts["use"])
    if facts.get("sources"):
        yield f"{name}: its sources:"
        yield _table(facts["sources"])
    if facts["omitted_documents"]:
        budget = facts["max_tokens"]
        yield f"{name}: documents that are changed, left out or without a target (data.max_tokens={budget}):"
        yield _table(facts["omitted_documents"])


def _step_lines(facts: Facts) -> Iterator[str]:
    last = facts["packs_in_last_step"]
    shorter = "" if last == facts["packs_per_step"] else f" (the last {last})"
    whole = facts["epochs_of_plan"]
    of = "an epoch" if whole == 1 else f"in {whole:,.3g} epochs"
    line = f"steps: {facts['steps_per_epoch']:,} {of} of {facts['packs_per_step']} packs{shorter}"
    if facts["data_parallel_ranks"] > 1:
        line += (
            f"; by cost, {facts['data_parallel_ranks']} data-parallel ranks are busy {facts['busy']:.1%} of the time "
            f"(shuffled: {facts['busy_if_shuffled']:.1%})"
        )
    yield line
    if facts["left_out_packs"]:
        yield (
            f"steps: every epoch leaves out other packs (data.drop_last=true); the first {facts['left_out_packs']}, "
            f"{facts['left_out_documents']:,} documents, {facts['left_out_tokens']:,} tokens"
        )


def _table(rows: Sequence[Facts]) -> str:
    return aligned([{name: _cell(name, value) for name, value in row.items()} for row in rows])


def _cell(name: str, value: Any) -> str:
    if name == "share":
        return f"{value:.2%}"
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}" if isinstance(value, float) else str(value)
