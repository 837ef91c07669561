"""The state of an engine in a checkpoint: collected, written, read, restored.

    state/__<rank>_0.distcp    the slices of tensors that a rank wrote, by torch.distributed.checkpoint
    state/.metadata            the place of each slice of each tensor, for any number of ranks to read
      model.<name>                      parameters and persistent buffers; tied ones only once
      optimizer.<name>.<exp_avg, …>     the optimizer state of a parameter; absent if it had no gradient so far
    extra.json                 the learning-rate schedule, and the scale of fp16's gradients
    adapter_config.json        in a LoRA run, PEFT's config of the adapters (verl_ext.checkpoint.export)

Options of the optimizer (lr, betas) come from the configuration and are not saved. Neither is the state of random
numbers, which follow from `trainer.seed`, the step and the rank. Reading runs no code:
``torch.load(weights_only=True)`` reads tensors, and the metadata, a pickle, may hold only torch's descriptions of them.
"""

import logging
import math
import pickle
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from verl.utils.fsdp_utils import offload_fsdp_optimizer

from verl_ext.engines.sharding import local_part
from verl_ext.files import is_inside, write_errors
from verl_ext.options import first_line, must
from verl_ext.text.read.json_records import parse_json

_OF_OPTIONS = ("base_lrs", "lr_lambdas", "_last_lr")  # of a schedule's state: they follow from a run's options
STATE, EXTRA, ADAPTERS = "state", "extra.json", "adapter_config.json"
MODEL, OPTIMIZER = "model.", "optimizer."
_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
}
_log = logging.getLogger(__name__)


def model_state(module: torch.nn.Module, adapters_only: bool = False) -> dict[str, torch.Tensor]:
    """Return the tensors of an FSDP2 model, which share its memory.

    adapters_only: of a model with adapters, those alone that are trained. They are more than the factors: with PEFT's
    modules_to_save, trainable_token_indices and bias, whole layers, rows of embeddings and biases.
    """
    tensors = module.state_dict()  # FSDP2 first replaces gathered parameters by its sharded ones
    names = {name for name, parameter in module.named_parameters() if parameter.requires_grad or not adapters_only}
    if not adapters_only:
        names |= {name for name, _ in module.named_buffers()}
    return {MODEL + name: tensor for name, tensor in tensors.items() if name in names}


