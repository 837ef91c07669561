"""The export of a checkpoint for plain transformers.

    global_step_N/state/  ──tensors──►  a model on the meta device, with PEFT's adapters  ──►  model-0000N.safetensors

PEFT itself merges adapters, so that each of its variants is merged as it is trained. The command reads the tensors into
memory-mapped files and merges there; transformers writes the shards. So the weights are never in memory as a whole, and
no GPU is needed.
"""

import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GenerationConfig
from transformers.utils.logging import disable_progress_bar
from verl.utils.fsdp_utils import load_fsdp_model_to_gpu, offload_fsdp_model_to_cpu

from verl_ext.checkpoint import layout
from verl_ext.checkpoint.card import CARD, model_card
from verl_ext.checkpoint.identity import BASE, weight_facts
from verl_ext.checkpoint.source import GENERATION, ExportFiles, plain_model, read_config, read_model
from verl_ext.checkpoint.state import ADAPTERS, MODEL, STATE, StateReader
from verl_ext.checkpoint.untrained import Untrained
from verl_ext.config.adapters import with_adapters
from verl_ext.config.weights import digest_of_weights
from verl_ext.engines.new_rows import add_rows
from verl_ext.engines.nf4 import dequantized
from verl_ext.engines.nf4_reading import round_to_nf4
from verl_ext.engines.sharding import fp32_names
from verl_ext.files import OutputFolder, follow_umask, write_errors, write_json
from verl_ext.options import DataError, first_line, must
from verl_ext.plugin import register_architectures

NF4_FACTS = ("model.quantization", "model.quantization_nested")  # of checkpoints and exports
# Files of an export that belong to merged weights, not to adapters.
_OF_WEIGHTS = ("model*.safetensors*", "config.json", GENERATION, "*.py")


class Export:
    """The files of `huggingface/`, from an engine, written at once or later.

    With `hf_model` in `checkpoint.save_contents` they include the weights, whole in the host memory of rank 0.
    """

    def __init__(self, engine: Any, files: ExportFiles | None) -> None:
        """Collect the weights; collective. files: those beside the weights, on rank 0."""
        self.engine, self.files = engine, files
        self.tensors: dict[str, torch.Tensor] | None = None
        if engine.checkpoint_manager.should_save_hf_model:
            if engine._is_offload_param:
                load_fsdp_model_to_gpu(engine.module)
            self.tensors = {name: engine.gather_to_rank0(tensor) for name, tensor in engine.module.state_dict().items()}
            if engine._is_offload_param:
                offload_fsdp_model_to_cpu(engine.module)
            if files is not None:
                # Built here, because transformers meanwhile changes torch's default dtype, which all threads share.
                self.model = plain_model(files.config, engine.model_config.trust_remote_code)
                self.dtypes = dtypes_of(self.model)
                if engine._is_lora:
                    self.model = with_adapters(self.model, engine.module.peft_config["default"])

    def write(self, checkpoint: Path) -> None:
        """Write the files into a checkpoint's folder; on rank 0 alone."""
        assert self.files is not None, "rank 0 has them"
        folder, untrained = checkpoint / layout.EXPORT, self.files.untrained
        self.files.write(folder)
        if untrained is not None:
            untrained.write(checkpoint)
        if self.tensors is not None:
            disable_progress_bar()  # A thread's bar would wait for the lock that training's bar shares.
            if hasattr(self.model, "peft_config"):
                self.tensors = {name: tensor.float() for name, tensor in dequantized(self.tensors)}
            model = filled(self.model, self.tensors)
            if told := convert(model, self.dtypes, self.files.config.dtype, torch.empty):
                print(f"warning: {folder}: {told}", file=sys.stderr, flush=True)
            write_weights(model, folder)
            if untrained is not None:
                untrained.copy(folder)


def filled(model: Any, tensors: dict[str, torch.Tensor], merges: bool = True) -> Any:
    """Give a model its weights without a copy; merge adapters if `merges`.

    One name of tied weights is enough; a tied weight of its own value is untied. Raises ValueError if weights do not
    fit, or if one of those to be written is missing.
    """
    main: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (first := main.setdefault(id(parameter), name)) != name:
            tied[name] = first
    for name, first in tied.items():
        if name in tensors and torch.equal(tensors.setdefault(first, tensors[name]), tensors[name]):
            del tensors[name]
    try:
        unknown = model.load_state_dict(tensors, strict=False, assign=True).unexpected_keys
    except RuntimeError as error:
        raise ValueError(f"the weights of {_name(model)} must have its shapes: {first_line(error)}") from error
    for name, first in tied.items():
        if name in tensors:
            model.config.tie_word_embeddings = False
        else:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, model.get_parameter(first))
    written = model.state_dict() if merges else {n: p for n, p in model.named_parameters() if p.requires_grad}
    missing = sorted(name for name, tensor in written.items() if tensor.is_meta)
    if unknown or missing:
        what = f"{missing[0]} is missing" if missing else f"{unknown[0]} is not one of them"
        raise ValueError(f"the weights of {_name(model)} must be whole; {what}")
    return _merged(model) if merges and hasattr(model, "peft_config") else model


