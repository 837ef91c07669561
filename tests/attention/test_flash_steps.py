"""Training steps of every mechanism on strict stand-ins of flash kernels and of NCCL, with the kernel of a real run.

A step's gradients may be twice as far from those in fp32 as the same step's on sdpa in half precision.
"""

import pickle
import sys
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.lib.flash_stand_ins import (
    CALLS,
    check_call,
    flash_attn_package,
    flash_attn_varlen_func,
    register_fa3_stand_ins,
    register_flash_stand_ins,
)
from tests.lib.nccl_rules import NcclRules
from tests.lib.packed_engine import build_worker, train_step
from tests.lib.parity_cases import DOCUMENTS, GROUPS, TRIES
from tests.lib.preference_cases import LOSSES, PACKS, options_of
from tests.lib.ranks import only_rank, run_cases
from tests.lib.reference import load_eager, pack_row, tree_row
from tests.lib.reference_pairs import PairReference
from tests.lib.small_models import write_small_models
from tests.lib.tiny_model import write_tiny_model
from verl_ext.attention import KernelDevice, packed, unusable
from verl_ext.data import CategoryTable
from verl_ext.losses import LossSpec
from verl_ext.trainer.collator import StepCollator
from verl_ext.trainer.objective import PreferenceObjective

BF16 = "engine.mixed_precision={param_dtype:bf16,reduce_dtype:fp32,buffer_dtype:fp32}"
BACKENDS = {"varlen": "torch", "flash_attn": "flash_attn", "fa3": "fa3"}  # and whose calls are counted
CATEGORIES = CategoryTable((7, 9, 11), ("gsm8k", "code", "absent"))


class Case(NamedTuple):
    """A step: its model, the ranks of a pack (Ulysses × groups), overrides, what its packs hold, who has no kernel."""

    model: str = "tiny"
    ulysses: int = 1
    groups: int = 1
    overrides: tuple[str, ...] = ()
    packs: str = "documents"
    on_sdpa: tuple[str, ...] = ()


CASES = {
    "documents": Case(),
    "shared prefixes": Case(packs="tries"),
    "tiles on the host": Case(overrides=("model.tile_tokens=5", "model.activation_offload=true")),
    "no recomputation": Case(overrides=("model.enable_gradient_checkpointing=false",)),
    "narrow values": Case("deepseek_v3"),
    "wide heads": Case("wide", on_sdpa=tuple(BACKENDS)),
    "windows": Case("mistral"),
    "sinks": Case("gpt_oss"),
    "a soft cap": Case("gemma2", on_sdpa=("varlen", "fa3")),
    "chunks": Case("llama4_text"),
    "a hybrid": Case("qwen3_5_text"),
    "pairs": Case(packs="cdpo"),
    "mismatched answers": Case(packs="kto"),
    "shared heads": Case(ulysses=2),
    "shared heads and prefixes": Case(ulysses=2, packs="tries"),
    "shared heads and sinks": Case("gpt_oss", ulysses=2),
    "travelling keys": Case(groups=2),
    "travelling keys and sinks": Case("gpt_oss", groups=2),
    "travelling keys of a window": Case("mistral", groups=2),
    "travelling keys of pairs": Case(groups=2, packs="dpo"),
}


@cache
def _engine(folder: str, ulysses: int, *overrides: str):
    return build_worker(folder, ulysses, overrides).engine


def _step(case: Case, folders: dict[str, str], rows: dict, *overrides: str):
    context = f"parallel.context_parallel_size={case.groups}"
    engine = _engine(folders[case.model], case.ulysses, context, *case.overrides, *overrides)
    if case.packs in LOSSES:
        objective, shares = PreferenceObjective(options_of(LOSSES[case.packs])), case.groups == 1
        categories = CategoryTable((7, 9), ("chat", "code"))
        spec = objective.options.spec(categories.names)
        collate = StepCollator(spec, categories, shares_prefixes=shares, objective=objective)
        return train_step(engine, rows[case.packs, shares], collate, 4, "fused")
    shares = case.packs == "tries"
    packs = [tree_row(p) for p in TRIES] if shares else [pack_row([DOCUMENTS[i] for i in g]) for g in GROUPS["packed"]]
    collate = StepCollator(LossSpec("token", np.ones(4)), CATEGORIES, shares_prefixes=shares)
    return train_step(engine, packs, collate, 4, "fused")


