"""The command's configuration: composed by Hydra from `conf/init_model.yaml`, typed and checked here."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from verl_ext.commands.output_check import output_problems
from verl_ext.commands.typed_options import least_problems, load_options
from verl_ext.config.nearest import choice_problem
from verl_ext.init_model.architecture import architecture_problem, is_preset
from verl_ext.init_model.tokenizer_config import TokenizerConfig

CONFIG_NAME = "init_model"
MARKER = "init_model.json"  # what the model was made of, by which an output folder of this command is known
DTYPES = ("float32", "bfloat16")
OPEN_NODES = {"config": "fields of the model's config to values"}
# Keys of the architecture that the command sets itself, and from what.
GIVEN_KEYS = {
    "bos_token_id": "the tokenizer",
    "eos_token_id": "the tokenizer",
    "pad_token_id": "the tokenizer",
    "dtype": "dtype",
    "torch_dtype": "dtype",
    "architectures": "model",
    "model_type": "model",
}


@dataclass
class InitModelConfig:
    """Everything that `python -m verl_ext.init_model` takes; the fields are described in `conf/init_model.yaml`."""

    model: Any = MISSING
    output_dir: str = MISSING
    overwrite: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    dtype: str = "float32"
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)

    def __post_init__(self) -> None:
        if isinstance(self.model, dict):  # what `_as_value` made of it
            (self.model,) = self.model.values()
        self.model = str(self.model)

    def problems(self) -> list[str]:
        """One line for every mistake that can be seen without transformers and without opening a source."""
        problems = [problem] if (problem := architecture_problem(self.model)) else []
        keep = [None if is_preset(self.model) else self.model, self.tokenizer.path, *self.tokenizer.train_patterns()]
        kept = "the model, a tokenizer, its text"
        problems += output_problems(self.output_dir, self.overwrite, MARKER, keep, kept)
        for key in GIVEN_KEYS.keys() & self.config.keys():
            problems.append(f"config must not set {key}, which {GIVEN_KEYS[key]} gives; got {self.config[key]}")
        problems += least_problems({"seed": (self.seed, 0)})
        problems += filter(None, [choice_problem("dtype", self.dtype, DTYPES)])
        return problems + self.tokenizer.problems()


def load_config(overrides: Sequence[str]) -> InitModelConfig:
    """Compose `conf/init_model.yaml` with command-line overrides, check it, and return it typed.

    Raises `UsageError` with one line for every mistake.
    """
    return load_options(CONFIG_NAME, InitModelConfig, [_as_value(text) for text in overrides], OPEN_NODES)


def _as_value(text: str) -> str:
    """`model=NAME` as `model={name:NAME}`: a plain value Hydra would look up in the trainer's group conf/model."""
    key, equals, value = text.partition("=")
    return f"model={{name:{value or chr(39) * 2}}}" if key == "model" and equals else text
