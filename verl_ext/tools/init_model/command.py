"""The options of `verl-ext init-model`, and the folder that it writes."""

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from verl_ext.commands.command_line import OutputOptions, command
from verl_ext.files import OutputFolder, follow_umask, write_json
from verl_ext.options import REQUIRED, choice_problem, must, option
from verl_ext.text.tokens.tokenizer import read_tokenizer, tokenizer_path_problems
from verl_ext.tools.init_model.model import PRESETS, TOKEN_IDS, config_file, count_parameters, meta_model, random_model
from verl_ext.tools.init_model.tokenizer import TokenizerOptions, TrainingText, trained_tokenizer

MARKER = "init_model.json"  # the origin of the model
SHARD_BYTES = 5 * 10**9  # of a weight file
GIVEN_KEYS = {*TOKEN_IDS, "dtype", "torch_dtype", "architectures", "model_type"}  # of the architecture, not of `config`


@dataclass(frozen=True)
class InitModelOptions(OutputOptions):
    """Create a Hugging Face folder with random weights and a tokenizer."""

    marker: ClassVar[str] = MARKER

    model: str = option(REQUIRED, f"{', '.join(PRESETS)}, a config.json, or a folder with one", required=True)
    config: dict[str, Any] = option(
        {},
        "architecture keys that replace the model's, e.g. {num_hidden_layers: 4}; null for vocab_size: as many rows "
        "as the tokenizer has tokens; head_dim and layer_types change too if they followed from a changed size",
    )
    seed: int = option(0, "seed that determines the weights bit for bit", least=0, most=2**63 - 1)
    dtype: str = option("float32", "data type of the saved weights, drawn in float32", choices=("float32", "bfloat16"))
    tokenizer: TokenizerOptions = option(TokenizerOptions, "exactly one of tokenizer.path and tokenizer.train_on")

    def problems(self) -> Iterator[str | None]:
        """Yield a line for every mistake visible without transformers or sources."""
        if not config_file(self.model).is_file():
            yield choice_problem("model", self.model, [*PRESETS, "a config.json or a folder with one"])
        path, patterns = self.tokenizer.path, self.tokenizer.train_patterns
        model = None if self.model in PRESETS else self.model
        yield from self.output_problems("the model, a tokenizer, its text", model, path, *patterns)
        for key in sorted(GIVEN_KEYS & self.config.keys()):
            yield must("config", f"not set {key}, which model, dtype or the tokenizer gives", self.config[key])
        if bool(path) == bool(patterns):
            got = f"{path} and {patterns}" if path else "neither"
            yield must("exactly one of tokenizer.path and tokenizer.train_on", "be given", got)
        elif path:
            yield from tokenizer_path_problems(path, "tokenizer.path")
            for name in self.tokenizer.changed().keys() - {"path"}:
                needed = "be left out with tokenizer.path, which is copied as it is"
                yield must(f"tokenizer.{name}", needed, getattr(self.tokenizer, name))


def init_model(options: InitModelOptions) -> str:
    """Write the model; return lines, or raise UsageError or DataError."""
    import torch  # slow to import, like transformers, so only after the checks
    import transformers

    transformers.utils.logging.set_verbosity_error()
    text, model_of = None, (options.model, options.config, options.dtype)
    if options.tokenizer.path is None:
        text = TrainingText(options.tokenizer.train_patterns, options.tokenizer.text_key)
        meta_model(*model_of, options.tokenizer.vocab_size)  # refuses mistakes before the training
    # The tokenizer comes first: its tokens decide the rows of the embedding and the ids in the config.
    with OutputFolder(options.output_dir, options.overwrite) as folder:
        if text is None:
            tokenizer = read_tokenizer(str(options.tokenizer.path), "tokenizer.path")
        else:
            tokenizer = trained_tokenizer(text, options.tokenizer)
        num_tokens = max(tokenizer.get_vocab().values()) + 1
        planned = meta_model(*model_of, num_tokens, **{name: getattr(tokenizer, name) for name in TOKEN_IDS})
        # Draw the weights last, because everything that can be refused is known before.
        total, outside = count_parameters(planned)
        print(f"random weights: {total:,}", file=sys.stderr)
        model = random_model(planned.config, options.seed, options.dtype)
        model.save_pretrained(folder.path, max_shard_size=SHARD_BYTES)
        follow_umask(folder.path)
        tokenizer.save_pretrained(folder.path)
        origin = {key: value for key, value in asdict(options).items() if key not in ("output_dir", "overwrite")}
        # The exact weights depend on these versions.
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        counts = {"parameters": total, "parameters_without_embeddings": outside}
        write_json(folder.path / MARKER, {**origin, **counts, "versions": versions})
        num_bytes = sum(file.stat().st_size for file in folder.path.iterdir())
        folder.publish()
    cls = type(model).__name__
    return "\n".join(
        [
            *_tokenizer_lines(options.tokenizer, tokenizer, text),
            f"model       {options.model}, {cls}: {total:,} parameters, {outside:,} without embeddings",
            f"weights     {options.dtype}, seed {options.seed}; the folder has {num_bytes / 1e6:,.1f} MB",
            *_model_notes(model.config, num_tokens),
            f"written to {options.output_dir}",
        ]
    )


def _tokenizer_lines(options: TokenizerOptions, tokenizer: Any, text: TrainingText | None) -> Iterator[str]:
    tokens = {name: getattr(tokenizer, f"{name}_token") for name in ("bos", "eos", "pad")}
    special = [f"{name} {token} = {getattr(tokenizer, f'{name}_token_id')}" for name, token in tokens.items() if token]
    line = f"tokenizer   {len(tokenizer):,} tokens; {', '.join(special) or 'no special ones'}"
    yield line + (f"; trained on {text.characters:,} characters of {len(text.files):,} files" if text else "")
    if text and len(tokenizer) < options.vocab_size:
        size = f"tokenizer.vocab_size={options.vocab_size:,}"
        yield f"note: the text has pairs to merge for {len(tokenizer):,} tokens, not for {size}"
    if tokenizer.eos_token_id is None:
        yield "note: the tokenizer has no end-of-text token, which data of documents needs between them"


def _model_notes(config: Any, num_tokens: int) -> Iterator[str]:
    # Here, because they import verl, which takes seconds.
    from verl_ext.config.architecture import Architecture
    from verl_ext.config.support import model_support_problems

    if config.vocab_size > num_tokens:
        rows = f"{config.vocab_size:,} rows of the vocabulary, of which the tokenizer uses {num_tokens:,}"
        yield f"note: {rows}; config.vocab_size=null makes as many as it uses"
    for problem in model_support_problems(Architecture(config)):
        yield f"note: this project's trainer refuses such a model: {problem}"


main = command(
    "init-model",
    InitModelOptions,
    init_model,
    example="model=minimind_104m output_dir=DIR ('tokenizer.train_on=[train.jsonl]' | tokenizer.path=TOKENIZER)",
)
