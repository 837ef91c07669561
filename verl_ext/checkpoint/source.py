"""What an export is made of: the files of its source, and what of them is training's.

    model-*.safetensors        training's; tensors that the class does not load are the source's (untrained.py)
    config.json                the source's, except the keys of :func:`exported_config`
    generation_config.json     the source's, with the ends of trained turns
    tokenizer, vocabulary      the source's; written with new tokens
    chat template              the source's, or another that the data was made with
    processor, Python code     the source's

The source is `model.path`, and `model.tokenizer_path` for the tokenizer. An export reads them again, because verl and
the run change the config and the tokenizer that they use.
"""

import copy
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.dynamic_module_utils import custom_object_save
from transformers.modeling_utils import load_state_dict
from transformers.utils import cached_file

from verl_ext.checkpoint.untrained import Untrained
from verl_ext.config.weights import weight_files
from verl_ext.data.tokenized.reports import TrainedChats
from verl_ext.engines.new_rows import add_to_config
from verl_ext.files import write_json
from verl_ext.layers.towers import auto_class, without_code
from verl_ext.text.tokens.new_tokens import add_tokens

GENERATION = "generation_config.json"
_TEMPLATE = "chat_template.jinja"
_TOKENIZER = (
    *("tokenizer*", "*.model", "*.model.v*", "*.tiktoken", "*.spm", "*.bpe", "*.codes", "tekken.json", "vocab*"),
    *("encoder.json", "merges.txt"),
)
_ADDED_TOKENS = ("added_tokens.json", "special_tokens_map.json")  # of the source's tokens alone
_PROCESSOR = ("*processor_config.json",)
_TEMPLATES = ("chat_template*", "additional_chat_templates/*")
# The keys of `model.override_config` that are the source's again, and why.
_ONLY_IN_TRAINING = {
    "the routers' loss, without which generate() can use a cache": (
        r"output_router_logits|\w*(aux|router|z)_loss_(coef\w*|alpha|weight)|aux_loss_alpha|seq_aux"
    ),
    "noise": r"\w*(dropout|layerdrop|drop_path|pdrop)\w*",
    "what a forward returns": r"use_cache|output_attentions|output_hidden_states|return_dict|attn_implementation",
    "how new weights begin": r"initializer_\w+",
}
_LASTING = re.compile(rf"(?!({'|'.join(_ONLY_IN_TRAINING.values())})$)")
_QUIET: dict[str, Any] = {  # of a look into the Hub's cache
    f"_raise_exceptions_for_{what}": False for what in ("gated_repo", "missing_entries", "connection_errors")
}


class ExportFiles:
    """The files of an export beside its weights.

    They are read once, at the start of a run, because the source may be gone when an export is written.

    Attributes:
        config: the config of the export; its dtype is that of the source's weights.
        files: the content of each file, by its path in the folder.
        untrained: the source's tensors that the model's class does not load; None without any.
    """

    def __init__(self, engine: Any, chats: TrainedChats) -> None:
        """Read them for an engine, with the form of its training chats."""
        options, module = engine.model_config, engine.module.get_base_model() if engine._is_lora else engine.module
        self.config = exported_config(options, module)
        plain = partial(plain_model, self.config, options.trust_remote_code)
        self.untrained = Untrained.of_source(options.path, module, plain, options.allow_weight_mismatch)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            _write_config(self.config, module, folder)
            _write_tokenizer(options, chats, folder)
            _write_generation_config(options, self.config, chats.ends, folder)
            files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
            self.files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}

    def write(self, folder: Path) -> None:
        """Write the files into a folder, which may not exist yet."""
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


def read_config(path: str | Path, trusted: bool = False) -> Any:
    """Return the config of a folder or Hub name; `trusted` allows its code."""
    return without_code(AutoConfig.from_pretrained(path, trust_remote_code=trusted), trusted)


def read_model(path: str, config: Any, trusted: bool = False) -> Any:
    """Return the model of a folder or Hub name in fp32; `trusted` allows its code."""
    options = {"config": config, "dtype": torch.float32, "trust_remote_code": trusted}
    return auto_class(config).from_pretrained(path, **options)


def plain_model(config: Any, trusted: bool = False) -> Any:
    """Build a config's model on the meta device; `trusted` allows its code."""
    with torch.device("meta"):
        return auto_class(config).from_config(config, trust_remote_code=trusted)


def exported_config(options: Any, module: Any) -> Any:
    """Return the config of an export: the source's, except these keys.

    architectures, auto_map     the class that was trained
    vocab_size                  the rows of new tokens
    tie_word_embeddings         false for a head that was trained as another weight than the embeddings
    quantization_config         none, because training reads quantized weights as plain ones
    dtype                       that of the written weights, set where they are written
    model.override_config       the keys that change what the model computes

    options: the model node of an engine. module: its plain model.
    """
    config = options.config_with(_lasting(options.override_config))
    add_to_config(config, options.new_pieces)
    config.architectures = [type(module).__name__.removeprefix("FSDP")]
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if getattr(config, "tie_word_embeddings", False):
        config.tie_word_embeddings = module.config.tie_word_embeddings
    config.dtype = source_dtype(config, options.path)
    return config


