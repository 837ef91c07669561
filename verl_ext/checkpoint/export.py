"""The export of a checkpoint for plain transformers.

    global_step_N/state/  ──tensors──►  a model on the meta device, with PEFT's adapters  ──►  model-0000N.safetensors

PEFT itself merges adapters, so that each of its variants is merged as it is trained. The command reads the tensors into
memory-mapped files and merges there; transformers writes the shards. So the weights are never in memory as a whole, and
no GPU is needed.
"""

import copy
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, GenerationConfig
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import cached_file
from transformers.utils.logging import disable_progress_bar
from verl.utils.fsdp_utils import load_fsdp_model_to_gpu, offload_fsdp_model_to_cpu

from verl_ext.checkpoint import layout
from verl_ext.checkpoint.card import CARD, model_card
from verl_ext.checkpoint.identity import BASE
from verl_ext.checkpoint.state import ADAPTERS, MODEL, STATE, read_tensors
from verl_ext.config.adapters import with_adapters
from verl_ext.config.weights import digest_of_weights
from verl_ext.data.chats import TrainedChats
from verl_ext.engines.new_rows import add_rows
from verl_ext.files import OutputFolder, follow_umask, write_errors, write_json
from verl_ext.layers.towers import auto_class
from verl_ext.options import DataError, first_line

_GENERATION, _TEMPLATE = "generation_config.json", "chat_template.jinja"
# Files of a tokenizer that transformers does not write anew, but other programs read; the second ones lack new tokens.
_OF_TOKENIZER = ("*.model", "*.tiktoken", "tekken.json", "vocab.json", "vocab.txt", "merges.txt")
_OF_ADDED = ("added_tokens.json", "special_tokens_map.json")
# Files of an export that belong to merged weights, not to adapters.
_OF_WEIGHTS = ("model*.safetensors*", "config.json", _GENERATION, "*.py")


class Export:
    """The files of `huggingface/`, from an engine, written at once or later.

    With `hf_model` in `checkpoint.save_contents` they include the weights, whole in the host memory of rank 0.
    """

    def __init__(self, engine: Any, chats: TrainedChats) -> None:
        """Collect the files, given the form of the training chats; collective."""
        self.engine, self.chats = engine, chats
        self.tensors: dict[str, torch.Tensor] | None = None
        if engine.checkpoint_manager.should_save_hf_model:
            self.tensors = _gathered_tensors(engine)
            # Built here, because transformers meanwhile changes torch's default dtype, which all threads share.
            self.model = plain_model(engine.module.config, engine.model_config.trust_remote_code)
            if engine._is_lora:
                self.model = with_adapters(self.model, engine.module.peft_config["default"])

    def write(self, folder: Path) -> None:
        """Write config, tokenizer, remote code and the weights; on rank 0 alone."""
        engine, config = self.engine, copy.deepcopy(self.engine.module.config)
        folder.mkdir(parents=True, exist_ok=True)
        module = engine.module.get_base_model() if engine._is_lora else engine.module
        if code := [cls for cls in type(module).__mro__ if cls.__module__.startswith("transformers_modules.")]:
            custom_object_save(code[0], folder)  # not of FSDP2's own class around it
            config.auto_map = {name: str(at).rpartition("--")[2] for name, at in config.auto_map.items()}
        config.save_pretrained(folder)
        processor = engine.checkpoint_manager.processing_class
        if processor is not None:
            processor.save_pretrained(folder)
        if self.chats.template is not None:
            (folder / _TEMPLATE).write_text(self.chats.template, encoding="utf-8")
        options = engine.model_config
        files = _OF_TOKENIZER if getattr(options, "new_pieces", {}) else (*_OF_TOKENIZER, *_OF_ADDED)
        copy_missing(Path(options.local_tokenizer_path or options.local_path), folder, files)
        copy_missing(Path(options.local_path), folder)
        tokenizer = getattr(processor, "tokenizer", processor)
        _write_generation_config(options.local_hf_config_path, config, tokenizer, self.chats.ends, folder)
        if self.tensors is not None:
            disable_progress_bar()  # A thread's bar would wait for the lock that training's bar shares.
            write_weights(filled(self.model, self.tensors), folder)


def copy_missing(source: Path, folder: Path, patterns: Sequence[str] = ()) -> None:
    """Copy files of `patterns`, and a processor's, that an export lacks."""
    has_template = any(folder.glob("chat_template*"))
    # verl may not load a processor, so that its files are copied as they are.
    for pattern in (*patterns, "*processor_config.json", *(() if has_template else ("chat_template*",))):
        for file in source.glob(pattern):
            if file.is_file() and not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)


