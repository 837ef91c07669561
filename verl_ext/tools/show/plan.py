"""A plan of a training run on the documents: over-length handling, mixture, packs, balance over ranks.

The numbers come from the trainer's own planning functions (verl_ext.packing, verl_ext.data.mixture,
verl_ext.trainer.step_plan), which need the lengths alone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from verl_ext.data.mixture import MixtureOptions, draw_spans
from verl_ext.packing import (
    MOST_TOKENS,
    OVER_LENGTH_POLICIES,
    STRATEGIES,
    TOKENS,
    CostModel,
    cut_spans,
    plan_packs,
)
from verl_ext.packing.strategies import plan_repeated
from verl_ext.text.sources import absolute_path
from verl_ext.tools.show.data import Documents
from verl_ext.trainer.step_plan import StepPlan
from verl_ext.values import DataError, Options, UsageError, option

# The document length at which attention costs as much as the rest of a layer, in a model of about 8 billion parameters.
_EVEN_AT = 25_000


@dataclass(frozen=True)
class PackOptions(Options):
    """The options that turn documents into packs, with the defaults of a training run's data node."""

    max_tokens: int | None = option(None, "budget of packs to plan, as data.max_tokens", least=2, most=MOST_TOKENS)
    over_length: str = option("error", "documents over max_tokens, as data.over_length", choices=OVER_LENGTH_POLICIES)
    strategy: str = option("best_fit", "how documents become packs, as data.strategy", choices=STRATEGIES)
    mixture: Any = option(None, "a mixture, as data.mixture: {sources: {NAME: {tokens: 4e9, …}}}")
    seed: int = option(42, "seed of the plan, as data.seed", least=0)
    ranks: int = option(1, "data-parallel ranks that share the packs", least=1)
    train_batch_size: int = option(8, "packs per optimizer step, as data.train_batch_size", least=1)

    def problems(self) -> Iterable[str | None]:
        """Yield a line if options of packs are given without max_tokens."""
        if self.max_tokens is None and (given := self.changed().keys() & {"mixture", "ranks", "train_batch_size"}):
            yield f"max_tokens is required with {', '.join(sorted(given))}; got null"


def plan_facts(documents: Documents, options: PackOptions, paths: Sequence[str]) -> dict[str, Any]:
    """Return packs, fill, over-length documents, steps, busy shares and the mixture's draws as plain values.

    `busy` is the share of an epoch in which an average rank works; a document of l tokens costs l + l²/25,000.

    Raises:
        DataError: the documents cannot be packed with these options.
        UsageError: the mixture cannot be used.
    """
    assert options.max_tokens is not None, "a plan has a budget"
    budget, lengths = options.max_tokens, documents.lengths
    over = lengths > budget
    try:
        spans = cut_spans(lengths, budget, options.over_length, "paths")
        rows: list[dict[str, Any]] = []
        if options.mixture is None:
            plan = plan_packs(spans.length, budget, options.strategy, options.seed)
        else:
            mixture = MixtureOptions.read(options.mixture)
            if own := sorted({path for of in mixture.folders for path in of or ()} - set(documents.paths)):
                raise UsageError(f"paths must name the folders of mixture.sources as well; {own[0]} is missing")
            given = [absolute_path(path) for path in paths]
            drawn, report = draw_spans(mixture, spans, documents.paths, documents.first_rows, given, options.seed)
            plan, rows = (
                plan_repeated(spans.length, drawn, budget, options.strategy, options.seed),
                list(map(asdict, report)),
            )
    except UsageError:
        raise
    except ValueError as error:
        raise DataError(str(error)) from error
    tokens, batch, ranks = plan.pack_sums(spans.length), options.train_batch_size, options.ranks
    costs = CostModel(linear=_EVEN_AT, quadratic=TOKENS.linear).packs(plan, spans.length)
    steps = StepPlan(plan.num_packs, batch, options.seed, costs=costs, group_size=ranks)
    shuffled = StepPlan(plan.num_packs, batch, options.seed)
    return {
        "max_tokens": budget,
        "over_length": options.over_length,
        "documents_over": int(over.sum()),
        "tokens_over": int(lengths[over].sum(dtype=np.int64)),
        "tokens_lost": int(lengths.sum(dtype=np.int64)) - int(spans.length.sum(dtype=np.int64)),
        "spans": len(spans),
        "packs": plan.num_packs,
        "tokens": int(tokens.sum()),
        "fill": int(tokens.sum()) / (plan.num_packs * budget),
        "documents_per_pack": len(plan.document_index) / plan.num_packs,
        "ranks": ranks,
        "steps": steps.steps_per_epoch,
        "busy": 1 / steps.cost_over_ideal(costs, ranks),
        "busy_if_shuffled": 1 / shuffled.cost_over_ideal(costs, ranks),
        "mixture": rows,
    }
