"""Output of runs and commands: lines of 80 columns, bars only on terminals, no control characters elsewhere."""

import os
import pty
import re
import struct
import subprocess
import sys
from fcntl import ioctl
from termios import TIOCSWINSZ

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.progress import four_digits

STEPS = """
from verl_ext.progress import StepProgress

progress = StepProgress(0, {total}, visible={visible})
for step in range(1, 4):
    progress.step(123456)
    names = ("gsm8k", "code", "a name of two-words", *(f"category_{{n}}" for n in range(20)))
    losses = {{f"train/{{name}}_loss": 2.71828182845904 for name in names}}
    counts = {{f"train/{{name}}_tokens": 1234 for name in names}}
    numbers = {{"loss": 2.13841295, "router_loss": 3.0, "tokens_per_second": 123456.789, "memory_gib": 141.234}}
    metrics = {{**{{f"train/{{name}}": value for name, value in numbers.items()}}, **losses, **counts}}
    progress.show(metrics)
    with progress.aside():
        progress.log(metrics, step)
    with progress.aside():
        shares = {{"val/exact_match": 0.91234, "val/accuracy": 0.91234}}
        progress.log({{"val/loss": 2.0123456, "val/perplexity": 7.48083456, **shares}}, step)
    with progress.aside():
        progress.log({{"train/save_pause": 0.123456789}}, step)
progress.close()
"""
FILES = """
from types import SimpleNamespace

from verl_ext.progress import Progress

for total in (1000, None):
    with Progress(total) as progress:
        for _ in range(4):
            progress.add(SimpleNamespace(records=300, tokens=123456, num_bytes=250))
"""


def on_terminal(code: str, columns: int, lines: int) -> str:
    """Return a program's output on a terminal of its own."""
    ours, theirs = pty.openpty()
    ioctl(theirs, TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += (more := os.read(ours, 65536))
        except OSError:  # the other end is closed
            break
        if not more:
            break
    os.close(ours)
    assert process.wait() == 0, shown.decode()
    return shown.decode().replace("\r\n", "\n")


def in_pipes(code: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("total", [3, 2_000_000])
def test_a_steps_line_fits_80_columns_and_redirected_output_has_no_control_characters(total):
    done = in_pipes(STEPS.format(total=total, visible=True))
    assert done.stderr == ""  # no bar in a file
    lines = done.stdout.splitlines()
    assert len(lines) == 10
    assert all(len(line) <= 80 and line.isprintable() for line in lines)
    width = len(str(total))
    first = rf"step {1:>{width}}/{total}  loss 2\.138  123\.5k tokens/s  141\.2 GiB  \d+(:\d\d)+ left"
    assert re.fullmatch(first, lines[0])
    assert lines[1].startswith(f"step {1:>{width}}/{total}  val  loss 2.012  exact_match 0.9123  accuracy 0.9123")
    assert lines[2] == f"step {1:>{width}}/{total}  saved, training waited 0.1235 s"
    assert lines[9].startswith("trained on 370,368 tokens in ")


@pytest.mark.parametrize(
    ("speed", "shown"), [("mfu", "MFU 41.2%"), ("tokens_per_second_per_gpu", "61.73k/rank"), ("other", None)]
)
@pytest.mark.parametrize("total", [300, 99_999, 2_000_000])
def test_a_steps_line_has_loss_rate_share_of_the_gpu_or_of_a_rank_memory_and_time_left(speed, shown, total):
    values = {"mfu": 0.4123, "tokens_per_second_per_gpu": 61728.394, "other": 1.0}
    metrics = {"train/loss": 2.13841295, "train/tokens_per_second": 123456.789, "train/memory_gib": 141.234}
    code = f"""
from verl_ext.progress import StepProgress
progress = StepProgress(0, {total}, visible=True)
progress.step(1000)
progress.started -= 0.05
progress.log({metrics | {f"perf/{speed}": values[speed]}}, 7)
"""
    (line,) = in_pipes(code).stdout.splitlines()
    assert len(line) <= 80
    if line.startswith("step "):
        assert line.startswith(f"step {7:>{len(str(total))}}/{total}  ")
    parts = re.split("  +", line[line.index("loss") :])
    assert parts[0] == "loss 2.138"
    assert parts[1] in ("123.5k tokens/s", "123.5k tok/s")
    assert parts[2:-2] == ([shown] if shown else [])
    assert parts[-2] == "141.2 GiB"
    assert re.fullmatch(r"\d+(:\d\d)+ left", parts[-1])


def test_an_80_column_terminal_shows_a_line_a_step_and_a_bar_that_fits():
    shown = on_terminal(STEPS.format(total=3, visible=True), 80, 24)
    rows = [row for line in shown.split("\n") for row in line.split("\r")]
    assert all(len(row) <= 80 for row in rows)
    assert len([row for row in rows if "loss 2.138  123.5k tokens/s" in row]) == 3
    assert any(row.startswith("train: 100%") for row in rows)
    assert "gsm8k" not in shown


def test_a_tall_terminal_has_the_categories_below_a_step():
    shown = on_terminal(STEPS.format(total=3, visible=True), 100, 40)
    rows = [row for line in shown.split("\n") for row in line.split("\r")]
    assert all(len(row) <= 100 for row in rows)
    (below,) = {row for row in rows if "gsm8k" in row}
    assert below.startswith("    gsm8k 2.718  code 2.718  a name of two-words 2.718  category_0 2.718")
    assert "router" not in shown


def test_other_ranks_show_nothing_and_a_run_without_steps_has_no_total():
    quiet = STEPS.format(total=3, visible=False).replace("progress.log(", "(")  # only rank 0 has verl's tracking
    assert on_terminal(quiet, 80, 24) == ""
    nothing = "from verl_ext.progress import StepProgress\nStepProgress(3, 3, True).close()\n"
    assert in_pipes(nothing).stdout == ""


def test_a_bar_over_files_is_whole_lines_in_a_log():
    told = in_pipes(FILES).stderr
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
