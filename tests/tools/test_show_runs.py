"""Runs in `verl-ext show`: curves of the metrics, steps with the packs that the trainer feeds, spikes."""

import json
import multiprocessing
import os
import subprocess
import sys
import threading
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.lib.chat_templates import CHATML, tiny_tokenizer
from tests.lib.errors import names
from tests.lib.ranks import forked, in_turn, run_ranks
from tests.lib.shown import document, page_data, refused_line, show, view, write_data, write_metrics
from tests.lib.training import small_run
from verl_ext.checkpoint.layout import lock_folder
from verl_ext.config.compose import compose
from verl_ext.files import write_json
from verl_ext.tools.show import run as show_run
from verl_ext.tools.show import runs
from verl_ext.trainer.setup import prepare

STEPS = 6


def test_curves_are_those_of_the_metrics(tmp_path):
    run = write_metrics(tmp_path / "run", 40)
    shown = view(run, f"json={tmp_path / 'curves.json'}")
    assert "step 40" in shown
    line = next(line for line in shown.splitlines() if line.startswith("train/maths_loss"))
    assert line.split()[1:4] == ["4.000", "0.1000", "0.1000"]
    (found,) = json.loads((tmp_path / "curves.json").read_text())
    tens = [10, 20, 30, 40]
    assert found["curves"]["val/loss"] == {"steps": tens, "values": [3.5 / step for step in tens]}
    assert found["curves"]["train/loss"]["values"] == [3 / step for step in range(1, 41)]


def test_a_picture_has_a_curve_of_every_category_and_colours_for_light_and_dark(tmp_path):
    run, other, picture = write_metrics(tmp_path / "run", 40), write_metrics(tmp_path / "other", 20), tmp_path / "c.svg"
    code, shown, errors = show(run, f"svg={picture}")
    assert (code, shown) == (0, f"written to {picture}\n"), errors
    drawn = picture.read_text()
    assert drawn.startswith("<svg ")
    assert "prefers-color-scheme: dark" in drawn
    categories = [name for name in ("maths", "code") if f'"train/{name}_loss"' in (run / "metrics.jsonl").read_text()]
    assert categories
    assert all(f">{name}</text>" in drawn for name in categories)
    view(run, other, f"svg={picture}")
    assert all(f">{name}</text>" in picture.read_text() for name in ("run", "other", *categories))
    code, _, errors = show(run, f"svg={picture}", "metric=beauty")
    assert code == 1
    assert names(errors, "metric", "loss", "beauty")


def test_a_page_begins_with_every_category_training_smoothed_and_validation_as_points_above_its_table(tmp_path):
    run, page = write_metrics(tmp_path / "run", 40), tmp_path / "page.html"
    lines = [{"step": step, "data": {"val/code_loss": step / 10}} for step in (20, 40)]
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    view(run, f"html={page}")
    (first, *_), text = page_data(page)["charts"], page.read_text()
    assert text.index('id="chart-0"') < text.index('class="part"') < text.index('id="chart-1"')
    drawn: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for value in first["values"]:
        drawn.setdefault((value["category"], value["kind"]), []).append((value["step"], value["value"]))
    assert drawn.keys() == {("maths", "train"), ("code", "train"), ("code", "val")}
    assert drawn["code", "val"] == [(20, 2.0), (40, 4.0)]
    steps = [[1], *([step, step + 1] for step in range(2, 40, 2)), [40]]  # a twentieth of the run is two steps
    means = [(sum(part) / len(part), round(sum(4 / step for step in part) / len(part), 4)) for part in steps]
    assert drawn["maths", "train"] == means


def test_a_torn_file_is_shown_up_to_the_tear_and_numbers_that_are_not_finite_leave_a_gap(tmp_path):
    run, curves = write_metrics(tmp_path / "run", 4), tmp_path / "curves.json"
    path = run / "metrics.jsonl"
    path.write_text(path.read_text()[:-20])
    code, shown, _ = show(run)
    assert code == 0
    assert "step 3" in shown
    assert "line 4 of its metrics is not whole" in shown
    lines = ('{"step": 1, "data": {"train/loss": NaN}}', '{"step": 2, "data": {"train/loss": 2.5, "train/lr": null}}')
    path.write_text("\n".join(lines))
    shown = view(run, f"json={curves}")
    (found,) = json.loads(curves.read_text())
    assert found["curves"]["train/loss"]["values"] == [None, 2.5]
    assert "2.500" in shown


