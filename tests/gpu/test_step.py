"""A whole optimizer step on the GPU: loss, category losses and every gradient.

fp32 is compared with plain Hugging Face on the same GPU, document by document (tests/lib/reference.py), and half
precision with the engine in fp32. Tolerances are relative: 1e-4 in fp32; in half precision 0.5 % of the loss, and 5 %
of a parameter's gradient norm, of which rounding weights and activations to bf16 alone gives about 1 %.
"""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gpu.deviations import BF16, assert_close, deviation
from tests.lib.packed_engine import build_worker, train_step
from tests.lib.ranks import run_ranks
from tests.lib.reference import Document, Reference, load_eager, pack_row
from tests.lib.tiny_model import VOCABULARY, write_tiny_model
from verl_ext.attention import unusable
from verl_ext.attention.packed import set_backend
from verl_ext.data import CategoryTable
from verl_ext.losses import LossSpec
from verl_ext.trainer.collator import StepCollator
from verl_ext.trainer.loss import StepLoss

CATEGORIES = CategoryTable((1, 2), ("code", "chat"))
LENGTHS = ((700, 1, 90), (33, 260, 5), (512,), (2, 2, 300))
FP16 = ("engine.mixed_precision={param_dtype:fp16,reduce_dtype:fp32,buffer_dtype:fp32}",)
CASES = {
    "bf16": BF16,
    "no checkpointing": (*BF16, "model.enable_gradient_checkpointing=false"),
    "gradients reduced at the end": (*BF16, "engine.use_no_sync_for_gradient_accumulation=true"),
    "fp16 with a scaler": FP16,
    "optimizer offload": (*BF16, "engine.optimizer_offload=true"),
    "parameter offload": (*BF16, "engine.param_offload=true", "engine.optimizer_offload=true"),
    "offload policy": (*BF16, "engine.offload_policy=true"),
    "activation offload": (*BF16, "model.activation_offload=true"),
    "tiled MLPs": (*BF16, "model.tile_tokens=64", "model.activation_offload=true"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Write a two-layer Qwen3 whose shape the flash kernels accept."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "max_position_embeddings": 4096}
    return str(write_tiny_model(tmp_path_factory.mktemp("model"), **shape, initializer_range=0.05))


def documents() -> list[list[Document]]:
    rng = np.random.default_rng(0)

    def document(length: int) -> Document:
        mask = [0, *rng.integers(0, 2, length - 1).tolist()]
        category = [int(rng.integers(1, 3))] * length
        return Document(
            rng.integers(4, VOCABULARY, length).tolist(), mask, category, rng.uniform(0.5, 2, length).tolist()
        )

    return [[document(length) for length in lengths] for lengths in LENGTHS]


PACKS = documents()


def collator(mode: str = "token") -> StepCollator:
    return StepCollator(LossSpec(mode, np.array([1.0, 0.5, 3.0])), CATEGORIES)


def step(model: str, overrides=(), head: str = "fused", backend: str = "auto", mode: str = "token", parallel="auto"):
    """Take one step in two micro-batches, from the same weights each time."""
    set_backend(backend)
    engine = build_worker(model, overrides=overrides, parallel=parallel).engine
    return train_step(engine, [pack_row(pack) for pack in PACKS], collator(mode), 2, head)


@pytest.fixture(scope="module")
def in_fp32(model, one_rank):
    return step(model, backend="sdpa")


@pytest.mark.parametrize("mode", ["token", "sequence", "longwriter"])
@pytest.mark.parametrize("head", ["fused", "targets", "plain"])
def test_in_fp32_a_step_equals_single_documents_in_plain_hugging_face(mode, head, model, device, one_rank):
    found = step(model, head=head, backend="sdpa", mode=mode)
    with torch.device(device):
        reference = Reference(load_eager(model).to(device), [d for pack in PACKS for d in pack])
        want = reference.step(PACKS, mode, {1: 0.5, 2: 3.0})
    assert found.report["train/loss"] == pytest.approx(want.loss, rel=1e-4)
    for name, truth in want.gradients.items():
        assert deviation(found.gradients[name], truth.cpu()) < 1e-4, name


@pytest.mark.parametrize("case", CASES)
def test_half_precision_stays_near_fp32(case, model, in_fp32, device):
    if device.type == "cpu" and case in ("fsdp1", "offload policy"):
        pytest.skip("needs a CUDA GPU")
    assert_close(step(model, CASES[case]), in_fp32, 5e-3, 5e-2)


@pytest.mark.parametrize("head", ["targets", "plain"])
@pytest.mark.parametrize("backend", ["flash_attn", "varlen", "sdpa"])
def test_every_kernel_and_head_stays_near_fp32(backend, head, model, in_fp32, device):
    if device.type == "cpu" and backend != "sdpa":
        pytest.skip("needs a CUDA GPU")
    if backend == "flash_attn" and unusable("flash_attn"):
        pytest.skip("needs the flash-attn package")
    assert_close(step(model, BF16, head, backend), in_fp32, 5e-3, 5e-2)


def test_liger_kernels_stay_near_fp32(model, in_fp32, gpu):
    pytest.importorskip("liger_kernel")
    assert_close(step(model, (*BF16, "model.use_liger=true")), in_fp32, 5e-3, 5e-2)


def test_lora_in_half_precision_stays_near_fp32(model, one_rank):
    lora = ("model.lora_rank=8", "model.lora_alpha=16", "model.target_modules=[q_proj,v_proj,down_proj]")
    steps = []
    for more in ((), BF16):
        torch.manual_seed(0)
        steps.append(step(model, (*lora, *more)))
    want, found = steps
    moved = {name for name, gradient in want.gradients.items() if bool(gradient.any())}
    assert moved  # B starts at 0, so A's gradient is 0
    assert found.report["train/loss"] == pytest.approx(want.report["train/loss"], rel=5e-3)
    for name in moved:
        assert deviation(found.gradients[name], want.gradients[name]) < 5e-2


class HostCopies(TorchDispatchMode):
    """A record, for every copy from the host to the GPU, of whether its source is page-locked."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[bool] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[0] if function is torch.ops.aten._to_copy.default else args[1]
            target = torch.device(kwargs.get("device") or args[0].device)
            if source.device.type == "cpu" and target.type == "cuda":
                self.pinned.append(source.is_pinned())
        return function(*args, **kwargs)


def test_no_micro_batch_waits_for_the_gpu(model, one_rank, gpu):
    engine = build_worker(model, overrides=BF16, parallel="auto").engine
    collate = collator()
    batch = collate([pack_row(pack) for pack in PACKS])
    loss = StepLoss(float(batch.normalisers), 1, None)
    batch = batch.pin_memory()  # as the loader does

    for mode in ("default", "error"):  # the first step creates streams and loads kernels
        micro_batches = list(batch.micro_batches(1, head="fused"))
        with engine.train_mode():
            engine.optimizer_zero_grad()
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode(mode)
            try:
                with HostCopies() as copies:
                    engine.accumulate(micro_batches, loss)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    assert copies.pinned  # the debug mode misses copies of pageable memory, which wait too
    assert all(copies.pinned)


def _on_its_own_gpu(model: str, sequence_parallel: int, store: str | None):
    if store is not None:  # in place of the gloo group that run_ranks makes
        rank = dist.get_rank()
        dist.destroy_process_group()
        torch.cuda.set_device(rank)
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=rank, world_size=2)
    set_backend("auto")
    engine = build_worker(model, sequence_parallel, BF16, parallel="auto").engine
    return train_step(engine, [pack_row(pack) for pack in PACKS], collator(), 2, "fused")


@pytest.mark.parametrize("sequence_parallel", [1, 2])
def test_two_ranks_give_what_one_gives(sequence_parallel, model, in_fp32, device, tmp_path):
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: nccl takes no two ranks on one")
    store = str(tmp_path / "store") if device.type == "cuda" else None
    first, second = run_ranks(_on_its_own_gpu, 2, model, sequence_parallel, store)
    assert first.report == second.report
    assert_close(first, in_fp32, 5e-3, 5e-2)
