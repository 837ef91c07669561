r"""The command `verl-ext migrate`, which translates other trainers' configurations.

verl-ext migrate qwen3_full_sft.yaml nproc=8       LLaMA-Factory, axolotl or TRL
verl-ext migrate sft.sh                            a script of ms-swift, TRL or verl
verl-ext migrate 'swift sft --model … --dataset …'
verl-ext migrate 'torchrun … -m verl.trainer.fsdp_sft_trainer model.partial_pretrain=$M …'
"""

import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any
from uuid import uuid4

from verl_ext.commands.command_line import command, read_options, words_of
from verl_ext.options import REQUIRED, DataError, Options, UsageError, must, option
from verl_ext.tools.migrate import (
    axolotl,
    launcher,
    llamafactory,
    llamafactory_v1,
    serving,
    swift,
    swift_megatron,
    trl,
    verl,
)
from verl_ext.tools.migrate.line import Moved, mapping, tokenize_keys, written_run
from verl_ext.tools.migrate.reading import IMAGE_SETTINGS, flags_of, ranks_of, read_yaml
from verl_ext.tools.migrate.script import commands_of

Reader = Callable[[Moved, Path], None]


@dataclass(frozen=True)
class MigrateOptions(Options):
    """Translate another trainer's configuration into a command of `verl-ext train`.

    It reads a YAML of axolotl, of LLaMA-Factory (with its dataset_info.json) or of TRL, a command or script of
    ms-swift, TRL, LLaMA-Factory or axolotl, and a command of verl's own SFT trainers. Comments below the new command
    name each key without an equivalent, each unknown key, and each default that differs.
    """

    command: str = option(
        REQUIRED,
        "the old command, as it stands in a shell script, or the file that holds the configuration",
        required=True,
    )
    nproc: int | None = option(
        None, "number of ranks, by which a step's rows are counted; null: that of the command, or 1", least=1
    )
    recipe: str | None = option(None, "name of a recipe: a YAML for --config-dir is printed instead of a long command")
    to: str | None = option(None, "new FILE.yaml that is written: `verl-ext train FILE.yaml` starts the run")

    def problems(self) -> Iterator[str]:
        """Yield a line for two forms of the result."""
        if self.to is not None and self.recipe is not None:
            yield must("to", f"be null beside recipe={self.recipe}, which is another form", self.to)


def migrate(options: MigrateOptions) -> str:
    """Return the new command and its comments, or raise UsageError."""
    path = Path(options.command).expanduser()
    text, folder, values, reader = options.command, Path(), None, None
    if _is_file(path):
        folder = path.parent
        if path.suffix in (".yaml", ".yml", ".json"):
            values = read_yaml(path)
            name, reader = _of_keys(values, path)
        else:
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(f"{path} must be a YAML or a shell script; it cannot be read as a text") from error
    elif re.fullmatch(r"\S+\.(ya?ml|sh|json)", options.command):
        raise UsageError(must("command", "be a command or an existing file", options.command))
    if reader is None and (_is_file(path) or verl.is_verls(text)):
        migrated = verl.migrate_script if _is_file(path) else verl.migrate_verl
        found = migrated(text, options.to)
        if found is not None:
            return found
    ranks = None
    if reader is None:
        name, reader, values, ranks = _of_command(text, folder)
    assert values is not None
    moved = Moved(name, values, options.nproc or ranks, (Path(), folder, *folder.resolve().parents))
    reader(moved, folder)
    if not isinstance(model := moved.words.get("model.path", ""), str):
        raise DataError(must("the model", "be a name or a folder", model))
    if moved.other is not None:
        for name in ("recipe", "to"):
            if (value := getattr(options, name)) is not None:
                raise UsageError(must(name, "be null for a configuration that trains nothing", value))
        return moved.command()
    moved.problems += _problems(moved)
    if options.to is not None:
        return written_run(options.to, moved.overrides(), moved.ranks, [*moved.comments()])
    return moved.command() if options.recipe is None else moved.recipe(options.recipe)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a command may be longer than a name
        return False


def _of_keys(values: dict[str, Any], where: Path) -> tuple[str, Reader]:
    """Return the trainer that a YAML's keys are of."""
    if "base_model" in values:
        return axolotl.NAME, axolotl.read_axolotl
    if "train_dataset" in values and "model" in values:
        return llamafactory.NAME, llamafactory_v1.read_llamafactory_v1
    if "model_name_or_path" in values and "dataset_name" in values:
        return trl.NAME, trl.read_trl
    if "model_name_or_path" in values and {"stage", "cutoff_len", "finetuning_type", "template"} & values.keys():
        if "dataset" in values:
            return llamafactory.NAME, llamafactory.read_llamafactory
        if "stage" in values and not values.get("do_predict"):
            raise UsageError(f"{where} must be of a training; it names no dataset")
        return llamafactory.NAME, serving.read_llamafactory_model
    if "model" in values and "peft_config" in values:
        return llamafactory.NAME, serving.read_llamafactory_model
    if "distributed_type" in values:
        return launcher.NAME, launcher.read_launcher
    if "model" in values and "dataset" in values:
        return swift.NAME, swift.read_swift
    raise UsageError(f"{where} must be of axolotl, LLaMA-Factory, ms-swift or TRL; it has the keys of none")


