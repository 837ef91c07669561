"""A benchmark over models: answers, verdicts, scores, and files."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from verl_ext.files import json_lines
from verl_ext.tables import as_text, pivot
from verl_ext.tools.endpoint.answer import Answer
from verl_ext.tools.endpoint.client import Client, SamplingOptions, all_of
from verl_ext.tools.endpoint.spending import QuestionProgress
from verl_ext.tools.judging.figures import Figure, FiguresByGroup, as_facts, figures
from verl_ext.tools.judging.task import Case, Scores, Task

RESULTS, ANSWERS, PREDICTIONS = "results.json", "answers.jsonl", "pred.jsonl"
TRIES = 5  # most requests for a verdict until one can be read, as in LongWriter and LongAlign


@dataclass(frozen=True)
class Judged:
    """A case with its answer, the judge's verdicts, and its scores."""

    case: Case
    answer: Answer
    verdicts: Sequence[Answer]
    scores: Scores

    @property
    def outcome(self) -> str:
        """The answer's outcome, or `verdict …` of a missing verdict."""
        missing = [verdict.outcome for verdict in self.verdicts if not verdict.is_done]
        return f"verdict {missing[0]}" if missing else self.answer.outcome

    def as_dict(self) -> dict[str, Any]:
        """Return a line of answers.jsonl."""
        facts = {"case": self.case.name, **self.case.facts, "answer": self.answer.raw, "outcome": self.outcome}
        about = {name: getattr(self.answer, name) for name in ("reason", "reasoning", "model")}
        verdicts = [
            {"verdict": verdict.raw, **{name: getattr(verdict, name) for name in ("outcome", "reason", "model")}}
            for verdict in self.verdicts
        ]
        return {**facts, **about, "judge": verdicts, "scores": self.scores}


JudgedModels = Mapping[str, Sequence[Judged]]
FiguresOfModels = Mapping[str, FiguresByGroup]


async def judge_model(
    name: str,
    task: Task,
    cases: Sequence[Case],
    model: Any,
    sampling: SamplingOptions,
    judge: Client | None,
    clients: Sequence[Client] = (),
) -> list[Judged]:
    """Ask a model about every case, and the judge about every answer.

    Args:
        name: the model's name, for the progress bar and the store.
        task: the benchmark.
        cases: its cases.
        model: a Client, LocalModel or Predictions.
        sampling: how the model draws its answers.
        judge: the client that gives verdicts; None if there is no judge.
        clients: those of `model` and `judge` that are clients, for the progress bar.
    """
    # All cases start at once; each client limits its own requests, and a case's verdicts need not wait for other cases.
    with QuestionProgress(clients, len(cases), f"judge {name}") as bar:

        async def judged(case: Case) -> Judged:
            messages = case.messages or [{"role": "user", "content": case.prompt}]
            answer = await model.ask(case.name, "answer", messages, sampling, **case.request)
            verdicts: list[Answer] = []
            scores: Scores = {}
            if answer.is_reply:
                text = answer.reply_text
                questions = task.questions(case, text) if judge is not None else []
                parsed = [task.worst] * len(questions)
                if judge is not None and text:  # no judge need read an empty answer
                    rule: Any = {"parse": task.verdict, "tries": TRIES, "schema": task.verdict_schema}
                    asked = (
                        judge.ask(case.name, f"judge/{number}", question, task.judge_sampling, **rule)
                        for number, question in enumerate(questions)
                    )
                    verdicts = await all_of(asked)
                    parsed = [verdict.parsed if verdict.is_done else None for verdict in verdicts]
                scores = task.scores(case, text, parsed)
            bar.item_done()
            return Judged(case, answer, verdicts, scores)

        return await all_of(judged(case) for case in cases)


def write_model(folder: Path, task: Task, judged: Sequence[Judged]) -> None:
    """Write a model's answers and scores, and any published predictions file."""
    folder.mkdir()
    _write_lines(folder / ANSWERS, (row.as_dict() for row in judged))
    rows = (task.published(one.case, one.answer.reply_text) for one in judged if one.scores)
    if published := [row for row in rows if row is not None]:
        _write_lines(folder / PREDICTIONS, published)