def _gradient(step) -> torch.Tensor:
    return torch.cat([torch.empty(0), *(of_one.double().flatten() for _, of_one in sorted(step.gradients.items()))])


def _measure(backend: str | None, names: list[str], folders: dict[str, str], rows: bytes) -> dict:
    """Return each case's (gradient, loss, calls of the backend); None gives those of sdpa in fp32 and in bf16."""
    found, packs = {}, pickle.loads(rows)
    if backend is None:
        packed.set_backend("sdpa")
        for name in names:
            exact, half = (_step(CASES[name], folders, packs, *overrides) for overrides in ((), (BF16,)))
            found[name] = _gradient(exact), _gradient(half)
        return found
    if backend == "fa3":
        register_fa3_stand_ins()
    else:
        register_flash_stand_ins()  # under flash-attn too: its function has no log-sum-exp for sinks
    sys.modules.pop("flash_attn", None)
    if backend == "flash_attn":
        sys.modules["flash_attn"] = flash_attn_package()
    unusable.cache_clear()
    packed.KernelDevice = lambda *_: KernelDevice("cuda", (9, 0) if backend == "fa3" else (8, 0))
    packed.set_backend("auto")
    for name in names:
        CALLS.clear()
        with NcclRules() as rules:
            step = _step(CASES[name], folders, packs, BF16)
        found[name] = _gradient(step), {**CALLS, "collectives": rules.calls}
    return found


@pytest.fixture(scope="module")
def steps(tiny_model, tmp_path_factory):
    """Return the steps of each backend, by case."""
    folder = tmp_path_factory.mktemp("models")
    kinds = {case.model for case in CASES.values()} - {"tiny", "wide"}
    folders = {"tiny": str(tiny_model), "wide": str(write_tiny_model(folder / "wide", head_dim=264))}
    folders |= write_small_models(sorted(kinds), folder, tiny_model)
    rows = pickle.dumps(_rows_of_pairs(str(tiny_model), folder))
    found: dict[str | None, dict] = {backend: {} for backend in (None, *BACKENDS)}
    for backends in ((None, "varlen", "flash_attn"), ("fa3",)):  # a process has one implementation of torch's operation
        cases = {}
        for ranks in sorted({case.ulysses * case.groups for case in CASES.values()}):
            names = [name for name, case in CASES.items() if case.ulysses * case.groups == ranks]
            cases |= {(backend, ranks): (ranks, _measure, backend, names, folders, rows) for backend in backends}
        for (backend, _), of_ranks in run_cases(cases).items():
            found[backend] |= of_ranks[0]
    return found


def _rows_of_pairs(model: str, folder) -> dict:
    """Return the packs of each loss of preferences, with documents that share their beginnings and without."""
    other = write_tiny_model(folder / "reference", seed=1)
    units = [unit for pack in PACKS[False] for unit in pack]
    reference, rows = PairReference(load_eager(model), load_eager(str(other)), units), {}
    for loss in {case.packs for case in CASES.values()} & set(LOSSES):
        rows |= {(loss, shares): reference.rows(PACKS[False], LOSSES[loss], shares) for shares in (False, True)}
    return rows


def _of_call(**changes):
    """Return the arguments of a kernel's call that is right but for the changes."""
    query, key = (torch.zeros(6, heads, 16, dtype=torch.bfloat16) for heads in (4, 2))
    boundaries = torch.tensor([0, 2, 6], dtype=torch.int32)
    call = {"query": query, "key": key, "value": key, "cu_q": boundaries, "cu_k": boundaries, "max_q": 4, "max_k": 4}
    call |= {"dropout": 0.0, "scale": None, "causal": True, "window": (-1, 0), "softcap": 0.0}
    return {**call, **changes}


