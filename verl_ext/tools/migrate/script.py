"""A shell script: its commands, with its own assignments, arrays and plain conditions put in place.

MODE=${MODE:-spmd}; ARGS=(a=1)                                torchrun -m verl.trainer.sft_trainer a=1
if [ "$MODE" = spmd ]; then RUN="torchrun -m verl.…"; fi  →
$RUN "${ARGS[@]}"

Nothing is executed: what only a shell could tell ($(…), $1, variables of the environment) stays as it is written.
"""

import re
from dataclasses import dataclass
from operator import eq, ge, gt, le, lt, ne

from verl_ext.options import UsageError, must
from verl_ext.tools.migrate.reading import IMAGE_SETTINGS, WORD, end_of, unquoted

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_ARRAY = re.compile(r"""(?<![^\s;])([A-Za-z_]\w*)(\+?)=\(((?:[^()'"]|'[^']*'|"(?:\\.|[^"\\])*"|\$\([^()]*\))*)\);?""")
_VARIABLE = re.compile(
    r"'[^']*'|\"?\$\{(?P<array>\w+)\[[@*]\](?:\+[^{}]*\{[^{}]*\}[^{}]*)?\}\"?|\$\{(?P<name>\w+)(?::?-(?P<usual>(?:[^{}]|\{[^{}]*\})*))?\}|\$(?P<bare>[A-Za-z_]\w*)"
)
_COMMENT = re.compile(r"(?:^|(?<=\s))#")
_SETTERS = ("export", "declare", "local", "readonly")
_TESTS = {
    **{"=": eq, "==": eq, "!=": ne},
    **{"-eq": eq, "-ne": ne, "-lt": lt, "-le": le, "-gt": gt, "-ge": ge},
}


@dataclass
class _Branches:
    """The branches of an `if`: whether the one that is read runs (None: unknown), and whether one has run.

    of_one: whether they are one statement after `&&` or `||`.
    """

    runs: bool | None
    has_run: bool | None
    condition: str
    of_one: bool = False


