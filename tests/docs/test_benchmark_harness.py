"""The harness of the benchmarks: turns, tables, cells of their own process and the command line."""

import json
import math
import subprocess
import sys

import pytest
import torch.distributed as dist

from benchmarks import __main__
from benchmarks.cells import ROOT, in_own_process, on_ranks
from benchmarks.harness import Turns, equal, relative, table, take_turns
from benchmarks.meters import measured
from tests.lib.errors import names, refused


def test_turns_print_their_median_and_range_and_divide_turn_by_turn():
    assert (f"{Turns([3, 1, 2]):.1f}", f"{Turns([4]):.1f}") == ("2.0 [1.0, 3.0]", "4.0")
    assert Turns([4, 9]) / [2, 3] == [2, 3]


def test_every_contestant_begins_a_turn_and_warm_ups_are_dropped():
    calls = []
    contestants = {name: lambda name=name: calls.append(name) or len(calls) for name in "abc"}
    assert take_turns(contestants, 2, warm_up=1) == {"a": [6, 8], "b": [4, 9], "c": [5, 7]}
    assert "".join(calls) == "abcbcacab"


def test_a_row_shows_its_figures_and_why_others_are_missing():
    def rows_of(options, folder):
        """Rows."""

    failed = [{"name": "b", "failed": "No module named 'b'"}, {"name": "c", "failed": "it broke"}]
    rows = [{"name": "a", "seconds": 1.25, "peak": None}, *failed]
    made = table("name {name} | seconds {seconds:.1f} | peak {peak:.0f} MiB")(rows_of)
    lines = made.text(rows).splitlines()
    assert lines[4:] == ["| a | 1.2 | – |", "| b | – | No module named 'b' |", "| c | – | it broke |"]
    assert made.failures(rows) == ["it broke"]


def test_ratios_are_to_the_first_row_and_rows_that_differ_are_no_result():
    rows = [{"loss": 1.0, "seconds": 2.0}, {"loss": 1.0 + 1e-6, "seconds": 3.0}, {"failed": "why"}]
    assert [row.get("× seconds") for row in relative(rows, "seconds")] == [1.0, 1.5, None]
    equal(rows, ("loss",), 1e-5)
    of_turns = [{"loss": [1.0, 2.0]}, {"loss": [1.0, 2.1]}]
    for differing, tolerance in ((rows, 1e-7), ([*rows, {"loss": math.nan}], 1e-5), (of_turns, 1e-2)):
        with refused("loss", error=RuntimeError):
            equal(differing, ("loss",), tolerance)


def _failing(value):
    print('{"found": "noise"}')
    yield {"found": value}
    raise ValueError("too long")


def _meeting():
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, dist.get_rank())
    return {"ranks": found}


def test_a_cell_returns_its_figures_alone_and_keeps_them_when_it_fails():
    named = "tests.docs.test_benchmark_harness:_failing"
    assert in_own_process(named, 3) == {"found": 3, "failed": "ValueError: too long"}


@pytest.mark.slow
def test_ranks_meet_and_one_that_fails_ends_the_benchmark():
    assert on_ranks(2, _meeting) == [{"ranks": [0, 1]}] * 2
    with refused("_failing", error=RuntimeError):
        on_ranks(1, _failing, 3)


@pytest.mark.parametrize(
    ("private", "figures"), [(False, {"seconds", "peak_mib"}), (True, {"seconds", "peak_mib", "held_mib"})]
)
def test_a_peak_is_what_a_block_adds(private, figures):
    kept = bytearray(64 << 20)
    with measured(private) as found:
        held = bytearray(b"x" * (32 << 20))
    assert found.keys() == figures
    assert 30 < found["peak_mib"] < 100
    assert not private or 30 < found["held_mib"] < 34
    del kept, held


@pytest.mark.parametrize(
    ("words", "things"),
    [
        (["pack"], ("NAME", "got pack")),
        (["packing", "repeats=0"], ("repeats", 1, 0)),
        (["packing", "document=3"], ("document", "nearest: documents")),
        (["packing", "--table", "speed"], ("--table", "compared, balance", "speed")),
        (["repeats=3"], ("NAME", "--table", 0)),
        (["head", "heads=[fused,trll]"], ("heads", "trll")),
        (["training", "documents=10"], ("documents", "micro_batch=4", 10)),
        (["gpu", "shapes=[0.6B]"], ("shapes", "tiny", "CUDA")),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(words, things, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", *words])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert __main__.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert names(line, "error", *things)


@pytest.mark.slow
def test_benchmarks_run_one_after_the_other_and_every_figure_is_written(tmp_path):
    output = tmp_path / "found.json"
    command = [sys.executable, "-m", "benchmarks", "head", "leaks", "--quick", "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())
    assert [row["kind"] for row in found["leaks"]["leaks"]] == ["llama"]
    assert found["head"]["options"]["vocabulary"] == 1000
    assert found["head"]["text"] in done.stdout
