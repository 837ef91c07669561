"""Preferences among a model's answers: GLM-Long, LongWriter, LongReward.

    prompt  →  answers 1 … N, a seed each  →  the usable ones, scored  →  the best against others

The answers must come from the model that is to be trained, as in these papers (arXiv 2408.07055, 2410.21252). An answer
that is cut, refused, empty, equal to another one or a passage of a benchmark is left out and counted, as is one without
a score.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from verl_ext.tools.endpoint.answer import DONE, Answer
from verl_ext.tools.endpoint.client import Client, SamplingOptions
from verl_ext.tools.synthesis.asked_prompts import AskedPrompt
from verl_ext.tools.synthesis.asking import Work, WriteResult, write_records
from verl_ext.tools.synthesis.items import SourceItem, drawn
from verl_ext.tools.synthesis.prompts import PromptTexts
from verl_ext.tools.synthesis.records import Result, Settings, refused_in_words
from verl_ext.tools.synthesis.scorers import Pairing, Scorer
from verl_ext.tools.word_count import count_words

PAIRS = ("best_worst", "best_random", "all", "best")
_BINS = (0, 0.5, 1, 2, 5, 10, 20, 50)  # lower edges of the report's gaps of scores


@dataclass
class PairStatistics:
    """What the report says of pairs, and of answers in none."""

    left_out: Counter[str] = field(default_factory=Counter)  # answers by reason
    gaps: Counter[str] = field(default_factory=Counter)  # pairs by the difference of their scores
    pairs: int = 0
    longer: int = 0  # pairs whose chosen answer has more words

    def add(self, best: tuple[str, float], others: Sequence[tuple[str, float]]) -> None:
        """Count the pairs of an answer with others."""
        for text, score in others:
            edge = max(edge for edge in _BINS if edge <= best[1] - score)
            self.gaps[f">={edge:g}"] += 1
            self.longer += count_words(best[0]) > count_words(text)
        self.pairs += len(others)

    def report(self, means: Mapping[str, Sequence[float]]) -> dict[str, Any]:
        """Return the numbers for report.yaml; means: the parts of scores by name."""
        return {
            "pairs": self.pairs,
            "chosen_longer": round(self.longer / self.pairs, 4) if self.pairs else None,
            "gaps": {name: self.gaps[name] for name in (f">={edge:g}" for edge in _BINS) if self.gaps[name]},
            "answers_left_out": dict(sorted(self.left_out.items())),
            "mean_scores": {name: round(sum(values) / len(values), 2) for name, values in sorted(means.items())},
        }

    def line(self) -> str:
        """Return the line for the terminal."""
        left_out = ", ".join(f"{count:,} {name}" for name, count in sorted(self.left_out.items())) or "none"
        share = f", the chosen answer is longer in {self.longer / self.pairs:.0%}" if self.pairs else ""
        return f"{self.pairs:,} pairs{share}; answers left out: {left_out}"


async def write_preferences(work: Work) -> WriteResult:
    """Write the preferences among the answers to the items' prompts."""
    pairing = work.options.pairing
    scorer, statistics = Scorer(pairing.scorer, work.settings.parse_tries), PairStatistics()
    make = partial(_preference, pairing, scorer, statistics)
    result = await write_records(make, work, scorer.opened)
    result.notes.append(statistics.line())
    result.facts = {"preferences": statistics.report(scorer.means)}
    return result


