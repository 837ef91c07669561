"""The state of a model and its optimizer as torch.distributed.checkpoint writes it, for any number of ranks to read.

    FOLDER/__<rank>_0.distcp    the slices of tensors that a rank wrote
    FOLDER/.metadata            which slice of which tensor lies where

    model.<name>                      parameters and persistent buffers; tied ones once
    optimizer.<name>.<exp_avg, …>     what the optimizer keeps of a parameter, none for one that never had a gradient

Everything is a tensor, read by ``torch.load(weights_only=True)``; the metadata is a pickle, of which only torch's own
descriptions of tensors are read. Options of the optimizer (lr, betas) are the configuration's and not saved.
"""

import io
import math
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from verl_ext.files import is_inside, write_errors
from verl_ext.values import first_line

METADATA = ".metadata"
_MODEL, _OPTIMIZER = "model.", "optimizer."
_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
}


def model_state(module: torch.nn.Module, adapters_only: bool = False) -> dict[str, torch.Tensor]:
    """The tensors of a model under FSDP2, by name; copying into them changes the model.

    Args:
        adapters_only: those of a LoRA adapter alone.
    """
    tensors = module.state_dict()  # FSDP2 puts its sharded parameters in place of gathered ones first
    once = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    return {
        _MODEL + name: tensor
        for name, tensor in tensors.items()
        if name in once and (not adapters_only or is_adapter(name))
    }


def is_adapter(name: str) -> bool:
    """Whether a tensor is one of PEFT's, by verl's rule."""
    return "lora_" in name or ".adapter_" in name


