"""Totals of a set of documents by category, and common mistakes.

The audit uses the columns alone if a folder has them; checks that need the tokens read each token once. A finding
counts documents (or records of `report.json`, which has no rows). It asks for a look, not for a change: all tokens
after the first are targets both in a text for pretraining and in a chat whose prompt was lost.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_ext.text.tokens.hashes import repeated
from verl_ext.text.tokens.tokenizer import ModelOptions, load_tokenizer
from verl_ext.tools.show.documents import ShownDocuments, model_of, tokenizer_of
from verl_ext.tools.show.tokens import TokenFacts, read_tokens

NAMED_ROWS = 5  # rows that a finding names, in the terminal and in the JSON
READ_UP_TO = 100_000_000  # tokens that an audit reads without scan=true, which takes some seconds
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
# finding: (its meaning, its input: "columns", "tokens", "tokenizer", "report", "validation", or "units" of preferences)
CHECKS = {
    "no_target": ("documents without a target: nothing is learnt", "columns"),
    "all_targets": ("documents of targets alone: texts, or chats whose prompt is lost", "columns"),
    "cut": ("documents that were cut when they were tokenized", "columns"),
    "cut_in_target": ("documents cut inside a target: its end is not learnt", "tokens"),
    "duplicates": ("documents whose tokens an earlier document has", "tokens"),
    "leaked": ("validation documents whose tokens a training document has", "validation"),
    "no_end": ("documents whose last target is no end of turn", "tokenizer"),
    "double_bos": ("documents that begin with BOS twice", "tokenizer"),
    "empty_reasoning": ("documents that learn an empty <think></think>", "tokenizer"),
    "other_tokenizer": ("documents of another tokenizer than that of model.path", "tokenizer"),
    "open_turns": ("turns of targets without an end-of-turn token", "report"),
    "special_tokens": ("records with names of special tokens in their text", "report"),
    "bad_records": ("records that could not be used", "report"),
    "unused_fields": ("records with a field that nothing read", "report"),
    "left_out_files": ("files of the sources' folders that were not read", "report"),
    "length_bias": (
        "pairs whose chosen answer has more targets: about half have, unless length is what is liked",
        "units",
    ),
    "unequal_parts": ("pairs of which only one answer has reasoning, or an empty thinking block", "units"),
    "unequal_ends": ("pairs of which only one answer has an end of turn", "units"),
    "unequal_prompts": ("pairs whose prompt the template prints in another form before each answer", "units"),
    "scores_reversed": ("pairs whose preferred answer has the lower score", "units"),
}


Finding = dict[str, Any]  # a check's result, as :func:`_finding` makes it


def audit(
    documents: ShownDocuments,
    validation: ShownDocuments | None = None,
    model: ModelOptions | None = None,
    read: bool | None = None,
) -> dict[str, Any]:
    """Return totals, `categories`, `findings` by name, and `not_checked` with reasons.

    model: names the tokenizer; None: the reports name it.
    read: whether the tokens are read; None: they are read if there are at most READ_UP_TO.
    """
    tokens = int(documents.lengths.sum(dtype=np.int64))
    facts, ids, tokenizer = None, _TokenIds(), None
    not_checked: dict[str, str] = {}
    # Only checks on tokens cost seconds on large data, so those alone wait for `scan=true`.
    if read or (read is None and tokens <= READ_UP_TO):
        tokenizer = tokenizer_of(model or ModelOptions(), documents.model)
        if tokenizer is not None:
            ids = _TokenIds.of(tokenizer, documents)
        else:
            not_checked |= _reasons("tokenizer", "no report names a tokenizer: model.path=FOLDER does")
        facts = read_tokens(documents, ids.bos, ids.empty_reasoning)
    else:
        reason = f"{tokens:,} tokens are read with scan=true alone"
        not_checked |= _reasons("tokens", reason) | _reasons("tokenizer", reason) | _reasons("validation", reason)
    # A check without its input is listed with the reason, so that silence never passes for a clean result.
    if validation is None:
        not_checked |= _reasons("validation", "val=FOLDER names validation data")
    if not any(documents.reports):
        not_checked |= _reasons("report", "the data has no report.json")
    found = [*_of_columns(documents), *_of_reports(documents)]
    if documents.units is not None:
        found += _of_units(documents)
    if facts is not None:
        found += _of_tokens(documents, facts, ids)
        if tokenizer is not None and model is not None and model.tokenizer:
            found.append(_other_tokenizer(documents, tokenizer))
        else:
            not_checked.setdefault("other_tokenizer", "model.path=FOLDER names the model")
        if validation is not None:
            leaked = np.isin(read_tokens(validation).hashes, facts.hashes)
            found.append(_of_mask(validation, "leaked", leaked))
    if "no_end" not in not_checked and not any(finding["name"] == "no_end" for finding in found):
        not_checked["no_end"] = "no end of turn is known: text, or a report from an older version"
    return {
        "paths": list(documents.paths),
        "tokenizer": documents.tokenizer,
        "documents": len(documents),
        "tokens": tokens,
        "targets": int(documents.targets.sum(dtype=np.int64)),
        "categories": _categories(documents, None if facts is None else documents.shared_tokens()),
        "findings": {finding["name"]: finding for finding in found},
        "not_checked": not_checked,
    }


@dataclass(frozen=True)
class _TokenIds:
    """Token ids of BOS, ends of turns and an empty reasoning block."""

    bos: int | None = None
    ends: tuple[int, ...] = ()
    empty_reasoning: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: Any, documents: ShownDocuments) -> "_TokenIds":
        texts = {text.strip() for report in documents.reports for text in _counts(report, "end_of_turn")} - {""}
        ends = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in sorted(texts)]
        empty: list[int] = []
        if "<think>" in tokenizer.get_vocab():
            empty = tokenizer("<think>\n\n</think>", add_special_tokens=False)["input_ids"]
        return cls(tokenizer.bos_token_id, tuple(ids[-1] for ids in ends if ids), tuple(empty))


def _of_columns(documents: ShownDocuments) -> list[Finding]:
    targets, lengths = documents.targets, documents.lengths
    masks = {"no_target": targets == 0, "cut": documents.full_lengths > lengths}
    if not documents.all_targets:
        masks["all_targets"] = (targets == lengths - 1) & (lengths > 1)
    return [_of_mask(documents, name, mask) for name, mask in masks.items()]


def _of_tokens(documents: ShownDocuments, facts: TokenFacts, ids: _TokenIds) -> list[Finding]:
    masks = {
        "cut_in_target": (documents.full_lengths > documents.lengths) & facts.ends_in_target,
        "duplicates": repeated(facts.hashes),
    }
    if ids.bos is not None:
        masks["double_bos"] = facts.double_start
    if ids.ends:
        # Plain text is not a chat: all its tokens after the first are targets, and it needs no end of turn.
        is_chat = (documents.targets > 0) & (documents.targets < documents.lengths - 1)
        masks["no_end"] = is_chat & ~np.isin(facts.last_target, ids.ends)
    if ids.empty_reasoning:
        masks["empty_reasoning"] = facts.sequence
    return [_of_mask(documents, name, mask) for name, mask in masks.items()]


def _of_units(documents: ShownDocuments) -> list[Finding]:
    """Compare the answers of pairs; a finding names rows of rejected ones."""
    assert documents.units is not None, "the caller has seen them"
    chosen, rejected = documents.units.pairs
    targets = documents.targets.astype(np.int64)
    longer, shorter = targets[chosen] > targets[rejected], targets[chosen] < targets[rejected]
    means = {f"targets of a {name} answer": values for name, values in (("chosen", chosen), ("rejected", rejected))}
    details = {name: round(float(targets[rows].mean())) for name, rows in means.items() if len(rows)}
    details["rejected is longer"] = int(shorter.sum())
    places = [documents.place(row) for row in rejected[longer][:NAMED_ROWS].tolist()]
    found = [_finding("length_bias", int(longer.sum()), len(rejected), places, details)]
    of_reports = [name for name, (_, source) in CHECKS.items() if source == "units" and name != "length_bias"]
    for name in of_reports if any(documents.reports) else ():
        counts = [_counts(report, "preferences") for report in documents.reports]
        count, of = (sum(each.get(key, 0) for each in counts) for key in (name, "pairs"))
        found.append(_finding(name, count, of))
    return found


def _other_tokenizer(documents: ShownDocuments, tokenizer: Any) -> Finding:
    """Compare the model's vocabulary with those of the reports' tokenizers."""
    vocabulary = tokenizer.get_vocab()
    differs = np.zeros(len(documents), bool)
    details = {}
    for number, report in enumerate(documents.reports):
        if not (named := report.get("tokenizer")):
            continue
        other = load_tokenizer(model_of(report)).get_vocab()
        if other != vocabulary:
            differs[slice(*documents.first_rows[number : number + 2].tolist())] = True
            changed = sum(vocabulary.get(token) != id_ for token, id_ in other.items())
            details[f"{named}: tokens with another id"] = changed
    return _of_mask(documents, "other_tokenizer", differs, details)


def _of_reports(documents: ShownDocuments) -> list[Finding]:
    """Return the reports' findings, which count records and name no rows."""
    if not any(documents.reports):
        return []
    records = sum(int(report.get("total", {}).get("records", 0)) for report in documents.reports)
    found = []
    for name in (name for name, (_, source) in CHECKS.items() if source == "report"):
        details: Counter[str] = Counter()
        key = {"special_tokens": "special_tokens_in_text", "open_turns": "end_of_turn"}.get(name, name)
        for report in documents.reports:
            counts = _counts(report, key).items()
            details.update({each: count for each, count in counts if (name == "open_turns") == (each == "")})
        of, count = records, max(details.values(), default=0) if name == "unused_fields" else sum(details.values())
        if name == "special_tokens":
            count = details.get("records", 0)
        if name == "open_turns":
            of, details = sum(sum(_counts(report, key).values()) for report in documents.reports), Counter()
        found.append(_finding(name, count, of, details={each: n for each, n in details.items() if n}))
    return found