def _write_generation_config(source: str, config: Any, tokenizer: Any, ends: Sequence[str], folder: Path) -> None:
    """Write the source's generation config with the ends of trained turns.

    Without a source, nothing is written for a model whose turns end as its config says.
    """
    path = cached_file(
        source,
        _GENERATION,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    # Keep the source's sampling settings: training knows only the end tokens.
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            path = None  # transformers cannot read it either
    # An end is one token id, and an ordinary token would also stop plain text.
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder} if tokenizer is not None and ends else ()
    encoded = [tokenizer(end, add_special_tokens=False)["input_ids"] for end in ends] if special else []
    trained = [ids[0] for ids in encoded if len(ids) == 1 and ids[0] in special]
    # The model's own end tokens stay, because a list in this file replaces those of its config.
    before = values.get("eos_token_id")
    for holder in (config.get_text_config(), tokenizer):
        before = getattr(holder, "eos_token_id", None) if before is None else before
    stops = before if isinstance(before, list) else [] if before is None else [before]
    if new := [token for token in trained if token not in stops]:
        if path is None:
            values = GenerationConfig.from_model_config(config).to_diff_dict()
            values.pop("_from_model_config", None)  # with it, generate() would take the config's end token again
        values["eos_token_id"] = [*stops, *new]
    if path is not None or new:
        write_json(folder / _GENERATION, values)


def _gathered_tensors(engine: Any) -> dict[str, torch.Tensor]:
    """Return weights and adapters in rank 0's host memory, by name; collective."""
    if engine._is_offload_param:
        load_fsdp_model_to_gpu(engine.module)
    tensors = {name: engine.gather_to_rank0(tensor) for name, tensor in engine.module.state_dict().items()}
    if engine._is_offload_param:
        offload_fsdp_model_to_cpu(engine.module)
    return tensors


def plain_model(config: Any, trusted: bool = False) -> Any:
    """Build a config's model on the meta device; `trusted` allows its code."""
    with torch.device("meta"):
        return auto_class(config).from_config(config, trust_remote_code=trusted)


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
        what = f"{missing[0]} is missing" if missing else f"{unknown[0]} is none of them"
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
    generation = folder / _GENERATION
    kept = generation.read_bytes() if generation.is_file() else None
    with write_errors(folder):
        model.save_pretrained(folder, max_shard_size=shard_bytes)
        if kept is not None:
            generation.write_bytes(kept)  # transformers writes one made of the config
    follow_umask(folder)


def adapter_config(module: Any) -> dict[str, Any]:
    """Return PEFT's config of an engine's adapters for JSON."""
    values = module.peft_config["default"].to_dict()
    return {name: sorted(value) if isinstance(value, set) else value for name, value in values.items()}


def export_checkpoint(
    folder: str,
    output_dir: str,
    overwrite: bool = False,
    base: str | None = None,
    dtype: str = "saved",
    shard_gb: float = 5.0,
    form: str = "merged",
    trust_remote_code: bool = False,
    license_name: str | None = None,
) -> str:
    """Export a checkpoint for transformers or PEFT; return a line about it.

    The arguments are the options of `verl-ext export`.

    Raises:
        DataError: If the checkpoint or its base cannot be used, with one line.
    """
    import verl_ext.models.qwen_titans  # noqa: F401  (its Auto classes)

    transformers.utils.logging.set_verbosity_error()
    # Compare sizes and checksums first: a damaged checkpoint must not become a model.
    checkpoint, manifest = _whole_checkpoint(Path(folder))
    merges = form == "merged"
    with OutputFolder(output_dir, overwrite) as output:
        # Read the tensors into files on the output's disk, because the host's memory may not hold the model.
        mapped = partial(_mapped, output.path / "mapped")
        try:
            model = _saved_model(checkpoint, manifest, base, dtype, merges, trust_remote_code, mapped)
        except ValueError as error:
            raise DataError(" ".join(str(error).split())) from error
        # The checkpoint's own export brings tokenizer and config; the weights are written anew below.
        left = shutil.ignore_patterns("model*.safetensors*", *(() if merges else _OF_WEIGHTS))
        shutil.copytree(checkpoint / layout.EXPORT, output.path, dirs_exist_ok=True, ignore=left)
        written = [p for p in model.parameters() if merges or p.requires_grad]
        if merges:
            write_weights(model, output.path, shard_bytes=int(shard_gb * 1e9))
        else:
            with write_errors(output.path):
                model.save_pretrained(output.path, save_embedding_layers=False)
            follow_umask(output.path)
        parameters = sum(parameter.numel() for parameter in written)
        facts = {"checkpoint": checkpoint.name, "step": manifest.step, "form": form, "parameters": parameters}
        write_json(output.path / layout.EXPORT_MARKER, facts)
        size = f"{parameters:,} {'parameters' if merges else 'parameters of adapters'} in {written[0].dtype}"
        card = model_card(checkpoint.parent, manifest.step, form, size, license_name)
        (output.path / CARD).write_text(card, encoding="utf-8")
        output.publish()
    return f"step {manifest.step}: {size}, written to {output_dir}"


