"""The command `verl-ext export`: a checkpoint of any number of ranks as a Hugging Face folder, without GPUs.

    global_step_N/state/  ──tensor by tensor──►  tensors in mapped files  ──►  model-00001-of-0000N.safetensors, …

A tensor is read on its own into a file that is mapped into memory, with its adapter merged, and transformers writes the
shards from there: the weights are never in memory as a whole.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from verl_ext.commands.command_line import OutputOptions, command
from verl_ext.files import OutputFolder, write_json
from verl_ext.values import REQUIRED, DataError, option

MARKER = "export.json"  # what was exported
_DTYPES = ("saved", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ExportOptions(OutputOptions):
    """A checkpoint as a folder for plain transformers: sharded safetensors, config and tokenizer; adapters are merged.

    It runs offline and without GPUs, a tensor at a time; a checkpoint of adapters alone (checkpoint.save_lora_only)
    needs the memory of its base model. Meanwhile the disk holds the weights twice."""

    marker: ClassVar[str] = MARKER

    checkpoint: str = option(REQUIRED, "a global_step_N folder, or a run's: its last one", required=True)
    base: str | None = option(None, "the model's folder, for a checkpoint of adapters alone")
    dtype: str = option("saved", "type of the weights; saved: as in the checkpoint", choices=_DTYPES)
    shard_gb: float = option(5.0, "most gigabytes of a file of weights", above=0)

    def problems(self) -> Iterator[str]:
        """A line for every mistake that can be seen without reading the checkpoint."""
        yield from self.output_problems("the checkpoint, its base", self.checkpoint, self.base)
        for name in ("checkpoint", "base"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_dir():
                yield f"{name} must be an existing folder; got {path}"


def export(options: ExportOptions) -> str:
    """Write the folder; return what it is, in a line. Raises DataError, of one line."""
    import transformers  # heavy, as torch: not for a command with a mistake in it

    import verl_ext.models.qwen_titans  # noqa: F401  (its Auto classes)
    from verl_ext.engines.saving import EXPORT, plain_model, write_weights

    transformers.utils.logging.set_verbosity_error()
    checkpoint, step = _whole_checkpoint(Path(options.checkpoint))
    with OutputFolder(options.output_dir, options.overwrite) as folder:
        mapped = folder.path / "tensors"
        mapped.mkdir()
        weights = _weights(checkpoint, options, mapped)
        weights_of_run = shutil.ignore_patterns("model*.safetensors*")
        shutil.copytree(checkpoint / EXPORT, folder.path, dirs_exist_ok=True, ignore=weights_of_run)
        config = transformers.AutoConfig.from_pretrained(folder.path)
        config.dtype = next(iter(weights.values())).dtype
        parameters = sum(tensor.numel() for tensor in weights.values())
        write_weights(plain_model(config), weights, folder.path, shard_bytes=int(options.shard_gb * 1e9))
        del weights
        shutil.rmtree(mapped)
        write_json(folder.path / MARKER, {"checkpoint": checkpoint.name, "step": step, "parameters": parameters})
        folder.publish()
    return f"step {step}: {parameters:,} parameters in {config.dtype}, written to {options.output_dir}"


def _whole_checkpoint(checkpoint: Path) -> tuple[Path, int]:
    """A checkpoint, or the last one of a run, and its step.

    Raises:
        DataError: it is not whole, holds no model, or is of verl's own form.
    """
    from verl_ext.config.checkpoints import MANIFEST, Damaged, Manifest, changed_file, resumable_ranks, saved_folders

    checkpoint = (saved_folders(checkpoint) or [checkpoint])[-1]
    try:
        manifest = Manifest.read(checkpoint)
    except Damaged as error:
        raise DataError(f"checkpoint must be whole; got {checkpoint}: {error}") from error
    if manifest is None and not resumable_ranks(checkpoint):
        raise DataError(f"checkpoint must be a folder with {MANIFEST}, or hold global_step_N folders; got {checkpoint}")
    if manifest is None or not manifest.elastic:
        raise DataError(
            f"checkpoint must be of this project's form; got {checkpoint}, of verl's, which "
            "python -m verl.model_merger merge --backend fsdp reads"
        )
    if wrong := changed_file(checkpoint, 0, 1, needed=("model",)):
        raise DataError(f"checkpoint must be whole; got {checkpoint}: {wrong}")
    return checkpoint, manifest.step


def _weights(checkpoint: Path, options: ExportOptions, folder: Path) -> dict[str, Any]:
    """The plain weights by name, adapters merged, each mapped from a file of `folder`."""
    from verl_ext.engines.saving import ADAPTERS, STATE, plain_name
    from verl_ext.engines.state import SavedModel, is_adapter

    saved = SavedModel(checkpoint / STATE)
    path = checkpoint / ADAPTERS
    adapters = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    plain = {plain_name(name): name for name in saved.names if not is_adapter(name)}
    base = {} if plain else _base(options)
    weights = {}
    for number, name in enumerate(plain or base):
        tensor = saved.tensor(plain[name]) if plain else base[name]
        if name in adapters:
            tensor = _merged(name, tensor, adapters[name], saved)
        weights[name] = _mapped(tensor, folder / str(number), options.dtype)
    if lost := sorted(adapters.keys() - weights.keys()):
        raise DataError(f"base must be the model that the adapters are of; got {options.base}, without {lost[0]}")
    return weights


def _base(options: ExportOptions) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    if options.base is None:
        raise DataError("base is required for a checkpoint of adapters alone: the folder of the model that it is of")
    return AutoModelForCausalLM.from_pretrained(options.base, dtype="auto").state_dict()


def _merged(name: str, weight: Any, adapter: Mapping[str, Any], saved: Any) -> Any:
    """W + scale · B A, in the precision of W as PEFT's merge."""
    if adapter["a"] is None:
        raise DataError(
            f"the adapter of {name} is more than two factors (DoRA, a bias, an embedding's) and is merged by training: "
            "checkpoint.save_contents=[model,optimizer,extra,hf_model]"
        )
    delta = saved.tensor(adapter["b"]) @ saved.tensor(adapter["a"])
    delta = (delta.T if adapter["transposed"] else delta) * adapter["scale"]
    return weight + delta.to(weight.dtype)


def _mapped(tensor: Any, file: Path, dtype: str) -> Any:
    """A copy in a file that is mapped into memory."""
    import torch

    if dtype != "saved" and tensor.is_floating_point():
        tensor = tensor.to(getattr(torch, dtype))
    if tensor.numel() == 0:
        return tensor
    mapped = torch.from_file(str(file), shared=True, size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
    return mapped.copy_(tensor)


main = command("export", ExportOptions, export, example="checkpoint=RUN/global_step_100 output_dir=DIR")