class Script:
    """The commands of a shell text.

    Attributes:
        commands: the words of each command, as they are written with the script's variables in place, and the
            variables' values.
        undecided: the conditions that cannot be told here, and whose branches set variables.
    """

    def __init__(self, text: str) -> None:
        """Read a text; raise UsageError for a quote that is not closed."""
        self.commands: list[tuple[list[str], dict[str, str]]] = []
        self.undecided: list[str] = []
        self._variables: dict[str, str] = {}
        self._arrays: dict[str, str] = {}
        self._branches: list[_Branches] = []
        text = re.sub(r"\\[ \t]*(\n|\Z)", " ", "\n".join(map(_without_comment, text.splitlines())))
        text = re.sub(
            r"<<-?\s*(['\"]?)(\w+)\1([^\n]*)\n.*?\n\s*\2(?=\s)", r"\3", text, flags=re.DOTALL
        )  # written elsewhere
        text = _ARRAY.sub(lambda match: f"\n{' '.join(match[0].split())}\n", text)  # a line of its own
        if re.sub(r"\s", "", WORD.sub("", text)):
            raise UsageError(must("command", "be whole", "a quote that is not closed"))
        for line in re.findall(rf"(?:{WORD.pattern}|[^\S\n])+", text, re.DOTALL):
            if match := _ARRAY.match(line):
                if self._runs():
                    before = self._arrays.get(match[1], "") if match[2] else ""
                    self._arrays[match[1]] = f"{before} {self._expanded(match[3])}".strip()
                self._end_of_one()
                continue
            ends = re.compile(r"(.+?);+", re.DOTALL)
            pieces = [(match[1], ";") if (match := ends.fullmatch(word)) else (word,) for word in WORD.findall(line)]
            words = [word for each in pieces for word in each]
            while words:
                end = end_of(words)
                self._read(words[:end])
                self._end_of_one()
                if words[0] in ("[", "[[") and words[end : end + 1] in (["&&"], ["||"]):
                    told = self._told(words[:end])
                    runs = None if told is None else told == (words[end] == "&&")
                    self._branches.append(_Branches(runs, runs, " ".join(words[:end]), of_one=True))
                words = words[end + 1 :]

    def _end_of_one(self) -> None:
        """Leave the branch of one statement, `[ … ] && statement`."""
        if self._branches and self._branches[-1].of_one:
            self._branches.pop()

    def _runs(self) -> bool:
        """Tell whether the statement, which sets a variable, runs; note a condition that leaves it open."""
        for each in self._branches:
            if each.runs is None and each.condition not in self.undecided:
                self.undecided.append(each.condition)
        return all(each.runs for each in self._branches)

    def _read(self, words: list[str]) -> None:
        """Read one statement."""
        word = words[0] if words else ""
        if word == "if":
            told = self._told(words[1:])
            self._branches.append(_Branches(told, told, " ".join(words[1:])))
        elif word == "case":
            self._branches.append(_Branches(None, None, " ".join(words)))
        elif word in ("elif", "else") and self._branches:
            own = self._branches[-1]
            if own.has_run is not None:
                told = True if word == "else" else self._told(words[1:])
                own.runs = False if own.has_run else told
                own.has_run = None if told is None else own.has_run or told
            if word == "else":
                self._read(words[1:])
        elif word in ("fi", "esac") and self._branches:
            self._branches.pop()
        elif word in ("then", "do", "{"):
            self._read(words[1:])
        else:
            if word.endswith(")") and self._branches and self._branches[-1].condition.startswith("case "):
                words = words[1:]  # a pattern
            while words and (words[0] in _SETTERS or _ASSIGNED.fullmatch(words[0])):
                if (match := _ASSIGNED.fullmatch(words[0])) and self._runs():
                    before = self._variables.get(match[1], "") if match[2] else ""
                    self._variables[match[1]] = before + unquoted(self._expanded(match[3]))
                words = words[1:]
            if words and not any(each.runs is False for each in self._branches):
                self.commands.append((WORD.findall(self._expanded(" ".join(words))), dict(self._variables)))

    def _told(self, words: list[str]) -> bool | None:
        """Return what `[ a = b ]` says, or None if only a shell could tell."""
        test = [unquoted(self._expanded(word)) for word in words]
        if len(test) < 3 or test[0] not in ("[", "[[") or test[-1] not in ("]", "]]") or "$" in " ".join(test):
            return None
        if len(test) == 4 and test[1] in ("-n", "-z"):
            return bool(test[2]) == (test[1] == "-n")
        if len(test) != 5 or test[2] not in _TESTS:
            return None
        sides: list[str] | list[int] = [test[1], test[3]]
        if test[2].startswith("-"):
            if not all(re.fullmatch(r"-?\d+", side) for side in (test[1], test[3])):
                return None
            sides = [int(test[1]), int(test[3])]
        return bool(_TESTS[test[2]](*sides))

    def _expanded(self, text: str) -> str:
        """Return a text with the script's variables and the usual values of others in place."""

        def value(match: re.Match[str]) -> str:
            if (array := match["array"]) is not None:
                return self._arrays.get(array, match[0])
            name = match["name"] or match["bare"]
            if name is None:
                return match[0]
            usual = None if match["usual"] is None else self._expanded(match["usual"])
            return self._variables.get(name, match[0] if usual is None else usual)

        return _VARIABLE.sub(value, text)


def _without_comment(line: str) -> str:
    """Return a line up to its comment; a # inside quotes begins none."""
    for match in _COMMENT.finditer(line):
        before = line[: match.start()]
        if before.count("'") % 2 == before.count('"') % 2 == 0:
            return before
    return line


def commands_of(text: str) -> list[list[str]]:
    """Return a script's commands as words without quotes, after the settings of ranks and images.

    Raises UsageError for a quote that is not closed.
    """
    found = []
    for words, variables in Script(text).commands:
        shown = []
        for name in ("NPROC_PER_NODE", "NNODES"):
            value = variables.get(name, variables.get(name.lower(), ""))
            shown += [f"{name}={value}"] * value.isdigit()
        shown += [f"{name}={variables[name]}" for name in IMAGE_SETTINGS if name in variables]
        found.append([*shown, *map(unquoted, words)])
    return found
