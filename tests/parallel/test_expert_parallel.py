"""Experts shared among ranks: a step has plain transformers' loss, norm and gradients, and no rank waits for ever.

Every case has ranks without a pack in its last micro-batch, which run one token of weight 0.
"""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import Qwen3MoeConfig

from tests.lib.packed_engine import build_worker, token_step
from tests.lib.ranks import run_cases
from tests.lib.reference import Reference, documents_of_answers, fill_adapters, load_eager
from tests.lib.small_models import write_small_models
from tests.lib.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow

DOCUMENTS = documents_of_answers(21, 2, 13, 30, 9, 17)
PACKS = [DOCUMENTS[:2], *([document] for document in DOCUMENTS[2:])]
FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "glm4_moe", "qwen3_5_moe_text", "qwen3_next")
TRANSFORMER_IMPL = "verl.workers.engine.fsdp.transformer_impl"
NO_CHECKPOINTS, LOOP = "model.enable_gradient_checkpointing=false", "model.experts=eager"
ADAPTERS = {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj", "gate_up_proj"]}
LORA = ("model.lora_rank=4", "model.lora_alpha=8", *(f"model.{key}=[{','.join(v)}]" for key, v in ADAPTERS.items()))
ROUTED = "+model.override_config.output_router_logits=true"
SUMMED_ONCE = "engine.use_no_sync_for_gradient_accumulation=true"
BF16 = "engine.mixed_precision={param_dtype:bf16,reduce_dtype:fp32,buffer_dtype:fp32}"
ON_HOST = "engine.offload_policy=true"
CASES = {  # (ranks, ranks of Ulysses, N, the router's choices, overrides)
    "two ranks": (2, 1, 2, None, ()),
    "two groups": (4, 1, 2, None, ()),
    "one group of four": (4, 1, 4, None, (SUMMED_ONCE,)),
    "ulysses": (4, 2, 4, None, ()),
    "context groups": (4, 1, 2, None, ("parallel.context_parallel_size=2",)),
    "no checkpoints": (2, 1, 2, None, (NO_CHECKPOINTS,)),
    "loop": (4, 1, 2, None, (LOOP,)),
    "activation offload and tiles": (2, 1, 2, None, ("model.activation_offload=true", "model.tile_tokens=4")),
    "replicas": (4, 1, 2, None, ("engine.fsdp_size=2",)),
    "weights on the host": (4, 1, 2, None, (ON_HOST,)),
    "cut experts": (4, 1, 2, None, ()),
    "frozen experts": (4, 1, 2, None, ("model.freeze=['*.experts.*']",)),
    "frozen layers": (2, 1, 2, None, ("model.freeze=['*.layers.*']",)),
    "adapters": (4, 1, 2, None, LORA),
    "adapters without checkpoints": (2, 1, 2, None, (*LORA, NO_CHECKPOINTS, LOOP)),
    "router loss": (4, 1, 2, None, (ROUTED,)),
    "router loss of all experts": (4, 1, 1, None, (ROUTED,)),
    "bf16": (2, 1, 2, None, (BF16,)),
    "bf16 of all experts": (2, 1, 1, None, (BF16,)),
    "bf16 and fp32 routing": (2, 1, 2, None, (BF16,)),
    "bf16 and fp32 routing of all experts": (2, 1, 1, None, (BF16,)),
    "all to one rank": (4, 1, 4, "first", ()),
    "all to one rank by a loop": (4, 1, 2, "first", (LOOP, NO_CHECKPOINTS)),
    "all to one rank by a loop again": (2, 1, 2, "first", (LOOP,)),
    "routed elsewhere in recomputation": (4, 1, 4, "shaken", ()),
}


def choose(module, choices):
    """Let routers choose the first experts, or other ones when a checkpoint recomputes them."""

    def chosen(_, __, output):
        logits, weights, index = output
        if choices == "first":
            return logits, weights, torch.arange(index.shape[-1]).expand_as(index).clone()
        is_again = torch._C._current_graph_task_id() != -1  # inside a backward pass
        return logits, weights, (index + 1) % logits.shape[-1] if is_again else index

    for part in module.modules():
        if type(part).__name__.endswith("TopKRouter"):
            part.register_forward_hook(chosen)


def step(folder, ulysses, ranks, choices, overrides):
    """Take a step of a model, whose experts so many ranks share."""
    overrides = [f"parallel.expert_parallel={ranks}", "optim.clip_grad=0.1", *overrides]
    # Ranks without a device cannot page-lock memory.
    policy = mock.patch(f"{TRANSFORMER_IMPL}.CPUOffloadPolicy", return_value=CPUOffloadPolicy(pin_memory=False))
    with policy:
        engine = build_worker(folder, ulysses, overrides).engine
    fill_adapters(engine.module)
    if choices in ("first", "shaken"):
        choose(engine.module, choices)
    placements = {str(p.placements) for name, p in engine.module.named_parameters() if "experts" in name}
    return SimpleNamespace(found=token_step(engine, PACKS), placements=placements)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("models")
    few = write_tiny_model(
        folder / "few", 0, Qwen3MoeConfig, num_experts=2, num_experts_per_tok=2, moe_intermediate_size=16
    )
    models = write_small_models(FAMILIES, folder, tiny_model)
    # Mixtral's routing weights are fp32, whatever a forward's type.
    in_fp32 = {name: models["mixtral"] for name in CASES if "fp32 routing" in name}
    return models | {"cut experts": str(few)} | in_fp32


@pytest.fixture(scope="module")
def found(folders):
    """Return rank 0's step of each case, and of each family on two and four ranks."""
    cases = {
        name: (ranks, step, folders.get(name, folders["qwen3_moe"]), *rest) for name, (ranks, *rest) in CASES.items()
    }
    for family in FAMILIES[1:]:
        for ranks, size in ((2, 2), (4, 2), (4, 4)):
            cases[family, ranks, size] = (ranks, step, folders[family], 1, size, None, ())
    return {name: of_ranks[0] for name, of_ranks in run_cases(cases).items()}


def plain_step(folder, case):
    """Take the step by plain transformers, one document at a time."""
    _, _, _, choices, overrides = CASES.get(case, (0, 0, 0, None, ()))
    plain = load_eager(folder)
    if LORA[0] in overrides:
        plain.config.model_type = "plain"  # of which PEFT reads names as they are written
        plain = get_peft_model(plain, LoraConfig(r=4, lora_alpha=8, **ADAPTERS)).eval()
        fill_adapters(plain)
    if choices == "first":
        choose(plain, choices)
    frozen = {"frozen experts": ".experts.", "frozen layers": ".layers."}.get(case)
    for name, parameter in plain.named_parameters() if frozen else ():
        parameter.requires_grad_(frozen not in name)
    return Reference(plain, DOCUMENTS).step(PACKS, "token", {})


OF_FAMILIES = [(family, *sizes) for family in FAMILIES[1:] for sizes in ((2, 2), (4, 2), (4, 4))]
TOLERANCES = {"qwen3_next": 5e-6}  # its scan's formulas differ from transformers', also without shared experts


@pytest.mark.parametrize(
    "case", [*(name for name in CASES if not name.startswith(("router loss", "bf16"))), *OF_FAMILIES], ids=str
)
def test_loss_norm_and_gradients_are_those_of_plain_transformers(case, folders, found):
    family = case[0] if isinstance(case, tuple) else "qwen3_moe"
    step, expected = found[case].found, plain_step(folders.get(case, folders[family]), case)
    tolerance = TOLERANCES.get(family, 2e-6)
    expected.assert_taken(step, 1e-6, tolerance)
    assert step.grad_norm == pytest.approx(expected.grad_norm, rel=tolerance)
    factor = 0.1 / expected.grad_norm
    for name, gradient in expected.gradients.items():
        assert torch.allclose(step.clipped[name].double(), gradient * factor, atol=1e-4 * factor), name


def test_the_router_loss_is_that_of_ranks_with_all_experts(found):
    shared, whole = found["router loss"].found, found["router loss of all experts"].found
    assert shared.grad_norm == pytest.approx(whole.grad_norm, rel=1e-6)
    for name, gradient in whole.gradients.items():
        assert float((shared.gradients[name] - gradient).norm()) <= 1e-6 * float(gradient.norm()) + 1e-9, name


@pytest.mark.parametrize("case", ["bf16", "bf16 and fp32 routing"])
def test_bf16_rounds_as_on_ranks_with_all_experts(case, found):
    shared, whole = found[case].found, found[f"{case} of all experts"].found
    assert shared.report["train/loss"] == whole.report["train/loss"]
    for name, gradient in whole.gradients.items():  # sums over other rows round otherwise
        assert float((shared.gradients[name] - gradient).norm()) <= 5e-3 * float(gradient.norm()) + 1e-7, name


def test_experts_are_strided_shards_and_cut_only_where_ranks_are_more(found):
    assert found["two groups"].placements == {"(_StridedShard(dim=0, sf=2), Shard(dim=0))"}
    assert found["cut experts"].placements == {"(Shard(dim=1), Shard(dim=0))"}
