"""Output of runs and commands: rows that fit a terminal, bars only there, no control characters elsewhere."""

import contextlib
import os
import pty
import re
import struct
import sys
import threading
from fcntl import ioctl
from termios import TIOCSWINSZ
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.progress import four_digits

CATEGORIES = 23
STEPS = """
from verl_ext.progress import StepProgress

progress = StepProgress(0, {total}, visible={visible})
for step in range(1, 4):
    progress.step(123456)
    names = ("gsm8k", "code", "a name of two-words", *(f"category_{{n}}" for n in range(20)))
    losses = {{f"train/{{name}}_loss": 2.71828182845904 for name in names}}
    counts = {{f"train/{{name}}_tokens": 1234 for name in names}}
    numbers = {{"loss": 2.13841295, "router_loss": 3.0, "tokens_per_second": 123456.789, "memory_gib": 141.234}}
    numbers |= {{"lr": 1e-5, "epoch": 0.25, "grad_norm": 1.23456}}
    metrics = {{**{{f"train/{{name}}": value for name, value in numbers.items()}}, **losses, **counts}}
    progress.show(metrics)
    progress.log(metrics, step)
    shares = {{"val/exact_match": 0.91234, "val/accuracy": 0.91234, "val/gsm8k_loss": 1.0, "val/gsm8k_tokens": 5}}
    progress.log({{"val/loss": 2.0123456, "val/perplexity": 7.48083456, **shares}}, step)
    progress.flush()
    with progress.aside():
        progress.log({{"train/save_pause": 0.123456789}}, step)
progress.close()
"""
FILES = """
from verl_ext.progress import Progress

for total in (1000, None):
    with Progress(total) as progress:
        for _ in range(4):
            progress.add(250, 300, 123456)
"""


