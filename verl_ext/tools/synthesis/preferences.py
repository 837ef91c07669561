"""Preferences among a model's answers: GLM-Long, LongWriter, LongReward.

    prompt  →  answers 1 … N, a seed each  →  the usable ones, scored  →  the best against others

The answers must come from the model that is to be trained, as in these papers (arXiv 2408.07055, 2410.21252). An answer
that is cut, refused, empty, equal to another one or a passage of a benchmark is left out and counted, as is one without
a score.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from verl_ext.options import must, option, spell
from verl_ext.text.read.bad_record import check_characters
from verl_ext.tools.endpoint.answer import DONE, Answer
from verl_ext.tools.endpoint.client import EndpointOptions
from verl_ext.tools.synthesis.asked_prompts import AskedPrompt, ScoredAnswer, asked_prompt
from verl_ext.tools.synthesis.items import SourceItem, drawn, item_of
from verl_ext.tools.synthesis.options import SynthesizeOptions
from verl_ext.tools.synthesis.replies import refused_in_words
from verl_ext.tools.synthesis.report import Result, spelled_counts
from verl_ext.tools.synthesis.scorers import ScorerOptions, scorer_of
from verl_ext.tools.synthesis.task import NoRecord, SynthesisTask, usable
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

    def add(self, best: ScoredAnswer, others: Sequence[ScoredAnswer]) -> None:
        """Count the pairs of an answer with others."""
        for other in others:
            edge = max(edge for edge in _BINS if edge <= best.score - other.score)
            self.gaps[f">={edge:g}"] += 1
            self.longer += count_words(best.text) > count_words(other.text)
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
        share = f", the chosen answer is longer in {self.longer / self.pairs:.0%}" if self.pairs else ""
        return f"{self.pairs:,} pairs{share}; answers left out: {spelled_counts(self.left_out) or 'none'}"


@dataclass(frozen=True)
class AnswerPairOptions(SynthesizeOptions):
    """Several answers to each prompt, scored, the best against others."""

    scorer: ScorerOptions = option(ScorerOptions, "how answers are scored")
    answers: int = option(4, "answers to ask for, of each prompt", least=1)
    pair: str = option(
        "best_worst",
        "best_worst | best_random: against one of the others, drawn | all: against every other | best: no"
        " pair, but a chat with the best answer",
        choices=PAIRS,
    )
    min_gap: float = option(0.0, "least difference of the scores of a pair, above 0", least=0)
    min_scored: int = option(2, "least different answers with a score, of each prompt", least=1)
    keep_given: bool = option(False, "true: the answer in a record's messages is scored too")
    question_key: str | None = option(
        None, "field with the question alone, which the scorer sees; null: the prompt without provenance.spans"
    )

    def task_problems(self) -> Iterator[str | None]:
        """Yield a line for each mistake in the answers, their scores and pairs."""
        yield from self.scorer.kind_problems()
        is_given = self.scorer.kind == "given"
        if not is_given:
            yield from self.endpoint.endpoint_problems()
        elif self.endpoint.base_url:
            needed = "be null with scorer.kind=given, which asks for no answer"
            yield must("endpoint.base_url", needed, self.endpoint.base_url)
        if self.prompts is not None and self.scorer.kind != "judge":
            got = f"{self.prompts} with {spell(self.scorer.kind)}"
            yield must("prompts", "be null unless scorer.kind=judge, whose request it holds", got)
        if is_given and self.keep_given:
            yield must("keep_given", "be false with scorer.kind=given, which scores no answer", True)
        candidates = self.answers + self.keep_given
        least = 1 if self.pair == "best" else 2
        if not is_given and candidates < least:
            yield must("answers", f"be at least {least} with pair={self.pair}", self.answers)
        if self.min_scored < least:
            yield must("min_scored", f"be at least {least} with pair={self.pair}", self.min_scored)
        if not is_given and self.min_scored > candidates >= least:
            yield must("min_scored", f"be at most the {candidates} answers of a prompt", self.min_scored)
        if not is_given and self.answers > 1 and self.sampling.temperature == 0:
            yield must("sampling.temperature", f"be above 0 for {self.answers} different answers", 0)

    @property
    def servers(self) -> list[EndpointOptions]:
        """The servers that are asked, the judge's too."""
        return [*super().servers, *self.scorer.servers]

    @property
    def loads_model(self) -> bool:
        """Whether a classifier on this machine scores answers."""
        return self.scorer.kind == "reward"


