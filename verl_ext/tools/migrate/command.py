r"""The command `verl-ext migrate`, which translates other trainers' configurations.

verl-ext migrate qwen3_full_sft.yaml nproc=8       LLaMA-Factory, axolotl or TRL
verl-ext migrate sft.sh                            a script of ms-swift, TRL or verl
verl-ext migrate 'swift sft --model … --dataset …'
verl-ext migrate 'torchrun … -m verl.trainer.fsdp_sft_trainer model.partial_pretrain=$M …'
"""

import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any, NamedTuple
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
from verl_ext.tools.migrate.line import Moved, mapping, number, tokenize_keys, written_run
from verl_ext.tools.migrate.reading import IMAGE_SETTINGS, file_below, flags_of, read_yaml, topology_of
from verl_ext.tools.migrate.script import commands_of
from verl_ext.tools.migrate.tables import page


class Reader(NamedTuple):
    """A trainer's name, the function that reads its keys, and whether they are of a training."""

    trainer: str
    read: Callable[[Moved], None]
    trains: bool = True


# By the names that tables/programs.yaml has for them
READERS = {
    "axolotl": Reader("axolotl", axolotl.read_axolotl),
    "axolotl_served": Reader("axolotl", serving.read_axolotl_model, trains=False),
    "axolotl_written": Reader("axolotl", partial(serving.read_axolotl_model, writes=True), trains=False),
    "llamafactory": Reader("LLaMA-Factory", llamafactory.read_llamafactory),
    "llamafactory_v1": Reader("LLaMA-Factory", llamafactory_v1.read_llamafactory_v1),
    "llamafactory_served": Reader("LLaMA-Factory", serving.read_llamafactory_model, trains=False),
    "swift": Reader("ms-swift", swift.read_swift),
    "megatron": Reader("ms-swift", swift_megatron.read_megatron),
    "swift_served": Reader("ms-swift", serving.read_swift_model, trains=False),
    "swift_written": Reader("ms-swift", partial(serving.read_swift_model, writes=True), trains=False),
    "trl": Reader("TRL", trl.read_trl),
    "trl_dpo": Reader("TRL", partial(trl.read_trl, family="dpo")),
    "trl_kto": Reader("TRL", partial(trl.read_trl, family="kto")),
    "accelerate": Reader("accelerate", launcher.read_launcher, trains=False),
}


class _Program(NamedTuple):
    """A program with its keys: the name of their reader, and all ranks and nodes that its words tell."""

    reader: str
    values: dict[str, Any]
    ranks: int | None = None
    nodes: int = 1


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
    is_file = _is_file(path)
    folder = path.parent if is_file else Path()
    if is_file and path.suffix in (".yaml", ".yml", ".json"):
        values = read_yaml(path)
        program = _Program(_reader_of(values, path), values)
    else:
        text = _script(path) if is_file else options.command
        if not is_file and re.fullmatch(r"\S+\.(ya?ml|sh|json)", text):
            raise UsageError(must("command", "be a command or an existing file", text))
        # A command of verl's keeps its own words, so it does not become a mapping of keys.
        own = verl.migrate_script if is_file else verl.migrate_verl
        if (is_file or verl.is_verls(text)) and (found := own(text, options.to)) is not None:
            return found
        program = _program_of(text, folder)
    reader = READERS[program.reader]
    moved = Moved(reader.trainer, program.values, program.ranks, folder, program.nodes)
    if options.nproc is not None:
        moved.ranks, moved.nodes = options.nproc, 1
    reader.read(moved)
    if not isinstance(model := moved.words.get("model.path", ""), str):
        raise DataError(must("the model", "be a name or a folder", model))
    if moved.other is not None:
        for name in ("recipe", "to"):
            if (value := getattr(options, name)) is not None:
                raise UsageError(must(name, "be null for a configuration that trains nothing", value))
        return moved.command()
    moved.problems += _problems(moved)
    if options.to is not None:
        return written_run(options.to, moved.overrides(), moved.nproc, [*moved.comments()])
    return moved.command() if options.recipe is None else moved.recipe(options.recipe)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a command may be longer than a name
        return False


def _script(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} must be a YAML or a shell script; it cannot be read as a text") from error