_ROWS = torch.zeros(6, 4, 16, dtype=torch.bfloat16)
REFUSED = {
    "fp16 and bf16": {"query": _ROWS.float(), "key": _ROWS.float(), "value": _ROWS.float()},
    "one type": {"value": _ROWS.half()},
    "contiguous last dimension": {"query": torch.zeros(6, 16, 4, dtype=torch.bfloat16).transpose(1, 2)},
    "aligned rows": {"query": torch.zeros(6, 4, 20, dtype=torch.bfloat16)[..., :16]},
    "multiple of 8 up to 256": {name: torch.zeros(6, 4, 264).half() for name in ("query", "key", "value")},
    "key heads that divide": {"key": _ROWS[:, :3], "value": _ROWS[:, :3]},
    "int32": {"cu_q": torch.tensor([0, 2, 6])},
    "from 0 to 6": {"cu_k": torch.tensor([0, 2, 5], dtype=torch.int32), "max_k": 3},
    "cu_seqlens on cpu": {"cu_k": torch.empty(3, dtype=torch.int32, device="meta")},
    "host int": {"max_q": torch.tensor(4)},
    "longest document's length 4": {"max_k": 3},
    "float as scale": {"scale": 1},
    "keys for all queries": {"cu_k": torch.tensor([0, 4, 6], dtype=torch.int32)},
}


@pytest.mark.parametrize("requirement", REFUSED)
def test_a_stand_in_refuses_what_a_kernel_would(requirement):
    register_flash_stand_ins()
    check_call(**_of_call())
    with pytest.raises(RuntimeError, match=requirement):
        check_call(**_of_call(**REFUSED[requirement]))


def test_the_package_has_the_signature_of_flash_attn():
    register_flash_stand_ins()
    call = _of_call()
    inputs = [call[name] for name in ("query", "key", "value", "cu_q", "cu_k", "max_q", "max_k")]
    assert flash_attn_varlen_func(*inputs, causal=True).shape == (6, 4, 16)
    for wrong in ({"deterministic": 1}, {"dropout_p": 0}, {"window_size": (1.0, 0)}):
        with pytest.raises(RuntimeError):
            flash_attn_varlen_func(*inputs, **{"causal": True, **wrong})
    with pytest.raises(TypeError):
        flash_attn_varlen_func(*inputs, scale=0.5)


def _reduced() -> list[str]:
    """Return what the rules say of the sum of each tensor."""
    x, said = torch.ones(4, 4), []
    for tensor, op in ((x, "SUM"), (x.short(), "SUM"), (x.t()[:, :2], "SUM"), (x.int(), "BAND")):
        with NcclRules():
            try:
                dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
                said.append("")
            except RuntimeError as error:
                said.append(str(error))
    return said


@pytest.mark.slow
def test_the_rules_of_nccl_refuse_types_and_strides_that_it_does_not_take():
    with only_rank():
        fits, short, strided, by_bits = _reduced()
    assert fits == ""
    assert "int16" in short
    assert "strides" in strided
    assert "by bits" in by_bits


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_makes_calls_that_a_kernel_takes_and_has_the_gradients_of_sdpa(backend, name, steps):
    exact, half = steps[None][name]
    found, calls = steps[backend][name]
    assert float((found - exact).norm()) <= 2 * float((half - exact).norm()) + 1e-6 * float(exact.norm())
    case = CASES[name]
    assert calls["collectives"] > 0
    calls = {kernel: count for kernel, count in calls.items() if kernel != "collectives"}
    if backend in case.on_sdpa:
        assert not calls
    else:
        taken = "torch" if backend == "flash_attn" and "sinks" in name else BACKENDS[backend]
        assert set(calls) == {taken}
