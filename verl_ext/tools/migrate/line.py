"""The command of this project that another trainer's keys become, with comments.

A key of a trainer ends in one of five ways, and none is dropped without a word:

    in the command          optim.lr=2e-5
    needs nothing           # needs nothing here: bf16, ddp_timeout
    is otherwise here       # differs: fp8=true: products are bf16
    has no equivalent       # no equivalent: load_in_4bit=true: the base model's weights are not quantized
    unknown                 # unknown key of axolotl: lora_rr=8; nearest: lora_r

Beside them stand the defaults that differ.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_ext.commands.command_line import known_options
from verl_ext.commands.tokenize import TokenizeOptions
from verl_ext.config.key_table import is_number
from verl_ext.config.run_file import run_file
from verl_ext.files import write_text
from verl_ext.options import DataError, UsageError, must, nearest_hint, spell
from verl_ext.overrides import quoted
from verl_ext.tools.migrate.reading import NUMBER, file_below
from verl_ext.tools.migrate.tables import key_table, section

# Texts that Hydra's grammar reads without quotes: as a value, and inside a list or a mapping.
_PLAIN = re.compile(r"[^\s'\"\[\]{}(),=\\#]+")
_VARIABLE = re.compile(r"\$\{\w+(:?[-=][\w./-]*)?\}")  # of the shell, which expands it inside "…"
_PLAIN_INSIDE = re.compile(r"[\w.+~-][\w./+~$@%-]*")
_OF_BOTH = ("model.path", "model.new_tokens", "model.new_special_tokens")  # which `tokenize` reads too
_NODES = ("attention", "checkpoint", "data", "engine", "eval", "loss", "model", "optim", "parallel", "trainer")


def number(value: Any, default: float = 0.0) -> float:
    """Return a value as a number, the default for any other."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return default


def is_on(value: Any) -> bool:
    """Tell whether a value asks for something."""
    return not (value in (None, False, [], {}, 0) or str(value).lower() in ("", "null", "none", "false", "no"))


def tokenize_keys() -> set[str]:
    """Return the keys of a command that are of `tokenize`."""
    return {*known_options(TokenizeOptions)} - {"model", "sources"}


def listed(value: Any) -> list[Any]:
    """Return a value as a list; a value alone is its one member, and null none."""
    return value if isinstance(value, list) else [] if value is None else [value]


def split_names(value: Any) -> list[str]:
    """Return names as a list; a text has them between commas."""
    names = value.split(",") if isinstance(value, str) else listed(value)
    return [str(name).strip() for name in names if is_on(name)]


def mapping(key: str, value: Any) -> dict[str, Any]:
    """Return a value that maps names, {} for none; raise DataError for another."""
    if value is not None and not isinstance(value, Mapping):
        raise DataError(must(key, "map names to values", value))
    return dict(value or {})