async def _preference(
    pairing: Pairing,
    scorer: Scorer,
    statistics: PairStatistics,
    item: SourceItem,
    client: Client | None,
    prompts: dict[str, PromptTexts],
    settings: Settings,
) -> Result:
    """Return the record of a prompt's answers, or why there is none."""
    asked = item.prompt
    assert asked is not None, "the items of this task have prompts"
    # Scores that the record has are taken as they are; otherwise the answers are asked for, then scored.
    answers: list[Answer] = []
    failed: list[tuple[str, Answer]] = []
    if pairing.scorer.kind == "given":
        scored = _distinct(asked.scored, settings, statistics)
    else:
        assert client is not None, "it is open"
        answers = await _answers(pairing, item, asked, client, settings.sampling)
        failed += [("answer", answer) for answer in answers if not answer.is_done]
        statistics.left_out.update(answer.outcome for _, answer in failed)
        texts = [answer.text for answer in answers if answer.is_done]
        texts = [asked.given, *texts] if pairing.keep_given and asked.given else texts
        question = [{"role": "user", "content": asked.question}]
        sees = asked.messages if pairing.scorer.context == "whole" else question
        scored = []
        for text, _ in _distinct([(text, 0.0) for text in texts], settings, statistics):
            found = await scorer.score(item.name, sees, text, prompts)
            if found.is_done:
                scored.append((text, found.parsed))
            else:
                statistics.left_out[f"score {found.outcome}"] += 1
                failed.append(("score", found))
    if len(scored) < pairing.min_scored:
        if failed:
            return Result.from_answer(*failed[0])
        got = f"{len(scored)} different answers have a score"
        return Result("few_answers", reason=f"{got}; min_scored is {pairing.min_scored}")
    best, others = _chosen(pairing, scored, drawn(settings.seed, item.name, "rejected"))
    if not others and pairing.pair != "best":
        return Result("tie", reason=f"no answer has a score below {best[1]:g} by min_gap={pairing.min_gap:g} or more")
    statistics.add(best, others)
    return Result(DONE, [_record(pairing, item, asked, best, others, answers, scored)])


async def _answers(
    pairing: Pairing, item: SourceItem, asked: AskedPrompt, client: Client, sampling: SamplingOptions
) -> list[Answer]:
    """Ask for the answers, while the server still caches the prompt."""
    if sampling.temperature is None:
        sampling = replace(sampling, temperature=1.0)
    found = []
    for number in range(1, pairing.answers + 1):
        found.append(refused_in_words(await client.ask(item.name, f"answer/{number}", asked.messages, sampling)))
    return found


def _distinct(
    scored: Sequence[tuple[str, float]], settings: Settings, statistics: PairStatistics
) -> list[tuple[str, float]]:
    """Return the answers without passages of benchmarks, empty ones and repetitions; count these."""
    kept: dict[str, float] = {}
    for text, score in scored:
        if not text.strip():
            statistics.left_out["empty"] += 1
        elif settings.passages.found_in(text):
            statistics.left_out["contaminated"] += 1
        elif text.strip() in kept:
            statistics.left_out["equal"] += 1
        else:
            kept[text.strip()] = score
    return list(kept.items())


def _chosen(
    pairing: Pairing, scored: Sequence[tuple[str, float]], number: int
) -> tuple[tuple[str, float], list[tuple[str, float]]]:
    """Return the best answer, and those that it is preferred to."""
    best = max(scored, key=lambda each: each[1])
    below = [each for each in scored if each[1] < best[1] and best[1] - each[1] >= pairing.min_gap]
    below.sort(key=lambda each: -each[1])
    if not below or pairing.pair == "best":
        return best, []
    return best, {"best_worst": below[-1:], "best_random": [below[number % len(below)]], "all": below}[pairing.pair]


def _record(
    pairing: Pairing,
    item: SourceItem,
    asked: AskedPrompt,
    best: tuple[str, float],
    others: Sequence[tuple[str, float]],
    answers: Sequence[Answer],
    scored: Sequence[tuple[str, float]],
) -> dict[str, Any]:
    """Return a record of a pair, of several answers, or a chat."""
    provenance = {
        "item": item.name,
        "source": item.source,
        "scorer": pairing.scorer.kind,
        "scores": [score for _, score in scored],
        "models": sorted({answer.model for answer in answers}),
        "seeds": [answer.seed for answer in answers],
    }
    # Each choice of pairs has the shape that `tokenize` recognizes for it.
    facts = {"category": asked.category or item.source, "provenance": provenance}
    prompt = [dict(message) for message in asked.messages]
    if pairing.pair == "best":
        return {"messages": [*prompt, {"role": "assistant", "content": best[0]}], **facts}
    if pairing.pair == "all":
        return {
            "prompt": prompt,
            "answers": [{"answer": text, "score": score} for text, score in (best, *others)],
            **facts,
        }
    ((rejected, score),) = others
    turns = [[{"role": "assistant", "content": text}] for text in (best[0], rejected)]
    scores = {"score_chosen": best[1], "score_rejected": score}
    return {"prompt": prompt, "chosen": turns[0], "rejected": turns[1], **scores, **facts}