def _whole_checkpoint(checkpoint: Path) -> tuple[Path, layout.Manifest]:
    """Return a whole checkpoint and its manifest, or raise DataError."""
    checkpoint = (layout.saved_folders(checkpoint) or [checkpoint])[-1]
    try:
        manifest = layout.Manifest.from_folder(checkpoint)
    except layout.Damaged as error:
        must = "checkpoint must be whole, or hold global_step_N folders"
        raise DataError(f"{must}; got {checkpoint}: {error}") from error
    except ValueError as error:
        raise DataError(str(error)) from error
    if not manifest.elastic:
        raise DataError(
            f"checkpoint must hold its tensors in {STATE}/; got {checkpoint}, whose files of verl's own form "
            "python -m verl.model_merger merge --backend fsdp reads"
        )
    if wrong := layout.changed_file(checkpoint, 0, 1, needed=("model",)):
        raise DataError(f"checkpoint must be whole; got {checkpoint}: {wrong}")
    return checkpoint, manifest


def _mapped(scratch: Path, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in a memory-mapped file, created and unlinked at `scratch`."""
    if 0 in size:
        return torch.empty(size, dtype=dtype)
    tensor = torch.from_file(str(scratch), shared=True, size=torch.Size(size).numel(), dtype=dtype).view(size)
    os.unlink(scratch)  # its space is freed together with the tensor
    return tensor


def _saved_model(
    checkpoint: Path,
    manifest: layout.Manifest,
    base: str | None,
    dtype: str,
    merges: bool,
    trusted: bool,
    allocate: Callable[..., torch.Tensor],
) -> Any:
    """Return a checkpoint's model in `dtype`, plain or with its adapters."""
    adapters = _saved_adapters(checkpoint)
    if adapters is None and not merges:
        raise DataError("form must be merged for a checkpoint without adapters; got adapter")
    model = _plain_of(checkpoint / layout.EXPORT, manifest.run_state.get("model.config.tie_word_embeddings"), trusted)
    tensors = read_tensors(checkpoint / STATE, MODEL, allocate)
    kind = next(iter(tensors.values())).dtype
    if adapters is not None:
        model = with_adapters(model, adapters)
        frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        if merges and frozen.isdisjoint(tensors):  # checkpoint.save_lora_only
            rows = model.config.get_text_config().vocab_size
            model = with_adapters(_base_model(base, manifest, kind, trusted, rows), adapters)
    model = filled(model, tensors, merges)
    if dtype != "saved":  # after adapters are merged, so that sums are rounded and not their terms
        _convert(model, getattr(torch, dtype), allocate)
    return model


def _saved_adapters(checkpoint: Path) -> Any:
    """Read PEFT's config of a checkpoint's adapters; return None without adapters."""
    path = checkpoint / ADAPTERS
    if path.is_file():
        from peft import LoraConfig  # heavy, and needed with adapters only

        return LoraConfig.from_peft_type(**json.loads(path.read_text(encoding="utf-8")))
    return None


def _plain_of(folder: Path, tied: bool | None, trusted: bool) -> Any:
    """Build a model on the meta device; raise DataError for untrusted code.

    tied: whether embeddings were tied when they were trained; the config of merged weights may untie them.
    """
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trusted)
        if tied is not None:
            config.tie_word_embeddings = tied
        return plain_model(config, trusted)
    except ValueError as error:
        if not trusted and "trust_remote_code" in str(error):
            needed = f"trust_remote_code must be true for a model with code of its own, {folder}"
            raise DataError(f"{needed}; got false") from error
        raise


def _base_model(base: str | None, manifest: layout.Manifest, dtype: torch.dtype, trusted: bool, rows: int) -> Any:
    """Load the model that adapters were trained on, or raise DataError.

    rows: the tokens that its embeddings and head get.
    """
    if base is None:
        raise DataError("base is required for a checkpoint of adapters alone: the folder of its model")
    trained, found = manifest.run_state.get(BASE), digest_of_weights(base)
    if trained not in (None, found):
        raise DataError(f"base must hold the weights that the adapters were trained on, {trained}; got {base}, {found}")
    config = AutoConfig.from_pretrained(base, trust_remote_code=trusted)
    model = auto_class(config).from_pretrained(base, dtype=dtype, trust_remote_code=trusted)
    if rows > config.get_text_config().vocab_size:
        add_rows(model, {rows - 1: []})  # those of the new tokens are among the adapters
    return model


def _convert(model: Any, dtype: torch.dtype, allocate: Callable[..., torch.Tensor]) -> None:
    """Convert the written floating-point weights, except those the architecture keeps in fp32."""
    plain = model.get_base_model() if hasattr(model, "peft_config") else model
    kept = [name.replace("*", ".*") for name in plain._get_dtype_plan(dtype)]  # the patterns of from_pretrained
    fp32 = re.compile("|".join(kept) or "(?!)")
    weights: dict[str, Any] = dict(model.state_dict(keep_vars=True))
    for name, tensor in weights.items():
        if tensor.is_floating_point() and not tensor.is_meta and not fp32.search(name):
            tensor.data = allocate(tensor.shape, dtype=dtype).copy_(tensor.data)
