"""recipes/papers/glm_long: the published budgets, and its demonstration from generated data to a mixture's table."""

import runpy
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.lib.errors import refused
from tests.lib.project import ROOT
from verl_ext.config.compose import compose
from verl_ext.data import SFTDataSet
from verl_ext.data.packs.mixture import MixtureOptions
from verl_ext.packing.mixture import TOLERANCE, draw_mixture
from verl_ext.packing.strategies import plan_repeated

pytestmark = pytest.mark.slow

RECIPE = ROOT / "recipes" / "papers" / "glm_long"
BUDGETS = {  # the published tokens and shortest length of each source
    "stage1_128k": {"original": (4e9, None), "over_8k": (3e9, 2**13), "over_32k": (3e9, 2**15)},
    "stage2_1m": {
        "original": (3.5e9, None),
        "over_8k": (1.5e9, 2**13),
        "over_32k": (1.5e9, 2**15),
        "over_128k": (1.5e9, 2**17),
        "artificial": (2e9, 2**13),
    },
}


def run(monkeypatch, script, *arguments):
    monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
    runpy.run_path(str(RECIPE / script), run_name="__main__")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("glm_long")
    with pytest.MonkeyPatch.context() as patch:
        run(patch, "make_data.py", "--output", folder)
    return folder


def overrides(stage, data, scale):
    words = [f"recipe=glm_long/{stage}", f"data.train_dir={data / 'original'}", f"data.mixture.scale={scale}"]
    if "artificial" in BUDGETS[stage]:
        words.append(f"data.mixture.sources.artificial.train_dir={data / 'artificial'}")
    return words


@pytest.mark.parametrize("stage", BUDGETS)
def test_a_stage_has_the_published_budgets_over_intervals_that_double_up_to_its_pack(stage):
    config = compose(overrides(stage, Path("DIR"), 1.0))
    options = MixtureOptions.read(config.data.mixture)
    assert {source.name: source.tokens for source in options.budgets} == {
        name: tokens for name, (tokens, _) in BUDGETS[stage].items()
    }
    assert sum(source.tokens for source in options.budgets) == 10e9
    for source in options.budgets:
        shortest = BUDGETS[stage][source.name][1]
        assert (source.edges and source.edges[0]) == shortest
        if source.edges:
            assert all(high == 2 * low for low, high in pairwise(source.edges))
            assert source.edges[-1] == config.data.max_tokens
    assert config.engine.ulysses_sequence_parallel_size == 8
    assert config.loss.mode == "token"


@pytest.mark.parametrize("stage", BUDGETS)
def test_a_scaled_stage_balances_the_tokens_of_its_intervals(stage, data):
    config = compose(overrides(stage, data, 0.1))
    dataset = SFTDataSet(config.data.train_dir, config=config.data)
    for source, (tokens, _) in BUDGETS[stage].items():
        rows = [row for row in dataset.mixture_report if row.source == source]
        assert sum(row.tokens_wanted for row in rows) == tokens / 10
        assert sum(row.tokens_given for row in rows) == pytest.approx(tokens / 10, rel=TOLERANCE)
        assert all(abs(row.off) <= TOLERANCE or row.blocked_by for row in rows)
    assert dataset.facts().tokens.sum() == sum(row.tokens_given for row in dataset.mixture_report)
    assert dataset.categories.names == ("text",)
    assert dataset.facts().tokens.max() <= config.data.max_tokens
    assert dataset.facts().tokens.mean() > 0.98 * config.data.max_tokens


def test_copies_of_a_document_lie_in_different_packs_while_they_are_no_more_than_the_parts():
    lengths = np.exp(np.random.default_rng(0).uniform(np.log(100), np.log(2**17), 30_000)).astype(np.int64)
    sources = MixtureOptions.read(compose(["recipe=glm_long/stage1_128k"]).data.mixture).budgets
    draws = draw_mixture(lengths, sources, [np.arange(30_000)] * 3, seed=0, scale=0.1)
    drawn = np.concatenate([draw.documents for draw in draws])
    assert np.bincount(drawn).max() >= 4
    plan = plan_repeated(lengths, drawn, 2**17, "best_fit", seed=0)
    pack_of = np.repeat(np.arange(plan.num_packs), np.diff(plan.pack_offsets))
    in_packs = np.unique(pack_of * len(lengths) + plan.document_index)
    assert len(in_packs) > 0.999 * len(drawn)


@pytest.mark.parametrize("stage", BUDGETS)
def test_the_plan_is_printed_without_a_gpu_or_a_model(stage, data, monkeypatch, capsys):
    run(monkeypatch, "plan.py", *overrides(stage, data, 0.01))
    told = capsys.readouterr().out
    for source in BUDGETS[stage]:
        assert f"\n{source.rjust(max(map(len, BUDGETS[stage])))} " in f"\n{told}"
    assert " packs of " in told


def test_mistakes_are_one_line(data, monkeypatch):
    key = "data.mixture.sources.over_8k.token"
    with refused("plan.py", key, f"nearest: {key}s", error=SystemExit):
        run(monkeypatch, "plan.py", *overrides("stage1_128k", data, 0.01), f"{key}=5")
    config = compose(["recipe=glm_long/stage2_1m"])
    with refused("data.mixture.sources.artificial.train_dir", "nothing"):
        MixtureOptions.read(config.data.mixture)


def test_the_same_seed_writes_the_same_documents_and_every_interval_has_some(data, tmp_path, monkeypatch):
    run(monkeypatch, "make_data.py", "--output", tmp_path)
    for name in ("original", "artificial"):
        first, again = (SFTDataSet(str(folder / name), 2**20) for folder in (data, tmp_path))
        assert first.spans.length.tolist() == again.spans.length.tolist()
        assert first[0]["input_ids"].tolist() == again[0]["input_ids"].tolist()
        assert first[0]["loss_mask"].sum() == len(first[0]["loss_mask"]) - first.facts().documents[0]
        counts, _ = np.histogram(first.spans.length, [2**power for power in range(13, 21)])
        assert counts.all()
