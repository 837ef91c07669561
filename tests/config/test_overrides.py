"""Names in any script on a command line, and the one-line error for a wrong word."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tests.lib.errors import refused
from tests.lib.ranks import run_ranks
from tests.lib.training import into, metrics, train_alone
from verl_ext.__main__ import main
from verl_ext.commands.command_line import OutputOptions, read_options
from verl_ext.commands.tokenize import TokenizeOptions
from verl_ext.config.compose import compose
from verl_ext.config.run_file import expanded
from verl_ext.options import UsageError, option
from verl_ext.overrides import Item, override_words, quoted


@dataclass(frozen=True)
class Named(OutputOptions):
    """Options with names of the user's own."""

    sources: dict[str, Any] = option({}, "name: file")


# Text without special meaning in Hydra's grammar, which it would not read as a number, a flag or null.
_LETTERS = st.characters(codec="utf-8", categories=["Lu", "Ll", "Lo", "Lm", "Mn", "So"])
_NAMES = st.text(_LETTERS, min_size=1, max_size=6).map(lambda name: f"n{name}")


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(_NAMES, st.text(_LETTERS, min_size=1).map(lambda text: f"v{text}"), min_size=1, max_size=4))
@example({"数学": "数.jsonl", "ä": "a b.jsonl"})
def test_names_and_values_of_any_script_arrive_as_they_were_given(words):
    unquoted = ",".join(f"{name}:{value}" for name, value in words.items())
    quoted = ", ".join(f'"{name}": "{value}"' for name, value in words.items())
    for written in (unquoted, quoted):
        assert read_options(Named, ["output_dir=x", f"sources={{{written}}}"]).sources == words
    one_by_one = [f"sources.{name}={value}" for name, value in words.items()]
    assert read_options(Named, ["output_dir=x", *one_by_one]).sources == words


# Names that Hydra or YAML would write otherwise.
NUMBERS = st.from_regex(r"[+-]?[0-9]{1,3}(\.[0-9]{0,2})?(e[0-9])?", fullmatch=True) | st.sampled_from(
    ["True", "NULL", "no", "nan", "0x1f", "1_000", "2024-11-25", "12:30"]
)


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(NUMBERS, st.sampled_from(["a.jsonl", "0.10 of it", "{1e3: a}"]), min_size=1, max_size=4))
def test_names_like_numbers_stay_as_they_are_written(tmp_path_factory, words):
    plain = {name: text for name, text in words.items() if ":" not in name}
    written = ",".join(f"{name}: {quoted(text)}" for name, text in plain.items())
    assert read_options(Named, ["output_dir=x", f"sources={{{written}}}"]).sources == plain
    file = tmp_path_factory.mktemp("run") / "run.yaml"
    file.write_text("replace:\n" + "".join(f"  {name}: '{text}'\n" for name, text in words.items()))
    found: dict[str, Any] = {}
    for item in map(Item.read, expanded([str(file)])):
        found |= item.parsed() if item.key == "replace" else {item.key.removeprefix("replace."): item.parsed()}
    assert found == words


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(_NAMES.map(lambda name: f"{name} x"), st.text("{}[],:'\" a"), min_size=1, max_size=3))
@example({"a b": "answer as {'key': 1}, \"other\": 2}"})
def test_a_text_in_quotes_is_left_as_it_is_beside_names_in_quotes(words):
    written = ",".join(f"{quoted(name)}: {quoted(text)}" for name, text in words.items())
    assert read_options(Named, ["output_dir=x", f"sources={{{written}}}"]).sources == words
    assert Item.read(f"sources={{{written}}}").parsed() == words


@settings(deadline=None, max_examples=3, phases=[Phase.generate])  # composing takes a second
@given(st.dictionaries(_NAMES, st.integers(0, 9), min_size=1, max_size=4))
def test_the_trainer_composes_names_of_any_script(weights):
    written = ",".join(f"{name}:{weight}" for name, weight in weights.items())
    assert compose([f"loss.category_weights={{{written}}}"]).loss.category_weights == weights
    assert compose([f"loss.category_weights.{n}={w}" for n, w in weights.items()]).loss.category_weights == weights


# Texts that Hydra, OmegaConf or our own escapes read as something else, any characters, and values of them.
_READ_OTHERWISE = [
    "null",
    "True",
    "1",
    "1e5",
    "nan",
    "",
    " a",
    "${a}",
    "\\\\${a}",
    "_U000041_",
    "{'a': 1}",
    "a=b",
    "~/x",
    "/x",
]
_TEXTS = (
    st.sampled_from(_READ_OTHERWISE)
    | st.text("{}[]()=,:'\"$\\ _U0041ab~/.#%\n")
    | st.text(st.characters(codec="utf-8"))
)
_LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _TEXTS.filter(lambda t: t != "???")
_VALUES = st.recursive(
    _LEAVES, lambda v: st.lists(v, max_size=3) | st.dictionaries(_TEXTS.filter(bool), v, min_size=1, max_size=3)
)


