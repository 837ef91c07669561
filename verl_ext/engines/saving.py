"""What an engine writes into a checkpoint's folder, and reads back.

    state/           the model and the optimizer, for any number of ranks (:mod:`verl_ext.engines.state`)
    extra.json       the learning-rate schedule, and the scale of fp16's gradients
    adapters.json    of a LoRA run: how an export merges them
    huggingface/     config and tokenizer; with `hf_model` in `checkpoint.save_contents` the weights as well

FSDP1, and optimizers of other packages than torch, whose states have forms of their own, keep verl's files: one of each
kind a rank, read by as many ranks as wrote them.
"""

import logging
import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils.logging import disable_progress_bar
from verl.utils.device import get_device_id, get_torch_device
from verl.utils.fsdp_utils import (
    load_fsdp_model_to_gpu,
    merged_lora_context,
    normalize_peft_param_name,
    offload_fsdp_model_to_cpu,
    offload_fsdp_optimizer,
)
from verl.utils.transformers_compat import drop_tied_target_keys

from verl_ext.engines.state import HostCopies, StateWriter, model_state, optimizer_state, read_model, read_optimizer
from verl_ext.files import follow_umask, write_errors, write_json
from verl_ext.text.json_records import parse_json
from verl_ext.values import first_line, reason_of

STATE, EXTRA, ADAPTERS, EXPORT = "state", "extra.json", "adapters.json", "huggingface"
# Variables that torch.load reads before its argument weights_only.
_FORCE_TENSORS, _FORCE_PICKLES = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
SCALER = "gradient_scaler.pt"  # beside verl's files, in place of extra.json
_UINT32 = np.zeros(0, np.uint32)  # numpy's random state, which verl saves, is an array of them
_OF_NUMPYS_STATE: list[Any] = [_UINT32.__reduce__()[0], np.ndarray, np.dtype, type(_UINT32.dtype)]
_log = logging.getLogger(__name__)


class NotWritten(OSError):
    """A rank could not write its part, as where a disk is full; raised by every rank."""