def optimizer_state(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the optimizer state of a model's parameters.

    Raises:
        ValueError: If a state is neither a number, nor sharded, nor shaped like its parameter.
    """
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    state: Any = get_optimizer_state_dict(module, optimizer)["state"]
    for name, values in state.items():
        for key, value in values.items():
            is_sharded = isinstance(value, DTensor)  # the scales of blocks are, in a shape of their own
            if not (is_sharded or (isinstance(value, torch.Tensor) and value.shape in (torch.Size(), shapes[name]))):
                needed = "keep numbers and tensors of its parameters' shapes to be saved"
                got = f"{type(optimizer).__name__}, whose {key} of {name} is neither"
                raise ValueError(must("optim.optimizer", needed, got))
    return _flat(state)


def _flat(state: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {f"{OPTIMIZER}{name}.{key}": value for name, values in state.items() for key, value in values.items()}


class StateWriter(dcp.FileSystemWriter):
    """A writer of tensors into a folder; each rank writes its slices."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), sync_files=False)

    def write(self, state: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
        """Write the tensors; collective over a group (None: all), errors too."""
        dcp.save(dict(state), storage_writer=self, process_group=group)

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        """Write this rank's slices; raise OSError on failure in any library."""
        with write_errors(Path(self.path)):  # here, because other ranks receive the error without its causes
            return super().write_data(*args, **kwargs)

    def storage_meta(self) -> StorageMeta:
        """Return metadata without the path of the folder, which is renamed afterwards."""
        return StorageMeta()


class HostCopies:
    """Copies of tensors in host memory, which later saves use again.

    With CUDA, the memory is pinned, and a separate stream copies sharded tensors while training goes on, because only
    an optimizer step changes them.
    """

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    def copy(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Start to overwrite the earlier copies; :meth:`wait` before reading the new."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        return {name: self._copied(name, tensor) for name, tensor in state.items()}

    def _copied(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        local = local_part(tensor)
        memory = self._memory.get(name)
        if memory is None or (memory.shape, memory.dtype) != (local.shape, local.dtype):
            memory = torch.empty_like(local, device="cpu", pin_memory=self._stream is not None)
            self._memory[name] = memory
        if not isinstance(tensor, DTensor):  # a buffer may change in a forward pass
            return memory.copy_(local)
        with torch.cuda.stream(self._stream):
            memory.copy_(local, non_blocking=self._stream is not None)
        return DTensor(memory, tensor._spec, requires_grad=False)

    def wait(self) -> None:
        """Wait on the host until the copies are whole."""
        if self._stream is not None:
            self._stream.synchronize()

    def hold_device(self) -> None:
        """Let the device's next operations wait for the copies, not the host."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


class StateReader(dcp.FileSystemReader):
    """The tensors in a folder; its metadata is read once, and refused if it holds anything else."""

    def __init__(self, folder: Path | str) -> None:
        super().__init__(str(folder))
        self.folder = Path(folder)

    @cached_property
    def metadata(self) -> Metadata:
        """The place, shape and type of each tensor. Raises ValueError for other content."""
        return read_metadata(self.folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return :attr:`metadata` to torch."""
        return self.metadata

    def entries(self, prefix: str) -> dict[str, TensorStorageMetadata]:
        """Return the tensors whose names begin with a prefix."""
        entries: dict[str, Any] = self.metadata.state_dict_metadata
        return {name: entry for name, entry in entries.items() if name.startswith(prefix)}

    def read(self, state: dict[str, torch.Tensor], **options: Any) -> None:
        """Read tensors into `state`, or raise ValueError; collective unless an option says otherwise."""
        try:
            dcp.load(state, storage_reader=self, **options)
        except CheckpointException as error:  # not a subclass of Exception; all ranks have it
            cause = next((cause for cause, _ in error.failures.values()), error)
            raise ValueError(self._unreadable(cause)) from error

    def read_whole(self, prefix: str, allocate: Callable[..., torch.Tensor] = torch.empty) -> dict[str, torch.Tensor]:
        """Read the tensors with a prefix in this process; return them unprefixed.

        ``allocate(size, dtype=…)`` creates the tensors to read into. Raises ValueError if a tensor cannot be read.
        """
        entries = self.entries(prefix)
        try:
            state = {name: allocate(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
            self.read(state, no_dist=True)
        except ValueError:
            raise
        except Exception as error:  # such as sizes that exceed the memory
            raise ValueError(self._unreadable(error)) from error
        return {name.removeprefix(prefix): tensor for name, tensor in state.items()}

    def refuse(self, problem: str, names: Iterable[str]) -> None:
        """Raise ValueError if there are such names, because the tensors are of another model."""
        if listed := sorted(names):
            more = f" and {len(listed) - 1} more" if len(listed) > 1 else ""
            raise ValueError(
                f"a checkpoint must be of the model of model.path; {self.folder} {problem} {listed[0]}{more}"
            )

    def _unreadable(self, error: BaseException) -> str:
        return f"{self.folder} must hold whole tensors; they cannot be read: {first_line(error)}"


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # in Python 3.11.0 to 3.11.3, which pickle a member of an enum so
            return _enum_member
        if name not in _METADATA_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a checkpoint's metadata")
        return super().find_class(module, name)


def _enum_member(kind: Any, name: str) -> Any:
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(f"{name} is no member of an enum in a checkpoint's metadata")
    return kind[name]


def read_metadata(folder: Path) -> Metadata:
    """Read where a folder's tensors lie; raise ValueError for other content."""
    path = folder / ".metadata"
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        files = {info.relative_path for info in metadata.storage_data.values()}
        is_sound = isinstance(metadata.storage_meta, StorageMeta) and all(
            isinstance(entry, TensorStorageMetadata)
            and isinstance(entry.properties.dtype, torch.dtype)
            and sum(math.prod(chunk.sizes) for chunk in entry.chunks) == math.prod(entry.size)
            for entry in metadata.state_dict_metadata.values()
        )
        is_sound = is_sound and all(Path(name).name == name and is_inside(folder / name, folder) for name in files)
    except OSError:
        raise
    except Exception as error:  # an unpickler may raise any error
        raise ValueError(must(f"{path}", "be the metadata of torch.distributed.checkpoint", "another file")) from error
    if not is_sound:
        raise ValueError(must(f"{path}", "be the metadata of tensors in files beside it", "that of something else"))
    return metadata


def load_engine(engine: Any, folder: Path) -> None:
    """Read the parts of a checkpoint in `checkpoint.load_contents` into an engine; collective.

    Raises:
        ValueError: If the checkpoint cannot be read, is of another model, or holds pickles.
    """
    manager, reader = engine.checkpoint_manager, StateReader(folder / STATE)
    if manager.should_load_optimizer:  # before the weights, because it runs a step with learning rate 0 on them
        _load_optimizer(reader, engine.module, engine.optimizer)
    if manager.should_load_model:
        _load_model(reader, engine.module)
    if manager.should_load_extra:
        schedule, scaler = read_extra(folder)
        _resume_schedule(engine.lr_scheduler, schedule)
        if engine.scaler is not None and scaler is not None:
            engine.scaler.load_state_dict(scaler)
        elif engine.scaler is not None and engine.rank == 0:
            _log.warning("%s is not of an fp16 run: the loss scale starts at its initial value", folder)
    if engine._is_offload_optimizer:
        offload_fsdp_optimizer(engine.optimizer)


def _load_model(reader: StateReader, module: torch.nn.Module) -> None:
    """Copy a saved model into a model under FSDP2."""
    saved = reader.entries(MODEL)
    state = model_state(module)
    if hasattr(module, "peft_config") and saved.keys() <= (adapters := model_state(module, adapters_only=True)).keys():
        state = adapters  # of checkpoint.save_lora_only
    reader.refuse("lacks", state.keys() - saved.keys())
    reader.refuse("has the unknown", saved.keys() - state.keys())
    reader.refuse("has another shape of", (name for name in state if state[name].shape != saved[name].size))
    reader.read(state)


def _load_optimizer(reader: StateReader, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load an optimizer's saved state, but none of its options."""
    saved = {name.removeprefix(OPTIMIZER).rpartition(".")[0] for name in reader.entries(OPTIMIZER)}
    optimizer.zero_grad()  # if there are no gradients, torch creates the states to read into by a step
    own: Any = get_optimizer_state_dict(module, optimizer)["state"]
    reader.refuse("has an optimizer state of the unknown", saved - own.keys())
    if saved:
        reader.read(_flat({name: values for name, values in own.items() if name in saved}))
    for name, parameter in module.named_parameters():
        if name not in saved:
            optimizer.state.pop(parameter, None)  # torch created it above; the saved run had none


def schedule_state(engine: Any) -> dict[str, Any]:
    """Return the content of extra.json."""
    scaler = None if engine.scaler is None else dict(engine.scaler.state_dict())
    schedule = {key: value for key, value in engine.lr_scheduler.state_dict().items() if key not in _OF_OPTIONS}
    return {"lr_scheduler": schedule, "scaler": scaler}


def read_extra(folder: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Read the states of schedule and fp16's scaler, or raise ValueError."""
    path = folder / EXTRA
    try:
        extra = parse_json(path.read_text(encoding="utf-8"))
        schedule, scaler = extra["lr_scheduler"], extra["scaler"]
        if not isinstance(schedule["last_epoch"], int) or not (scaler is None or isinstance(scaler["scale"], float)):
            raise TypeError("its last_epoch or scale is no number")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} must hold the state of a schedule; it cannot be read as one") from error
    return schedule, scaler


def _resume_schedule(schedule: Any, saved: Mapping[str, Any]) -> None:
    """Move the configured schedule to the saved step."""
    kept = {key: value for key, value in saved.items() if key not in _OF_OPTIONS}
    schedule.load_state_dict({**schedule.state_dict(), **kept})
    rates = [base * at(schedule.last_epoch) for base, at in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = rates