def _reader_of(values: dict[str, Any], path: Path) -> str:
    """Return the name of the reader for a file's keys."""
    for row in page("programs")["files"]:
        others = row.get("one_of", "").split()
        if {*row["keys"].split()} <= values.keys() and (not others or {*others} & values.keys()):
            reader: str = row["reader"]
            is_training = {"model_name_or_path", "stage"} <= values.keys() and not values.get("do_predict")
            if is_training and not READERS[reader].trains:
                raise UsageError(f"{path} must be of a training; it names no dataset")
            return reader
    raise UsageError(f"{path} must be of axolotl, LLaMA-Factory, ms-swift or TRL; it has the keys of none")


def _program_of(text: str, folder: Path) -> _Program:
    """Return the program that a text's commands start, one that trains before all others."""
    programs: list[_Program] = []
    refused = None
    for words in commands_of(text):
        line = " ".join(words)
        if re.match(r"(\w+=\S* )*(echo|printf)\b", line):  # it shows a command and starts none
            continue
        found = ((row, match) for row in page("programs")["commands"] if (match := re.search(row["words"], line)))
        row, match = next(found, (None, None))
        if row is None or match is None:
            continue
        if "reader" not in row:
            refused = refused or match[0].strip()
            continue
        # What the command itself says wins over its file, its launcher and its program.
        start = next(n for n in range(1, len(words) + 1) if len(" ".join(words[:n])) >= match.end())
        reader, values = _with_file(row["reader"], words[start:], folder)
        launched = launcher.launched_by(words[:start], folder)
        topology = launched.pop("topology", {}) | topology_of(words)
        ranks, nodes = _ranks_and_nodes(topology)
        values = launched | values
        for key, usual in row.get("usual", {}).items():
            values.setdefault(key, usual)
        if READERS[reader].trainer == "ms-swift":
            values |= dict(word.split("=", 1) for word in words[:start] if word.startswith(IMAGE_SETTINGS))
        programs.append(_Program(reader, values, ranks, nodes))
    # A script may export or serve what it has trained; its training is translated.
    training = [each for each in programs if READERS[each.reader].trains]
    if len(training) > 1:
        print(f"note: the first of {len(training)} commands that train is translated", file=sys.stderr)
    if training:
        swift.take_cached(training[0].values, [each.values for each in programs if each.reader == "swift_written"])
    if programs:
        return (training or programs)[0]
    if refused is not None:
        raise UsageError(must("command", "train on texts or given answers", refused))
    raise UsageError("command must start axolotl, LLaMA-Factory, ms-swift, TRL or verl's SFT trainer; got none of them")


def _ranks_and_nodes(topology: Mapping[str, str]) -> tuple[int | None, int]:
    """Return all ranks of a topology (None: unknown) and its nodes."""
    per_node, nodes, ranks = (
        int(value) if (value := str(topology.get(name))).isdigit() else None for name in ("per_node", "nodes", "ranks")
    )
    if per_node is not None:  # torchrun's; the words of a launcher of one program do not have both
        ranks = per_node * (nodes or 1)
    return ranks or None, nodes or 1


def _with_file(reader: str, words: Sequence[str], folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the reader and the keys of a command's words and of the YAML that they name."""
    values = flags_of(words)
    trainer = READERS[reader].trainer
    named = values.pop("config", None) if trainer in ("TRL", "ms-swift") else None
    if named is None and words and words[0].endswith((".yaml", ".yml", ".json")):
        named = words[0]
    if named is None:
        return reader, values
    path = file_below(folder, str(named))
    if path is None:
        raise UsageError(must("command", "name an existing file of keys", named))
    of_file = read_yaml(path)
    variables = mapping("ENV", of_file.pop("ENV", None)) if trainer == "ms-swift" else {}
    of_file |= {key: value for key, value in variables.items() if key in IMAGE_SETTINGS}
    # LLaMA-Factory's one command trains on files of both of its versions.
    return _reader_of(of_file, path) if reader == "llamafactory" else reader, of_file | values


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
    # What `tokenize` refuses; it writes nothing here, because its options alone are read.
    new = Path(gettempdir()) / uuid4().hex
    if not words_of(words, ["data.sources"]):
        problems.append("data.sources is required: the command names no data")
    try:
        given = [word.replace("data.sources", "sources", 1) for word in words_of(words, ["data.sources"])]
        read_options(TokenizeOptions, [*given, *encoding, "model.path=owner/name", f"output_dir={new}"])
    except ValueError as error:
        problems += str(error).splitlines() if given else []
    # What the trainer refuses, on a CPU, where no device is looked for.
    overrides = [word for word in words if word not in sources and word not in encoding]
    validates = ["data.val_dir=DIR"] * moved.validates
    ranks = moved.ranks or int(number(moved.words.get("engine.ulysses_sequence_parallel_size"), 1))
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