def source_dtype(config: Any, path: str) -> torch.dtype:
    """Return the type in which transformers reads the weights of a folder or Hub name."""
    if config.dtype is None:
        first = load_state_dict(weight_files(path)[0], map_location="meta").values()
        return next((tensor.dtype for tensor in first if tensor.is_floating_point()), torch.float32)
    dtype: torch.dtype = getattr(torch, str(config.dtype).removeprefix("torch."))
    return dtype


def _lasting(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that an export keeps, also of the parts of a config."""
    lasting = {key: value for key, value in values.items() if _LASTING.match(key)}
    return {key: _lasting(value) if isinstance(value, Mapping) else value for key, value in lasting.items()}


def _write_config(config: Any, module: Any, folder: Path) -> None:
    """Write config.json, and the Python code of a model that transformers lacks."""
    written = copy.deepcopy(config)
    if code := [cls for cls in type(module).__mro__ if cls.__module__.startswith("transformers_modules.")]:
        custom_object_save(code[0], folder)  # not of FSDP2's own class around it
        written.architectures = [code[0].__name__]
        written.auto_map = {name: str(at).rpartition("--")[2] for name, at in written.auto_map.items()}
    written.save_pretrained(folder)


def _write_tokenizer(options: Any, chats: TrainedChats, folder: Path) -> None:
    """Write the tokenizer, the processor and their chat template.

    A template of the data that the source lacks takes the place of all of them.
    """
    tokenizer, path = options.tokenizer, options.local_tokenizer_path or options.local_path
    named = getattr(tokenizer, "chat_template", None)  # of several templates a dict
    templates = {named} if isinstance(named, str) else {*(named or {}).values()}
    template = None if chats.template in templates and not options.custom_chat_template else chats.template
    patterns = [*_TOKENIZER, *getattr(tokenizer, "vocab_files_names", {}).values()]
    patterns += [] if options.new_pieces else _ADDED_TOKENS
    beside = [*_PROCESSOR, *(_TEMPLATES if template is None else ()), *(("*.py",) if options.trust_remote_code else ())]
    copy_missing(folder_of(path), folder, [*patterns, *beside])
    copy_missing(folder_of(options.local_path), folder, beside)
    if options.new_pieces:  # read again, because verl gives a tokenizer without a padding token one
        written = AutoTokenizer.from_pretrained(path, trust_remote_code=options.trust_remote_code)
        add_tokens(written, options.new_tokens, options.new_special_tokens, path)
        written.save_pretrained(folder)
    if template is not None:
        for file in [folder / name for name in ("tokenizer_config.json", "processor_config.json")]:
            values = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
            if values.pop("chat_template", None) is not None:
                write_json(file, values)
        shutil.rmtree(folder / "additional_chat_templates", ignore_errors=True)  # of a tokenizer with new tokens
        (folder / _TEMPLATE).write_text(template, encoding="utf-8")


def folder_of(path: str) -> Path:
    """Return a folder, or that of a Hub model's files in the cache."""
    for name in () if os.path.isdir(path) else ("tokenizer_config.json", "config.json"):
        if file := cached_file(path, name, **_QUIET):
            return Path(file).parent
    return Path(path)


def copy_missing(source: Path, folder: Path, patterns: Sequence[str] = (*_PROCESSOR, *_TEMPLATES)) -> None:
    """Copy the files of `patterns` that an export lacks; of chat templates, only if it has none."""
    if any(folder.glob("chat_template*")):
        patterns = [pattern for pattern in patterns if pattern not in _TEMPLATES]
    for file in [file for pattern in patterns for file in source.glob(pattern)]:
        if file.is_file() and not (to := folder / file.relative_to(source)).exists():
            to.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, to)


def _write_generation_config(options: Any, config: Any, ends: Sequence[str], folder: Path) -> None:
    """Write the source's generation config with the ends of trained turns.

    Without a source, nothing is written for a model whose turns end as its config says.
    """
    path = cached_file(options.local_hf_config_path, GENERATION, **_QUIET)
    # Keep the source's sampling settings: training knows only the end tokens.
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            path = None  # transformers cannot read it either
    # An end is one token id, and an ordinary token would also stop plain text.
    tokenizer = options.tokenizer
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder} if tokenizer is not None and ends else ()
    encoded = [tokenizer(end, add_special_tokens=False)["input_ids"] for end in ends] if special else []
    trained = [ids[0] for ids in encoded if len(ids) == 1 and ids[0] in special]
    # The model's own end tokens stay, because a list in this file replaces those of its config.
    of_config = GenerationConfig.from_model_config(config)
    before = values.get("eos_token_id")
    for holder in (of_config, tokenizer):
        before = getattr(holder, "eos_token_id", None) if before is None else before
    stops = before if isinstance(before, list) else [] if before is None else [before]
    if new := [token for token in trained if token not in stops]:
        if path is None:
            values = of_config.to_diff_dict()
            values.pop("_from_model_config", None)  # with it, generate() would take the config's end token again
        values["eos_token_id"] = [*stops, *new]
    if path is not None or new:
        write_json(folder / GENERATION, values)