def _counts(report: Mapping[str, Any], key: str) -> dict[str, int]:
    """Return a report's total counts of a key; {} without the key."""
    counts = report.get("total", {}).get(key, {})
    return counts if isinstance(counts, dict) else {}


def _reasons(source: str, reason: str) -> dict[str, str]:
    return {name: reason for name, (_, of) in CHECKS.items() if of == source}


def _of_mask(
    documents: ShownDocuments, name: str, mask: NDArray[np.bool_], details: dict[str, int] | None = None
) -> Finding:
    rows = np.flatnonzero(mask)
    places = [documents.place(row) for row in rows[:NAMED_ROWS].tolist()]
    return _finding(name, len(rows), len(documents), places, details)


def _finding(
    name: str, count: int, of: int, rows: Sequence[tuple[str, int]] = (), details: Mapping[str, int] | None = None
) -> Finding:
    """Return a finding about `count` of `of` documents or records, with the first (path, row) pairs."""
    share = count / of if of else 0.0
    return {"name": name, "count": count, "of": of, "rows": rows, "details": {**(details or {})}, "share": share}


def _categories(documents: ShownDocuments, shared: NDArray[np.int64] | None) -> dict[str, dict[str, Any]]:
    """Return counts, shares, length quantiles and target kinds by category name.

    shared: int64[D], the tokens that data.share_prefixes does not compute again (None: unknown), for the share
    `computed`.
    """
    order = np.lexsort((documents.lengths, documents.categories))
    every_length, every_target = documents.lengths[order], documents.targets[order]
    numbers, begins = np.unique(documents.categories[order], return_index=True)
    kinds = _kinds(documents)
    total = max(int(every_target.sum(dtype=np.int64)), 1)
    found = {}
    for number, begin, end in zip(numbers.tolist(), begins, [*begins[1:], len(order)], strict=True):
        lengths, targets = every_length[begin:end], int(every_target[begin:end].sum(dtype=np.int64))
        name = documents.names.get(number, str(number) if number else "(none)")
        row: dict[str, Any] = {"documents": len(lengths), "tokens": int(lengths.sum(dtype=np.int64))}
        row |= {"targets": targets, "share": targets / total}
        if shared is not None:
            row["computed"] = 1 - int(shared[order[begin:end]].sum()) / max(row["tokens"], 1)
        nearest = {key: int(lengths[math.ceil(share * len(lengths)) - 1]) for key, share in QUANTILES.items()}
        row["length"] = nearest | {"max": int(lengths[-1])}
        found[name] = row | ({"kinds": kinds[name]} if name in kinds else {})
    return found


def _kinds(documents: ShownDocuments) -> dict[str, Counter[str]]:
    """Sum the reports' `target_kinds` by category."""
    found: dict[str, Counter[str]] = {}
    for report in documents.reports:
        for category, kinds in (report.get("target_kinds") or {}).items():
            found.setdefault(category, Counter()).update(kinds)
    return found
