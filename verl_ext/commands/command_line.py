"""The command line of a command: options, help, errors and exit codes.

A command is a module with an options dataclass, a function of the options, which returns the text to print and raises
UsageError and DataError, and its `main`:

    @dataclass(frozen=True)
    class IndexOptions(SourceOptions):
        '''Text tokenized once into Megatron's indexed form.'''      the first lines of --help

        add_eos: bool = option(True, "one EOS token after each document")
        model: ModelOptions = option(ModelOptions, "the tokenizer")      its fields are model.path, model.tokenizer_path

    main = command("index", IndexOptions, index_texts, example="'sources={books:books/}' output_dir=DIR")

Below a field annotated `dict` or `Any`, the user may choose any keys, such as sources.books=books/.
"""

import inspect
import re
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_origin

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_ext.files import REPORT, output_problems
from verl_ext.options import (
    REQUIRED,
    DataError,
    Option,
    Options,
    UsageError,
    default_values,
    first_line,
    option,
    options_of,
    refuse,
    spell,
    unknown,
)
from verl_ext.overrides import parsed_words, restored
from verl_ext.redaction import redacted_text
from verl_ext.text.read.sources import FORMATS, local_path
from verl_ext.text.tokens.tokenizer import TRUSTED, ModelOptions, leave_out_torch

OptionsT = TypeVar("OptionsT", bound=Options)


@dataclass(frozen=True)
class OutputOptions(Options):
    """The options of all commands that write a folder."""

    marker: ClassVar[str] = REPORT  # the file that marks an output folder of the command

    output_dir: str = option(REQUIRED, "folder that is written; it appears only when complete", required=True)
    overwrite: bool = option(False, "true: replace the whole output_dir if this command wrote it")

    def output_problems(self, kept: str, *paths: str | None) -> list[str]:
        """Return a line if output_dir must not be written or holds inputs.

        paths: the inputs, which `kept` names in words.
        """
        return output_problems(self.output_dir, self.overwrite, self.marker, paths, kept)


@dataclass(frozen=True)
class SourceOptions(OutputOptions):
    """The options of commands that read named sources with a tokenizer."""

    sources: dict[str, Any] = option(
        {}, f"name: file, folder, glob, URL, Hub dataset or list of them; {FORMATS}", required=True
    )
    num_workers: int | None = option(
        None, "worker processes; null: chosen by CPUs and input size. The output does not depend on it", least=1
    )

    @property
    def patterns(self) -> dict[str, list[str]]:
        """The paths and globs of every source, in the order of `sources`."""
        return {name: as_list(value) for name, value in self.sources.items()}

    def file_name_problems(self) -> list[str]:
        """Return a line for each name that an index cannot have."""
        wrong = (
            name
            for name in self.sources
            if not name or name.startswith(".") or name.endswith((".bin", ".idx")) or set(name) & set("/\\\0")
        )
        return [f"sources.{name} must be a file's name, that of {name}.bin and {name}.idx" for name in wrong]

    def source_problems(self, model: ModelOptions) -> list[str]:
        """Return lines for sources without file names and a forbidden output_dir."""
        problems = [
            f"sources.{name} must be a path, a glob or a list of them; got {value!r}"
            for name, value in self.sources.items()
            if not is_names(value)
        ]
        files = [local_path(path) for values in self.patterns.values() if is_names(values) for path in values]
        return problems + self.output_problems("a source, the tokenizer", model.path, model.tokenizer_path, *files)


def as_list(value: Any) -> Any:
    """Wrap a text in a list; return any other value unchanged."""
    return [value] if isinstance(value, str) else value


def is_names(value: Any) -> bool:
    """Tell whether a value is one text or more, none empty."""
    names = as_list(value)
    return isinstance(names, list) and bool(names) and all(isinstance(name, str) and name for name in names)


def command(
    name: str,
    options_class: type[OptionsT],
    run: Callable[[Any], str],
    example: str,
    read: Callable[[Sequence[str]], Any] | None = None,
    loads_models: Callable[[Any], bool] = lambda options: False,
) -> Callable[[Sequence[str]], int]:
    """Return a command's `main`, which runs it and returns an exit code.

    The codes are 0 for success and --help, 1 for DataError and OSError, 2 for UsageError and missing arguments, and
    130 for Ctrl-C and SIGTERM.

    Args:
        name: the command's name after `verl-ext`.
        options_class: its options, for --help and for parsing the words.
        run: the function that executes the command.
        example: the words of the usage line.
        read: a function that parses the words into the argument of `run`, instead of :func:`read_options`.
        loads_models: tells of options whether `run` loads a model, for which transformers needs torch.
    """

    def main(arguments: Sequence[str]) -> int:
        if not arguments or {"-h", "--help"} & set(arguments):
            print(help_text(name, options_class, example))
            return 0 if arguments else 2
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM cleans up like Ctrl-C.
        try:
            options = read(arguments) if read else read_options(options_class, arguments)
            if isinstance(model := getattr(options, "model", None), ModelOptions):
                # torch takes seconds to import, and few commands need it.
                if not loads_models(options):
                    leave_out_torch(model)
                if model.trust_remote_code:
                    print(f"note: {TRUSTED}", file=sys.stderr)
            if text := run(options):
                print(text)
        except (UsageError, DataError, OSError) as error:
            print(f"error: {redacted_text(str(error))}", file=sys.stderr)
            return 2 if isinstance(error, UsageError) else 1
        except KeyboardInterrupt:
            print("error: interrupted; nothing was written", file=sys.stderr)
            return 130
        return 0

    return main


