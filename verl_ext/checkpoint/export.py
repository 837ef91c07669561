"""The export of a checkpoint for plain transformers, by training or by `verl-ext export`.

    global_step_N/state/  ──tensors──►  files mapped into memory  ──►  model-00001-of-0000N.safetensors, …

The command reads the tensors into memory-mapped files and merges the adapters there; transformers writes the shards. So
the weights are never in memory as a whole, and no GPU is needed.
"""

import json
import os
import shutil
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils.logging import disable_progress_bar
from verl.utils.fsdp_utils import (
    load_fsdp_model_to_gpu,
    merged_lora_context,
    normalize_peft_param_name,
    offload_fsdp_model_to_cpu,
)
from verl.utils.transformers_compat import drop_tied_target_keys

from verl_ext.checkpoint import layout
from verl_ext.checkpoint.state import ADAPTERS, MODEL, STATE, is_adapter, read_tensors
from verl_ext.files import OutputFolder, follow_umask, write_errors, write_json
from verl_ext.layers.towers import auto_class
from verl_ext.values import DataError


class Export:
    """The files of `huggingface/`, collected from an engine and written at once or later.

    With `hf_model` in `checkpoint.save_contents` they include the weights, whole in the host memory of rank 0.
    """

    def __init__(self, engine: Any) -> None:
        """Collect the files; collective."""
        self.engine = engine
        self.weights: dict[str, torch.Tensor] | None = None
        if engine.checkpoint_manager.should_save_hf_model:
            self.weights = _gathered_weights(engine)
            # Built here, because transformers meanwhile changes torch's default dtype, which all threads share.
            self.plain = plain_model(engine.module.config, engine.model_config.trust_remote_code)

    def write(self, folder: Path) -> None:
        """Write config, tokenizer, remote code and the weights; on rank 0 alone."""
        engine, config = self.engine, self.engine.module.config
        config.save_pretrained(folder)
        with suppress(OSError, ValueError):  # many models have no generation config
            GenerationConfig.from_pretrained(config.name_or_path).save_pretrained(folder)
        if (processor := engine.checkpoint_manager.processing_class) is not None:
            processor.save_pretrained(folder)
        _copy_processor(Path(engine.model_config.local_path), folder)
        if hasattr(config, "auto_map"):
            module = engine.module.get_base_model() if engine._is_lora else engine.module
            custom_object_save(module, folder, config=config)
        if self.weights is not None:
            disable_progress_bar()  # A thread's bar would wait for the lock that training's bar shares.
            _write_weights(self.plain, self.weights, folder)


def _copy_processor(model: Path, folder: Path) -> None:
    """Copy the processor files that an export lacks, because verl may not load a processor."""
    has_template = any(folder.glob("chat_template*"))
    for pattern in ("*processor_config.json", *(() if has_template else ("chat_template*",))):
        for file in model.glob(pattern):
            if file.is_file() and not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)


def _gathered_weights(engine: Any) -> dict[str, torch.Tensor]:
    """Return the weights by transformers' names, with merged LoRA, in rank 0's host memory; collective."""
    if engine._is_offload_param:
        load_fsdp_model_to_gpu(engine.module)
    with merged_lora_context(engine.module, backup_adapters=True) if engine._is_lora else nullcontext():
        named = engine.module.state_dict()
        named = normalize_peft_param_name(named) if engine._is_lora else named
        weights = {name: engine.gather_to_rank0(tensor) for name, tensor in named.items()}
    if engine._is_offload_param:
        offload_fsdp_model_to_cpu(engine.module)
    return weights


def plain_model(config: Any, trusted: bool = False) -> PreTrainedModel:
    """Build the transformers model of a config on the meta device, with its own code if `trusted`."""
    with torch.device("meta"):
        return auto_class(config).from_config(config, trust_remote_code=trusted)


def _write_weights(
    plain: PreTrainedModel, weights: dict[str, torch.Tensor], folder: Path, shard_bytes: int = 5 * 10**9
) -> None:
    """Write a model's weights by parameter name, like plain transformers, beside its other files.

    One name of tied weights is enough. Raises OSError if a file is not written, and ValueError if weights are missing.
    """
    with suppress(OSError, ValueError):
        plain.generation_config = GenerationConfig.from_pretrained(folder)
    drop_tied_target_keys(weights, plain, plain.config)
    if missing := sorted({name for name, _ in plain.named_parameters()} - weights.keys()):
        raise ValueError(f"the weights of {type(plain).__name__} must be whole; {missing[0]} is missing")
    with write_errors(folder):
        plain.save_pretrained(folder, state_dict=weights, max_shard_size=shard_bytes)
    follow_umask(folder)


def adapters_of(module: torch.nn.Module) -> dict[str, Any]:
    """Return the factor names, scale and orientation of each LoRA adapter, by the plain weight's name.

    An adapter with more than two factors of a linear layer (DoRA, a bias, an embedding) has no factor names here.
    """
    from peft.tuners.lora import LoraLayer  # heavy, but a run with adapters has loaded it

    found = {}
    for name, layer in module.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        simple = "default" in layer.lora_A and not layer.lora_variant and layer.lora_B["default"].bias is None
        found[_plain_name(f"{name}.weight")] = {
            "a": f"{name}.lora_A.default.weight" if simple else None,
            "b": f"{name}.lora_B.default.weight" if simple else None,
            "scale": float(layer.scaling["default"]),
            "transposed": bool(getattr(layer, "fan_in_fan_out", False)),
        }
    return found


