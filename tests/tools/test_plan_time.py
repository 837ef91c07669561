"""A plan's time equals its formula, and a step's bytes equal those of docs/why/parallelism.md and FSDP."""

import numpy as np
import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from tests.lib.ranks import only_rank
from tests.lib.tensor_calls import counted
from tests.lib.tiny_model import write_tiny_model
from tests.lib.tokenized_data import random_units, write_units
from tests.lib.training import into, small_run
from verl_ext.config.compose import compose
from verl_ext.tools.plan.lines import plan_lines
from verl_ext.tools.plan.machine import planned_run
from verl_ext.tools.plan.options import PlanOptions
from verl_ext.tools.plan.report import memory_facts
from verl_ext.trainer.report import write_report

pytestmark = pytest.mark.slow

RANKS, BATCH = 4, 4
TFLOPS, EFFICIENCY, LINK = 0.001, 0.5, 3e6
TOKENS = 128


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    return folder, *plan_in(folder)


def plan_in(folder, *more):
    """Return a plan's facts, the document lengths of the packs in an epoch's order, and the steps; write its report."""
    model = write_tiny_model(folder / "model", tie_word_embeddings=False)
    lengths = np.random.default_rng(0).integers(5, 100, 60).tolist()
    batch = (f"data.max_tokens={TOKENS}", f"data.train_batch_size={BATCH}", "parallel=ulysses2")
    steps = ("trainer.total_epochs=3", f"trainer.gpu_peak_tflops={TFLOPS}", "model.enable_gradient_checkpointing=true")
    overrides = small_run(folder, model, [TOKENS, *lengths], *batch, *steps, into(folder / "out"), *more)
    of_plan = {"world_size": RANKS, "gpu": "mine", "gpu_memory": "80GiB", "link": f"{LINK:.0f}", "network": "1GB"}
    with only_rank(), pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run, options = planned_run(compose(overrides), PlanOptions.read({**of_plan, "efficiency": EFFICIENCY}))
        (*_, facts) = memory_facts(run, options)
        write_report({**run.data_report(), "memory": facts}, run.output)
    dataset = run.train_set
    packs = [dataset.spans.length[dataset.plan().documents(pack)].tolist() for pack in run.plan.order(0)]
    return facts, packs, run.total_steps


def test_a_rank_receives_the_bytes_of_fsdp_and_of_ulysses(plan):
    folder, facts, _, _ = plan
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    received, config = facts["time"]["received"], model.config
    parameters = sum(p.numel() for p in model.parameters())
    layers = sum(p.numel() for p in model.model.layers.parameters())
    micro_steps, share = BATCH // 2, (RANKS - 1) / RANKS  # a rank without a pack runs an idle one
    assert received["gradients (FSDP)"] == pytest.approx(4 * parameters * share * micro_steps, rel=0.02)  # fp32
    gathered = 2 * (parameters + layers) * share * micro_steps  # a layer twice, in bf16
    assert received["parameters (FSDP)"] == pytest.approx(gathered, rel=0.1)
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    forward = facts["time"]["tokens"] / 2 / 2 * heads * config.head_dim * 2 * (1 / 2)  # (T / n) · … · (u − 1) / u
    exchanged = 3 * forward * config.num_hidden_layers  # forward, again, backward
    assert received["heads (Ulysses)"] == pytest.approx(exchanged, rel=0.02)


def test_a_rank_receives_its_whole_matrices_and_its_rows_of_the_others_updates_of_muon(plan, tmp_path):
    _, facts, _, _ = plan
    time = plan_in(tmp_path, "optim.optimizer=Muon")[0]["time"]
    layers = AutoModelForCausalLM.from_pretrained(tmp_path / "model").model.layers
    sizes = [p.numel() for p in layers.parameters() if p.ndim == 2]
    mine, share = sum(sizes[::RANKS]), (RANKS - 1) / RANKS  # rank 0 has the first matrix of each round
    rows = sum(sizes) / RANKS - mine / RANKS
    assert time["received"]["matrices (Muon)"] == pytest.approx(2 * (mine * share + rows))
    assert facts["time"]["received"]["matrices (Muon)"] == 0


def test_the_step_takes_its_dearest_packs_and_the_traffic_that_nothing_hides(plan):
    folder, facts, packs, steps = plan
    time = facts["time"]
    config = AutoConfig.from_pretrained(folder / "model")
    config._attn_implementation = "eager"
    alone, again = AutoModelForCausalLM.from_config(config), AutoModelForCausalLM.from_config(config).train()
    again.gradient_checkpointing_enable()
    flops = {length: (counted(alone, [length]), counted(again, [length])) for length in {n for p in packs for n in p}}
    count = -(-len(packs) // BATCH)
    assert time["model_flops"] == pytest.approx(sum(flops[n][0] for p in packs for n in p) / count, rel=0.02)
    counted_again = sum(flops[n][1] for p in packs for n in p) / count
    more = time["computed_flops"] / counted_again
    assert 0.99 < more < 1.07  # torch leaves out the last matrix of each layer
    received = time["received"]
    micro_steps, speed = BATCH // 2, 2 * EFFICIENCY * TFLOPS * 1e12 / more
    gather = received["parameters (FSDP)"] / micro_steps / (0.75 * LINK)
    reduce = received["gradients (FSDP)"] / micro_steps / (0.75 * LINK)
    per_token = received["heads (Ulysses)"] / (time["tokens"] / 2) / (0.75 * LINK)
    seconds = 0.0
    for first in range(0, len(packs), BATCH):
        step = packs[first : first + BATCH]
        for micro in range(micro_steps):
            mine = step[2 * micro : 2 * micro + 2]
            computing = max((sum(flops[n][1] for n in p) for p in mine), default=0) / speed
            seconds += max(computing, gather + reduce) + per_token * max((sum(p) for p in mine), default=0)
    assert time["step_seconds"] == pytest.approx(seconds / count, rel=0.02)
    assert time["step_seconds"] == pytest.approx(sum(time["seconds"].values()))
    assert (time["steps"], steps) == (3 * count, 3 * count)
    assert time["hours"] == pytest.approx(time["step_seconds"] * steps / 3600)
    assert time["mfu"] == pytest.approx(time["model_flops"] / time["step_seconds"] / (RANKS * TFLOPS * 1e12))


def test_a_plan_of_preferences_names_the_passes_that_its_time_leaves_out(plan, tmp_path):
    units = write_units(tmp_path / "units", random_units(np.random.default_rng(2), [2, 3, 2, 2, 4, 2]))
    facts = plan_in(tmp_path, f"data.train_dir={units}", "data=preference", "loss=kto")[0]
    passes = ["the reference's pass over the data", "a step's forward pass of mismatched answers"]
    assert (plan[1]["time"]["left_out"], facts["time"]["left_out"]) == ([], passes)
    assert any(line.endswith(", ".join(["jitter", *passes])) for line in plan_lines(facts))


def test_sizes_that_fit_come_first_the_cheapest_at_the_top(plan):
    sizes = plan[1]["sizes"]
    facts = plan[1]
    assert {(size["ulysses"], size["context"]) for size in sizes} == {(1, 1), (2, 1), (4, 1)}
    assert [size["ulysses"] for size in sizes if size["own"]] == [2]
    assert all(size["fits"] for size in sizes)
    assert [s["step_seconds"] for s in sizes] == sorted(s["step_seconds"] for s in sizes)
    own = next(size for size in sizes if size["own"])
    assert own["step_seconds"] == facts["time"]["step_seconds"]
