"""Packs and steps on the data, by the trainer's own code."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import RenderableType
from rich.text import Text

from verl_ext.commands.preview import Decode
from verl_ext.data.tokenized.beginnings import SHARE_LEAST
from verl_ext.options import DataError, Options, UsageError, must, one_line, option, options_of
from verl_ext.packing import MOST_TOKENS, OVER_LENGTH_POLICIES, STRATEGIES, TOKENS, CostModel
from verl_ext.tables import plain_table
from verl_ext.tools.show.documents import ShownDocuments
from verl_ext.trainer.step_plan import StepPlan

if TYPE_CHECKING:
    from verl_ext.data import PackDataset
    from verl_ext.data.packs.packed import PackedDataset

OPENING = 36  # characters of a document that its row shows
# In a model of about 8 billion parameters, attention to 25,000 tokens costs as much as the rest of a layer.
_COST = CostModel(linear=25_000, quadratic=TOKENS.linear)


@dataclass(frozen=True)
class PackOptions(Options):
    """Options that turn documents into packs, with training's defaults."""

    max_tokens: int | None = option(None, "budget of packs to plan, as data.max_tokens", least=2, most=MOST_TOKENS)
    over_length: str = option("error", "documents over max_tokens, as data.over_length", choices=OVER_LENGTH_POLICIES)
    strategy: str = option("best_fit", "how documents become packs, as data.strategy", choices=STRATEGIES)
    share_prefixes: bool = option(False, "true: documents share their beginnings, as data.share_prefixes")
    share_least: int = option(SHARE_LEAST, "tokens of a shared beginning, as data.share_least", least=1)
    mixture: Any = option(None, "a mixture, as data.mixture: {sources: {NAME: {tokens: 4e9, …}}}")
    seed: int = option(42, "seed of the plan, as data.seed", least=0)
    ranks: int = option(1, "data-parallel ranks that share the packs", least=1)
    train_batch_size: int = option(8, "packs per optimizer step, as data.train_batch_size", least=1)

    def problems(self) -> Iterable[str | None]:
        """Yield a line if options of packs are given without max_tokens."""
        changed = [name for name in options_of(PackOptions) if name in self.changed()]
        if self.max_tokens is None and changed:
            yield f"max_tokens is required with {', '.join(changed)}; got null"


def open_packs(documents: ShownDocuments, options: PackOptions) -> "PackedDataset":
    """Open tokenized folders as the training set of a run.

    Raises:
        DataError: the trainer refuses the data.
        UsageError: a folder of the mixture is missing in `documents`.
    """
    from verl_ext.data import SFTDataSet  # imports torch, as the trainer's class of packs does
    from verl_ext.data.families.preference import PreferenceDataSet

    family: type[PackedDataset] = SFTDataSet if documents.units is None else PreferenceDataSet
    names = ("max_tokens", "over_length", "strategy", "share_prefixes", "share_least", "mixture", "seed")
    try:
        given = {name: getattr(options, name) for name in names}
        packs = family(list(documents.paths), **given, key="paths")
        len(packs)  # plans them, which refuses units that are too long
    except UsageError:
        raise
    except ValueError as error:
        raise DataError("; ".join(str(error).splitlines())) from error
    if missing := [folder for folder in packs.folders if folder not in documents.paths]:
        raise UsageError(f"paths must name the folders of mixture.sources as well; {missing[0]} is missing")
    return packs


def plan_facts(documents: ShownDocuments, packs: "PackedDataset", options: PackOptions) -> dict[str, Any]:
    """Return the facts of packs, steps and documents over max_tokens.

    `busy` is the share of an epoch in which an average rank works; a document of l tokens costs l + l²/25,000.
    Raises DataError if the trainer refuses the data.
    """
    from verl_ext.trainer.report import data_facts, step_facts  # imports torch

    try:
        of_packs, facts = packs.facts(_COST), data_facts(packs)
    except ValueError as error:
        raise DataError(str(error)) from error
    size, costs = options.train_batch_size, of_packs.costs
    steps = StepPlan(len(packs), size, options.seed, costs=costs, group_size=options.ranks)
    facts |= step_facts(of_packs, steps, options.ranks, 1)
    over = documents.lengths[documents.lengths > packs.max_tokens]
    return {
        **facts,
        "over_length": options.over_length,
        "documents_over": len(over),
        "tokens_over": int(over.sum(dtype=np.int64)),
        "tokens_lost": int(documents.lengths.sum(dtype=np.int64)) - int(packs.spans.length.sum(dtype=np.int64)),
        "spans": len(packs.spans),
        "documents_per_pack": facts["documents"] / facts["packs"],
        "ranks": options.ranks,
        "steps": steps.steps_per_epoch,
    }