def _write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    # Half a surrogate pair, which UTF-8 has not, is written as JSON's escape.
    text = "".join(json_lines(rows))
    path.write_text(text, encoding="utf-8", errors="backslashreplace")


def figures_of(judged: JudgedModels, task: Task) -> FiguresOfModels:
    """Return {model: {group: {score: its figure}}}."""
    return {
        name: figures((task.groups(row.case), row.scores) for row in rows if row.scores)
        for name, rows in judged.items()
    }


def differences_of(judged: JudgedModels, task: Task) -> FiguresOfModels:
    """Return {"OTHER - FIRST": {group: {score: the figure of its differences}}} over the cases that both models have.

    The interval is that of differences of the same cases, which is narrower than the two models' own if easy cases are
    easy for both.
    """
    (first, base), *others = judged.items()
    pairs = {f"{name} - {first}": zip(rows, base, strict=True) for name, rows in others}
    return {
        pair: figures((task.groups(one.case), _less(one, other)) for one, other in rows) for pair, rows in pairs.items()
    }


def _less(one: Judged, other: Judged) -> Scores:
    pairs = {name: (score, other.scores.get(name)) for name, score in one.scores.items()}
    return {name: None if None in pair else pair[0] - pair[1] for name, pair in pairs.items()}  # type: ignore[operator]


def results(judged: JudgedModels, figures: FiguresOfModels) -> dict[str, Any]:
    """Return each model's figures, outcomes, and sums if scores are complete."""
    by_model = {}
    for name, rows in judged.items():
        complete = all(row.scores and None not in row.scores.values() for row in rows)
        scores = rows[0].scores if complete else ()
        by_model[name] = {
            "figures": as_facts(figures[name]),
            "outcomes": dict(Counter(row.outcome for row in rows)),
            "sums": {score: sum(float(row.scores[score] or 0) for row in rows) for score in scores},
        }
    return by_model


def difference_table(differences: FiguresOfModels) -> str:
    """Return a table of the differences between models over all cases; "" without any."""
    cells = {(score, pair): shown(figure) for pair, of in differences.items() for score, figure in of["all"].items()}
    return as_text(pivot("difference", cells)) if cells else ""


def cell_tables(judged: JudgedModels, task: Task) -> str:
    """Return each model's means by the two kinds of groups of a heat map; "" without one."""
    if task.heat_map is None:
        return ""
    (across, down, score), tables = task.heat_map, []
    for model, rows in judged.items():
        values: dict[tuple[str, str], list[float]] = {}
        for row in rows:
            groups, value = task.groups(row.case), row.scores.get(score)
            if value is not None and across in groups:
                values.setdefault((groups[down], groups[across]), []).append(value)
        cells = {place: f"{fmean(of_place):.2f}" for place, of_place in values.items()}
        tables += [as_text(pivot(f"{model}: {score}", cells))] if cells else []
    return "\n\n".join(tables)


def table(judged: JudgedModels, figures: FiguresOfModels) -> str:
    """Return a table of scores and outcomes by model, over all cases."""
    cells: dict[tuple[str, str], str] = {}
    for model, by_group in figures.items():
        cells |= {(score, model): shown(figure) for score, figure in by_group["all"].items()}
    for outcome in sorted({row.outcome for rows in judged.values() for row in rows}):
        counts = {model: sum(row.outcome == outcome for row in rows) for model, rows in judged.items()}
        cells |= {(f"cases {outcome}", model): str(count) for model, count in counts.items()}
    return as_text(pivot("score", cells, columns=figures, missing=shown(None)))


def shown(figure: Figure | None) -> str:
    """Return a mean with its interval; a dash for None."""
    if figure is None:
        return "–"
    interval = "" if figure.low is None else f" [{figure.low:.2f}, {figure.high:.2f}]"
    return f"{figure.mean:.2f}{interval}"
