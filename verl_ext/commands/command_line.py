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
import logging
import re
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_origin

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_ext.config import key_table
from verl_ext.files import REPORT, output_problems
from verl_ext.options import (
    REQUIRED,
    DataError,
    Option,
    Options,
    UsageError,
    default_values,
    first_line,
    must,
    nearest_key,
    option,
    options_of,
    refuse,
    spell,
    unknown,
)
from verl_ext.overrides import Item, parsed_words, quoted, restored, split_flags
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
            must(f"sources.{name}", "be a path, a glob or a list of them", value)
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
    first: str | Callable[[str], str] | None = None,
    needs_words: bool = True,
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
        first: the option that a first word without a `=` gives, or a function that returns its override.
        needs_words: whether the command prints its help if it gets no words.
    """

    def main(arguments: Sequence[str]) -> int:
        if (needs_words and not arguments) or {"-h", "--help"} & set(arguments):
            return print_help(partial(help_text, name, options_class, example), arguments)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM cleans up like Ctrl-C.
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # PEFT imports it: it warns of a kernel it lacks
        if first is not None and arguments and not re.search(r"^-|=", arguments[0]):
            word, *others = arguments
            arguments = [first(word) if callable(first) else f"{first}={quoted(word)}", *others]
        try:
            options = read(arguments) if read else read_options(options_class, arguments)
            if isinstance(model := getattr(options, "model", None), ModelOptions):
                # torch takes seconds to import, and few commands need it.
                if not loads_models(options):
                    leave_out_torch(model)
                if model.trust_remote_code:
                    print(f"note: {TRUSTED}", file=sys.stderr)
            text = run(options)
        except (UsageError, DataError, OSError) as error:
            print(f"error: {redacted_text(str(error))}", file=sys.stderr)
            return 2 if isinstance(error, UsageError) else 1
        except KeyboardInterrupt:
            print("error: interrupted; nothing was written", file=sys.stderr)
            return 130
        if text:
            print(text)
        return 0

    return main


def print_help(text: Callable[[str], str], arguments: Sequence[str]) -> int:
    """Print the help of a command for the topic behind the flag, if any; return the exit code."""
    flag = next((number for number, word in enumerate(arguments) if word in ("-h", "--help")), len(arguments))
    try:
        print(text(next(iter(arguments[flag + 1 :]), "")))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if arguments else 2


def words_of(words: Iterable[str], keys: Iterable[str]) -> list[str]:
    """Return the overrides of these keys and of the keys below them."""
    nodes = tuple(f"{key}." for key in keys)
    return [word for word in words if f"{Item.read(word).key}.".startswith(nodes)]


def read_options(options_class: type[OptionsT], arguments: Sequence[str], **more: Any) -> OptionsT:
    """Parse `key=value` words over the class's defaults, in Hydra's grammar.

    more: further values by name, which are not parsed. Raises UsageError with one line for any mistake.
    """
    known = known_options(options_class)
    config = OmegaConf.create(default_values(options_class))
    try:
        flags, words = split_flags(arguments)
        refuse(f"an option is written key=value; got {flag}" for flag in flags)
        for item in parsed_words(words):
            key, value = restored(item.key), item.parsed()
            if item.prefix == "~" or "@" in key:
                raise ValueError(unknown(restored(f"{item.prefix}{item.key}"), known))
            given = {key: value}
            if key in known and known[key].is_node and isinstance(value, dict):
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
        if field.is_node:
            known |= known_options(field.type, f"{prefix}{name}.")
    return known


def help_text(name: str, options_class: type[Options], example: str, topic: str = "") -> str:
    """Return a command's help; with a topic, that of one key or node.

    It has the usage, the options' docstring, and a line per option.

    A command that passes overrides to the trainer also has the trainer's keys, of which `train` shows those that are
    used most. Raises UsageError if no key has the topic.
    """
    own = [key_of(key, field) for key, field in known_options(options_class).items() if not field.is_node]
    every = [*own, *_keys_of_trainer(name, own)]
    if topic not in ("", "all"):
        return "\n".join(_topic_lines(name, topic, every))
    lines = [f"usage: verl-ext {name} {example}", "", inspect.getdoc(options_class) or "", ""]
    if name != "train" or topic:
        return "\n".join([*lines, *table_lines(every if topic else own)])
    used = {row.key: row for row in reversed(every)}
    nodes = dict.fromkeys(row.key.partition(".")[0] for row in every if "." in row.key)
    lines += ["The keys that are used most:", "", *table_lines([used[key] for key in key_table.MOST_USED]), ""]
    lines += textwrap.wrap(
        f"--help NODE lists the keys of a node ({', '.join(nodes)}) or of `tokenize`, --help KEY says all about a key "
        "or a choice, and --help all lists every key.",
        _width(),
    )
    return "\n".join(lines)


def key_help(name: str, topic: str) -> str:
    """Return the help for a key or node of the trainer, for a command without options of its own."""
    every = _keys_of_trainer(name)
    return "\n".join(table_lines(every) if topic == "all" else _topic_lines(name, topic, every))


def _keys_of_trainer(name: str, own: Sequence[key_table.KeyRow] = ()) -> list[key_table.KeyRow]:
    """Return the keys that a command leaves to others: to the trainer and, for `train`, to `tokenize`."""
    if name not in ("train", "plan", "launch"):
        return []
    more = [*key_table.keys_of("train"), *(key_table.keys_of("tokenize") if name == "train" else ())]
    unread = key_table.OF_TRAIN if name == "launch" else ()
    return [row for row in more if row not in own and not row.key.startswith(unread)]


def key_of(key: str, field: Option, of: str = "") -> key_table.KeyRow:
    """Return an option as a row of the help; of: as in :class:`key_table.KeyRow`."""
    default = f"[{','.join(map(spell, value))}]" if isinstance(value := field.default, list) else spell(value)
    if field.required and not field.default:
        default = "required"
    bounds = {"≥": field.least, ">": field.above, "≤": field.most}
    kind = "any" if field.type is Any else getattr(field.type, "__name__", "any")
    limits = [f"{sign} {spell(bound)}" for sign, bound in bounds.items() if bound is not None]
    values = " ".join([kind, *limits, *["or null"] * (field.nullable and kind != "any")])
    return key_table.KeyRow(key, default, " | ".join(field.choices) or values, field.meaning, of)


def table_lines(rows: Sequence[key_table.KeyRow]) -> Iterator[str]:
    """Yield the lines of a help: key, default, and what the key means."""
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    widths[1] = min(widths[1], _LONG)
    indent = " " * (sum(widths) + 6)
    for row in rows:
        meaning = f"with {row.of}: {row.meaning}" if row.of else row.meaning
        if "|" in row.values and any(choice not in meaning for choice in row.values.split(" | ")):
            meaning += f" ({row.values})"
        first = f"  {row.key:<{widths[0]}}  {row.default:<{widths[1]}}  "
        width = max(_width(), len(indent) + 40)
        yield from textwrap.wrap(meaning, width, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)


def _topic_lines(name: str, topic: str, every: Sequence[key_table.KeyRow]) -> Iterator[str]:
    """Yield the keys of a node, or all about one key. Raises UsageError."""
    topic = topic.partition("=")[0].lstrip("+~-")
    below = key_table.keys_of(topic) if topic == "tokenize" and name == "train" else []
    below = below or [row for row in every if row.key.startswith(f"{topic}.")]
    exact = [row for row in every if row.key == topic]
    if not (exact or below):
        close = nearest_key(topic, dict.fromkeys(row.key for row in every))
        hint = f" (nearest: {close})" if close else ""
        raise UsageError(must("--help", "be followed by a key, a node or all", topic) + hint)
    for row in exact:
        yield f"{row.key}={row.default}" + (f"   with {row.of}" if row.of else "")
        yield from textwrap.wrap(row.meaning, _width(), initial_indent="  ", subsequent_indent="  ")
        yield from textwrap.wrap(f"values: {row.values}", _width(), initial_indent="  ", subsequent_indent="  ")
    yield from [""] * bool(exact and below)
    yield from table_lines(below)


_LONG = 24  # letters of a default, behind which longer ones move their line


def _width() -> int:
    return shutil.get_terminal_size((120, 24)).columns


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
    if field.is_node:
        keys = ", ".join(other for other in known if other.startswith(f"{key}."))
        return must(key, f"be given by its keys, {keys}", value)
    if _is_dict(field) and not isinstance(value, dict):
        given = f"[{','.join(map(spell, value))}]" if isinstance(value, list) else spell(value)
        pair = given  # without quotes, the shell turns sources={a:x,b:y} into sources=a:x
        if not re.fullmatch(r"[^:/\\[]+:(?!//)[^:]+", given):
            first = value[0] if isinstance(value, list) and value else value
            pair = f"{Path(spell(first)).name.partition('.')[0] or 'name'}:{given}"
        return must(key, f"map names to values, e.g. '{key}={{{pair}}}'", given)
    return field.problem(key, None) if value is None else None
