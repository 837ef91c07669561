"""The set-up of a run before its model: configuration, data, steps.

A mistake found here gives one line with the requirement, the dotted key and the value. At that time no device has been
used, and only caches have been written, which the next start reuses: scans of the data, tokenized texts and indices.
"""

import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from verl.utils.torch_dtypes import PrecisionType

from verl_ext.answers.server import Server
from verl_ext.attention import gpu_capability
from verl_ext.checkpoint import resume
from verl_ext.checkpoint.copies import check_copies
from verl_ext.checkpoint.identity import SCHEDULE
from verl_ext.checkpoint.layout import Manifest, refuse_locked, step_of
from verl_ext.config.check import (
    check_categories,
    check_positions,
    check_run,
    check_watched,
    check_weight_files,
    read_hf_config,
)
from verl_ext.config.model import ModelFacts
from verl_ext.config.resolve import resolve_run
from verl_ext.config.run import Machine, RunConfig
from verl_ext.config.upstream import select
from verl_ext.config.weights import digest_of_weights, revision, weight_problems
from verl_ext.data import PackDataset, PackFacts, check_vocabulary
from verl_ext.data.chats import TrainedChats
from verl_ext.data.dataset import CONTENT
from verl_ext.data.files_in_use import DataFiles
from verl_ext.data.mixture import mixture_notices
from verl_ext.data.usage import BINS, repetition_notices
from verl_ext.engines.activations import check_host_memory
from verl_ext.engines.cost import balancing_cost
from verl_ext.engines.schedule import keeps_rates, schedule_problems
from verl_ext.environment import differences, folder_digest, versions
from verl_ext.metrics import RESERVED
from verl_ext.options import leaves, refuse, spell
from verl_ext.packing import TOKENS, CostModel
from verl_ext.text.tokens.tokenizer import TRUSTED
from verl_ext.trainer.distributed import RunRanks, accelerator, print_on_rank0, user_errors_end_the_run
from verl_ext.trainer.inputs import new_token_problem, open_prompts, open_sets
from verl_ext.trainer.objective import objective_of
from verl_ext.trainer.report import what_runs
from verl_ext.trainer.run import Run, Validation
from verl_ext.trainer.step_plan import StepPlan


def prepare(composed: DictConfig) -> Run:
    """Prepare a run on this machine; a mistake ends all ranks.

    Every rank leaves each block, with or without a mistake, before the ranks communicate again.
    """
    ranks, is_rank0 = RunRanks(), dist.get_rank() == 0
    config, model = checked(composed, this_machine())
    trains = not config.trainer.eval_only

    # Before the data is read, which may take long: weights, folders and servers.
    with user_errors_end_the_run():
        if is_rank0:
            check_weight_files(config)
            differing = model.kind.check_weights(config, model.source or model.hf_config)
            config = replace(config, notices=(*config.notices, *differing))
            if trains:
                refuse_locked(Path(config.trainer.default_local_dir))
                check_copies(config.trainer)
        if config.eval.base_url is not None and config.eval.prompts is not None:
            Server(config.eval)
        output = resume.check_output(composed, config.machine.world_size)
    with user_errors_end_the_run():  # every rank reads its share of the files
        checkpoint = resume.verified(output, ranks)

    # Compare the nodes before the digest, to which each of them adds a share of the same files.
    run = opened(config, model)
    with user_errors_end_the_run():
        _check_nodes(run, output)
        if config.model_options.activation_offload:
            text, dtype = model.hf_config.get_text_config(), PrecisionType.to_dtype(config.param_dtype)
            tokens = config.data.micro_batch_size_per_gpu * run.train_set.max_tokens // config.sequence_parallel_size
            on_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            check_host_memory(text.num_hidden_layers, text.hidden_size, dtype, tokens, on_node)
    content = run.files.digest(ranks) if trains else None

    # Without adapters, a measurement takes all weights from the checkpoint.
    with user_errors_end_the_run():
        reads_base = trains or config.model_options.lora_rank
        base = digest_of_weights(config.model_folder) if reads_base and is_rank0 else None
        reference, path, adapter = None, config.reference.path, config.model_options.lora_adapter_path
        if path is not None and is_rank0:
            reference = digest_of_weights(path, "reference.path")
        elif adapter and is_rank0:  # the reference is the model with this adapter
            reference = f"{base} {folder_digest(adapter)}"
    base, reference = ranks.broadcast((base, reference))
    replaces = output.action is resume.OutputAction.REPLACE
    run = replace(run, content=content, base=base, reference=reference)
    run = replace(run, checkpoint=checkpoint, replaces_output=replaces)
    with user_errors_end_the_run():
        if checkpoint is None:  # else `_resumed` checks the plan of the groups that the run keeps
            run.check_targets()
        if trains:  # the fingerprint of a measurement has fewer keys
            run.run_state().check_allowed()
        return run if checkpoint is None else _resumed(run, checkpoint)