def test_several_runs_show_what_differs_in_their_configs_without_secrets(tmp_path, monkeypatch):
    for name, rate in (("one", 0.1), ("two", 0.2)):
        run = write_metrics(tmp_path / name, 3)
        config = {"optim": {"lr": rate, "betas": [0.9, 0.95]}, "trainer": {"wandb_api_key": f"secret-{name}"}}
        write_json(run / "run.json", {"config": config, "total_steps": 6})
    shown = view(tmp_path / "one", tmp_path / "two")
    assert ["optim.lr", "0.1", "0.2"] in [line.split() for line in shown.splitlines()]
    assert "betas" not in shown
    assert "secret-" not in shown
    assert "step 3 of 6 (50%) · not running" in shown
    monkeypatch.setattr(runs, "is_locked", lambda folder: True)
    shown = show(tmp_path / "one", tmp_path / "two")[1]
    assert "step 3 of 6 (50%) · 00:06 left" in shown  # 3 steps of 1,000 tokens at 500 a second


def test_losses_and_scores_by_length_are_compared_first_and_last(tmp_path):
    for name, gain in (("short", 0.1), ("long", 0.5)):
        run, lines = tmp_path / name, []
        run.mkdir()
        for step in (0, 4):
            data = {"val/loss": 2.0, "val/loss_0_8": 2.0, "val/loss_8_inf": 3.0 - step * gain, "val/answer_8_inf": 0.5}
            counts = {"val/target_tokens_0_8": 7, "val/target_tokens_8_inf": 9, "val/answer/qa_1_2": 1.0}
            lines.append(json.dumps({"step": step, "data": data | counts}))
        (run / "metrics.jsonl").write_text("\n".join(lines))
    shown = view(tmp_path / "short", tmp_path / "long")
    words = [line.split() for line in shown.splitlines()]
    assert ["loss", "by", "document", "length", "0_8", "8_inf"] in words
    for name, last in (("short", "2.600"), ("long", "1.000")):
        assert [f"{name},", "step", "0", "2.000", "3.000"] in words
        assert [f"{name},", "step", "4", "2.000", last] in words
    assert ["answer", "by", "document", "length", "8_inf"] in words
    assert "target_tokens" not in shown
    view(tmp_path / "short", tmp_path / "long", f"html={tmp_path / 'page.html'}")
    page = (tmp_path / "page.html").read_text()
    assert '"title": "loss by document length, first and last"' in page
    assert '{"model": "long, step 4", "group": "8_inf", "mean": 1.0, "low": 1.0, "high": 1.0, "cases": 9}' in page


