"""The set-up of a run before its model: configuration, data, steps.

A mistake found here gives one line with the requirement, the dotted key and the value. At that time no device has been
used, and only caches have been written, which the next start reuses: scans of the data, tokenized texts and indices.
"""

import os
import socket
import sys

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from verl.utils.torch_dtypes import PrecisionType

from verl_ext.attention import gpu_capability
from verl_ext.checkpoint import resume
from verl_ext.checkpoint.copies import SecondStorage
from verl_ext.checkpoint.identity import SCHEDULE, Identity, allowed_changes, run_facts
from verl_ext.checkpoint.layout import Checkpoint, refuse_locked
from verl_ext.config.check import check_run, check_weight_files, read_hf_config
from verl_ext.config.resolve import resolve_run
from verl_ext.config.run import Machine
from verl_ext.config.weights import TENSORS, digest_of_weights, revision
from verl_ext.data.packs.dataset import CONTENT
from verl_ext.engines.activations import check_host_memory
from verl_ext.engines.schedule import keeps_rates
from verl_ext.environment import differences, folder_digest, versions
from verl_ext.options import leaves, refuse, spell
from verl_ext.text.tokens.tokenizer import TRUSTED
from verl_ext.trainer.distributed import RunRanks, accelerator, print_on_rank0, user_errors_end_the_run
from verl_ext.trainer.inputs import open_data
from verl_ext.trainer.report import what_runs
from verl_ext.trainer.run import Checked, Opened, Run


def prepare(composed: DictConfig) -> Run:
    """Prepare a run on this machine; a mistake ends all ranks.

    Every rank leaves each part, with or without a mistake, before the ranks communicate again.
    """
    ranks = RunRanks()
    checked = check(composed, this_machine())
    # Before the data is read, which may take long: weights and folders.
    differing = _check_weights(checked)
    output = _check_output(checked)
    checkpoint = resume.verified(output, ranks)
    opened = open_data(checked, checkpoint)
    _check_host_memory(opened)
    # Compare the nodes before the digest, to which each of them adds a share of the same files.
    _check_nodes(opened, output, ranks)
    content = opened.files.digest(ranks) if checked.trains else None
    base, reference = ranks.broadcast(_weights(opened))
    return _begin(opened, output.action, checkpoint, content, base, reference, differing)


def this_machine() -> Machine:
    """Return the machine of these ranks."""
    device = accelerator()
    name = torch.cuda.get_device_name() if device == "cuda" else None
    return Machine(dist.get_world_size(), device, gpu_capability(), name)


@user_errors_end_the_run()
def check(composed: DictConfig, machine: Machine) -> Checked:
    """Check and type a completed configuration; a mistake ends all ranks."""
    if composed.model.trust_remote_code:  # printed before remote code runs
        print_on_rank0([f"note: {TRUSTED}"], sys.stderr)
    config = resolve_run(composed, machine)
    model = check_run(config)
    config = config.sharing(model.not_shared)
    from verl_ext.trainer.hooks import hook_classes  # now: verl's engines choose the device when they are imported

    hook_classes([*config.trainer.hooks, *model.kind.hooks])
    print_on_rank0([what_runs(config, model.backend, model.head)])
    return Checked(config=config, model=model, notices=(*config.notices, *model.notices))


@user_errors_end_the_run()
def _check_weights(checked: Checked) -> tuple[str, ...]:
    """Check the weights' files, on rank 0; return notices."""
    if dist.get_rank() != 0:
        return ()
    config, model = checked.config, checked.model
    check_weight_files(config)
    differing = [*model.kind.check_weights(config, model.source or model.hf_config)]
    if (path := config.reference.path) is not None:
        reference = read_hf_config(path, bool(config.model_options.trust_remote_code), "reference.path")
        differing += model.kind.check_weights(config, reference, "reference.path")
    return tuple(differing)


@user_errors_end_the_run()
def _check_output(checked: Checked) -> resume.OutputDecision:
    """Decide the treatment of the output folder."""
    if dist.get_rank() == 0 and checked.trains:
        refuse_locked(checked.output)
        if place := checked.config.trainer.default_hdfs_dir:
            SecondStorage(place).check(checked.output)
    return resume.check_output(checked.config)


@user_errors_end_the_run()
def _check_host_memory(opened: Opened) -> None:
    """Raise ValueError if a node's memory is too small for `model.activation_offload`."""
    config, text = opened.config, opened.model.hf_config.get_text_config()
    if config.model_options.activation_offload:
        dtype, on_node = PrecisionType.to_dtype(config.param_dtype), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        tokens = config.data.micro_batch_size_per_gpu * opened.train_set.max_tokens // config.sequence_parallel_size
        check_host_memory(text.num_hidden_layers, text.hidden_size, dtype, tokens, on_node)


