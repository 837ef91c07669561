"""The preview of written documents: runs of targets are decoded whole, shortened, and marked."""

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.lib.chat_templates import CHATML, tiny_tokenizer
from verl_ext.commands.preview import CUT, preview_of, previews_text

TOKENIZER = tiny_tokenizer(CHATML)
RUNS = [[(False, "<|im_start|>user\n\tq "), (True, "a[0]\x1b[31m\u202e"), (False, "\n")]]


def on_console(**options: Any) -> str:
    return previews_text({"chat": RUNS}, Console(file=io.StringIO(), width=20, **options))


def test_targets_are_marked_and_control_characters_escaped_where_there_is_no_colour() -> None:
    expected = "\nchat, document 1 (targets in [[…]]):\n<|im_start|>user\\n\n\\tq [[a[0]\\x1b[31m\\u202e]]\\n\n"
    assert on_console() == expected


def test_targets_are_in_colour_on_a_terminal_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = on_console(force_terminal=True, color_system="standard")
    assert "\x1b[1;32ma[0]\\x1b[31m\\u202e\x1b[0m\\n" in shown
    assert "[[a" not in shown
    monkeypatch.setenv("NO_COLOR", "1")
    assert "[[a[0]" in on_console(force_terminal=True, color_system="standard")


@given(st.text(st.sampled_from("ab \n😀中é"), min_size=3, max_size=60), st.data())
def test_runs_of_whole_characters_decode_to_the_text(text: str, data: st.DataObject) -> None:
    border = data.draw(st.integers(1, len(text) - 1))
    parts = [TOKENIZER(part, add_special_tokens=False)["input_ids"] for part in (text[:border], text[border:])]
    mask = np.repeat([0, 1], [len(part) for part in parts]).astype(np.int8)
    runs = preview_of(np.array(parts[0] + parts[1]), mask, TOKENIZER.decode)
    whole = [text[:border], text[border:]]
    assert [is_target for is_target, _ in runs] == [False, True]
    for (_, shown), expected in zip(runs, whole, strict=True):
        assert CUT not in shown
        head, *tail = shown.split(" … ")
        assert (expected.startswith(head) and expected.endswith(tail[-1])) if tail else shown == expected


def test_many_and_long_runs_are_shortened_in_the_middle() -> None:
    ids = TOKENIZER("the cat sat " * 200, add_special_tokens=False)["input_ids"]
    ((is_target, shown),) = preview_of(np.array(ids), np.ones(len(ids), np.int8), TOKENIZER.decode)
    assert is_target
    assert shown.startswith("the cat sat ")
    assert f" … {len(ids) - 96:,} tokens … " in shown
    runs = preview_of(np.array(ids), (np.arange(len(ids)) % 2).astype(np.int8), TOKENIZER.decode)
    assert [is_target for is_target, _ in runs] == [False, True] * 3 + [False] + [False, True] * 3
    assert runs[6][1] == f" … {len(ids) - 12:,} tokens … "