@settings(deadline=None, max_examples=100)
@given(st.dictionaries(_TEXTS.filter(bool), _VALUES, min_size=1))
def test_options_from_python_arrive_at_a_command_as_they_are(values):
    words = override_words({"output_dir": Path("x"), "sources": values})
    assert read_options(Named, words).sources == values


@settings(deadline=None, max_examples=4, phases=[Phase.generate])  # composing takes a second
@given(st.lists(_VALUES, min_size=20, max_size=40))
@example([{"a": {}, "b": [np.float32(0.5), np.int64(2), Path("/x y"), ("a", 1)]}])
def test_options_from_python_arrive_at_the_trainer_as_they_are(values):
    values = {f"key{number}": value for number, value in enumerate(values)}
    config = compose(override_words({"model": {"path": "M", "override_config": values}, "loss": "sequence"}))
    composed = OmegaConf.to_container(config.model.override_config, resolve=True)
    plain = json.loads(json.dumps(values, default=lambda v: v.item() if hasattr(v, "item") else str(v)))
    assert {key: value for key, value in composed.items() if key in values} == plain
    assert config.loss.mode == "sequence"


@pytest.mark.slow
def test_categories_of_any_script_are_tokenized_indexed_and_trained_on(tmp_path, tiny_model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {"数学.jsonl": "one and two is three", "g.jsonl": "a short text"}.items():
        lines = [json.dumps({"text": f"{text} {number}"}) for number in range(6)]
        (tmp_path / name).write_text("\n".join(lines), encoding="utf-8")
    sources = 'sources={数学:数学.jsonl,ä:"g.jsonl"}'
    for command in ("tokenize", "index"):
        options = [sources, f"output_dir={command}", f"model.path={tiny_model}", "num_workers=1"]
        assert main([command, *options]) == 0
    assert json.loads((tmp_path / "tokenize/categories.json").read_text()) == {"1": "数学", "2": "ä"}
    assert (tmp_path / "index/数学.idx").is_file()
    keys = [f"data.train_dir={tmp_path}/tokenize", "loss.category_weights={数学:2}", f"model.path={tiny_model}"]
    run_ranks(train_alone, 1, [*keys, into(tmp_path / "run")])
    assert metrics(tmp_path / "run")[1, "train/数学_loss"] > 0


MISTAKES = [
    (["sources={a:x.jsonl"], ("sources={a:x.jsonl", "a }", "quotes")),
    (["sources=[x.jsonl"], ("sources=[x.jsonl", "a ]", "quotes")),
    (["sources={a:[x.jsonl}"], ("sources={a:[x.jsonl}", "a ]")),
    (["sources=a:x.jsonl}"], ("sources=a:x.jsonl}", "a } without its {")),
    (["sources={a:", "x.jsonl,", "b:y.jsonl}"], ("sources={a:", "a }", "quotes")),
    (["output_dir=my", "folder"], ("folder", "quotes around both: 'output_dir=my folder'")),
    (["sources={a:'x.jsonl}"], ("sources={a:'x.jsonl}", "its '")),
    (["sources={a:x(1.jsonl}"], ("sources={a:x(1.jsonl}", "brackets")),
    (["output dir=x"], ("output dir=x", "space")),
]


@pytest.mark.parametrize(("words", "things"), MISTAKES)
def test_a_missing_bracket_or_quote_is_named_on_every_command_line(words, things):
    with refused("key=value", *things, error=UsageError):
        read_options(TokenizeOptions, words)

    def of_trainer(word):
        return word.replace("sources", "data.mixture").replace("output_dir", "data.train_dir")

    with refused("key=value", *map(of_trainer, things)):
        compose([of_trainer(word) for word in words])


@pytest.mark.parametrize(
    ("value", "pair"),
    [
        ("g.jsonl", "g:g.jsonl"),
        ("[g.jsonl]", "g:[g.jsonl]"),
        ("[d/g.jsonl,h.jsonl]", "g:[d/g.jsonl,h.jsonl]"),
        ("gsm8k:g.jsonl", "gsm8k:g.jsonl"),  # a shell's expansion of braces without quotes
        ("https://host/g.jsonl", "g:https://host/g.jsonl"),
    ],
)
def test_the_example_for_files_without_a_category_can_be_pasted(value, pair):
    written = f"sources={{{pair}}}"
    with refused("sources", f"'{written}'", value, error=UsageError):
        read_options(TokenizeOptions, [f"sources={value}"])
    name, _, files = pair.partition(":")
    assert read_options(Named, ["output_dir=x", written]).sources == {
        name: files if files[0] != "[" else files[1:-1].split(",")
    }
