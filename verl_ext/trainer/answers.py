"""Answers to prompts, which the ranks share, and their mean scores.

The prompts of `eval.prompts` and the questions of a validation set (data=babilong) are shared in the same way:

    prompts, the longest first   0 1 2 3 4 5 6      rank 0: 0 2 4 6      rank 1: 1 3 5 -
    batches of 2                                            [0 2] [4 6]          [1 3] [5]
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch.distributed as dist
from numpy.typing import ArrayLike

from verl_ext.answers.generation import Sampling
from verl_ext.answers.prompts import Prompt, Prompts, prompt_end
from verl_ext.answers.scores import ScoreFailed, Scorer, scorer
from verl_ext.engines.step import StepEngine
from verl_ext.metrics import LengthBins
from verl_ext.options import one_line
from verl_ext.progress import terminal_bar
from verl_ext.text.records.reasoning import decode_answer
from verl_ext.trainer.distributed import RunRanks
from verl_ext.trainer.hang import watch
from verl_ext.trainer.run import Run

Texts = Callable[[list[Prompt]], list[str]]  # answers a batch; collective for the model in training, also for []


class PromptList(Protocol):
    """Prompts by number, which may be read on demand."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Prompt: ...


class Scored(NamedTuple):
    """An answer and its score.

    score: None without one. text: None if no table shows the answer.
    """

    number: int
    category: str
    score: float | None
    text: str | None


class NoAnswers(ValueError):
    """The one-line reason, on every rank, why prompts have no scores."""


def scored_answers(
    prompts: PromptList, order: Sequence[int], answer: Texts, score: Scorer, batch_size: int, shown: Sequence[int] = ()
) -> list[Scored]:
    """Answer this rank's prompts; return all scores by number; collective.

    order: the prompt numbers, with similar lengths side by side. shown: the numbers whose texts are returned.
    Raises NoAnswers on every rank if a scorer fails on one rank.
    """
    ranks = RunRanks()
    mine, share = list(order[ranks.rank :: ranks.size]), -(-len(order) // ranks.size)
    found: list[Scored] = []
    failure: str | None = None
    batches = range(0, share, batch_size)
    # Every rank has as many batches, the last perhaps empty, because a forward pass needs all ranks.
    for first in terminal_bar("answer", ranks.rank == 0, batches, unit="batch", leave=False):
        batch = mine[first : first + batch_size]
        asked = [prompts[number] for number in batch]
        try:
            texts = answer(asked)
            for number, prompt, text in zip(batch, asked, texts, strict=True):
                if failure is None:
                    value = score(prompt.record, prompt.expected, text)
                    found.append(Scored(number, prompt.category, value, text if number in shown else None))
        except ScoreFailed as error:  # the rank goes on, because others need it in their forward passes
            failure = one_line(str(error))
        watch.mark()
    # A failure on one rank is every rank's, so that all go on with the training alike.
    gathered = ranks.gather((found, failure))
    if failed := next((failure for _, failure in gathered if failure is not None), None):
        raise NoAnswers(failed)
    return sorted((scored for found, _ in gathered for scored in found), key=lambda scored: scored.number)


def mean_scores(scored: Sequence[Scored]) -> dict[str, float]:
    """Return the mean scores by category, and of all under "".

    Categories are in the order of first prompts; the category "" of a prompt means no category. Without a score there
    is not a mean.
    """
    by_category: dict[str, list[float]] = defaultdict(list)
    scores = [(one.category, one.score) for one in scored if one.score is not None]
    for category, score in scores:
        by_category[category].append(score)
    by_category[""] = [score for _, score in scores]
    return {name: fmean(scores) for name, scores in by_category.items() if scores}


def scores_by_length(scored: Sequence[Scored], lengths: ArrayLike, bins: LengthBins) -> dict[str, float]:
    """Return the mean scores by bin of the lengths, which `number` indexes; none without edges."""
    bins_of = bins.index(lengths)
    named = [one._replace(category=bins.names[bins_of[one.number]]) for one in scored if bins.edges]
    means = mean_scores(named)
    return {name: means[name] for name in bins.names if name in means}


def engine_texts(engine: StepEngine, tokenizer: Any, sampling: Sampling) -> Texts:
    """Return a function that answers by the model in training."""
    seeds = itertools.count(sampling.seed)  # each batch has its own seed

    def texts(batch: list[Prompt]) -> list[str]:
        idle = [[tokenizer.eos_token_id or 0]]  # for the others' sake, a rank without prompts answers one token
        answers = engine.generate_answers([prompt.ids for prompt in batch] or idle, replace(sampling, seed=next(seeds)))
        return [decode_answer(tokenizer, tokens) for tokens in answers[: len(batch)]]

    return texts


@dataclass(frozen=True)
class Answers:
    """The evaluation of a run by the answers to `eval.prompts`."""

    run: Run
    prompts: Prompts
    engine: StepEngine

    def measure(self, step: int) -> tuple[dict[str, float], list[Mapping[str, Any]]]:
        """Return common metrics and table rows, or raise NoAnswers; collective."""
        options, items = self.run.config.eval, self.prompts.items
        tokenizer = self.engine.model_config.tokenizer
        rows = min(options.table_rows, len(items))
        shown = [number * len(items) // rows for number in range(rows)]
        order = sorted(range(len(items)), key=lambda number: -len(items[number].ids))
        answer = engine_texts(self.engine, tokenizer, self._sampling(step))
        with self.engine.eval_mode():
            scored = scored_answers(items, order, answer, scorer(options.score), options.batch_size, shown)
        table: list[Mapping[str, Any]] = [
            {
                "step": step,
                "category": one.category,
                "question": items[one.number].question,
                "prompt": prompt_end(items[one.number], tokenizer),
                "answer": one.text,
                "expected": items[one.number].expected,
                "score": one.score,
            }
            for one in scored
            if one.text is not None
        ]
        means = mean_scores(scored)
        metrics = {f"val/answer/{name}" if name else "val/answer": mean for name, mean in means.items()}
        by_length = scores_by_length(scored, [len(item.ids) for item in items], self.run.config.trainer.bins)
        return metrics | {f"val/answer_{name}": mean for name, mean in by_length.items()}, table

    def _sampling(self, step: int) -> Sampling:
        """Return the sampling settings, whose seeds a resumed run repeats."""
        options = self.run.config.eval
        seed = np.random.SeedSequence([self.run.config.trainer.seed, step, dist.get_rank()])
        draws = options.temperature, options.top_p, int(seed.generate_state(1)[0])
        return Sampling(options.max_new_tokens, self.prompts.stops, *draws)
