"""The memory of a step predicted on fake tensors equals that of real ranks; and a plan's lines about memory."""

import copy
import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from tests.lib.checked import typed
from tests.lib.errors import names, refused
from tests.lib.ranks import in_turn, only_rank, run_ranks
from tests.lib.small_models import write_small_models
from tests.lib.tiny_model import write_tiny_model
from tests.lib.training import heard, small_run
from verl_ext.config.compose import compose
from verl_ext.data import CategoryTable
from verl_ext.flops import GPUS
from verl_ext.losses import LossSpec
from verl_ext.plugin import PACKED
from verl_ext.tools.plan.caching_allocator import reserved
from verl_ext.tools.plan.fake_gpu import MemoryTracker
from verl_ext.tools.plan.lines import memory_lines, remedy_line
from verl_ext.tools.plan.machine import planned_run
from verl_ext.tools.plan.options import PlanOptions, num_bytes
from verl_ext.tools.plan.report import Predictor, memory_facts
from verl_ext.tools.plan.run import KINDS, Job, build_engine, fill_optimizer, take_step
from verl_ext.trainer.collator import StepCollator

pytestmark = pytest.mark.slow

CHECKPOINTING = "model.enable_gradient_checkpointing"


def job_of(model, ranks, tokens, micro_batches, *overrides):
    """Make a job of CPU ranks, with packs of two documents whose tokens are all targets."""
    config = typed(compose([f"model.path={model}", "data.train_dir=unused", "optim.lr=1e-3", *overrides]))
    pack = {
        "input_ids": torch.arange(tokens) % 100,
        "position_ids": torch.arange(tokens // 2).repeat(2),
        "loss_mask": (torch.arange(tokens) % (tokens // 2) > 0).long(),
        "category_ids": torch.zeros(tokens, dtype=torch.int64),
    }
    batch = StepCollator(LossSpec("token"), CategoryTable((), ()))([pack])
    return Job(config.values, [[batch] * micro_batches], ranks, 0, "sdpa", PACKED, on_gpu=False)


def write_one_sided(folder):
    """Save a mixture of which each token chooses the first two of four experts, which one of two ranks holds."""
    sizes = {"moe_intermediate_size": 64, "hidden_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
    model = AutoModelForCausalLM.from_pretrained(
        write_tiny_model(folder, config_class=Qwen3MoeConfig, vocab_size=512, **sizes)
    )
    for layer in model.model.layers:
        layer.mlp.gate.weight.data.zero_()
    model.save_pretrained(folder)
    return folder


def tracked(jobs):
    """Return the peak bytes of each job's step, with real tensors on a real rank.

    A thread of gloo lets go of a buffer some time after its collective: a peak may only be too high by that, and the
    least of several steps is the step's own.
    """
    peaks = []
    for job in jobs:
        tracker = MemoryTracker("cpu", fake=False)
        with tracker:
            engine = build_engine(job)
            fill_optimizer(engine, tracker)
            tried = []
            for _ in range(5):
                tracker.forget_peak()
                take_step(engine, job, job.steps[0], tracker)
                tried.append({kind: tracker.peak.get(kind, 0) for kind in KINDS})
        peaks.append(min(tried, key=lambda kinds: sum(kinds.values())))
    return peaks


def compared(jobs):
    """Return the prediction of each job, which must be what its fullest rank allocates."""
    with Predictor() as predictor:
        predictions = [predictor.predict(job) for job in jobs]
    of_ranks = run_ranks(tracked, 2, jobs)
    for prediction, *real in zip(predictions, *of_ranks, strict=True):
        kinds = max(real, key=lambda kinds: sum(kinds.values()))
        assert prediction.peak == pytest.approx(sum(kinds.values()), rel=0.02)
        for kind in ("parameters", "gradients", "optimizer state"):
            assert prediction.kinds[kind] == pytest.approx(kinds[kind], rel=0.01)
            assert kinds[kind] > 0
    return predictions


def test_a_prediction_on_fake_tensors_is_what_real_ranks_allocate_also_of_a_frozen_tower(tmp_path, tiny_model):
    model = write_tiny_model(tmp_path / "model", hidden_size=64, intermediate_size=256, vocab_size=512)
    packed = write_tiny_model(tmp_path / "packed", hidden_size=64, intermediate_size=256, vocab_size=512, head_dim=16)
    tower = write_small_models(["gemma3"], tmp_path, tiny_model)["gemma3"]
    jobs = [
        job_of(model, 2, 512, 1, f"{CHECKPOINTING}=false", "loss.head=plain", "parallel=ulysses2"),
        job_of(model, 2, 256, 2, f"{CHECKPOINTING}=true", "engine.use_no_sync_for_gradient_accumulation=true"),
        job_of(model, 2, 256, 1, "optim.optimizer=Muon"),
        job_of(model, 2, 256, 1, "optim.optimizer=AdamW8bit"),
        job_of(model, 2, 256, 1, "model.lora_rank=8", "model.use_dora=true", "model.modules_to_save=[lm_head]"),
        job_of(tower, 2, 96, 1),
        job_of(tower, 2, 96, 2, f"{CHECKPOINTING}=false"),
        job_of(packed, 2, 256, 1, "model.lora_rank=8", "model.quantization=nf4", "model.modules_to_save=[lm_head]"),
    ]
    predictions = compared(jobs)
    adamw, muon = (prediction.kinds["optimizer state"] for prediction in predictions[1:3])
    assert muon < 0.75 * adamw  # of the matrices a momentum alone, for a moment a whole one in bf16
    # A rank's half of embeddings, head and MLPs has codes and scales; smaller matrices are as AdamW's.
    narrow, wide = (2 * 512 * 64 + 2 * 2 * 256 * 64) // 2, 2 * 64 * 256 // 2
    saved = (8 - 2) * (narrow + wide) - 2 * 4 * (narrow // 64 + wide // 256) - 2 * 4 * (256 + 255)  # tables of codes
    assert predictions[1].standing - predictions[3].standing == saved


def test_with_shared_experts_a_prediction_by_the_real_imbalance_is_what_the_fullest_rank_allocates(tmp_path):
    model = write_one_sided(tmp_path / "model")
    shared = ("parallel.expert_parallel=2", "model.freeze=['*.gate.*']")
    one_sided = dataclasses.replace(job_of(model, 2, 256, 1, *shared), expert_imbalance=2.0)
    compared([one_sided, job_of(model, 2, 256, 1, *shared, "+model.override_config.num_experts_per_tok=4")])  # and even


def test_layers_over_tiles_with_an_offload_add_weights_alone_to_a_prediction(tmp_path):
    options = ["model.activation_offload=true", "model.tile_tokens=512", f"{CHECKPOINTING}=true"]
    models = [write_tiny_model(tmp_path / str(layers), num_hidden_layers=layers) for layers in (2, 4)]
    with Predictor() as predictor:
        fewer, more = (predictor.predict(job_of(model, 2, 4096, 1, *options)) for model in models)
    assert more.kinds["activations"] == fewer.kinds["activations"]
    assert more.kinds["backward pass"] < fewer.kinds["backward pass"] + 4096 * 32  # a hidden state is four times that
    assert more.host == 2 * fewer.host


def test_steps_of_a_second_process_are_replayed_as_if_one_process_had_run_them(tmp_path):
    model = write_tiny_model(tmp_path / "model")
    job, other = (job_of(model, 2, tokens, 1) for tokens in (256, 512))
    with Predictor() as predictor:
        own, others = predictor.predict(job), predictor.predict(other)
        both = predictor.predict(dataclasses.replace(job, steps=[*job.steps, *other.steps]))
        apart = predictor.predict(job, others=other.steps)
    assert own.events[0] == others.events[0] == both.events[0]  # a step's blocks come after them
    assert own.events[1] == apart.events[1] != others.events[1]
    before, *steps = both.events
    assert apart.peak == own.peak < both.peak
    assert apart.reserved == {
        kind: reserved(before, steps * 3, kind == "expandable") for kind in ("expandable", "fixed")
    }


def planned(of_plan, overrides):
    """Return a plan's facts about memory, each time that there are more."""
    return [copy.deepcopy(facts) for facts in memory_facts(*planned_run(compose(overrides), PlanOptions.read(of_plan)))]


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """Return the facts of a plan on small GPUs, those of one on a small host, and the refusals of GPUs beside a CPU."""
    folder = tmp_path_factory.mktemp("plans")
    model = write_tiny_model(folder / "model")
    (model / "model.safetensors").unlink()  # a plan reads only the config
    run = small_run(folder, model, [30] * 80, "data.max_tokens=64", "data.train_batch_size=16")
    gpus = {"gpu_memory": "1GiB", "reserve": "1GiB", "world_size": 8}
    hosts = {"gpu_memory": "8GiB", "host_memory": "1KiB", "world_size": 16, "ranks_per_node": 4}
    calls = [
        (planned, gpus, [*run, "loss.head=plain", f"{CHECKPOINTING}=false"]),
        (planned, hosts, [*run, "model.activation_offload=true"]),
        *((heard, plan, ["parallel=cpu", f"model.path={model}"], {key: value}) for key, value in ON_CPU.items()),
    ]
    with only_rank(), pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return in_turn(calls)


def plan(overrides, of_plan):
    planned_run(compose(overrides), PlanOptions.read(of_plan))


ON_CPU = {"gpu_memory": "80GiB", "gpu": "H100-80G"}


def test_a_plan_says_what_a_gpu_would_need_and_which_override_lowers_it(plans):
    reports = plans[0]
    first, last = reports[0], reports[-1]
    assert (first["world_size"], first["micro_batch_tokens"], first["fits"]) == (8, 60, False)
    assert first["peak"] == sum(first["kinds"].values())
    assert first["kinds"]["optimizer state"] > 1.8 * first["kinds"]["parameters"]  # it has buffers too
    peaks = {remedy["override"]: remedy["peak"] for remedy in last["remedies"]}
    alone = [override for override in peaks if " " not in override]
    assert alone == [
        "loss.head=fused",
        "model.tile_tokens=4096",
        "optim.optimizer=AdamW8bit",
        f"{CHECKPOINTING}=true",
        *(f"engine.ulysses_sequence_parallel_size={ranks}" for ranks in (2, 4)),
        *(f"parallel.context_parallel_size={groups}" for groups in (2, 4, 8)),
        "engine.offload_policy=true",
        "data.max_tokens=32",  # half of a pack, which holds every document
    ]
    assert peaks["data.max_tokens=32"] < first["peak"]
    assert peaks[f"{CHECKPOINTING}=true"] < first["peak"]
    assert peaks["engine.ulysses_sequence_parallel_size=2"] < first["peak"]
    together = [override for override in peaks if " " in override]
    assert peaks[together[-1]] < min(peaks[override] for override in alone)
    of_allocator = first["reserved_by_allocator"]
    assert all(
        first["peak"] < size < first["peak"] + 200 * 2**20 for size in of_allocator.values()
    )  # one segment or two for each stream
    assert "PyTorch's allocator reserves" in list(memory_lines(first))[-2]
    assert "memory: it does not fit" in list(memory_lines(first))[-1]
    assert f"{together[-1]} does not fit: peak 0.00" in remedy_line(last["remedies"][-1])


def test_a_plan_compares_what_a_nodes_ranks_keep_on_the_host(plans):
    first = plans[1][0]
    assert first["host"] > 256
    assert (first["ranks_of_node"], first["host_memory"], first["fits"]) == (4, 1024, False)
    assert first["peak"] + first["reserve"] < first["gpu_memory"]
    fitting = dict(first, host_memory=2**40)
    assert ", which does not fit" in "\n".join(memory_lines(first))
    assert "of 1024.00 (plan.host_memory), its 4 ranks'" in "\n".join(memory_lines(fitting))


@pytest.mark.parametrize(
    ("given", "things"),
    [
        ({"host_memory": "much"}, ("plan.host_memory", "80GiB", "much")),
        ({"gpu_memory": 80}, ("plan.gpu_memory", "1GiB", 80)),
        ({"gpu_memory": "4GiB"}, ("plan.reserve", "plan.gpu_memory=4GiB", "5GiB")),
        (
            {"gpu": "H100-80", "gpu_memory": "80GiB"},
            ("plan.gpu", ", ".join(GPUS), "H100-80", "nearest: H100-80G", "trainer.gpu_peak_tflops, plan.link"),
        ),
        ({"gpu": "H100-80G", "link": "fast"}, ("plan.link", "450GB", "fast")),
    ],
)
def test_a_plan_that_cannot_be_made_is_one_line(given, things):
    with refused(*things):
        PlanOptions.read(given).with_values_of_gpu(None)


def test_a_gpu_of_a_plan_is_refused_beside_a_cpu_and_before_a_run(plans):
    for (key, value), line in zip(ON_CPU.items(), plans[2:], strict=True):
        assert names(line, f"plan.{key}", "trainer.device=cpu", value)
    for word in ("plan.world_size=8", "trainer.plan_only=true"):
        with refused("`verl-ext plan`", word.partition("=")[0]):
            compose([word])


def test_sizes_are_read_with_their_units():
    sizes = {"80GiB": 80 * 2**30, "80GB": 80 * 10**9, "1.5 TiB": 3 * 2**39, 17: 17, "512MiB": 2**29, "12": 12}
    assert {size: num_bytes(size) for size in sizes} == sizes
    assert [num_bytes(size) for size in ("", "80Gi B", "GiB", "-1GiB", None, True)] == [None] * 6
