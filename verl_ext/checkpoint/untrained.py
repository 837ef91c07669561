"""Tensors that transformers does not load from a source, such as multi-token prediction layers.

Training does not know them. Servers draft tokens with them, so an export has them as they are in the source.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import utils
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import load_state_dict

from verl_ext.config.weights import weight_files
from verl_ext.files import follow_umask, write_errors, write_json

UNTRAINED = "untrained.json"  # in a checkpoint
_SCALES = "_scale_inv"  # the end of the name of an FP8 weight's scales, one for each block
_Tensors = Mapping[str, Callable[[], torch.Tensor]]


@dataclass(frozen=True)
class Untrained:
    """Tensors of a source that a class does not load.

    Attributes:
        owner: the name of the class.
        path: the folder of the source, or its name on the Hub.
        names: the names of the tensors.
    """

    owner: str
    path: str
    names: list[str]

    @classmethod
    def of_source(cls, path: str, module: Any, plain: Callable[[], Any], left_out: Iterable[str]) -> "Untrained | None":
        """Find them by the patterns that a class ignores; return None without any.

        Args:
            path: the source.
            module: the model in training.
            plain: a function that builds its plain model on the meta device.
            left_out: `model.allow_weight_mismatch`, globs of tensors that the user leaves out.
        """
        patterns = getattr(module, "_keys_to_ignore_on_load_unexpected", None)
        if not patterns:
            return None
        ignored = re.compile("|".join(f"({pattern})" for pattern in patterns))
        names = [name for name in _tensors(path) if ignored.search(name)]
        names = [name for name in names if not any(fnmatchcase(name, glob) for glob in left_out)]
        if names:  # a pattern may name a layer that the model has: GLM-4.5 has 92, GLM-4.5-Air 46
            model = plain()
            names = sorted({*names} - revert_weight_conversion(model, model.state_dict()).keys())
        place = os.path.abspath(path) if os.path.isdir(path) else path
        return cls(type(module).__name__.removeprefix("FSDP"), place, names) if names else None

    @classmethod
    def from_checkpoint(cls, folder: Path) -> "Untrained | None":
        """Read what a checkpoint says of its source."""
        file = folder / UNTRAINED
        return cls(**json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None

    def write(self, folder: Path) -> None:
        """Write the names and their source into a checkpoint."""
        write_json(folder / UNTRAINED, asdict(self))

    def copy(
        self, folder: Path, sources: Iterable[str] = (), dtype: torch.dtype | None = None, shard_bytes: int = 5 * 10**9
    ) -> None:
        """Copy the tensors into further shards of an export, and print a line that says so or warns.

        Quantized tensors become plain ones, as those that are trained.

        Args:
            folder: the export, which has the weights of the model.
            sources: where to look for them first; without any, in `path` alone.
            dtype: the type of the copies; None: of each its own, of quantized ones bfloat16.
            shard_bytes: the size of a file, which a single tensor may exceed.
        """
        more = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        told = f"of the source, {self.owner} does not load {self.names[0]}{more}"
        for source in sources or [self.path]:
            tensors: _Tensors = {}
            with suppress(OSError, ValueError, LookupError):  # it is gone, or another folder now
                tensors = _tensors(source)
            if tensors.keys() >= (all_names := {*self.names}):
                # The scales of a quantized weight are multiplied into it, so they have no place of their own.
                names = sorted(name for name in all_names if name.removesuffix(_SCALES) not in all_names - {name})
                chosen = ((name, _plain(name, tensors, dtype)) for name in names)
                with write_errors(folder):
                    _append(folder, chosen, shard_bytes)
                follow_umask(folder)
                print(f"{told}: copied from {source} as they are", flush=True)
                return
        lost = f"warning: {told}: the export lacks them, because {self.path} has them no longer"
        print(lost, file=sys.stderr, flush=True)


def _tensors(path: str) -> _Tensors:
    """Return a function for each tensor in the weight files of a folder or Hub name, which reads it."""
    found: dict[str, Callable[[], torch.Tensor]] = {}
    for file in weight_files(path):
        if file.endswith(".safetensors"):
            opened = safe_open(file, framework="pt")
            found |= {name: partial(opened.get_tensor, name) for name in opened.keys()}  # noqa: SIM118
        else:
            found |= {name: tensor.clone for name, tensor in load_state_dict(file).items()}
    return found


def _plain(name: str, tensors: _Tensors, dtype: torch.dtype | None) -> torch.Tensor:
    """Read a tensor, and multiply the blocks of an FP8 matrix [R, C] by their scales."""
    tensor = tensors[name]()
    if name + _SCALES in tensors:
        scales = tensors[name + _SCALES]().float()
        blocks = [-(-size // count) for size, count in zip(tensor.shape, scales.shape, strict=True)]
        # Blocks have a size of a power of two, also where the last one is cut.
        for axis, block in enumerate(1 << (block - 1).bit_length() for block in blocks):
            scales = scales.repeat_interleave(block, axis).narrow(axis, 0, tensor.shape[axis])
        return (tensor.float() * scales).to(dtype or torch.bfloat16)
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _append(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int) -> None:
    """Write tensors into further shards of a folder, and all shards into its index."""
    # Which tensor is in which file: by the index of several shards, else by the one file.
    index, single = folder / utils.SAFE_WEIGHTS_INDEX_NAME, folder / utils.SAFE_WEIGHTS_NAME
    described: dict[str, Any] = {"metadata": {}}
    if index.is_file():
        described = json.loads(index.read_text(encoding="utf-8"))
        files = {name: folder / file for name, file in described["weight_map"].items()}
    else:
        with safe_open(single, framework="pt") as opened:
            files = dict.fromkeys(opened.keys(), single)
    for number, shard in enumerate(_shards(tensors, shard_bytes)):
        file = folder / f"untrained-{number}.safetensors"
        save_file(shard, file, metadata={"format": "pt"})
        files |= dict.fromkeys(shard, file)
    # A shard's name says how many there are, so the earlier ones get new names, too.
    shards = list(dict.fromkeys(files.values()))
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    for place, (file, name) in enumerate(zip(shards, names, strict=True)):
        shards[place] = file.rename(folder / name)
    renamed = dict(zip(dict.fromkeys(files.values()), names, strict=True))
    described["metadata"]["total_size"] = sum(map(_bytes_of_tensors, shards))
    write_json(index, {**described, "weight_map": {name: renamed[file] for name, file in sorted(files.items())}})


def _shards(tensors: Iterable[tuple[str, torch.Tensor]], most: int) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        if shard and sum(other.nbytes for other in (*shard.values(), tensor)) > most:
            yield shard
            shard = {}
        shard[name] = tensor.contiguous()
    if shard:
        yield shard


def _bytes_of_tensors(file: Path) -> int:
    with file.open("rb") as opened:
        return file.stat().st_size - 8 - int.from_bytes(opened.read(8), "little")