def this_machine() -> Machine:
    """Return the machine of these ranks."""
    found = accelerator()
    name = torch.cuda.get_device_name() if found == "cuda" else None
    return Machine(dist.get_world_size(), found, gpu_capability(), name)


def checked(composed: DictConfig, machine: Machine) -> tuple[RunConfig, ModelFacts]:
    """Check and type a completed configuration; a mistake ends all ranks."""
    from verl_ext.trainer.hooks import hook_classes  # here, because hooks import this module

    with user_errors_end_the_run():
        if composed.model.trust_remote_code:  # printed before remote code runs
            print_on_rank0([f"note: {TRUSTED}"], sys.stderr)
        config = resolve_run(composed, machine)
        model = check_run(config)
        config = config.sharing(model.not_shared)
        hook_classes(config.trainer.hooks)
    print_on_rank0([what_runs(config, model.backend, model.head)])
    return config, model


def opened(config: RunConfig, model: ModelFacts) -> Run:
    """Open the data and plan packs and steps; mistakes end all ranks."""
    with user_errors_end_the_run():
        print_on_rank0(["reading the data …"])
        train_set, val_set = open_sets(config)
        prompts = open_prompts(config, model.hf_config, train_set.folders)
        files = DataFiles(train_set.data_files, train_set.key)
    # Reading together is collective, so it has blocks for mistakes of its own.
    datasets = [dataset for dataset in (train_set, val_set) if dataset is not None]
    for dataset in datasets:
        dataset.read_together(RunRanks())
    with user_errors_end_the_run():
        for dataset in datasets:
            _check_data(config, model, dataset)
        check_categories(config.loss, train_set.categories.names)
        asked = () if prompts is None else {item.category: None for item in prompts.items if item.category}
        check_watched(config, () if val_set is None else val_set.categories.names, asked)
        chats = TrainedChats.of_folders(train_set.folders)
        refuse([chats.template_problem(config.model_options.custom_chat_template, train_set.key)])
        # The plan needs the costs, because balanced steps group packs by them.
        cost, unknown = _cost(config, model)
        packs = train_set.facts(cost)
        plan = _step_plan(config, packs)
        length = config.trainer.total_epochs, config.trainer.total_training_steps, config.optim.lr_schedule_span
        total_steps, schedule_steps = plan.run_steps(*length, packs.epochs if packs.is_ordered else None)
        refuse(schedule_problems(config.optim, schedule_steps))
        # Validation has one order, by cost, in which the ranks wait least for each other.
        validation = None
        if val_set is not None:
            batch, costs = config.data_parallel_size * config.data.micro_batch_size_per_gpu, val_set.facts(cost).costs
            steps = StepPlan(len(val_set), batch, config.dataset.seed, shuffle=False, costs=costs)
            validation = Validation(val_set, steps)
        use = [row.times(total_steps / plan.steps_per_epoch) for row in train_set.usage(config.trainer.bins or BINS)]
    notices = *config.notices, *model.notices, *unknown, *_notices(config, packs, plan)
    if not config.trainer.eval_only:
        of_data = objective_of(config.loss).data_notices(train_set)
        notices = *notices, *of_data, *repetition_notices(use, train_set.key)
    return Run(
        config=config,
        train_set=train_set,
        packs=packs,
        files=files,
        plan=plan,
        cost=cost,
        model=model,
        validation=validation,
        total_steps=total_steps,
        schedule_steps=schedule_steps,
        notices=(*notices, *chats.notices(train_set.key)),
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
        must = f"reference.path must have a vocabulary with the token ids of {dataset.key}, up to {highest}"
        refuse([f"{must}; got one of {size} in {path}"] if highest >= size else [])
        refuse(weight_problems(path, "reference.path") if os.path.isdir(path) else [])
    if model.kind.needs_positions:
        check_positions(facts.longest_document, dataset.max_tokens, model.hf_config)
    if reserved := [name for name in dataset.categories.names if name in RESERVED]:
        raise ValueError(f"{dataset.key}: no category may be named {reserved[0]}, which is a metric")
    refuse([objective_of(config.loss).data_problem(dataset)])


def _resumed(run: Run, checkpoint: Path) -> Run:
    """Resume from a checkpoint; raise ValueError if its fingerprint differs."""
    saved = Manifest.from_folder(checkpoint).run_state
    loaded, evaluates = run.config.checkpoint.load_contents, run.config.trainer.eval_only
    if anew := list(resume.begins_anew(loaded, evaluates)):
        notice = f"checkpoint.load_contents={spell(list(loaded))}: from {checkpoint.name} on, {' and '.join(anew)}"
        run = replace(run, notices=(*run.notices, notice))
    seen = step_of(checkpoint) * run.plan.batch_size
    is_same = saved.get(CONTENT, run.content) == run.content
    if not run.config.trainer.eval_only and is_same and run.train_set.extends(saved, seen):
        notice = f"the {seen:,} samples seen stay the same, and {run.plan.num_packs:,} are now planned"
        run = replace(run, extends=True, notices=(*run.notices, notice))
    if keeps_rates(run.config.optim, run.schedule_steps, saved, saved.get(SCHEDULE), step_of(checkpoint)):
        run = replace(run, keeps_rates=True)
    state = run.run_state()
    if run.config.trainer.eval_only:
        state.check(saved)
        return run
    state.load_state_dict(saved)
    run.grouped(state.grouping).check_targets()  # in the groups that the run keeps
    return run


def _check_nodes(run: Run, output: resume.OutputDecision) -> None:
    """Refuse nodes that differ in options, packages, data or model.

    The ranks share the scan of the data and the plan. Collective; on one node there is nothing to compare.
    """
    if dist.get_world_size() == int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())):
        return
    config = run.config
    facts: dict[str, str] = {}
    if os.environ["LOCAL_RANK"] == "0":
        stated = {**dict(leaves(config.values)), **config.loss.fingerprint}  # includes the code of a custom loss mode
        facts |= {key: spell(value) for key, value in stated.items()} | versions()
        resumed = next((path.name for path in output.checkpoints), "no checkpoint")
        facts["what trainer.default_local_dir holds"] = f"{resumed} ({output.action.value})"
        for dataset in [run.train_set, *([run.validation.dataset] if run.validation else [])]:
            facts |= {
                f"the content of {dataset.key}, folder {n}": folder_digest(p)
                for n, p in enumerate(dataset.folders, start=1)
            }
        facts["the content of model.path"] = revision(config.model_folder)
    gathered = RunRanks().gather((socket.gethostname(), facts))
    nodes = [(host, facts) for host, facts in gathered if facts]
    refuse(differences({f"node {number} ({host})": facts for number, (host, facts) in enumerate(nodes)}))


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


def _step_plan(config: RunConfig, packs: PackFacts) -> StepPlan:
    data = config.data
    plan = StepPlan(
        num_packs=len(packs.costs),
        batch_size=data.train_batch_size,
        seed=config.dataset.seed,
        drop_last=data.drop_last,
        shuffle=data.shuffle and not packs.is_ordered,
        costs=packs.costs if data.balance == "sorted" else None,
        group_size=data.balance_group or config.data_parallel_size,
    )
    if plan.steps_per_epoch == 0:
        raise ValueError(
            f"data.drop_last=true leaves no step: data.train_dir makes {plan.num_packs} packs, "
            f"data.train_batch_size={plan.batch_size}"
        )
    return plan
