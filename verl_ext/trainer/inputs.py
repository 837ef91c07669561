"""The data that a run reads, and the plan of its packs and steps."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from typing import Any

from verl_ext.answers.prompts import Prompts
from verl_ext.checkpoint.identity import resumed_grouping
from verl_ext.checkpoint.layout import Checkpoint
from verl_ext.config.check import check_categories, check_positions, check_watched, model_positions, read_hf_config
from verl_ext.config.model import ModelFacts, model_kind
from verl_ext.config.run import RunConfig
from verl_ext.config.upstream import select
from verl_ext.config.weights import weight_problems
from verl_ext.data import PackDataset, PackFacts, check_vocabulary
from verl_ext.data.packs.dataset import open_datasets
from verl_ext.data.packs.mixture import mixture_notices
from verl_ext.data.packs.options import RunLength
from verl_ext.data.packs.usage import BINS, repetition_notices
from verl_ext.data.tokenized.files_in_use import DataFiles
from verl_ext.data.tokenized.reports import TrainedChats, tokens_added
from verl_ext.engines.cost import balancing_cost
from verl_ext.engines.schedule import schedule_problems
from verl_ext.metrics import RESERVED
from verl_ext.options import first_line, must, refuse, spell
from verl_ext.packing import TOKENS, CostModel
from verl_ext.text.tokens.new_tokens import KEYS, add_tokens
from verl_ext.trainer.distributed import RunRanks, print_on_rank0, user_errors_end_the_run
from verl_ext.trainer.objective import objective_of
from verl_ext.trainer.run import Checked, Opened, Validation
from verl_ext.trainer.step_plan import StepPlan


def open_data(checked: Checked, checkpoint: Checkpoint | None = None) -> Opened:
    """Open the data, and plan packs and steps; mistakes end all ranks.

    checkpoint: the one to resume from, whose packs stay grouped as they were.
    """
    print_on_rank0(["reading the data …"])
    train_set, val_set, prompts, files = _open_files(checked)
    # Reading together is collective, so it has blocks for mistakes of its own.
    for dataset in (train_set, *([] if val_set is None else [val_set])):
        dataset.read_together(RunRanks())
    return _planned(checked, checkpoint, train_set, val_set, prompts, files)


@user_errors_end_the_run()
def _open_files(checked: Checked) -> tuple[PackDataset, PackDataset | None, Prompts | None, DataFiles]:
    """Open the sets, the prompts and the files, of which each rank then reads a share."""
    train_set, val_set = open_sets(checked.config)
    prompts = open_prompts(checked.config, checked.model.hf_config, train_set.folders)
    return train_set, val_set, prompts, DataFiles(train_set.data_files, train_set.key)


@user_errors_end_the_run()
def _planned(
    checked: Checked,
    checkpoint: Checkpoint | None,
    train_set: PackDataset,
    val_set: PackDataset | None,
    prompts: Prompts | None,
    files: DataFiles,
) -> Opened:
    """Check the data that was read, and plan packs and steps."""
    from verl_ext.trainer.evaluation import measured_names  # here, because it imports the engines

    config, model, data, trains = checked.config, checked.model, checked.config.data, checked.trains
    for dataset in (train_set, *([] if val_set is None else [val_set])):
        _check_data(config, model, dataset)
    check_categories(config.loss, train_set.categories.names)
    asked = () if prompts is None else {item.category: None for item in prompts.items if item.category}
    check_watched(config, () if val_set is None else measured_names(config, objective_of(config.loss), val_set), asked)
    chats = TrainedChats.of_folders(train_set.folders)
    refuse([chats.template_problem(config.model_options.custom_chat_template, train_set.key)])
    # Balanced steps group packs by their costs. A resumed run keeps the groups of its first layout of ranks.
    cost, notices = _cost(config, model)
    group_size = data.balance_group or config.data_parallel_size
    own: dict[str, Any] = {"group_size": group_size, "cost": list(astuple(cost))} if data.balance == "sorted" else {}
    grouping = own
    if checkpoint is not None and trains:
        grouping = resumed_grouping(config.values["data"], own, checkpoint.manifest.facts)
    if grouping != own:
        notices.append(f"packs stay grouped as the run began: {grouping['group_size']} of like cost")
    grouped = CostModel(*grouping["cost"]) if grouping else cost
    packs = train_set.facts(grouped)
    plan = StepPlan(
        num_packs=len(packs.costs),
        batch_size=data.train_batch_size,
        seed=config.dataset.seed,
        drop_last=data.drop_last,
        shuffle=data.shuffle and not packs.is_ordered,
        costs=packs.costs if grouping else None,
        group_size=grouping.get("group_size", group_size),
    )
    if plan.steps_per_epoch == 0:
        raise ValueError(
            f"data.drop_last=true leaves no step: data.train_dir makes {plan.num_packs} packs, "
            f"data.train_batch_size={plan.batch_size}"
        )
    length = config.trainer.total_epochs, config.trainer.total_training_steps, config.optim.lr_schedule_span
    total_steps, schedule_steps = plan.run_steps(*length, packs.epochs if packs.is_ordered else None)
    refuse(schedule_problems(config.optim, schedule_steps))
    if trains or checkpoint is None:
        plan.check_targets(packs.targets, total_steps)
    # Validation has one order, by cost, in which the ranks wait least for each other.
    validation = None
    if val_set is not None:
        batch, costs = config.data_parallel_size * data.micro_batch_size_per_gpu, val_set.facts(cost).costs
        validation = Validation(val_set, StepPlan(len(val_set), batch, config.dataset.seed, shuffle=False, costs=costs))
    use = [row.times(total_steps / plan.steps_per_epoch) for row in train_set.usage(config.trainer.bins or BINS)]
    notices += _notices(config, packs, plan)
    if trains:
        notices += objective_of(config.loss).data_notices(train_set)
        notices += repetition_notices(use, train_set.key)
    notices += chats.notices(train_set.key)
    return Opened(
        **checked.parts(),
        notices=(*checked.notices, *notices),
        train_set=train_set,
        packs=packs,
        files=files,
        plan=plan,
        cost=grouped,
        validation=validation,
        total_steps=total_steps,
        schedule_steps=schedule_steps,
        prompts=prompts,
        chats=chats,
        use=tuple(use),
    )


def _check_data(config: RunConfig, model: ModelFacts, dataset: PackDataset) -> None:
    """Raise ValueError for data that the model, the reference or the loss cannot take."""
    refuse([new_token_problem(config, dataset)])
    facts = dataset.facts()
    check_vocabulary(facts.token_range, model.hf_config.get_text_config().vocab_size, dataset.key)
    if (path := config.reference.path) is not None:
        reference = read_hf_config(path, bool(config.model_options.trust_remote_code), "reference.path")
        highest, size = facts.token_range[1], reference.get_text_config().vocab_size
        needed = f"have a vocabulary with the token ids of {dataset.key}, up to {highest}"
        refuse([must("reference.path", needed, f"one of {size} in {path}")] if highest >= size else [])
        refuse(weight_problems(path, "reference.path") if os.path.isdir(path) else [])
    if model.kind.needs_positions:
        check_positions(facts.longest_document, dataset.max_tokens, model.hf_config)
    if reserved := [name for name in dataset.categories.names if name in RESERVED]:
        raise ValueError(f"{dataset.key}: no category may be named {reserved[0]}, which is a metric")
    refuse([objective_of(config.loss).data_problem(dataset)])


def _notices(config: RunConfig, packs: PackFacts, plan: StepPlan) -> Iterator[str]:
    """Warn about settings that are allowed but may be unintended."""
    yield from mixture_notices(packs.mixture)
    if plan.num_packs < plan.batch_size:
        yield f"data.train_batch_size={plan.batch_size}, but data.train_dir makes only {plan.num_packs} packs"
    if plan.costs is not None and plan.group_size >= plan.batch_size > 1:
        yield (
            f"data.balance=sorted with data.train_batch_size={plan.batch_size}: every step is one group of packs of "
            "like cost; raise it for steps that mix costs, or set data.balance=none"
        )
    if config.trainer.profile_interval[1] > 0 and not select(config.values, "profiler.enable"):
        interval = spell(list(config.trainer.profile_interval))
        yield f"trainer.profile_interval={interval} needs profiler.enable=true, which is false: no profile is written"
    if missing := [name for name in ("model", "optimizer", "extra") if name not in config.checkpoint.save_contents]:
        yield f"checkpoint.save_contents lacks {', '.join(missing)}: this run's checkpoints cannot be resumed"


def _cost(config: RunConfig, model: ModelFacts) -> tuple[CostModel, list[str]]:
    """Return the cost model of `data.cost`, and a notice for unknown FLOPs."""
    if config.data.cost == "tokens":
        return TOKENS, []
    if model.module is not None:
        if config.model_options.lora_rank:
            model.module.requires_grad_(False)  # a frozen matrix has no gradient to compute
        cost = balancing_cost(model.module, model.hf_config, config.engine.ulysses_sequence_parallel_size)
        if cost is not None:
            return cost, []
    name = type(model.hf_config).__name__
    return TOKENS, [f"data.cost=flops balances packs by their tokens: the FLOPs of a {name} are unknown"]


def open_sets(config: RunConfig) -> tuple[PackDataset, PackDataset | None]:
    """Open training and validation sets (None without), and plan their packs."""
    steps = config.trainer.total_training_steps
    length = RunLength(steps and steps * config.data.train_batch_size, config.trainer.total_epochs or 1)
    tokenizer = _tokenizer(config.model_options) if config.dataset_class.needs_tokenizer else None
    return open_datasets(config.dataset_class, config.values["data"], tokenizer, length, config.trainer.eval_only)


def open_prompts(config: RunConfig, hf_config: Any, folders: Sequence[str]) -> Prompts | None:
    """Read `eval.prompts` (None: none), given the training data's folders."""
    options = config.eval
    if options.prompts is None:
        return None
    prompts = Prompts.read(options, _tokenizer(config.model_options), folders)
    positions = model_positions(hf_config) if model_kind(config.values).needs_positions else None
    if positions is not None and prompts.longest + options.max_new_tokens > positions:
        rest = f"what the longest prompt of eval.prompts leaves of the model's {positions} positions"
        needed = f"be at most {positions - prompts.longest}, {rest}"
        raise ValueError(must("eval.max_new_tokens", needed, options.max_new_tokens))
    return prompts


