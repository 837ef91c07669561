"""The frame of the commands: options from words, help, exit codes."""

import errno
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from tests.lib.errors import names, refused
from verl_ext.__main__ import main
from verl_ext.commands.command_line import command, help_text, read_options
from verl_ext.options import REQUIRED, DataError, Options, UsageError, option


@dataclass(frozen=True)
class OvenOptions(Options):
    """Where it is baked."""

    prefix: ClassVar[str] = "oven"

    degrees: int = option(200, "how hot", least=50)
    fan: bool | None = option(None, "null: as the recipe says")


@dataclass(frozen=True)
class CakeOptions(Options):
    """Cakes of any size."""

    name: str = option(REQUIRED, "what it is called", required=True)
    layers: dict[str, Any] = option({}, "layer: filling, or a list of them")
    taste: str = option("sweet", "what it is like", choices=("sweet", "salty"))
    guests: Any = option(None, "a number, or {table: number}")
    tins: list[Any] = option(["round"], "its tins")
    oven: OvenOptions = option(OvenOptions, "where")


def read(*words: str) -> CakeOptions:
    return read_options(CakeOptions, ["name=torte", *words])


def test_words_are_read_in_hydras_grammar_over_the_defaults() -> None:
    assert read() == CakeOptions(name="torte")
    options = read("layers={a:[x,y]}", "layers.b=z", "++layers.2024=w", "oven.degrees=180", "+tins=[flat]", "guests=3")
    assert options.layers == {"a": ["x", "y"], "b": "z", "2024": "w"}
    assert (options.oven, options.tins, options.guests) == (OvenOptions(180), ["flat"], 3)
    assert read("oven={degrees:90,fan:true}").oven == OvenOptions(90, True)
    assert read("guests.kitchen=2", "taste='salty'").guests == {"kitchen": 2}
    assert read("layers={2024:x}").layers == {"2024": "x"}
    assert read("name=7").name == "7"
    assert read("guests=${oven.degrees}", "oven.degrees=70").guests == 70  # values may refer to others


@pytest.mark.parametrize(
    ("words", "things"),
    [
        ([], ("name", "what it is called", None)),
        (["name=a", "tast=salty"], ("tast", "nearest: taste")),
        (["name=a", "oven.dgrees=1"], ("oven.dgrees", "nearest: oven.degrees")),
        (["name=a", "oven={dgrees:1}"], ("oven.dgrees", "nearest: oven.degrees")),
        (["name=a", "tins.x=1"], ("tins.x", "nearest: tins")),
        (["name=a", "oven=hot"], ("oven", "oven.degrees, oven.fan", "hot")),
        (["name=a", "layers=a/cream.txt"], ("layers", "'layers={cream:a/cream.txt}'", "got a/cream.txt")),
        (["name=a", "layers={a:x,a:y}"], ("layers", "once", "got a")),
        (["name=a", "oven.degrees=null"], ("oven.degrees", None)),
        (["name=a", "oven.degrees=9", "taste=sour"], ("taste", "sweet, salty", "sour", "oven.degrees", 9)),
        (["name=a", "taste=sweet,salty"], ("taste", "sweet,salty", "taste=[sweet,salty]")),
        (["name=a", "taste"], ("key=value", "taste", "the word before it")),
        (["name=a", "guests=${ovn.degrees}"], ("guests", "'ovn.degrees'")),
        (["name=a", "~layers.a"], ("~layers.a",)),
        (["name=a", "taste@x=sweet"], ("taste@x",)),
    ],
)
def test_a_mistake_is_one_line(words: list[str], things: tuple[Any, ...]) -> None:
    with refused(*things, error=UsageError):
        read_options(CakeOptions, words)


def test_help_has_every_option_with_default_choices_and_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert help_text("bake", CakeOptions, "name=NAME").splitlines() == [
        "usage: verl-ext bake name=NAME",
        "",
        "Cakes of any size.",
        "",
        "  name          required  what it is called",
        "  layers        {}        layer: filling, or a list of them",
        "  taste         sweet     what it is like (sweet | salty)",
        "  guests        null      a number, or {table: number}",
        "  tins          [round]   its tins",
        "  oven.degrees  200       how hot",
        "  oven.fan      null      null: as the recipe says",
    ]


ENDS = [
    (UsageError("name must be short; got torte"), 2, "error: name must be short; got torte\n"),
    (DataError("a.jsonl:3: no fields"), 1, "error: a.jsonl:3: no fields\n"),
    (OSError(errno.ENOSPC, "No space left on device", "cake/a"), 1, "No space left on device: 'cake/a'\n"),
    (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1, "Broken pipe\n"),
    (KeyboardInterrupt(), 130, "error: interrupted; nothing was written\n"),
]


@pytest.mark.parametrize(("error", "code", "line"), ENDS, ids=[type(error).__name__ for error, *_ in ENDS])
def test_a_command_that_fails_ends_with_its_code_and_one_line(error, code, line, capsys, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def bake(options: CakeOptions) -> str:
        raise error

    assert command("bake", CakeOptions, bake, example="name=NAME")(["name=torte"]) == code
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.endswith(line)


def test_a_command_prints_what_it_made_and_its_help_on_request_or_without_words(capsys, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    main = command("bake", CakeOptions, lambda options: f"a {options.name}", example="name=NAME")
    assert (main(["name=torte"]), capsys.readouterr()) == (0, ("a torte\n", ""))
    assert main(["nam=torte"]) == 2
    out, err = capsys.readouterr()
    assert (out, names(err, "nam", "nearest: name")) == ("", True)
    assert (main([]), main(["name=x", "--help"])) == (2, 0)
    assert capsys.readouterr().out == f"{help_text('bake', CakeOptions, 'name=NAME')}\n" * 2


def test_sigterm_ends_a_command_as_ctrl_c_does() -> None:
    program = (
        "import os, signal, sys; from tests.commands.test_command_options import CakeOptions\n"
        "from verl_ext.commands.command_line import command\n"
        "main = command('bake', CakeOptions, lambda _: os.kill(os.getpid(), signal.SIGTERM), example='name=NAME')\n"
        "sys.exit(main(['name=torte']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (130, "error: interrupted; nothing was written\n")


def test_the_command_line_lists_its_commands_and_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "\n  init-model  a model with random weights" in capsys.readouterr().out
    assert main([]) == 2
    assert main(["babylong", "x=1"]) == 2
    assert names(capsys.readouterr().err, "babylong", "nearest: babilong")


def test_a_task_of_synthesize_lists_its_own_options_and_refuses_those_of_others(capsys):
    assert main(["synthesize", "longalign", "--help"]) == 0
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}
    assert {"questions", "intervals"} <= listed
    assert not {"window", "scorer.kind", "languages"} & listed
    for words in (["longalign", "window=64"], ["task=longalign", "window=64"]):
        assert main(["synthesize", *words]) == 2
        assert names(capsys.readouterr().err, "window", "glm_long")


def test_show_plan_is_refused_in_a_line_that_says_where_its_numbers_are(tmp_path, capsys):
    assert main(["show", "plan", str(tmp_path)]) == 2
    assert names(capsys.readouterr().err, "data_report.json")