class Preferences(SynthesisTask):
    """Answers to prompts, the best of which is preferred to others."""

    name: ClassVar[str] = "preferences"
    options_class: ClassVar[type[SynthesizeOptions]] = AnswerPairOptions
    options: AnswerPairOptions

    def __init__(self, options: AnswerPairOptions) -> None:
        super().__init__(options)
        # Scores that the records have are taken as they are; otherwise the answers are asked for, then scored.
        self.scorer = None if options.scorer.kind == "given" else scorer_of(options.scorer, self)
        self.statistics = PairStatistics()

    def read(self, record: Mapping[str, Any], name: str, source: str) -> SourceItem:
        """Return a record's prompt, with what the record holds beside it."""
        prompt = asked_prompt(record, self.text_key, self.options.question_key)
        item = item_of(record, prompt.text, self.text_key, name, source)
        check_characters("\0".join([prompt.given, prompt.category, *(each.text for each in prompt.scored)]))
        return replace(item, prompt=prompt)

    async def make(self, item: SourceItem) -> Result:
        """Return the record of a prompt's answers; raise NoRecord if there is none."""
        options, asked, counts = self.options, item.prompt, self.statistics.left_out
        assert asked is not None, "the items of this task have prompts"
        answers: list[Answer] = []
        failed: list[tuple[str, Answer]] = []
        if self.scorer is None:
            scored = self._distinct(asked.scored)
        else:
            answers = await self._answers(item, asked)
            failed += [("answer", answer) for answer in answers if not answer.is_done]
            counts.update(answer.outcome for _, answer in failed)
            texts = [answer.text for answer in answers if answer.is_done]
            texts = [asked.given, *texts] if options.keep_given and asked.given else texts
            question = [{"role": "user", "content": asked.question}]
            sees = asked.messages if options.scorer.context == "whole" else question
            scored = []
            for each in self._distinct([ScoredAnswer(text, 0.0) for text in texts]):
                found = await self.scorer.score(item.name, sees, each.text)
                if found.is_done:
                    scored.append(ScoredAnswer(each.text, found.parsed))
                else:
                    counts[f"score {found.outcome}"] += 1
                    failed.append(("score", found))
        if len(scored) < options.min_scored:
            for stage, answer in failed[:1]:
                usable(answer, stage)
            got = f"{len(scored)} different answers have a score"
            raise NoRecord("few_answers", f"{got}; min_scored is {options.min_scored}")
        best, others = self._chosen(scored, drawn(options.seed, item.name, "rejected"))
        if not others and options.pair != "best":
            raise NoRecord("tie", f"no answer has a score below {best.score:g} by min_gap={options.min_gap:g} or more")
        self.statistics.add(best, others)
        return Result(DONE, [self._record(item, asked, best, others, answers, scored)])

    async def _answers(self, item: SourceItem, asked: AskedPrompt) -> list[Answer]:
        """Ask for the answers, while the server still caches the prompt."""
        client, sampling = self.clients[self.options.endpoint.prefix], self.options.sampling
        if sampling.temperature is None:
            sampling = replace(sampling, temperature=1.0)
        found = []
        for number in range(1, self.options.answers + 1):
            found.append(refused_in_words(await client.ask(item.name, f"answer/{number}", asked.messages, sampling)))
        return found

    def _distinct(self, scored: Sequence[ScoredAnswer]) -> list[ScoredAnswer]:
        """Return the answers without passages of benchmarks, empty ones and repetitions; count these."""
        kept: dict[str, float] = {}
        for each in scored:
            text = each.text.strip()
            if not text:
                self.statistics.left_out["empty"] += 1
            elif self.passages.found_in(each.text):
                self.statistics.left_out["contaminated"] += 1
            elif text in kept:
                self.statistics.left_out["equal"] += 1
            else:
                kept[text] = each.score
        return [ScoredAnswer(text, score) for text, score in kept.items()]

    def _chosen(self, scored: Sequence[ScoredAnswer], number: int) -> tuple[ScoredAnswer, Sequence[ScoredAnswer]]:
        """Return the best answer, and those that it is preferred to."""
        pair = self.options.pair
        best = max(scored, key=lambda each: each.score)
        below = [each for each in scored if each.score < best.score and best.score - each.score >= self.options.min_gap]
        below.sort(key=lambda each: -each.score)
        if not below or pair == "best":
            return best, []
        return best, {"best_worst": below[-1:], "best_random": [below[number % len(below)]], "all": below}[pair]

    def _record(
        self,
        item: SourceItem,
        asked: AskedPrompt,
        best: ScoredAnswer,
        others: Sequence[ScoredAnswer],
        answers: Sequence[Answer],
        scored: Sequence[ScoredAnswer],
    ) -> dict[str, Any]:
        """Return a record of a pair, of several answers, or a chat."""
        provenance = {
            "item": item.name,
            "source": item.source,
            "scorer": self.options.scorer.kind,
            "scores": [each.score for each in scored],
            "models": sorted({answer.model for answer in answers}),
            "seeds": [answer.seed for answer in answers],
        }
        # Each choice of pairs has the shape that `tokenize` recognizes for it.
        facts = {"category": asked.category or item.source, "provenance": provenance}
        prompt = [dict(message) for message in asked.messages]
        if self.options.pair == "best":
            return {"messages": [*prompt, {"role": "assistant", "content": best.text}], **facts}
        if self.options.pair == "all":
            ranked = [{"answer": each.text, "score": each.score} for each in (best, *others)]
            return {"prompt": prompt, "answers": ranked, **facts}
        (rejected,) = others
        turns = [[{"role": "assistant", "content": each.text}] for each in (best, rejected)]
        scores = {"score_chosen": best.score, "score_rejected": rejected.score}
        return {"prompt": prompt, "chosen": turns[0], "rejected": turns[1], **scores, **facts}

    def finish(self) -> None:
        """Report the pairs, and the means of the parts of scores."""
        self.outcomes.notes.append(self.statistics.line())
        means = {} if self.scorer is None else self.scorer.means
        self.outcomes.facts["preferences"] = self.statistics.report(means)
