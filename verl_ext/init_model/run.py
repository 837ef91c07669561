"""The run: architecture, tokenizer, random weights, folder."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from verl_ext.commands.errors import DataError
from verl_ext.commands.output_folder import OutputFolder
from verl_ext.commands.tokenizer import read_tokenizer
from verl_ext.config.model_support import model_support_problems
from verl_ext.init_model.architecture import TOKEN_IDS, changed, fitted, read_architecture
from verl_ext.init_model.config import MARKER, InitModelConfig
from verl_ext.init_model.hf_config import hf_config
from verl_ext.init_model.tokenizer import trained_tokenizer
from verl_ext.init_model.training_text import TrainingText, find_training_files
from verl_ext.init_model.weights import count_parameters, random_model, save_model


def init_model(config: InitModelConfig) -> str:
    """Write the model of `config` to `config.output_dir`; return what it is, in lines.

    Raises `UsageError` and `DataError`, each one line, and leaves `output_dir` as it was then.
    """
    fields = changed(read_architecture(config.model), config.config)
    text = None
    if config.tokenizer.path is None:
        text = TrainingText(find_training_files(config.tokenizer.train_patterns()), config.tokenizer.text_key)
        hf_config(fitted(fields, config.tokenizer.vocab_size, {}))  # mistakes in it, before the training
    with OutputFolder(config.output_dir, config.overwrite) as folder:
        tokenizer = _tokenizer(config, text)
        num_tokens = max(tokenizer.get_vocab().values()) + 1
        ids = {name: getattr(tokenizer, name) for name in TOKEN_IDS}
        made_of = hf_config(fitted(fields, num_tokens, ids))
        model = random_model(made_of, config.seed, config.dtype)
        save_model(model, folder.path)
        tokenizer.save_pretrained(folder.path)
        _write_marker(folder.path, config, count_parameters(model))
        num_bytes = sum(file.stat().st_size for file in folder.path.iterdir())
        folder.publish()
    lines = [*_tokenizer_lines(config, tokenizer, text), *_model_lines(config, model, num_tokens, num_bytes)]
    return "\n".join(lines)


def _tokenizer(config: InitModelConfig, text: TrainingText | None) -> Any:
    if text is None:
        assert config.tokenizer.path is not None, "problems() is empty"
        return read_tokenizer(config.tokenizer.path, "tokenizer.path")
    tokenizer = trained_tokenizer(text, config.tokenizer)
    if not text.characters:
        patterns = ", ".join(config.tokenizer.train_patterns())
        raise DataError(f"tokenizer.train_on must hold text; got none in {patterns}")
    return tokenizer


def _write_marker(folder: Path, config: InitModelConfig, counts: tuple[int, int]) -> None:
    """What the model was made of: the options, the parameters, and the versions that the weights' bits depend on."""
    options = {key: value for key, value in asdict(config).items() if key not in ("output_dir", "overwrite")}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    made = {**options, "parameters": counts[0], "parameters_without_embeddings": counts[1], "versions": versions}
    (folder / MARKER).write_text(json.dumps(made, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _tokenizer_lines(config: InitModelConfig, tokenizer: Any, text: TrainingText | None) -> list[str]:
    tokens = {name: getattr(tokenizer, f"{name}_token") for name in ("bos", "eos", "pad")}
    special = [f"{name} {token} = {getattr(tokenizer, f'{name}_token_id')}" for name, token in tokens.items() if token]
    lines = [f"tokenizer   {len(tokenizer):,} tokens; {', '.join(special) or 'no special ones'}"]
    if text is not None:
        lines[0] += f"; trained on {text.characters:,} characters of {len(text.files):,} files"
        if len(tokenizer) < config.tokenizer.vocab_size:
            asked = f"tokenizer.vocab_size={config.tokenizer.vocab_size:,}"
            lines.append(f"note: the text has pairs to merge for {len(tokenizer):,} tokens, not for {asked}")
    if tokenizer.eos_token_id is None:
        lines.append("note: the tokenizer has no end-of-text token, which data of documents needs between them")
    return lines


def _model_lines(config: InitModelConfig, model: Any, num_tokens: int, num_bytes: int) -> list[str]:
    total, outside = count_parameters(model)
    name = f"{config.model}, {model.config.architectures[0]}"
    lines = [
        f"model       {name}: {total:,} parameters, {outside:,} without embeddings",
        f"weights     {config.dtype}, seed {config.seed}; the folder has {num_bytes / 1e6:,.1f} MB",
    ]
    if model.config.vocab_size > num_tokens:
        rows = f"{model.config.vocab_size:,} rows of the vocabulary, of which the tokenizer uses {num_tokens:,}"
        lines.append(f"note: {rows}; config.vocab_size=null makes as many as it uses")
    problems = model_support_problems(model.config)
    return lines + [f"note: this project's trainer refuses such a model: {problem}" for problem in problems]