def _name(model: Any) -> str:
    return type(model.get_base_model() if hasattr(model, "peft_config") else model).__name__


def _merged(model: Any) -> Any:
    """Merge PEFT's adapters in the weights' memory; return the plain model."""
    from peft.tuners.lora import LoraLayer  # heavy, and needed with adapters only

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # below, what is merged here already
        layers: list[Any] = [module for module in model.modules() if isinstance(module, LoraLayer)]
        for layer in layers:
            if layer.lora_variant:  # it replaces the weight by a new one
                weight = layer.get_base_layer().weight
                memory = weight.data
                layer.merge()
                weight.data = memory.copy_(weight.data)
        try:
            return model.merge_and_unload()
        except RuntimeError as error:  # a bias of factors beside a layer without one
            raise ValueError(f"form=adapter must be given for adapters that PEFT does not merge: {error}") from error


def write_weights(model: Any, folder: Path, shard_bytes: int = 5 * 10**9) -> None:
    """Write a model's weights like plain transformers, beside its other files."""
    generation = folder / GENERATION
    content = generation.read_bytes() if generation.is_file() else None
    _set_dtype(model.config, model.dtype)
    with write_errors(folder):
        model.save_pretrained(folder, max_shard_size=shard_bytes)
        # transformers writes one made of the config
        generation.unlink(missing_ok=True) if content is None else generation.write_bytes(content)
    follow_umask(folder)


def _set_dtype(config: Any, dtype: torch.dtype) -> None:
    """Set the dtype of a config and of its parts, as transformers does when it reads weights."""
    config.dtype = dtype
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            _set_dtype(part, dtype)


def adapter_config(module: Any) -> dict[str, Any]:
    """Return PEFT's config of an engine's adapters for JSON."""
    values = module.peft_config["default"].to_dict()
    return {name: sorted(value) if isinstance(value, set) else value for name, value in values.items()}


@dataclass(frozen=True)
class ExportForm:
    """What is exported and how: the options of `verl-ext export` by their names."""

    checkpoint: str
    output_dir: str
    overwrite: bool = False
    base: str | None = None
    dtype: str = "source"
    shard_gb: float = 5.0
    form: str = "merged"
    trust_remote_code: bool = False
    license: str | None = None
    base_form: str = "dequantized"

    @property
    def shard_bytes(self) -> int:
        """The size of a file of weights."""
        return int(self.shard_gb * 1e9)


def export_checkpoint(asked: ExportForm) -> str:
    """Export a checkpoint for transformers or PEFT; return a line about it.

    Raises:
        DataError: If the checkpoint or its base cannot be used, with one line.
    """
    register_architectures()

    transformers.utils.logging.set_verbosity_error()
    # Compare sizes and checksums first: a damaged checkpoint must not become a model.
    whole = _whole_checkpoint(Path(asked.checkpoint))
    checkpoint, manifest = whole.folder, whole.manifest
    merges = asked.form == "merged"
    with OutputFolder(asked.output_dir, asked.overwrite) as output:
        # Read the tensors into files on the output's disk, because the host's memory may not hold the model.
        mapped = partial(_mapped, output.path / "mapped")
        try:
            model = _saved_model(whole, asked, mapped)
        except ValueError as error:
            raise DataError(" ".join(str(error).split())) from error
        # The checkpoint's own export brings tokenizer and config; the weights are written below.
        left = shutil.ignore_patterns("model*.safetensors*", *(() if merges else _OF_WEIGHTS))
        shutil.copytree(checkpoint / layout.EXPORT, output.path, dirs_exist_ok=True, ignore=left)
        written = [p for p in model.parameters() if merges or p.requires_grad]
        if merges:
            write_weights(model, output.path, asked.shard_bytes)
            if (untrained := Untrained.from_checkpoint(checkpoint)) is not None:
                own = None if asked.dtype in ("source", "saved") else getattr(torch, asked.dtype)
                sources = [place for place in (asked.base, untrained.path, str(checkpoint / layout.EXPORT)) if place]
                untrained.copy(output.path, sources, own, asked.shard_bytes)
        else:
            vars(model.peft_config["default"]).update(target_modules=adapter_config(model)["target_modules"])  # sorted
            with write_errors(output.path):
                model.save_pretrained(output.path, save_embedding_layers=False)
            follow_umask(output.path)
        parameters = sum(parameter.numel() for parameter in written)
        facts = {"checkpoint": checkpoint.name, "step": manifest.step, "form": asked.form, "parameters": parameters}
        facts |= (nf4 := {name: value for name, value in manifest.facts.items() if name in NF4_FACTS and value})
        write_json(output.path / layout.EXPORT_MARKER, facts)
        size = f"{parameters:,} {'parameters' if merges else 'parameters of adapters'} in {written[0].dtype}"
        if nf4:
            size += f", {base_of(nf4, asked)}"
        card = model_card(checkpoint.parent, manifest.step, asked.form, size, asked.license)
        (output.path / CARD).write_text(card, encoding="utf-8")
        output.publish()
    return f"step {manifest.step}: {size}, written to {asked.output_dir}"