class Moved:
    """What a trainer's keys become.

    Attributes:
        trainer: the trainer's name.
        values: its known keys and their values.
        usual: what the trainer does without a key.
        answers: {a loss of answers: {its option: the keys}} of the trainer.
        adopted: values by the names of another trainer, whose function reads them in place of the trainer's own.
        words: {our key: value} of the command.
        ranks: the number of ranks of all nodes, or None if nothing says it.
        nodes: the number of nodes.
        folder: where the configuration lies.
    """

    def __init__(
        self,
        trainer: str,
        values: Mapping[str, Any],
        ranks: int | None = None,
        folder: Path = Path(),
        nodes: int = 1,
    ) -> None:
        self.trainer, self.values, self.folder = trainer, dict(values), folder
        self.ranks, self.nodes = ranks, nodes
        self.usual: dict[str, Any] = {}
        self.answers: Mapping[str, Mapping[str, str]] = {}
        self.adopted: dict[str, Any] = {}
        self._own_names: dict[str, str] = {}
        self.words: dict[str, Any] = {}
        self.problems: list[str] = []  # of the trainer's checks
        self.other: str | None = None  # the command of a configuration that trains nothing
        self._asked: set[str] = set()
        self._read: list[str] = []
        self._lacks: dict[str, list[str]] = {}
        self._free: list[str] = []
        self._other: list[str] = []
        self._unknown: list[str] = []
        self._differences: list[str] = []
        self._work = ""

    def take(self, table: str) -> None:
        """Translate each key by its rule in a table; name the keys without one."""
        known, self.usual, self.answers = key_table(table), section(table, "usual"), section(table, "answers")
        for key in [key for key in self.values if key not in known]:
            hint = nearest_hint(key, known).replace(" (", "; ").strip(")")
            self._unknown.append(f"{key}={spell(self.values.pop(key))}{hint}")
        for key, value in self.values.items():
            rule, word = known[key], str(value).lower()
            ours = (split_names(value) or None) if rule.names else rule.values.get(word, value)
            asks = value is not None and word not in rule.all_but if rule.all_but else is_on(value)
            if rule.to is not None and ours not in (None, ""):
                self.put(rule.to, ours)
            elif (rule.lacks or rule.differs) and asks and word not in rule.unless:
                if rule.lacks:
                    self.lack(key, rule.lacks)
                else:
                    self._other.append(key)
                    self.differ(f"{key}={spell(value)}: {rule.differs}")
            else:
                (self._read if rule.read and word not in rule.all_but else self._free).append(key)

    def put(self, key: str, value: Any) -> None:
        """Give one of our keys a value."""
        self.words[key] = value

    def become(self, line: str, what: str) -> None:
        """Stand for another command than a training."""
        self.other, self._work = line, what

    def lack(self, key: str, why: str) -> None:
        """Say that a key has no equivalent, by the trainer's own name; an adopted value may have none."""
        own = self._own_names.get(key, key)
        if key in self.adopted and own not in self.values:
            return
        reasons = self._lacks.setdefault(own, [])
        reasons += [why] * (why not in reasons)

    def lack_others(self, key: str, why: str, values: Mapping[str, Any], known: Iterable[str]) -> None:
        """Say which names below a key have no equivalent: those that are not known."""
        if others := [name for name, value in values.items() if name not in known and is_on(value)]:
            self.lack(key, f"{why} {', '.join(others)}")

    def adopt(self, names: Mapping[str, str]) -> None:
        """Let another trainer's function read the values, by {the trainer's name: the other's}."""
        self.adopted |= {other: self.get(own) for own, other in names.items()}
        self._own_names |= {other: own for own, other in names.items()}

    def differ(self, line: str) -> None:
        """Say what is otherwise here."""
        self._differences += [line] * (line not in self._differences)

    def has(self, *names: str) -> bool:
        """Tell whether one of the names is given."""
        self._asked.update(names)
        return any(self._given(name) is not None for name in names)

    def get(self, *names: str) -> Any:
        """Return the value of the first of the names that is given, or what the trainer does without them."""
        self._asked.update(names)
        values = (*map(self._given, names), *map(self.usual.get, names))
        return next((value for value in values if value is not None), None)

    def is_on(self, *names: str) -> bool:
        """Tell whether one of the names asks for something."""
        self._asked.update(names)
        return any(is_on(self._given(name)) for name in names)

    def _given(self, name: str) -> Any:
        return self.adopted[name] if name in self.adopted else self.values.get(name)

    def file(self, name: str) -> Path | None:
        """Return where a file lies that a value names, or None."""
        return file_below(self.folder, name)

    @property
    def validates(self) -> bool:
        """Whether the command names validation data."""
        return any(key == "val_share" or key.startswith("data.val_") for key in self.words)

    @property
    def summary(self) -> str:
        """The counts of keys in one line."""
        lacking, unknown, free = len(self._lacks), len(self._unknown), len(self.free)
        other = len([key for key in self._other if key not in self._lacks])
        keys, held = len(self.values) + unknown, len(self.values) - lacking - free - other
        parts = [f"{keys} keys of {self.trainer}: {held} in the command", f"{free} need nothing"]
        parts += [f"{other} done otherwise"] * bool(other)
        parts += [f"{lacking} without an equivalent"] * bool(lacking) + [f"{unknown} unknown"] * bool(unknown)
        return ", ".join(parts)

    @property
    def free(self) -> list[str]:
        """The keys that need nothing, such as a rank without adapters."""
        return self._free + [key for key in self._read if key not in self._asked and key not in self._lacks]

    def overrides(self) -> list[str]:
        """Return the words of the command in Hydra's grammar, unquoted for the shell."""
        return [f"{key}={_value(value)}" for key, value in self.words.items()]

    def comments(self) -> Iterator[str]:
        """Yield the comment lines."""
        if self.other is not None:
            yield f"no training: {self._work}"
        yield self.summary
        for key, reasons in self._lacks.items():
            yield f"no equivalent: {key}={spell(self.values.get(key))}: {'; '.join(reasons)}"
        yield from (f"unknown key of {self.trainer}: {line}" for line in self._unknown)
        yield from (f"to correct: {line}" for line in self.problems)
        if self.nodes > 1:
            of_all = "" if self.ranks is None else f", and a step is that of all {self.ranks} ranks"
            yield (
                f"differs: {self.nodes} nodes there: this command runs on one machine{of_all}; "
                "`verl-ext tokenize`, then `verl-ext launch` on each node, runs on all (docs/guides/launch/nodes.md)"
            )
        yield from (f"differs: {line}" for line in self._differences)
        if self.free:
            yield f"needs nothing here: {', '.join(self.free)}"

    @property
    def nproc(self) -> int | None:
        """The number of ranks of one machine, if anything says it."""
        return self.ranks and max(self.ranks // self.nodes, 1)

    @property
    def _start(self) -> str:
        return "verl-ext train" + (f" nproc={self.nproc}" if self.nproc else "")

    def command(self) -> str:
        """Return the command and its comments, as a shell script has them."""
        words = self.other or " \\\n    ".join([self._start, *map(shell_word, self.overrides())])
        return "\n".join([words, *(f"# {line}" for line in self.comments())])

    def recipe(self, name: str) -> str:
        """Return a recipe's file with the trainer's keys, and the command that reads it, as a comment."""
        import yaml  # type: ignore[import-untyped]

        nodes: dict[str, Any] = {}
        rest = dict(self.words)
        for key, value in self.words.items():
            if key.startswith(("data.sources.", "data.val_sources.", "data.cache_dir")):
                continue
            # A variable stays in the command, where the shell expands it.
            if "." in key and key.partition(".")[0] in _NODES and key not in _OF_BOTH and "$" not in str(value):
                *above, last = key.split(".")
                node = nodes
                for part in above:
                    node = node.setdefault(part, {})
                node[last] = float(value) if isinstance(value, str) and NUMBER.fullmatch(value) else value
                del rest[key]
        groups = {key: rest.pop(key) for key in ("model", "loss", "parallel") if key in rest}
        lines = ["# @package _global_", f"# DIR/recipe/{name}.yaml"]
        if groups:
            lines += ["defaults:", *(f"  - override /{group}: {choice}" for group, choice in groups.items())]
        lines.append(yaml.safe_dump(nodes, sort_keys=False, allow_unicode=True).rstrip())
        words = [f"{key}={_value(value)}" for key, value in rest.items()]
        line = " ".join([self._start, "--config-dir DIR", f"recipe={name}", *map(shell_word, words)])
        return "\n".join([*lines, f"# {line}", *(f"# {comment}" for comment in self.comments())])


def written_run(to: str, words: Sequence[str], ranks: int | str | None, comments: Iterable[str]) -> str:
    """Write a run's file; return the command that starts it, and the comments, which the file has too.

    words: the overrides of the run. Variables of the shell become those of the environment, which the run reads.
    Raises UsageError for what only a shell can evaluate, and for a file that is there.
    """
    file = Path(to).expanduser()
    if file.exists() or file.suffix not in (".yaml", ".yml"):
        raise UsageError(must("to", "be a new file NAME.yaml", to))
    words = [*words, *([] if ranks is None else [f"nproc={ranks}"])]
    try:
        text = run_file([_with_environment(word) for word in words], None, None)
    except ValueError as reason:
        raise UsageError(must("to", f"be null: {reason}", to)) from None
    head = [f"Starts the run: verl-ext train {file.name}", *comments]
    lines = [line for line in text.splitlines() if not line.startswith("# ") and line != "nproc: null"]
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, "\n".join([*(f"# {line}" for line in head), *lines, ""]))
    return "\n".join([shlex.join(["verl-ext", "train", to]), *(f"# {comment}" for comment in comments)])