def optimizer_state(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """What the optimizer keeps, by name.

    Raises:
        ValueError: a state is neither a number nor sharded as its parameter.
    """
    names = _names(module)
    state = {}
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            like = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            if not (isinstance(value, torch.Tensor) and (value.ndim == 0 or like)):
                raise ValueError(
                    "optim.optimizer must keep numbers and tensors of its parameters' shapes to be saved; got "
                    f"{type(optimizer).__name__}, whose {key} of {names[parameter]} is neither"
                )
            state[f"{_OPTIMIZER}{names[parameter]}.{key}"] = value
    return state


def _names(module: torch.nn.Module) -> dict[torch.Tensor, str]:
    return {parameter: name for name, parameter in module.named_parameters()}


class StateWriter(dcp.FileSystemWriter):
    """A writer of tensors into a folder, each rank its slices."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), sync_files=False)

    def write(self, state: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
        """Collective over a group, all ranks where it is None; an error of one rank is raised by all."""
        dcp.save(dict(state), storage_writer=self, process_group=group)

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        with write_errors(Path(self.path)):  # here: other ranks get the error alone, without those before it
            return super().write_data(*args, **kwargs)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # without the path of a folder that is renamed afterwards


class HostCopies:
    """Copies of tensors in host memory, which is kept from one save to the next, page-locked where there is CUDA.

    There sharded tensors, which nothing but an optimizer's step changes, are copied on a stream of their own while
    training goes on.
    """

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    def copy(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Begin to copy; before the copies are read :meth:`wait`, and the copies before are overwritten."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        return {name: self._copied(name, tensor) for name, tensor in state.items()}

    def _copied(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
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
        """Have what the device does next wait for the copies; the host does not wait."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


class StateReader(dcp.FileSystemReader):
    """Reads tensors of a folder; every part of the metadata that could do more is refused."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_metadata(Path(self.path))
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata


def read_metadata(folder: Path) -> Metadata:
    """What lies in a folder of :class:`StateWriter`.

    Raises:
        ValueError: the file is no such metadata, or names files of other folders.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        entries = metadata.state_dict_metadata.values()
        files = {info.relative_path for info in metadata.storage_data.values()}
        sound = isinstance(metadata.storage_meta, StorageMeta) and all(map(_is_sound, entries))
        sound = sound and all(Path(name).name == name and is_inside(folder / name, folder) for name in files)
    except OSError:
        raise
    except Exception as error:  # an unpickler raises whatever the bytes lead it to
        raise ValueError(f"{path} must be the metadata of torch.distributed.checkpoint; got another file") from error
    if not sound:
        raise ValueError(f"{path} must be of tensors in files beside it; got the metadata of something else")
    return metadata


def _is_sound(entry: Any) -> bool:
    """Whether an entry is a tensor's, whose chunks lie inside it and are as many elements as it has."""
    if not (isinstance(entry, TensorStorageMetadata) and isinstance(entry.properties.dtype, torch.dtype)):
        return False
    edges = [(chunk.offsets, chunk.sizes) for chunk in entry.chunks]
    return sum(math.prod(sizes) for _, sizes in edges) == math.prod(entry.size) and all(
        len(offsets) == len(sizes) == len(entry.size)
        and all(0 <= at <= at + size <= most for at, size, most in zip(offsets, sizes, entry.size, strict=True))
        for offsets, sizes in edges
    )


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _METADATA_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a checkpoint's metadata")
        return super().find_class(module, name)


def read_model(folder: Path, module: torch.nn.Module) -> None:
    """Copy a saved model into one under FSDP2; collective.

    Raises:
        ValueError: tensors are missing, too many, or of other shapes.
    """
    saved = _entries(folder, _MODEL)
    state = model_state(module, adapters_only=bool(saved) and all(map(is_adapter, saved)))
    for problem, names in (("lacks", state.keys() - saved.keys()), ("has the unknown", saved.keys() - state.keys())):
        _refuse(folder, problem, names)
    _refuse(folder, "has another shape of", (name for name in state if state[name].shape != saved[name].size))
    _read(folder, state)


class SavedModel:
    """The tensors of a saved model, each read on its own by a single process."""

    def __init__(self, folder: Path) -> None:
        """Reads the metadata; ValueError as :func:`read_metadata`."""
        self._folder, self._metadata = folder, read_metadata(folder)

    @property
    def names(self) -> list[str]:
        """In the order in which they were saved."""
        saved = self._metadata.state_dict_metadata
        return [name.removeprefix(_MODEL) for name in saved if name.startswith(_MODEL)]

    def tensor(self, name: str) -> torch.Tensor:
        """The whole tensor; `dcp.load` would keep each until Python next collects its cycles.

        Raises ValueError for one that cannot be read.
        """
        entry: Any = self._metadata.state_dict_metadata[_MODEL + name]
        try:
            whole = torch.empty(entry.size, dtype=entry.properties.dtype)
            for chunk in entry.chunks:
                edges = zip(chunk.offsets, chunk.sizes, strict=True)
                region = tuple(slice(begin, begin + size) for begin, size in edges)
                place = self._metadata.storage_data[MetadataIndex(_MODEL + name, chunk.offsets)]
                with (self._folder / place.relative_path).open("rb") as file:
                    file.seek(place.offset)
                    whole[region] = torch.load(io.BytesIO(file.read(place.length)), weights_only=True)
        except Exception as error:  # as an unpickler
            raise ValueError(f"{self._folder} must hold {name}; it cannot be read: {first_line(error)}") from error
        return whole


def _entries(folder: Path, prefix: str) -> dict[str, TensorStorageMetadata]:
    entries: dict[str, Any] = read_metadata(folder).state_dict_metadata
    return {name: entry for name, entry in entries.items() if name.startswith(prefix)}


def _refuse(folder: Path, problem: str, names: Iterable[str]) -> None:
    listed = sorted(names)
    if listed:
        more = f" and {len(listed) - 1} more" if len(listed) > 1 else ""
        raise ValueError(f"a checkpoint must be of the model of model.path; {folder} {problem} {listed[0]}{more}")


def read_optimizer(folder: Path, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer its saved state, its options stay; a parameter without one has none afterwards. Collective."""
    saved: dict[str, dict[str, TensorStorageMetadata]] = {}
    for name, entry in _entries(folder, _OPTIMIZER).items():
        of, _, key = name.removeprefix(_OPTIMIZER).rpartition(".")
        saved.setdefault(of, {})[key] = entry
    names = _names(module)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    _refuse(folder, "has an optimizer state of the unknown", saved.keys() - {names[p] for p in parameters})
    state = {
        index: {key: _empty(parameter, entry) for key, entry in saved[names[parameter]].items()}
        for index, parameter in enumerate(parameters)
        if names[parameter] in saved
    }
    _read(
        folder,
        {
            f"{_OPTIMIZER}{names[parameters[index]]}.{key}": value
            for index, values in state.items()
            for key, value in values.items()
        },
    )
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _empty(parameter: torch.Tensor, entry: TensorStorageMetadata) -> torch.Tensor:
    if entry.size == parameter.shape and parameter.ndim > 0:
        return torch.zeros_like(parameter, dtype=entry.properties.dtype, requires_grad=False)
    return torch.zeros(entry.size, dtype=entry.properties.dtype)


def _read(folder: Path, state: dict[str, torch.Tensor]) -> None:
    if state:
        dcp.load(state, storage_reader=StateReader(str(folder)))