@pytest.mark.parametrize("width", [80, 160])
def test_lines_fit_the_terminal_and_a_pipe_has_no_control_characters(tmp_path, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    shown = show(write_metrics(tmp_path / "run", 500))[1]
    assert max(map(len, shown.splitlines())) <= width
    assert "\x1b" not in shown


def test_every_metric_of_the_file_is_shown_but_the_details_of_categories(tmp_path):
    """Answers and their categories, accuracies, entropies, totals and whatever else a hook logged, also on the page."""
    train = ["loss", "maths_loss", "router_loss", "token_accuracy", "entropy", "total_tokens", "loss_scale", "mine"]
    shown = [*(f"train/{name}" for name in train), "val/answer", "val/answer/maths", "val/entropy", "val/perplexity"]
    shown.append("perf/mfu")
    details = ["train/maths_tokens", "train/maths_entropy", "train/maths_token_accuracy", "val/maths_entropy"]
    values = dict.fromkeys((*shown, *details), 0.5) | {"val/perplexity": 8e6, "train/skipped_steps": 0}
    lines = [{"step": step, "data": values} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [line.split()[0] for line in show(tmp_path)[1].splitlines() if "/" in line.split(" ")[0]]
    assert set(rows) == {*shown, "train/skipped_steps"}
    order = [rows.index(name) for name in ("train/router_loss", "perf/mfu", "train/token_accuracy")]
    assert order == sorted(order)
    page = tmp_path / "page.html"
    view(tmp_path, f"html={page}")
    _, *charts = page_data(page)["charts"]  # all categories, then each metric
    assert {curve["metric"] for chart in charts for curve in chart["curves"]} == set(shown)  # no figure of zeros
    scales = {chart["title"]: chart["spec"]["encoding"]["y"]["scale"] for chart in charts}
    assert "mfu" in scales
    assert scales["answer"] == scales["token accuracy"] == {"domain": [0, 1]}
    assert scales["perplexity"]["type"] == "log"
    assert scales["loss"] == {"zero": False}


def hold_lock(folder: Path, told: Connection) -> None:
    _ = lock_folder(folder)
    told.send("locked")
    threading.Event().wait()


def test_following_waits_for_the_first_step_and_ends_with_the_process_that_trains(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    ours, theirs = multiprocessing.Pipe()
    process = forked(hold_lock, folder, theirs)
    assert ours.recv() == "locked"

    def describe() -> None:
        write_metrics(folder, 3)
        write_json(folder / "run.json", {"total_steps": 6})

    def kill() -> None:
        process.kill()
        process.join()

    events = iter((describe, kill))
    monkeypatch.setattr(show_run.time, "sleep", lambda seconds: next(events)())
    shown = view(folder, "follow")
    assert next(events, None) is None
    assert "not running" in shown
    write_metrics(folder, 6)  # a finished run, or one whose metrics were moved: shown once
    (folder / "run.json").unlink()
    view(folder, "follow")
    page = tmp_path / "page.html"
    view(folder, "follow", f"html={page}")
    assert page.is_file()


def test_bad_runs_are_one_line(tmp_path):
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "latest_checkpointed_iteration.txt").write_text("3")
    (tmp_path / "other.jsonl").write_text('{"messages": []}\n')
    run = write_metrics(tmp_path / "run", 3)
    for code, key, *words in (
        (2, "metrics.jsonl", tmp_path / "none"),
        (2, "model.path", tmp_path / "other.jsonl"),  # not metrics, so raw data
        (2, "run.json", run, "step=2"),
        (2, "step", run, "rank=1"),
    ):
        assert names(refused_line(*words, code=code), key)


def test_the_documents_of_a_spike_are_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")  # a long path wraps no line
    run = write_metrics(tmp_path / "run", 3)
    data = write_data(tmp_path / "data", [document([1, 2], [1]), document([1, 2, 3, 4, 5], [2, 4])])
    place = {"folder": data, "row": 1, "start": 2, "tokens": 3, "category": "maths", "pack": 0, "loss": 9.5}
    spike = {"step": 2, "reason": "spike", "loss": 7.0, "reference": 1.0, "packs": [0], "documents": [place]}
    (run / "spikes.jsonl").write_text(json.dumps(spike) + "\n")
    assert names(refused_line(run, "step=2", code=2), "model.path")  # the data names no tokenizer
    tiny_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    shown = view(run, "step=2", "tokens", f"model.path={tmp_path / 'model'}")
    assert "row 1 of" in shown
    assert "loss 9.5" in shown
    assert [part.rpartition("·")[2] for part in shown.strip().splitlines()[-1].split()] == ["3", "4", "5"]


def describe(overrides: list[str], folder: str) -> None:
    """Write a run's description, and for every step and rank the rows that it trains on; paths are below `folder`."""
    os.chdir(folder)
    run = prepare(compose(overrides))
    documents = run.train_set.documents_of
    rows = [
        [
            [place.row for pack in run.plan.rank_packs(step, rank, 2) if pack is not None for place in documents(pack)]
            for rank in range(2)
        ]
        for step in range(STEPS)
    ]
    if run.config.machine.world_size == 2:
        write_json(Path(folder) / "run.json", run.facts())
        write_json(Path(folder) / "rows.json", rows)


@pytest.mark.slow
def test_the_packs_of_a_step_are_those_that_the_run_feeds(tmp_path, tiny_model):
    calls = []
    for balance in ("sorted", "none"):
        (tmp_path / balance).mkdir()
        small_run(tmp_path / balance, tiny_model, range(4, 60), seed=5)
        words = ["data.train_dir=data", f"model.path={tiny_model}", "data.max_tokens=64", "data.train_batch_size=4"]
        words += ["optim.lr=1e-3"]
        words += [f"data.balance={balance}", "data.seed=3", "parallel=cpu", f"trainer.total_training_steps={STEPS}"]
        calls.append((describe, [*words, "trainer.default_local_dir=run"], str(tmp_path / balance)))
    run_ranks(in_turn, 2, calls)
    for balance in ("sorted", "none"):
        folder = tmp_path / balance
        (folder / "metrics.jsonl").write_text('{"step": 1, "data": {"train/loss": 1.0}}\n')
        rows = json.loads((folder / "rows.json").read_text())
        for step, rank in product((1, STEPS), range(2)):
            shown = view(folder, f"step={step}", f"rank={rank}")
            found = [int(line.split()[2]) for line in shown.splitlines() if line.startswith("data row")]
            assert found == rows[step - 1][rank]
    # A process of its own has nothing of what other tests imported.
    program = [sys.executable, "-m", "verl_ext", "show", str(folder), "step=1", "rank=0"]
    alone = subprocess.run(program, cwd=tmp_path.parent, capture_output=True, text=True, check=True).stdout
    assert alone.count("data row") == len(rows[0][0])
    small_run(folder, tiny_model, range(5, 61), seed=5)
    assert names(refused_line(folder, "step=1", code=1), "data.train_dir")