def _of_command(text: str, folder: Path) -> tuple[str, Reader, dict[str, Any], int | None]:
    """Return a command's trainer, its reader, keys and ranks."""
    found: list[tuple[str, Reader, dict[str, Any], int | None]] = []
    others: list[tuple[str, Reader, dict[str, Any], int | None]] = []  # which train nothing
    refused = None
    for words in commands_of(text):
        line = " ".join(words)
        if re.match(r"(\w+=\S* )*(echo|printf)\b", line):
            continue
        for pattern, name, read in _STARTS:
            if not (match := re.search(pattern, line)):
                continue
            if read is None:
                refused = refused or match[0].strip()
            if read is not None:
                start = next(n for n in range(1, len(words) + 1) if len(" ".join(words[:n])) >= match.end())
                read, values = _with_file(name, read, words[start:], folder)
                launched = launcher.launched_by(words[:start], folder)
                own = launched.pop("ranks", "")
                ranks = str(ranks_of(words) or own)
                if name == swift.NAME:
                    if "rlhf" in match[0]:
                        values.setdefault("rlhf_type", "dpo")
                    if re.search(r"\bpt\b", match[0]):
                        values.setdefault("use_chat_template", False)
                    values |= dict(word.split("=", 1) for word in words[:start] if word.startswith(IMAGE_SETTINGS))
                trains = read not in _WITHOUT_TRAINING
                (found if trains else others).append(
                    (name, read, launched | values, int(ranks) if ranks.isdigit() else None)
                )
            break
    if len(found) > 1:
        print(f"note: the first of {len(found)} commands that train is translated", file=sys.stderr)
    if found and others:
        swift.take_cached(found[0][2], [values for _, read, values, _ in others if read is _SWIFT_EXPORT])
    if found or others:
        return (found or others)[0]
    if refused is not None:
        raise UsageError(must("command", "train on texts or given answers", refused))
    raise UsageError("command must start axolotl, LLaMA-Factory, ms-swift, TRL or verl's SFT trainer; got none of them")


_SWIFT_EXPORT = partial(serving.read_swift_model, writes=True)
_AXOLOTL_EXPORT = partial(serving.read_axolotl_model, writes=True)
# (the words that start a trainer, its name, its reader); those without a reader train something else.
_STARTS: tuple[tuple[str, str, Reader | None], ...] = (
    (r"\bswift (sft|pt|rlhf)\b|swift/cli/(sft|pt|rlhf)\.py", swift.NAME, swift.read_swift),
    (r"\bswift (infer|deploy|app)\b|swift/cli/(infer|deploy|app)\.py", swift.NAME, serving.read_swift_model),
    (r"\bswift (export|merge-lora)\b|swift/cli/(export|merge_lora)\.py", swift.NAME, _SWIFT_EXPORT),
    (r"\bmegatron (sft|pt|rlhf)\b|_megatron/(sft|pt|rlhf)\.py", swift.NAME, swift_megatron.read_megatron),
    (
        r"\bmegatron \w+\b|swift/cli/_megatron/\w+\.py|\bswift [a-z-]+\b|swift/cli/\w+\.py",
        swift.NAME,
        None,
    ),
    (r"\bsft_(vlm|diffusion)\w*\.py", trl.NAME, None),
    (r"\btrl sft\b|\bsft\w*\.py", trl.NAME, trl.read_trl),
    (r"\btrl dpo\b|\bdpo\.py", trl.NAME, partial(trl.read_trl, family="dpo")),
    (r"\btrl kto\b|\bkto\.py", trl.NAME, partial(trl.read_trl, family="kto")),
    (r"\btrl [a-z]+\b|trl/scripts/\w+\.py", trl.NAME, None),
    (
        r"\b(llamafactory-cli|lmf) train\b|llamafactory/\S*train\S*\.py|\bsrc/train\.py",
        llamafactory.NAME,
        llamafactory.read_llamafactory,
    ),
    (r"\b(llamafactory-cli|lmf) (chat|webchat|api|export)\b", llamafactory.NAME, serving.read_llamafactory_model),
    (r"\baxolotl inference\b|-m axolotl\.cli\.inference\b", axolotl.NAME, serving.read_axolotl_model),
    (
        r"\baxolotl merge-lora\b|-m axolotl\.cli\.merge_lora\b",
        axolotl.NAME,
        _AXOLOTL_EXPORT,
    ),
    (r"\baxolotl train\b|-m axolotl\.cli\.train\b", axolotl.NAME, axolotl.read_axolotl),
)