def _plain_name(name: str) -> str:
    """Convert PEFT's name of a base model's parameter to that of plain transformers."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def export_checkpoint(
    folder: str, output_dir: str, overwrite: bool, base: str | None, dtype: str, shard_gb: float
) -> str:
    """Write a checkpoint as a folder for plain transformers; return a line that describes it.

    The arguments are the options of `verl-ext export`.

    Raises:
        DataError: If the checkpoint or its base cannot be used, with one line.
    """
    import verl_ext.models.qwen_titans  # noqa: F401  (its Auto classes)

    transformers.utils.logging.set_verbosity_error()
    checkpoint, step = _whole_checkpoint(Path(folder))
    with OutputFolder(output_dir, overwrite) as output:
        weights = _saved_weights(checkpoint, base, dtype, output.path / "mapped")
        weights_of_run = shutil.ignore_patterns("model*.safetensors*")
        shutil.copytree(checkpoint / layout.EXPORT, output.path, dirs_exist_ok=True, ignore=weights_of_run)
        config = AutoConfig.from_pretrained(output.path)
        config.dtype = next(iter(weights.values())).dtype
        parameters = sum(tensor.numel() for tensor in weights.values())
        _write_weights(plain_model(config), weights, output.path, shard_bytes=int(shard_gb * 1e9))
        write_json(
            output.path / layout.EXPORT_MARKER, {"checkpoint": checkpoint.name, "step": step, "parameters": parameters}
        )
        output.publish()
    return f"step {step}: {parameters:,} parameters in {config.dtype}, written to {output_dir}"


def _whole_checkpoint(checkpoint: Path) -> tuple[Path, int]:
    """Return a checkpoint (or a run's last one) and its step; raise DataError unless it is whole and in our format."""
    checkpoint = (layout.saved_folders(checkpoint) or [checkpoint])[-1]
    try:
        manifest = layout.Manifest.from_folder(checkpoint)
    except layout.Damaged as error:
        raise DataError(f"checkpoint must be whole; got {checkpoint}: {error}") from error
    if manifest is None and not layout.resumable_ranks(checkpoint):
        raise DataError(
            f"checkpoint must be a folder with {layout.MANIFEST}, or hold global_step_N folders; got {checkpoint}"
        )
    if manifest is None or not manifest.elastic:
        raise DataError(
            f"checkpoint must be of this project's form; got {checkpoint}, of verl's, which "
            "python -m verl.model_merger merge --backend fsdp reads"
        )
    if wrong := layout.changed_file(checkpoint, 0, 1, needed=("model",)):
        raise DataError(f"checkpoint must be whole; got {checkpoint}: {wrong}")
    return checkpoint, manifest.step


def _saved_weights(checkpoint: Path, base: str | None, dtype: str, scratch: Path) -> dict[str, torch.Tensor]:
    """Return the plain weights by name, with merged adapters, each in a memory-mapped file.

    Each file is created at the path `scratch`, and has no name once it is mapped.
    """

    def mapped(size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if 0 in size:
            return torch.empty(size, dtype=dtype)
        tensor = torch.from_file(str(scratch), shared=True, size=torch.Size(size).numel(), dtype=dtype).view(size)
        os.unlink(scratch)  # its space is freed together with the tensor
        return tensor

    saved = read_tensors(checkpoint / STATE, MODEL, mapped)
    weights = {_plain_name(name): tensor for name, tensor in saved.items() if not is_adapter(name)}
    if not weights:
        if base is None:
            raise DataError("base is required for a checkpoint of adapters alone: the folder of its model")
        weights = auto_class(AutoConfig.from_pretrained(base)).from_pretrained(base, dtype="auto").state_dict()
    path = checkpoint / ADAPTERS
    adapters = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if lost := sorted(adapters.keys() - weights.keys()):
        raise DataError(f"base must be the model that the adapters are of; got {base}, without {lost[0]}")
    for name, weight in weights.items():
        kind = getattr(torch, dtype) if dtype != "saved" and weight.is_floating_point() else weight.dtype
        if adapter := adapters.get(name):
            if adapter["a"] is None:
                raise DataError(
                    f"the adapter of {name} is more than two factors (DoRA, a bias, an embedding's) and is merged by "
                    "training: checkpoint.save_contents=[model,optimizer,extra,hf_model]"
                )
            delta = saved[adapter["b"]] @ saved[adapter["a"]]  # W + scale · B A, in the precision of W, as in PEFT
            delta = (delta.T if adapter["transposed"] else delta) * adapter["scale"]
            weight = weight + delta.to(weight.dtype)
        if adapter or kind != weight.dtype:
            weights[name] = mapped(weight.shape, kind).copy_(weight)
    return weights