def _check_nodes(opened: Opened, output: resume.OutputDecision, ranks: RunRanks) -> None:
    """Refuse nodes that differ in options, packages, data or model: their ranks share scan and plan; collective."""
    facts = _node_facts(opened, output)
    nodes = [(host, of_node) for host, of_node in ranks.gather((socket.gethostname(), facts)) if of_node]
    with ranks.guard():
        refuse(differences({f"node {number} ({host})": of_node for number, (host, of_node) in enumerate(nodes)}))


@user_errors_end_the_run()
def _node_facts(opened: Opened, output: resume.OutputDecision) -> dict[str, str]:
    """Return what must be the same on every node, on the first rank of each; {} on others, and with a single node."""
    config, world_size = opened.config, dist.get_world_size()
    if world_size == int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) or os.environ["LOCAL_RANK"] != "0":
        return {}
    stated = {**dict(leaves(config.values)), **config.loss.fingerprint}  # includes the code of a custom loss mode
    facts = {key: spell(value) for key, value in stated.items()} | versions()
    resumed = next((checkpoint.folder.name for checkpoint in output.checkpoints), "no checkpoint")
    facts["what trainer.default_local_dir holds"] = f"{resumed} ({output.action.value})"
    for dataset in [opened.train_set, *([opened.validation.dataset] if opened.validation else [])]:
        for number, folder in enumerate(dataset.folders, start=1):
            facts[f"the content of {dataset.key}, folder {number}"] = folder_digest(folder)
    facts["the content of model.path"] = revision(config.model_folder)
    return facts


@user_errors_end_the_run()
def _weights(opened: Opened) -> tuple[str | None, str | None]:
    """Return the digests of the base and of a reference with weights of its own, on rank 0."""
    config, path = opened.config, opened.config.reference.path
    if dist.get_rank() != 0:
        return None, None
    base = reference = None
    # Without adapters, a measurement takes all weights from the checkpoint.
    if opened.trains or config.model_options.lora_rank:
        base = digest_of_weights(config.model_folder)
    if path is not None:
        reference = digest_of_weights(path, "reference.path")
    elif adapter := config.model_options.lora_adapter_path:  # the reference is the model with this adapter
        files, mark, tensors = str(base).partition(TENSORS)
        reference = f"{files} {folder_digest(adapter)}{mark}{tensors}"
    return base, reference


@user_errors_end_the_run()
def _begin(
    opened: Opened,
    action: resume.OutputAction,
    checkpoint: Checkpoint | None,
    content: str | None,
    base: str | None,
    reference: str | None,
    differing: tuple[str, ...],
) -> Run:
    """Return the run, new or resumed, after comparing it with its checkpoint."""
    config, trains = opened.config, opened.trains
    extends = has_rates = False
    notices = [*opened.notices, *differing]
    if checkpoint is not None:
        saved, step = checkpoint.manifest.facts, checkpoint.manifest.step
        loaded = config.checkpoint.load_contents
        if fresh := " and ".join(resume.begins_anew(loaded, evaluates=not trains)):
            notices.append(f"checkpoint.load_contents={spell(list(loaded))}: from {checkpoint.folder.name} on, {fresh}")
        seen = step * opened.plan.batch_size
        if trains and saved.get(CONTENT, content) == content and opened.train_set.extends(saved, seen):
            extends = True
            notices.append(f"the {seen:,} samples seen stay the same, and {opened.plan.num_packs:,} are now planned")
        has_rates = keeps_rates(config.optim, opened.schedule_steps, saved, saved.get(SCHEDULE), step)
    reference_weights = (reference or base) if trains and opened.objective.has_reference else None
    facts = run_facts(
        config, opened.model.hf_config, opened.train_set, opened.schedule_steps, content, base, reference_weights
    )
    identity = Identity(facts, opened.grouping, str(opened.output), allowed_changes(config, extends, has_rates))
    if trains:  # the facts of a measurement are fewer
        identity.check_allowed()
    if checkpoint is not None:
        identity.check(opened.model.kind.identity_of_today(checkpoint.manifest.facts))
    return Run(
        **opened.parts(),
        notices=tuple(notices),
        action=action,
        checkpoint=checkpoint,
        content=content,
        base=base,
        reference=reference,
        identity=identity,
    )