_WITHOUT_TRAINING = (
    *(serving.read_llamafactory_model, serving.read_swift_model, serving.read_axolotl_model),
    *(_SWIFT_EXPORT, _AXOLOTL_EXPORT),
)


def _with_file(name: str, read: Reader, words: Sequence[str], folder: Path) -> tuple[Reader, dict[str, Any]]:
    """Return the reader and the keys of a command's words and of the YAML that they name."""
    values = flags_of(words)
    named = values.pop("config", None) if name in (trl.NAME, swift.NAME) else None
    if named is None and words and words[0].endswith((".yaml", ".yml", ".json")):
        named = words[0]
    if named is None:
        return read, values
    places = [root / str(named) for root in (Path(), folder, *folder.resolve().parents)]
    path = next((each for each in places if each.is_file()), None)
    if path is None:
        raise UsageError(must("command", "name an existing file of keys", named))
    of_file = read_yaml(path)
    variables = mapping("ENV", of_file.pop("ENV", None)) if name == swift.NAME else {}
    of_file |= {key: value for key, value in variables.items() if key in IMAGE_SETTINGS}
    if read is llamafactory.read_llamafactory:
        read = _of_keys(of_file, path)[1]
    return read, of_file | values


def _problems(moved: Moved) -> list[str]:
    """Return what the checks of `tokenize` and of the trainer refuse in the new command.

    The data and the model are not known yet.
    """
    from verl_ext.commands.tokenize import TokenizeOptions
    from verl_ext.commands.train import NODES
    from verl_ext.config.check import batch_problem, optimizer_problem
    from verl_ext.config.compose import compose  # imports torch and verl, which takes seconds
    from verl_ext.config.resolve import resolve_run
    from verl_ext.config.run import Machine
    from verl_ext.config.upstream import fixed_value_problems
    from verl_ext.engines.schedule import schedule_problems

    # The shell puts a value in place of each variable: a name in a path, else a number, which other options take.
    variable = re.compile(r"\$\{[^}]*\}|\$\([^()]*\)|\$\w+")
    values = {"data.max_tokens": "2", "data.sources": "x", "data.val_sources": "x"}
    words = [
        variable.sub(next((values[key] for key in values if word.startswith(key)), "1"), word)
        for word in moved.overrides()
    ]
    sources = words_of(words, NODES.values())
    encoding = words_of(words, tokenize_keys())
    problems: list[str] = []
    new = Path(gettempdir()) / uuid4().hex  # nothing is written
    if not words_of(words, ["data.sources"]):
        problems.append("data.sources is required: the command names no data")
    try:
        given = [word.replace("data.sources", "sources", 1) for word in words_of(words, ["data.sources"])]
        read_options(TokenizeOptions, [*given, *encoding, "model.path=owner/name", f"output_dir={new}"])
    except ValueError as error:
        problems += str(error).splitlines() if given else []
    overrides = [word for word in words if word not in sources and word not in encoding]
    validates = ["data.val_dir=DIR"] * moved.validates
    ranks = moved.ranks or int(moved.words.get("engine.ulysses_sequence_parallel_size", 1))
    try:
        composed = compose([*overrides, "data.train_dir=DIR", *validates, "parallel=cpu"])
        config = resolve_run(composed, Machine(ranks))
        found = [batch_problem(config, ranks), *schedule_problems(config.optim), *fixed_value_problems(config.values)]
        problems += [line for line in found if line]
        if (problem := optimizer_problem(config)) and "must be a module that is installed" not in problem:
            problems.append(problem)
    except ValueError as error:
        problems += str(error).splitlines()
    return problems


def _read(words: Sequence[str]) -> MigrateOptions:
    """Return the options from one word, or from all words after `migrate`."""
    own = [] if len(words) > 1 and not _is_whole(words[0]) else words_of(words, ["nproc", "recipe", "to"])
    rest = [word for word in words if word not in own]
    if rest and rest[0].startswith("command="):
        return read_options(MigrateOptions, words)
    if not rest:
        return read_options(MigrateOptions, own)
    return read_options(MigrateOptions, own, command=rest[0] if len(rest) == 1 else shlex.join(rest))


def _is_whole(word: str) -> bool:
    """Tell whether the first word is the whole command, or its file."""
    return " " in word or word.endswith((".yaml", ".yml", ".sh", ".json")) or _is_file(Path(word))


main = command("migrate", MigrateOptions, migrate, "FILE|COMMAND [nproc=N] [to=FILE.yaml]", _read)