def pack_view(dataset: "PackDataset", pack: int, decode: Decode | None) -> Iterator[RenderableType]:
    """Yield a pack's fill, and its documents with places, positions and openings.

    A document that shares tokens stands below the one that has them, with its own opening.

    Raises:
        UsageError: there is no such pack.
    """
    from verl_ext.parallel.trees import read_documents  # imports torch, as the dataset does

    if pack >= len(dataset):
        raise UsageError(must("pack", f"be below {len(dataset):,}, the packs of the data", pack))
    tensors = {name: values.numpy() for name, values in dataset[pack].items()}
    positions, mask = tensors["position_ids"], tensors["loss_mask"]
    real = int(tensors["attention_mask"].sum()) if "attention_mask" in tensors else len(positions)
    fill = f"{real:,} of {dataset.max_tokens:,} tokens, {real / dataset.max_tokens:.1%} full"
    yield Text(f"pack {pack}: {fill}, {int(mask.sum()):,} targets", "bold")
    # Positions alone tell where documents begin, and which tokens they share with the one before.
    documents = read_documents(positions[:real])
    shares, places = bool(documents.begins.any()), dataset.documents_of(pack)
    names = dict(zip(dataset.categories.ids, dataset.categories.names, strict=True))
    table = plain_table("document", "category", "tokens", *["shared"] * shares, "targets", "positions", left=2)
    table.add_column("opening", overflow="fold")  # the widest, which gives way on a narrow terminal
    table.columns[-1].justify = "left"
    first, start = 0, 0  # the document's own first token, and that of its whole text
    branch: list[int] = []  # where the documents begin that this one goes on from
    for number, (own, begin) in enumerate(zip(*(values.tolist() for values in documents), strict=True)):
        end = start + begin + own
        category = np.unique(tensors["category_ids"][start:end][mask[start:end] == 1])
        place = "-"
        # Places are left out unless each start has one, because a wrong row number misleads.
        if len(places) == len(documents.begins):
            of = places[number]
            place = f"{Path(of.folder).name} row {of.row}{f' from {of.start:,}' if of.start else ''}"
        branch = [*(other for other in branch if other < begin), begin]
        place = "  " * (len(branch) - 2) + "└ " * (begin > 0) + one_line(place)
        ids = tensors["input_ids"][first : first + own]
        opening = "" if decode is None else decode(ids[:OPENING].tolist())
        table.add_row(
            *(Text(place), Text(one_line(", ".join(names.get(int(c), str(c)) for c in category)))),
            *(f"{begin + own:,}", *[f"{begin:,}"] * shares, f"{int(mask[start:end].sum()):,}"),
            *(f"{begin}..{begin + own - 1}", Text(one_line(opening)[:OPENING])),
        )
        first, start = first + own, end
    if real < len(positions):
        table.add_row("padding", "", f"{len(positions) - real:,}", *[""] * shares, "0", "", "")
    yield table


def step_view(
    dataset: "PackDataset", plan: StepPlan, cost: CostModel, facts: Mapping[str, Any], step: int
) -> Iterator[RenderableType]:
    """Yield the packs of a step, counted from 1, by rank.

    The slowest pack sets a micro-step's time.

    Raises:
        UsageError: the run has no such step.
    """
    if not 1 <= step <= facts["total_steps"]:
        raise UsageError(must("step", f"be 1 to {facts['total_steps']:,}, the steps of the run", step))
    ranks, micro = facts["data_parallel_size"], facts["config"]["data"]["micro_batch_size_per_gpu"]
    packs = dataset.facts(cost)
    costs, tokens = packs.costs, packs.tokens
    if facts.get("runs_longest"):
        costs = np.ones(len(costs))  # of the ranks of a micro-step, each computes as much as the longest row asks for
    yield Text(f"step {step}: {len(plan.packs(step - 1))} packs on {ranks} data-parallel ranks", "bold")
    table = plain_table("rank", "micro-step", "pack", "tokens", "fill", "cost / mean", left=0)
    for rank in range(ranks):
        for slot, pack in enumerate(plan.rank_packs(step - 1, rank, ranks)):
            where = str(rank), str(slot // micro)
            if pack is None:
                table.add_row(*where, "idle", "0", "", "")
            else:
                share = f"{tokens[pack] / dataset.max_tokens:.1%}", f"{costs[pack] / costs.mean():.2f}"
                table.add_row(*where, str(pack), f"{tokens[pack]:,}", *share)
    yield table
