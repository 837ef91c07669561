"""`verl-ext init-model`: its options, and the folder that it writes: architecture, tokenizer, random weights."""

import sys
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from verl_ext.commands.command_line import OutputOptions, command
from verl_ext.commands.init_model.model import (
    PRESETS,
    TOKEN_IDS,
    changed,
    check_memory,
    count_parameters,
    fitted,
    hf_config,
    meta_model,
    model_problem,
    random_model,
    read_fields,
)
from verl_ext.commands.init_model.tokenizer import TokenizerOptions, TrainingText, trained_tokenizer
from verl_ext.files import OutputFolder, follow_umask, write_json
from verl_ext.text.tokenizer import read_tokenizer
from verl_ext.values import REQUIRED, DataError, option

MARKER = "init_model.json"  # what the model was made of
SHARD_BYTES = 5 * 10**9  # of one file of weights
# Keys of the architecture that the command sets itself, and from what.
GIVEN_KEYS = {
    **dict.fromkeys(TOKEN_IDS, "the tokenizer"),
    **dict.fromkeys(("dtype", "torch_dtype"), "dtype"),
    **dict.fromkeys(("architectures", "model_type"), "model"),
}


@dataclass(frozen=True)
class InitModelOptions(OutputOptions):
    """A model from scratch: a Hugging Face folder with random weights, and a tokenizer that is trained or copied."""

    marker: ClassVar[str] = MARKER
    maps: ClassVar[dict[str, str]] = {"config": "fields of the model's config to values"}

    model: str = option(REQUIRED, f"{', '.join(PRESETS)}, a config.json, or a folder with one", required=True)
    config: dict[str, Any] = option(
        {},
        "the architecture's own keys, over the model's, e.g. {num_hidden_layers: 4}; vocab_size: null is as many rows "
        "as the tokenizer has tokens; head_dim and layer_types follow where they followed from the sizes changed",
    )
    seed: int = option(0, "seed of the weights, which it determines bit for bit", least=0)
    dtype: str = option(
        "float32", "type of the saved weights, which are drawn in float32", choices=("float32", "bfloat16")
    )
    tokenizer: TokenizerOptions = option(TokenizerOptions, "exactly one of tokenizer.path and tokenizer.train_on")

    def problems(self) -> list[str]:
        """One line for every mistake that can be seen without transformers and without opening a source."""
        problems = [problem] if (problem := model_problem(self.model)) else []
        model = None if self.model in PRESETS else self.model
        paths = (model, self.tokenizer.path, *self.tokenizer.train_patterns)
        problems += self.output_problems("the model, a tokenizer, its text", *paths)
        for key in GIVEN_KEYS.keys() & self.config.keys():
            problems.append(f"config must not set {key}, which {GIVEN_KEYS[key]} gives; got {self.config[key]}")
        return [*problems, *self.tokenizer.source_problems()]


def init_model(options: InitModelOptions) -> str:
    """Write the model to `output_dir`; return what it is, in lines. Raises UsageError and DataError, each one line."""
    import torch  # heavy, as transformers: not for a command with a mistake in it
    import transformers

    transformers.utils.logging.set_verbosity_error()
    fields = changed(read_fields(options.model), options.config)
    text = None
    if options.tokenizer.path is None:
        text = TrainingText(options.tokenizer.train_patterns, options.tokenizer.text_key)
        config = hf_config(fitted(fields, options.tokenizer.vocab_size, {}))  # mistakes in it, before the training
        check_memory(count_parameters(meta_model(config))[0], options.dtype)
    with OutputFolder(options.output_dir, options.overwrite) as folder:
        tokenizer = _tokenizer(options.tokenizer, text)
        num_tokens = max(tokenizer.get_vocab().values()) + 1
        ids = {name: getattr(tokenizer, name) for name in TOKEN_IDS}
        config = hf_config(fitted(fields, num_tokens, ids))
        count = count_parameters(meta_model(config))[0]
        check_memory(count, options.dtype)
        print(f"random weights: {count:,}", file=sys.stderr)
        model = random_model(config, options.seed, options.dtype)
        model.save_pretrained(folder.path, max_shard_size=SHARD_BYTES)
        follow_umask(folder.path)
        tokenizer.save_pretrained(folder.path)
        origin = {key: value for key, value in asdict(options).items() if key not in ("output_dir", "overwrite")}
        origin["parameters"], origin["parameters_without_embeddings"] = count_parameters(model)
        # the weights' bits depend on them
        origin["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
        write_json(folder.path / MARKER, origin)
        num_bytes = sum(file.stat().st_size for file in folder.path.iterdir())
        folder.publish()
    lines = _tokenizer_lines(options.tokenizer, tokenizer, text) + _model_lines(options, model, num_tokens, num_bytes)
    return "\n".join([*lines, f"written to {options.output_dir}"])


def _tokenizer(options: TokenizerOptions, text: TrainingText | None) -> Any:
    if text is None:
        return read_tokenizer(str(options.path), "tokenizer.path")
    tokenizer = trained_tokenizer(text, options)
    if not text.characters:
        raise DataError(f"tokenizer.train_on must hold text; got none in {', '.join(options.train_patterns)}")
    return tokenizer


def _tokenizer_lines(options: TokenizerOptions, tokenizer: Any, text: TrainingText | None) -> list[str]:
    tokens = {name: getattr(tokenizer, f"{name}_token") for name in ("bos", "eos", "pad")}
    special = [f"{name} {token} = {getattr(tokenizer, f'{name}_token_id')}" for name, token in tokens.items() if token]
    lines = [f"tokenizer   {len(tokenizer):,} tokens; {', '.join(special) or 'no special ones'}"]
    if text is not None:
        lines[0] += f"; trained on {text.characters:,} characters of {len(text.files):,} files"
        if len(tokenizer) < options.vocab_size:
            asked = f"tokenizer.vocab_size={options.vocab_size:,}"
            lines.append(f"note: the text has pairs to merge for {len(tokenizer):,} tokens, not for {asked}")
    if tokenizer.eos_token_id is None:
        lines.append("note: the tokenizer has no end-of-text token, which data of documents needs between them")
    return lines


def _model_lines(options: InitModelOptions, model: Any, num_tokens: int, num_bytes: int) -> list[str]:
    from verl_ext.config.support import model_support_problems  # heavy: it imports verl

    total, outside = count_parameters(model)
    name = f"{options.model}, {model.config.architectures[0]}"
    lines = [
        f"model       {name}: {total:,} parameters, {outside:,} without embeddings",
        f"weights     {options.dtype}, seed {options.seed}; the folder has {num_bytes / 1e6:,.1f} MB",
    ]
    if model.config.vocab_size > num_tokens:
        rows = f"{model.config.vocab_size:,} rows of the vocabulary, of which the tokenizer uses {num_tokens:,}"
        lines.append(f"note: {rows}; config.vocab_size=null makes as many as it uses")
    problems = model_support_problems(model.config)
    return lines + [f"note: this project's trainer refuses such a model: {problem}" for problem in problems]


main = command(
    "init-model",
    InitModelOptions,
    init_model,
    example="model=minimind_104m output_dir=DIR ('tokenizer.train_on=[train.jsonl]' | tokenizer.path=TOKENIZER)",
)