@contextmanager
def errors_shared(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """What a rank raises inside is raised by all: :class:`NotWritten` for an OSError, with the rank and the reason.

    Collective over a group, all ranks where it is None; inside, a rank that may fail joins no other collective than
    those of torch's checkpoints, whose errors are shared already.
    """
    failure: tuple[bool, str] | None = None
    try:
        yield
    except CheckpointException as error:
        causes = {rank: cause for rank, (cause, _) in error.failures.items()}
        rank, cause = next(iter(causes.items()))
        of_files = all(isinstance(cause, OSError) for cause in causes.values())
        failure = of_files, f"rank {rank}: {_words(cause)}"
        raised: BaseException = error
    except Exception as error:
        failure = isinstance(error, OSError), f"rank {dist.get_rank()}: {_words(error)}"
        raised = error
    failures: list[tuple[bool, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure, group)
    told = [each for each in failures if each is not None]
    if not told:
        return
    of_files, words = min(told)  # a mistake of the program before a full disk
    if of_files:
        raise NotWritten(words)
    raise RuntimeError(words) from (raised if failure is not None else None)


def _words(error: BaseException) -> str:
    return reason_of(error) if isinstance(error, OSError) else first_line(error)


class Save:
    """What a checkpoint is made of, collected from an engine at one step, and written then or later.

    Args:
        engine: a `StepEngine`.
        folder: to write into.
        as_verl: writes verl's own files.
        later: tensors are copied to the host, so that training may go on before :meth:`write`.
    """

    def __init__(self, engine: Any, folder: Path, as_verl: Callable[[str], None], later: bool = False) -> None:
        """Collective."""
        get_torch_device().synchronize()  # verl offloads weights and states without waiting for their copies
        self.engine, self.folder = engine, folder
        manager = engine.checkpoint_manager
        self.state: dict[str, torch.Tensor] = {}
        self.extra: dict[str, Any] | None = None
        self.exports = is_elastic(engine) or (engine._is_lora and manager.should_save_hf_model)
        if is_elastic(engine):
            self._collect(later)
        else:
            self._write_as_verl(as_verl)
        self.weights: dict[str, torch.Tensor] | None = None
        if manager.should_save_hf_model and self.exports:
            self.weights = _export_weights(engine)
            # Here: transformers changes torch's default dtype meanwhile, which is of all threads.
            self.plain = plain_model(engine.module.config, engine.model_config.trust_remote_code)

    def _collect(self, later: bool) -> None:
        engine, manager = self.engine, self.engine.checkpoint_manager
        self.writer, self.state = StateWriter(self.folder / STATE), self._tensors()
        if later:
            engine.host_copies = engine.host_copies or HostCopies()
            self.state = engine.host_copies.copy(self.state)
        if manager.should_save_extra:
            scaler = None if engine.scaler is None else dict(engine.scaler.state_dict())
            self.extra = {"lr_scheduler": dict(engine.lr_scheduler.state_dict()), "scaler": scaler}

    def _tensors(self) -> dict[str, torch.Tensor]:
        manager, module = self.engine.checkpoint_manager, self.engine.module
        state: dict[str, torch.Tensor] = {}
        if manager.should_save_model:
            state |= model_state(module, adapters_only=manager.should_save_lora_only and self.engine._is_lora)
        if manager.should_save_optimizer:
            state |= optimizer_state(module, self.engine.optimizer)
        return state

    def _write_as_verl(self, as_verl: Callable[[str], None]) -> None:
        engine, manager = self.engine, self.engine.checkpoint_manager
        contents = manager.checkpoint_save_contents
        if engine._is_lora:  # verl's export has PEFT's names, which plain transformers cannot load
            manager.checkpoint_save_contents = [content for content in contents if content != "hf_model"]
        try:
            as_verl(str(self.folder))
        finally:
            manager.checkpoint_save_contents = contents
        with errors_shared(), write_errors(self.folder):
            if engine.scaler is not None and manager.should_save_extra and engine.rank == 0:
                torch.save(engine.scaler.state_dict(), self.folder / SCALER)
            if engine.rank == 0 and (self.folder / EXPORT).is_dir():
                follow_umask(self.folder / EXPORT)

    def write(self, group: dist.ProcessGroup | None = None) -> None:
        """Write it; collective over a group, all ranks where it is None.

        Raises:
            NotWritten: a file cannot be written.
        """
        if self.engine.host_copies is not None:
            self.engine.host_copies.wait()
        with errors_shared(group):
            if self.state:
                self.writer.write(self.state, group)
        with errors_shared(group):
            if self.engine.rank == 0 and self.extra is not None:
                write_json(self.folder / EXTRA, self.extra)
            if self.engine.rank == 0 and self.state and self.engine._is_lora:
                write_json(self.folder / ADAPTERS, adapters_of(self.engine.module))
            if self.engine.rank == 0 and self.exports:
                self._write_export(self.folder / EXPORT)

    def _write_export(self, folder: Path) -> None:
        """Write `huggingface/`: config, tokenizer, the code of a model of the Hub's, and the weights."""
        engine, config = self.engine, self.engine.module.config
        config.save_pretrained(folder)
        with suppress(OSError, ValueError):  # many models have none
            GenerationConfig.from_pretrained(config.name_or_path).save_pretrained(folder)
        if (processor := engine.checkpoint_manager.processing_class) is not None:
            processor.save_pretrained(folder)
        if hasattr(config, "auto_map"):
            module = engine.module.get_base_model() if engine._is_lora else engine.module
            custom_object_save(module, folder, config=config)
        if self.weights is not None:
            disable_progress_bar()  # A thread's bar beside the one of training would wait for the lock of both.
            write_weights(self.plain, self.weights, folder)


def load_engine(engine: Any, folder: Path, as_verl: Callable[[str], None]) -> None:
    """Read what `checkpoint.load_contents` asks for; collective.

    Args:
        as_verl: reads verl's own files, which also versions before 0.2 wrote.
    """
    if (folder / STATE).is_dir():
        _load_elastic(engine, folder)
        if engine._is_offload_optimizer:
            offload_fsdp_optimizer(engine.optimizer)
        return
    _load_as_verl(engine, folder, as_verl)
    if engine.scaler is None or not engine.checkpoint_manager.should_load_extra:
        return
    if (folder / SCALER).is_file():
        engine.scaler.load_state_dict(torch.load(folder / SCALER, weights_only=True))
    elif engine.rank == 0:
        _log.warning("%s has no %s: the loss scale starts anew", folder, SCALER)


def _load_as_verl(engine: Any, folder: Path, as_verl: Callable[[str], None]) -> None:
    """Its files hold options of the optimizer and the schedule as well, in whose place the configuration's stay."""
    schedule, groups = engine.lr_scheduler, engine.optimizer.param_groups
    options = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    base_lrs = list(schedule.base_lrs)
    as_verl(str(folder))
    for group, own in zip(engine.optimizer.param_groups, options, strict=True):
        group.update(own)
    schedule.base_lrs = base_lrs
    _resume_schedule(schedule, schedule.state_dict())


def check_readable(folder: Path) -> None:
    """Raises ValueError where this rank's files of verl's own form cannot be read; their tensors are mapped alone.

    Ranks whose files can would wait in verl's barriers for one that fails while it loads.
    """
    for path in sorted(folder.glob(f"*_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt")):
        try:
            torch.load(path, map_location="cpu", mmap=True, weights_only=False)
        except pickle.UnpicklingError:
            raise
        except Exception as error:  # as an unpickler
            raise ValueError(f"a checkpoint must be whole; {path} cannot be read: {first_line(error)}") from error


@contextmanager
def tensors_alone(checkpoint: Path) -> Iterator[None]:
    """Let ``torch.load`` read tensors and plain values inside, whatever it is asked for: verl asks for any object.

    Raises ValueError where a file of the checkpoint holds something else, of which nothing is run.
    """
    before = {name: os.environ.pop(name, None) for name in (_FORCE_TENSORS, _FORCE_PICKLES)}
    os.environ[_FORCE_TENSORS] = "1"
    try:
        with torch.serialization.safe_globals(_OF_NUMPYS_STATE):
            yield
    except pickle.UnpicklingError as error:
        unknown = re.search(r"(?<=GLOBAL )[\w.]+", str(error))
        raise ValueError(
            f"a checkpoint must hold tensors and plain values alone; {checkpoint} has a pickle of "
            f"{unknown[0] if unknown else 'something else'}: trainer.allow_pickled_checkpoints=true reads it, and "
            "runs the code that is in it"
        ) from error
    finally:
        del os.environ[_FORCE_TENSORS]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def is_elastic(engine: Any) -> bool:
    """Whether an engine's checkpoints are read by any number of ranks."""
    return isinstance(engine.module, FSDPModule) and engine.optimizer_config.optimizer_impl == "torch.optim"


def _load_elastic(engine: Any, folder: Path) -> None:
    manager = engine.checkpoint_manager
    if manager.should_load_model:
        read_model(folder / STATE, engine.module)
    if manager.should_load_optimizer:
        read_optimizer(folder / STATE, engine.module, engine.optimizer)
    if manager.should_load_extra:
        schedule, scaler = read_extra(folder)
        _resume_schedule(engine.lr_scheduler, schedule)
        if engine.scaler is not None and scaler is not None:
            engine.scaler.load_state_dict(scaler)
        elif engine.scaler is not None and engine.rank == 0:
            _log.warning("%s is not of an fp16 run: the loss scale starts anew", folder)


def read_extra(folder: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """(state of the schedule, state of fp16's scaler) of a checkpoint's folder; ValueError where there is none."""
    path = folder / EXTRA
    try:
        extra = parse_json(path.read_text(encoding="utf-8"))
        schedule, scaler = extra["lr_scheduler"], extra["scaler"]
        whole = isinstance(schedule["last_epoch"], int) and (scaler is None or isinstance(scaler["scale"], float))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} must hold the state of a schedule; it cannot be read as one") from error
    if not whole:
        raise ValueError(f"{path} must hold the state of a schedule; its last_epoch or scale is no number")
    return schedule, scaler


def _resume_schedule(schedule: Any, saved: Mapping[str, Any]) -> None:
    """Put a schedule of the configuration at the saved step."""
    of_options = ("base_lrs", "lr_lambdas", "_last_lr")
    schedule.load_state_dict({**schedule.state_dict(), **{k: v for k, v in saved.items() if k not in of_options}})
    rates = [base * at(schedule.last_epoch) for base, at in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = rates


def _export_weights(engine: Any) -> dict[str, torch.Tensor]:
    """The weights under plain transformers' names, LoRA merged, whole on rank 0's host memory; collective."""
    if engine._is_offload_param:
        load_fsdp_model_to_gpu(engine.module)
    with merged_lora_context(engine.module, backup_adapters=True) if engine._is_lora else nullcontext():
        named = engine.module.state_dict()
        named = normalize_peft_param_name(named) if engine._is_lora else named
        weights = {name: gather_to_rank0(tensor) for name, tensor in named.items()}
    if engine._is_offload_param:
        offload_fsdp_model_to_cpu(engine.module)
    return weights


def gather_to_rank0(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor on rank 0's host memory, nothing elsewhere; every rank takes part in the gather."""
    full = tensor
    if isinstance(tensor, DTensor):
        # verl offloads weights without waiting for their copies: read on the host they could be half there.
        on_device: Any = tensor.to(get_device_id())
        full = on_device.full_tensor()
    return full.detach().to("cpu", copy=True) if dist.get_rank() == 0 else full.new_empty(0)


def plain_model(config: Any, trusted: bool = False) -> PreTrainedModel:
    """The model of plain transformers of a config, on the meta device; `trusted`: its code may be the folder's own."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trusted)


def write_weights(
    plain: PreTrainedModel, weights: dict[str, torch.Tensor], folder: Path, shard_bytes: int = 5 * 10**9
) -> None:
    """Write the whole weights of a model as plain transformers does, beside its other files.

    Args:
        weights: by the names of the parameters of `plain`; of tied ones one name is enough.
        shard_bytes: most bytes of a file.

    Raises:
        OSError: a file cannot be written.
        ValueError: weights are missing.
    """
    with suppress(OSError, ValueError):
        plain.generation_config = GenerationConfig.from_pretrained(folder)
    drop_tied_target_keys(weights, plain, plain.config)
    if missing := sorted(_own_names(plain) - weights.keys()):
        raise ValueError(f"the weights of {type(plain).__name__} must be whole; {missing[0]} is missing")
    with write_errors(folder):
        plain.save_pretrained(folder, state_dict=weights, max_shard_size=shard_bytes)
    follow_umask(folder)


def _own_names(plain: torch.nn.Module) -> set[str]:
    """Names of a model's parameters, of tied ones the first."""
    return {name for name, _ in plain.named_parameters()}


def adapters_of(module: torch.nn.Module) -> dict[str, Any]:
    """How each LoRA adapter is merged: the name of the plain weight to its factors' names, scale and orientation.

    An adapter that is more than two factors of a linear layer (DoRA, a bias, an embedding's) has no factors here.
    """
    from peft.tuners.lora import LoraLayer  # heavy; a run with adapters has loaded it

    found = {}
    for name, layer in module.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        simple = "default" in layer.lora_A and not layer.lora_variant and layer.lora_B["default"].bias is None
        found[plain_name(f"{name}.weight")] = {
            "a": f"{name}.lora_A.default.weight" if simple else None,
            "b": f"{name}.lora_B.default.weight" if simple else None,
            "scale": float(layer.scaling["default"]),
            "transposed": bool(getattr(layer, "fan_in_fan_out", False)),
        }
    return found


def plain_name(name: str) -> str:
    """PEFT's name of a base model's parameter as plain transformers has it."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")