def new_token_problem(config: RunConfig, dataset: PackDataset) -> str | None:
    """Return a line for a folder that was tokenized with other new tokens than the model gets."""
    model = config.model_options
    given = [*model.new_tokens, *model.new_special_tokens]
    made_with = [(folder, tokens_added(folder)) for folder in dataset.folders]
    compared = [(folder, made) for folder, made in made_with if made is not None and (made or given)]
    vocabulary = _tokenizer(model).get_vocab() if compared else {}
    for folder, made in compared:
        if any(vocabulary.get(token) != number for token, number in made.items()) or {*given} - {*made}:
            needed = f"be those that {dataset.key} was tokenized with, {spell([*made])}"
            got = f"{spell(given)} for {folder}: verl-ext tokenize with these makes it again"
            return must(" and ".join(KEYS), needed, got)
    return None


def reopened(facts: Mapping[str, Any]) -> tuple[PackDataset, StepPlan, CostModel]:
    """Open a run's training set, step plan and cost model from run.json.

    Raises:
        ValueError: the data cannot be opened any more, or differs from the data that the run was trained on.
    """
    config, plan, cost = RunConfig.from_composed(facts["config"]), dict(facts["plan"]), CostModel(*facts["cost"])
    train_set, _ = open_sets(config)
    if len(train_set) != plan["num_packs"] or train_set.digest != facts["digest"]:
        raise ValueError(f"{train_set.key} must hold the documents that the run was trained on; they differ")
    costs = train_set.facts(cost).costs if plan.pop("is_balanced") else None
    return train_set, StepPlan(**plan, costs=costs), cost


def _tokenizer(model: Any) -> Any:
    from verl.utils import hf_tokenizer

    from verl_ext.text.tokens.tokenizer import (  # here, because only some datasets read text
        check_round_trip,
        check_tokenizer,
    )

    key = "model.tokenizer_path" if model.tokenizer_path else "model.path"
    path = model.tokenizer_path or model.path
    try:
        tokenizer = hf_tokenizer(path, trust_remote_code=model.trust_remote_code)
    except Exception as error:  # files of no tokenizer, or of one of a later version, fail in many ways
        raise ValueError(must(key, "hold a tokenizer", f"{path} ({first_line(error)})")) from None
    check_tokenizer(tokenizer, path, key)
    check_round_trip(tokenizer, path, key)
    add_tokens(tokenizer, model.new_tokens, model.new_special_tokens, path)
    return tokenizer
