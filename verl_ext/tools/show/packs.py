"""Packs as the trainer feeds them, from data with given options or from a step of a run.

The run's dataset class makes the packs, and the run's step plan assigns them to ranks; run.json describes both.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import RenderableType
from rich.text import Text

from verl_ext.checkpoint.layout import RUN
from verl_ext.packing import CostModel
from verl_ext.tables import plain_table
from verl_ext.text.tokenizer import ModelOptions, load_tokenizer
from verl_ext.tools.show.document import Decode
from verl_ext.tools.show.plan import PackOptions
from verl_ext.trainer.step_plan import StepPlan
from verl_ext.values import DataError, UsageError, one_line

if TYPE_CHECKING:
    from verl_ext.data import PackDataset

OPENING = 36  # characters of a document that its row shows


def packs_of_data(paths: Sequence[str], options: PackOptions) -> "PackDataset":
    """Open tokenized folders as the packed dataset of a run with these options. Raises DataError for bad data."""
    from verl_ext.data import SFTDataSet  # imports torch, as the trainer's class of packs does

    names = ("max_tokens", "over_length", "strategy", "mixture", "seed")
    try:
        return SFTDataSet(list(paths), **{name: getattr(options, name) for name in names}, key="paths")
    except ValueError as error:
        raise DataError(str(error)) from error


def read_run(folder: Path) -> dict[str, Any]:
    """Return a run's run.json: config, versions, step plan. Raises UsageError if it is missing or incomplete."""
    path = folder / RUN
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder} must hold {RUN}, which a training run writes; {error}") from error
    if not isinstance(facts, dict) or not facts.keys() >= {"config", "plan", "cost"}:
        raise UsageError(f"{path} must be of a training run of this version; it lacks config, plan or cost")
    return facts


def packs_of_run(facts: Mapping[str, Any]) -> tuple["PackDataset", StepPlan, CostModel]:
    """Open the training set of a run with its plan of steps, as the trainer does.

    Raises:
        DataError: the data cannot be opened any more, or differs from the data that the run was trained on.
    """
    from verl_ext.config.run import dataset_class
    from verl_ext.data.dataset import RunLength

    config, plan = facts["config"], dict(facts["plan"])
    node, steps, epochs = config["data"], config["trainer"]["total_training_steps"], config["trainer"]["total_epochs"]
    custom = node.get("custom_cls") or {}
    try:
        family: Any = dataset_class({"data": {"custom_cls": custom}})
        tokenizer = load_tokenizer(ModelOptions.read(config["model"])) if family.needs_tokenizer else None
        dataset, _ = family.open_sets(
            node, tokenizer, RunLength(steps and steps * node["train_batch_size"], epochs or 1)
        )
        is_same = len(dataset) == plan["num_packs"] and dataset.digest == facts["digest"]
    except ValueError as error:
        raise DataError(str(error)) from error
    if not is_same:
        raise DataError(f"{dataset.key} must hold the documents that the run was trained on; they differ")
    cost = CostModel(*facts["cost"])
    costs = dataset.pack_costs(cost) if plan.pop("is_balanced") else None
    return dataset, StepPlan(**plan, costs=costs), cost


def pack_view(dataset: "PackDataset", pack: int, decode: Decode | None) -> Iterator[RenderableType]:
    """Yield a pack as the model gets it: its fill, and the place, positions, targets and opening of every document.

    Raises:
        UsageError: there is no such pack.
    """
    if pack >= len(dataset):
        raise UsageError(f"pack must be below {len(dataset):,}, the packs of the data; got {pack}")
    tensors = {name: values.numpy() for name, values in dataset[pack].items()}
    positions, mask = tensors["position_ids"], tensors["loss_mask"]
    real = int(tensors["attention_mask"].sum()) if "attention_mask" in tensors else len(positions)
    fill = f"{real:,} of {dataset.max_tokens:,} tokens, {real / dataset.max_tokens:.1%} full"
    yield Text(f"pack {pack}: {fill}, {int(mask.sum()):,} targets", "bold")
    starts = np.flatnonzero(positions[:real] == 0)
    places = dataset.documents_of(pack)
    names = dict(zip(dataset.categories.ids, dataset.categories.names, strict=True))
    table = plain_table("document", "category", "tokens", "targets", "positions", left=2)
    table.add_column("opening", overflow="fold")  # the widest, which gives way on a narrow terminal
    table.columns[-1].justify = "left"
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], real], strict=True)):
        category = np.unique(tensors["category_ids"][start:end][mask[start:end] == 1])
        place = "-"
        if len(places) == len(starts):
            of = places[number]
            place = f"{Path(of.folder).name} row {of.row}{f' from {of.start:,}' if of.start else ''}"
        opening = "" if decode is None else decode(tensors["input_ids"][start : min(end, start + OPENING)].tolist())
        table.add_row(
            *(Text(one_line(place)), Text(one_line(", ".join(names.get(int(c), str(c)) for c in category)))),
            *(f"{end - start:,}", f"{int(mask[start:end].sum()):,}", f"{positions[start]}..{positions[end - 1]}"),
            Text(one_line(opening)[:OPENING]),
        )
    if real < len(positions):
        table.add_row("padding", "", f"{len(positions) - real:,}", "0", "", "")
    yield table


def step_view(
    dataset: "PackDataset", plan: StepPlan, cost: CostModel, facts: Mapping[str, Any], step: int
) -> Iterator[RenderableType]:
    """Yield the packs of a step (steps count from 1) by rank and micro-step; the slowest pack sets a micro-step's time.

    Raises:
        UsageError: the run has no such step.
    """
    if not 1 <= step <= facts["total_steps"]:
        raise UsageError(f"step must be 1 to {facts['total_steps']:,}, the steps of the run; got {step}")
    ranks, micro = facts["data_parallel_size"], facts["config"]["data"]["micro_batch_size_per_gpu"]
    costs, tokens = dataset.pack_costs(cost), dataset.pack_tokens()
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