def on_terminal(code: str, columns: int, lines: int) -> str:
    """Return what a program prints on a terminal."""
    ours, theirs = pty.openpty()
    ioctl(theirs, TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    shown = []

    def read() -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while more := os.read(ours, 65536):
                shown.append(more)

    reader = threading.Thread(target=read)
    reader.start()
    with (
        open(theirs, "w", encoding="utf-8") as terminal,
        mock.patch.dict(os.environ, environment, clear=True),
        mock.patch.multiple(sys, stdout=terminal, stderr=terminal, __stdout__=terminal),
    ):
        exec(code, {})
    reader.join()
    os.close(ours)
    return b"".join(shown).decode().replace("\r\n", "\n")


def in_files(code: str, capfd: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Return what a program prints into files, on stdout and stderr."""
    exec(code, {})
    return capfd.readouterr()


@pytest.mark.parametrize("total", [3, 2_000_000])
def test_redirected_output_has_one_line_a_step_with_every_category_and_no_control_characters(total, capfd):
    out, errors = in_files(STEPS.format(total=total, visible=True), capfd)
    assert errors == ""  # no bar in a file
    lines = out.splitlines()
    assert len(lines) == 7
    assert all(line.isprintable() for line in lines)
    width = len(str(total))
    count, train, val, pace = lines[0].split(" | ")
    assert count == f"step {1:>{width}}/{total}"
    assert train.startswith("loss 2.138  gsm8k_loss 2.718  code_loss 2.718  a name of two-words_loss 2.718  ")
    assert len(train.split("  ")) == 1 + CATEGORIES
    assert val == "val loss 2.012  exact_match 0.9123  accuracy 0.9123  perplexity 7.481  gsm8k_loss 1.000"
    assert re.fullmatch(
        r"lr 1e-05  epoch 0\.25  grad_norm 1\.235  123\.5k tokens/s  141\.2 GiB  \d+(:\d\d)+ left", pace
    )
    assert lines[1] == f"step {1:>{width}}/{total}  saved, training waited 0.1235 s"
    assert lines[6].startswith("trained on 370,368 tokens in ")


@pytest.mark.parametrize(
    ("speed", "shown"), [("mfu", "MFU 41.2%"), ("tokens_per_second_per_gpu", "61.73k/rank"), ("other", None)]
)
def test_a_steps_line_has_the_share_of_the_gpu_or_the_rate_of_a_rank(speed, shown, capfd):
    values = {"mfu": 0.4123, "tokens_per_second_per_gpu": 61728.394, "other": 1.0}
    metrics = {"train/loss": 2.13841295, "train/tokens_per_second": 123456.789, "train/memory_gib": 141.234}
    code = f"""
from verl_ext.progress import StepProgress
progress = StepProgress(0, 300, visible=True)
progress.step(1000)
progress.log({metrics | {f"perf/{speed}": values[speed]}}, 7)
progress.flush()
"""
    (line,) = in_files(code, capfd)[0].splitlines()
    count, loss, pace = line.split(" | ")
    assert (count, loss) == ("step   7/300", "loss 2.138")
    assert pace.split("  ")[:-1] == ["123.5k tokens/s", *([shown] if shown else []), "141.2 GiB"]


@pytest.mark.parametrize(("columns", "lines"), [(80, 20), (132, 50)])
def test_a_terminal_of_any_height_shows_every_category_in_rows_that_fit_beside_the_bar(columns, lines):
    shown = on_terminal(STEPS.format(total=3, visible=True), columns, lines)
    rows = [row for line in shown.split("\n") for row in line.split("\r")]
    assert all(len(row) <= columns for row in rows)
    assert any(row.startswith("train: 100%") for row in rows)
    text = re.sub(r"\n {4}", "  ", shown)  # rows that go on
    names = ("gsm8k", "code", "a name of two-words", *(f"category_{n}" for n in range(20)))
    for name in names:
        assert text.count(f"  {name}_loss 2.718") == 3
    assert text.count("val loss 2.012") == 3
    assert "router" not in text


def test_the_bar_of_a_resumed_run_begins_after_the_steps_that_are_done():
    code = "from verl_ext.progress import StepProgress\nbar = StepProgress(2, 4, True)\nbar.step(10)\nbar.close()\n"
    percentages = re.findall(r"train: +(\d+)%", on_terminal(code, 80, 24))
    assert (percentages[0], percentages[-1]) == ("50", "75")


def test_a_failed_validation_leaves_the_line_of_its_step(capfd):
    code = """
from verl_ext.progress import StepProgress
progress = StepProgress(0, 3, visible=True)
progress.log({"train/loss": 2.0}, 1)
with progress.paused():
    print(end="")
    raise KeyError
"""
    with pytest.raises(KeyError):
        exec(code, {})
    assert capfd.readouterr().out.splitlines() == ["step 1/3 | loss 2.000"]


def test_other_ranks_show_nothing_and_a_run_without_steps_has_no_total(capfd):
    quiet = STEPS.format(total=3, visible=False).replace("progress.log(", "(")  # only rank 0 has verl's tracking
    assert on_terminal(quiet, 80, 24) == ""
    nothing = "from verl_ext.progress import StepProgress\nStepProgress(3, 3, True).close()\n"
    assert in_files(nothing, capfd)[0] == ""


def test_a_bar_over_files_is_whole_lines_in_a_log(capfd):
    told = in_files(FILES, capfd)[1]
    assert all(line.isprintable() for line in told.splitlines())
    assert [line.partition(":")[0] for line in told.splitlines()] == ["tokenize", "tokenize"]
    assert "| 1,200 records, " in told
    assert "100%|" in told


def test_a_bar_over_files_says_nothing_that_it_does_not_know():
    shown = on_terminal(FILES, 80, 24)
    rows = [row for line in shown.split("\n") for row in line.split("\r")]
    assert all(len(row) <= 80 for row in rows)
    assert "?" not in shown
    assert "| ," not in shown
    assert any(re.match(r"tokenize: 100%\|█+\| 1,200 records, \S+ tokens/s \[\S+, 00:00 left\]", row) for row in rows)


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=-9e12, max_value=9e12))
def test_four_digits_are_short_and_within_half_a_digit(value):
    text = four_digits(value)
    assert len(text) <= 11
    factor = {"k": 1e3, "M": 1e6, "G": 1e9}.get(text[-1], 1)
    assert float(text.rstrip("kMG")) * factor == pytest.approx(value, rel=5.0001e-4)
    if abs(value) >= 1e-3:
        assert len(text.strip("-kMG").replace(".", "").lstrip("0")) == 4


@pytest.mark.parametrize(
    ("value", "text"), [(float("nan"), "nan"), (float("inf"), "inf"), (0, "0.000"), (9999.6, "10.00k")]
)
def test_four_digits_of_edges(value, text):
    assert four_digits(value) == text