def base_of(nf4: Mapping[str, Any], asked: ExportForm) -> str:
    """Say what a base in NF4 is in an export. nf4: the facts of its run that are in :data:`NF4_FACTS`."""
    nested = " with nested scales" if nf4.get(NF4_FACTS[1]) else ""
    if asked.form == "adapter":
        return f"for a base in bitsandbytes' NF4{nested}, on which they were trained"
    of_training = f"the numbers of NF4{nested} on which the adapters were trained"
    if asked.base_form == "dequantized":
        return f"merged into {of_training}"
    return f"merged into the original weights, not into {of_training}"


def _whole_checkpoint(folder: Path) -> layout.Checkpoint:
    """Return a checkpoint, or the last one of a run, or raise DataError if it is not whole."""
    checkpoint = (layout.saved_folders(folder) or [folder])[-1]
    try:
        whole = layout.Checkpoint.read(checkpoint, needed=("model",))
    except layout.Damaged as error:
        needed = "be whole, or hold global_step_N folders"
        raise DataError(must("checkpoint", needed, f"{checkpoint}: {error}")) from error
    except ValueError as error:
        raise DataError(str(error)) from error
    if wrong := whole.changed_file():
        raise DataError(must("checkpoint", "be whole", f"{checkpoint}: {wrong}"))
    return whole


