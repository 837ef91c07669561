"""The audit and the plan as tables for a terminal."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from verl_ext.data.tokenized.beginnings import NOTICED_SHARE
from verl_ext.options import one_line
from verl_ext.tables import plain_table
from verl_ext.tools.show.audit import CHECKS, QUANTILES
from verl_ext.trainer.report_lines import report_lines


def audit_tables(audit: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Yield the tables and lines of an audit for a terminal."""
    total = f"{audit['documents']:,} documents, {audit['tokens']:,} tokens, {audit['targets']:,} targets"
    yield Text(one_line(f"{total} in {', '.join(audit['paths'])}"), "bold")
    if audit["tokenizer"]:
        yield Text(one_line(f"tokenizer {audit['tokenizer']}"), "dim")
    yield _categories(audit["categories"])
    tokens = sum(row["tokens"] * row.get("computed", 1) for row in audit["categories"].values())
    if 0 < tokens <= NOTICED_SHARE * audit["tokens"] and "plan" not in audit:
        share = f"{tokens / audit['tokens']:.0%} of the tokens"
        yield Text(f"documents begin alike: data.share_prefixes=true computes {share} where packs hold what they share")
    if kinds := _kinds(audit["categories"]):
        yield kinds
    if plan := audit.get("plan"):
        yield Text("\n".join(report_lines({"train": plan, "steps": plan})))
    found = [finding for finding in audit["findings"].values() if finding["count"]]
    if found:
        yield _findings(found)
    clean = [name for name, finding in audit["findings"].items() if not finding["count"]]
    if clean:
        yield Text(f"none of: {', '.join(clean)}", "green")
    for reason in dict.fromkeys(audit["not_checked"].values()):
        names = [name for name, why in audit["not_checked"].items() if why == reason]
        yield Text(f"not checked: {', '.join(names)} ({one_line(reason)})", "dim")


def _categories(categories: Mapping[str, Any]) -> Table:
    shared = ["computed"] * any(row.get("computed", 1) <= NOTICED_SHARE for row in categories.values())
    table = plain_table("category", "documents", "tokens", *shared, "targets", "share", *QUANTILES, "max")
    for name, row in categories.items():
        counts = [f"{row[key]:,}" for key in ("documents", "tokens", "targets")]
        counts[2:2] = [f"{row[key]:.0%}" for key in shared]
        lengths = (f"{row['length'][key]:,}" for key in (*QUANTILES, "max"))
        table.add_row(Text(one_line(name)), *counts, f"{row['share']:.1%}", *lengths)
    return table


def _kinds(categories: Mapping[str, Any]) -> Table | None:
    """Return the targets by kind; None if no report counts them."""
    kinds = list(dict.fromkeys(kind for row in categories.values() for kind in row.get("kinds", ())))
    if not kinds:
        return None
    table = plain_table("targets by kind", *(kind.replace("_", " ") for kind in kinds))
    for name, row in categories.items():
        if of := row.get("kinds"):
            every = max(sum(of.values()), 1)
            table.add_row(
                Text(one_line(name)), *(f"{of.get(kind, 0):,} ({of.get(kind, 0) / every:.0%})" for kind in kinds)
            )
    return table


def _findings(found: list[dict[str, Any]]) -> Table:
    table = plain_table("look at", "count", "share", left=1)
    table.add_column("what", overflow="fold")
    for finding in found:
        meaning = Text(CHECKS[finding["name"]][0])
        if finding["rows"]:
            paths = {path for path, _ in finding["rows"]}
            named = ", ".join(str(row) if len(paths) == 1 else f"{path}:{row}" for path, row in finding["rows"])
            meaning.append(f"; rows {one_line(named)}{', …' if finding['count'] > len(finding['rows']) else ''}", "dim")
        if finding["details"]:
            listed = sorted(finding["details"].items(), key=lambda item: -item[1])[:6]
            meaning.append(f"; {', '.join(f'{one_line(name)}: {count:,}' for name, count in listed)}", "dim")
        table.add_row(Text(finding["name"], "yellow"), f"{finding['count']:,}", f"{finding['share']:.2%}", meaning)
    return table