def _with_environment(word: str) -> str:
    """Replace shell variables in a word by references to the environment."""
    key, _, value = word.partition("=")
    if re.search(r"\$(?![A-Za-z_{])|\$\{(?!\w+(:-[^{}$]*)?\})", value):
        raise UsageError(must("to", "be null for a command with a value that only a shell evaluates", word))
    found = re.sub(r"\$(?:\{(\w+)(?::-([^{}]*))?\}|(\w+))", _environment, value)
    if re.fullmatch(r"\$\{oc\.env:[^{}]*\}", found) and is_number(key):
        found = f"${{oc.decode:{found}}}"
    is_text = found != value and value[0] not in "'\"[{"
    return f"{key}={quoted(found) if is_text else found}"


def _environment(found: re.Match[str]) -> str:
    default = "" if found[2] is None else f",{found[2]}"
    return f"${{oc.env:{found[1] or found[3]}{default}}}"


def _value(value: Any) -> str:
    """Return the value of a word; a text is quoted only if it must be."""
    plain = isinstance(value, str) and _PLAIN.fullmatch(_VARIABLE.sub("x", value))
    return value if plain and "${" not in _VARIABLE.sub("x", value) else _inside(value)


def _inside(value: Any) -> str:
    """Return a value as Hydra's grammar reads it inside a list or a mapping."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_inside(key)}:{_inside(below)}" for key, below in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_inside, value)) + "]"
    text = spell(value)
    if not isinstance(value, str) or _PLAIN_INSIDE.fullmatch(text):
        return text
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def shell_word(word: str) -> str:
    """Quote a word for the shell; variables are expanded as before."""
    if "$" not in word:
        return shlex.quote(word)
    return '"' + re.sub(r'(["\\`])', r"\\\1", word) + '"'