def words_of(words: Iterable[str], keys: Iterable[str]) -> list[str]:
    """Return the overrides of these keys and of the keys below them."""
    nodes = tuple(f"{key}." for key in keys)
    return [word for word in words if f"{word.partition('=')[0].lstrip('+~')}.".startswith(nodes)]


def read_options(options_class: type[OptionsT], arguments: Sequence[str], **more: Any) -> OptionsT:
    """Parse `key=value` words over the class's defaults, in Hydra's grammar.

    more: further values by name, which are not parsed. Raises UsageError with one line for any mistake.
    """
    known = known_options(options_class)
    config = OmegaConf.create(default_values(options_class))
    try:
        for item in parsed_words(arguments):
            key, value = restored(item.key), item.parsed()
            if item.prefix == "~" or "@" in key:
                raise ValueError(unknown(restored(f"{item.prefix}{item.key}"), known))
            given = {key: value}
            if key in known and _is_node(known[key]) and isinstance(value, dict):
                given = {f"{key}.{name}": below for name, below in value.items()}
            for name, below in given.items():
                gone = options_class.gone.get(name)
                refuse([f"unknown key {name}; {gone}" if gone else _problem(name, below, known)])
                OmegaConf.update(config, name, below, merge=True, force_add=True)
        values: Any = OmegaConf.to_container(config, resolve=True)
        for name, value in values.items():
            if isinstance(value, dict):  # the key in sources={2024:a.jsonl} is a number
                values[name] = {key if isinstance(key, str) else spell(key): below for key, below in value.items()}
        return options_class.read({**values, **more})
    except OmegaConfBaseException as error:
        where = getattr(error, "full_key", None)
        raise UsageError(f"{where}: {first_line(error)}" if where else first_line(error)) from error
    except ValueError as error:
        raise UsageError("; ".join(str(error).splitlines())) from error


def known_options(options_class: type[Options], prefix: str = "") -> dict[str, Option]:
    """Return {dotted key: dataclass field}, with nodes before the keys below them."""
    known = {}
    for name, field in options_of(options_class).items():
        known[f"{prefix}{name}"] = field
        if _is_node(field):
            known |= known_options(field.type, f"{prefix}{name}.")
    return known


def help_text(name: str, options_class: type[Options], example: str) -> str:
    """Return the usage, the options' docstring, and a line per option."""
    rows = []
    for key, field in known_options(options_class).items():
        if _is_node(field):
            continue
        default = f"[{','.join(map(spell, value))}]" if isinstance(value := field.default, list) else spell(value)
        if field.required and not field.default:
            default = "required"
        meaning = field.meaning
        if any(choice not in meaning for choice in field.choices):
            meaning += f" ({' | '.join(field.choices)})"
        rows.append((key, default, meaning))
    keys, defaults = (max(len(row[column]) for row in rows) for column in (0, 1))
    indent = " " * (keys + defaults + 6)
    width = max(shutil.get_terminal_size((120, 24)).columns, len(indent) + 40)
    lines = [f"usage: verl-ext {name} {example}", "", inspect.getdoc(options_class) or "", ""]
    for key, default, meaning in rows:
        first = f"  {key:<{keys}}  {default:<{defaults}}  "
        lines += textwrap.wrap(meaning, width, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)
    return "\n".join(lines)


def _is_node(field: Option) -> bool:
    return isinstance(field.type, type) and issubclass(field.type, Options)


def _is_dict(field: Option) -> bool:
    return (get_origin(field.type) or field.type) is dict


def _problem(key: str, value: Any, known: Mapping[str, Option]) -> str | None:
    """Return a line for an unknown key or a value silently misread."""
    field = known.get(key)
    if field is None:
        parents = (known[node] for node in known if key.startswith(f"{node}."))
        if any(parent.type is Any or _is_dict(parent) for parent in parents):
            return None
        return unknown(key, known)
    if _is_node(field):
        keys = ", ".join(other for other in known if other.startswith(f"{key}."))
        return f"{key} must be given by its keys, {keys}; got {spell(value)}"
    if _is_dict(field) and not isinstance(value, dict):
        given = f"[{','.join(map(spell, value))}]" if isinstance(value, list) else spell(value)
        pair = given  # without quotes, the shell turns sources={a:x,b:y} into sources=a:x
        if not re.fullmatch(r"[^:/\\[]+:(?!//)[^:]+", given):
            first = value[0] if isinstance(value, list) and value else value
            pair = f"{Path(spell(first)).name.partition('.')[0] or 'name'}:{given}"
        return f"{key} must map names to values, e.g. '{key}={{{pair}}}'; got {given}"
    return field.problem(key, None) if value is None else None