def _mapped(scratch: Path, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in a memory-mapped file, created and unlinked at `scratch`."""
    if 0 in size:
        return torch.empty(size, dtype=dtype)
    tensor = torch.from_file(str(scratch), shared=True, size=torch.Size(size).numel(), dtype=dtype).view(size)
    os.unlink(scratch)  # its space is freed together with the tensor
    return tensor


def _saved_model(checkpoint: layout.Checkpoint, asked: ExportForm, allocate: Callable[..., torch.Tensor]) -> Any:
    """Return a checkpoint's model in the type that is asked for, plain or with its adapters."""
    base, dtype, trusted, merges = asked.base, asked.dtype, asked.trust_remote_code, asked.form == "merged"
    folder, facts = checkpoint.folder, checkpoint.manifest.facts
    adapters = _saved_adapters(folder)
    if adapters is None and not merges:
        raise DataError(must("form", "be merged for a checkpoint without adapters", "adapter"))
    tied, kind = facts.get("model.config.tie_word_embeddings"), getattr(torch, dtype, None)
    model = _plain_of(folder / layout.EXPORT, tied, kind, trusted)
    dtypes = dtypes_of(model)
    if dtype == "source" and merges:
        kind = model.config.dtype
    tensors = StateReader(folder / STATE).read_whole(MODEL, allocate)
    if adapters is not None:
        model = with_adapters(model, adapters)
        frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        is_nf4 = bool(facts.get(NF4_FACTS[0]))
        # A base in four bits is not the weights that the adapters are merged into, or needed beside them.
        if is_nf4 and (not merges or asked.base_form == "original"):
            tensors = {name: tensors[name] for name, parameter in model.named_parameters() if parameter.requires_grad}
        if merges:  # in fp32, so that sums are rounded and not their terms
            floats = dequantized(tensors)
            tensors = {name: allocate(x.shape, dtype=torch.float32).copy_(x) for name, x in floats}
            # With checkpoint.save_lora_only, the base is read from where it was, or where the user says that it is.
            if frozen.isdisjoint(tensors):
                rows = model.config.get_text_config().vocab_size
                named = adapters.base_model_name_or_path or ""  # not a folder that is gone
                base = named if base is None and (os.path.isdir(named) or not os.path.isabs(named)) else base
                plain = _base_model(base, facts, trusted, rows)
                if is_nf4 and asked.base_form == "dequantized":
                    round_to_nf4(plain, facts.get(NF4_FACTS[1], False), adapters.modules_to_save or ())
                model = with_adapters(plain, adapters)
    model = filled(model, tensors, merges)
    # The weights get the types in which the source has them, or the one that is asked for.
    if kind is not None and (told := convert(model, dtypes, kind, allocate)):
        raise ValueError(must("dtype", "hold the weights", f"{dtype}: {told}"))
    return model


def _saved_adapters(checkpoint: Path) -> Any:
    """Read PEFT's config of a checkpoint's adapters; return None without adapters."""
    path = checkpoint / ADAPTERS
    if path.is_file():
        from peft import LoraConfig  # heavy, and needed with adapters only

        return LoraConfig.from_peft_type(**json.loads(path.read_text(encoding="utf-8")))
    return None


def _plain_of(folder: Path, tied: bool | None, dtype: torch.dtype | None, trusted: bool) -> Any:
    """Build a model on the meta device; raise DataError for untrusted code.

    tied: whether embeddings were tied when they were trained; the config of merged weights may untie them. dtype: that
    of the model; None: of its config.
    """
    try:
        config = read_config(folder, trusted)
        config.dtype = dtype or config.dtype
        if tied is not None and tied != getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = tied
        return plain_model(config, trusted)
    except ValueError as error:
        if not trusted and "trust_remote_code" in str(error):
            needed = f"be true for a model with code of its own, {folder}"
            raise DataError(must("trust_remote_code", needed, False)) from error
        raise


def _base_model(base: str | None, saved: Mapping[str, Any], trusted: bool, rows: int) -> Any:
    """Load the model that adapters were trained on in fp32, or raise DataError.

    saved: the facts of their checkpoint. rows: the tokens that its embeddings and head get.
    """
    if not base:
        raise DataError("base is required for a checkpoint of adapters alone: the folder of its model; got null")
    needed = "hold the weights that the adapters were trained on"
    try:
        facts = weight_facts(BASE, digest_of_weights(base, "base"))
    except OSError as error:  # of the Hub
        raise DataError(must("base", needed, f"{base}: {error}")) from error
    for name, found in facts.items():
        if (trained := saved.get(name, found)) != found:
            raise DataError(must("base", f"{needed}, {trained}", f"{base}, {found}"))
    config = read_config(base, trusted)
    model = read_model(base, config, trusted)
    # As a model that is built from its config has it: transformers refuses to save some that it has read.
    model.generation_config = GenerationConfig.from_model_config(config) if model.can_generate() else None
    if rows > config.get_text_config().vocab_size:
        add_rows(model, {rows - 1: []})  # those of the new tokens are among the adapters
    return model


def dtypes_of(model: Any) -> dict[str, torch.dtype]:
    """Return the floating-point types that tensors have when transformers reads the config's model.

    model: a plain model on the meta device, which was built in that dtype.
    """
    fp32, tensors = fp32_names(model, model.config.dtype), model.state_dict().items()
    floating = {name: tensor.dtype for name, tensor in tensors if tensor.is_floating_point()}
    return {name: torch.float32 if fp32.search(name) else dtype for name, dtype in floating.items()}


def convert(
    model: Any, dtypes: dict[str, torch.dtype], default: torch.dtype, allocate: Callable[..., Any]
) -> str | None:
    """Convert the floating-point weights that are written; default: the type of adapters.

    Returns a line if finite numbers became infinite.
    """
    weights: dict[str, Any] = dict(model.state_dict(keep_vars=True))
    beyond: list[str] = []
    for name, tensor in weights.items():
        dtype = dtypes.get(name, default)
        if tensor.is_floating_point() and not tensor.is_meta and tensor.dtype != dtype:
            converted = allocate(tensor.shape, dtype=dtype).copy_(tensor.data)
            if dtype == torch.float16 and tensor.isfinite().all() and not converted.isfinite().all():
                beyond.append(name)
            tensor.data = converted
    return f"{beyond[0]} has numbers beyond float16, which are infinite there" if beyond else None
