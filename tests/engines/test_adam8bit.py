"""AdamW with moments of 8 bits: one process' bits over shards of any ranks, and checkpoints for other ranks."""

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from tests.lib.errors import names
from tests.lib.ranks import run_cases
from tests.lib.tiny_model import write_tiny_model
from tests.lib.training import (
    differences,
    fit,
    heard,
    into,
    metrics,
    refusals,
    resume_run,
    small_run,
    stopped_at,
    tensors_of,
    train_twice,
)
from verl_ext.engines import adam8bit
from verl_ext.engines.adam8bit import block_size
from verl_ext.engines.optimizer import built_optimizer

EIGHT = "optim.optimizer=AdamW8bit"
# Rows of whole blocks (also of experts, and on three ranks one without any), a small matrix, a vector.
SHAPES = [(64, 256), (9, 1024), (5, 2, 512), (2, 2048), (3, 256), (6,)]
STEPS = 3


def options(**given: Any) -> Any:
    of_verl = {"optimizer": "AdamW8bit", "optimizer_impl": "torch.optim", "lr": 0.1, "betas": (0.8, 0.9)}
    return SimpleNamespace(**of_verl, weight_decay=0.2, override_optimizer_config=given)


def values(seed: int, shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """Return tensors of different magnitudes, with some rows of zeros."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator) * 10.0 ** (seed - 2) for shape in shapes]
    for tensor in tensors:
        tensor[-1] *= seed % 2
    return tensors


def groups_of(parameters: list[Any]) -> list[dict[str, Any]]:
    """Return groups as of optim.decay=matrices and optim.lr_of."""
    first = {"params": parameters[:1], "lr": 0.3, "weight_decay": 0.2}
    matrices = {"params": [p for p in parameters[1:] if p.ndim > 1], "lr": 0.1, "weight_decay": 0.2}
    return [first, matrices, {"params": [p for p in parameters if p.ndim == 1], "lr": 0.1, "weight_decay": 0.0}]


def after_steps(shapes: list[tuple[int, ...]], **given: Any) -> tuple[list[torch.Tensor], int]:
    """Return a rank's whole parameters after steps over its shards, and the bytes of its state."""
    model = nn.Module()
    for number, tensor in enumerate(values(0, shapes)):
        model.register_parameter(f"p{number}", nn.Parameter(tensor))
    has_replicas = dist.get_world_size() == 4
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp")) if has_replicas else None)
    parameters: list[Any] = list(model.parameters())
    optimizer = built_optimizer(groups_of(parameters), options(**given))
    for step in range(1, STEPS + 1):
        for parameter, gradient in zip(parameters, values(step, shapes), strict=True):
            parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        optimizer.step()
    tensors: list[Any] = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    held = sum(tensor.to_local().nbytes for tensor in tensors)
    return [parameter.full_tensor().detach() for parameter in parameters], held


def levels(has_sign: bool) -> torch.Tensor:
    """Return the dynamic map of 8 bits: zero, one, and the middles of even steps in seven decades."""
    found = [torch.tensor([0.0, 1.0])]
    for decade in range(7):
        bounds = torch.linspace(0.1, 1, 2 ** (decade + 1 - has_sign) + 1)
        middles = 10.0 ** (decade - 6) * ((bounds[1:] + bounds[:-1]) / 2)
        found += [middles, -middles] if has_sign else [middles]
    return torch.cat(found).sort().values


def rounded(moment: torch.Tensor, has_sign: bool, block: int) -> torch.Tensor:
    """Return the numbers that a moment's codes and scales stand for."""
    blocks, known = moment.reshape(-1, block), levels(has_sign)
    scales = blocks.abs().amax(1, keepdim=True).clip(1e-12)
    nearest = [(known - block.unsqueeze(1)).abs().argmin(1) for block in blocks / scales]
    return (known[torch.stack(nearest)] * scales).view(moment.shape)


def of_reference() -> list[torch.Tensor]:
    """Return the whole parameters after steps of AdamW whose moments are rounded after each, by its formulas."""
    parameters = values(0, SHAPES)
    moments = [[torch.zeros(shape), torch.zeros(shape)] for shape in SHAPES]
    rates = {id(p): torch.tensor(group["lr"]) for group in groups_of(parameters) for p in group["params"]}
    decays = {id(p): group["weight_decay"] for group in groups_of(parameters) for p in group["params"]}
    for step in range(1, STEPS + 1):
        for parameter, both, gradient in zip(parameters, moments, values(step, SHAPES), strict=True):
            rate = rates[id(parameter)]
            mean, square = both[0].lerp(gradient, 1 - 0.8), both[1].lerp(gradient.square(), 1 - 0.9)
            is_whole = parameter.numel() < 4096
            both[:] = (mean, square) if is_whole else (rounded(mean, True, 256), rounded(square, False, 256))
            unbias, unbias_square = 1 - 0.8 ** torch.tensor(float(step)), 1 - 0.9 ** torch.tensor(float(step))
            parameter -= rate * decays[id(parameter)] * parameter
            parameter -= rate * (mean / unbias) / (square.sqrt() / unbias_square.sqrt() + 1e-8)
    return parameters


@pytest.fixture(scope="module")
def expected():
    return of_reference()


# Not among the packages of the tests, because transformers imports it wherever it is installed: seconds a process.
@pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")
def test_the_bits_are_those_of_torchao_without_the_compiler(expected):
    from torchao.optim import AdamW8bit  # type: ignore[import-untyped]

    parameters = [nn.Parameter(tensor) for tensor in values(0, SHAPES)]
    optimizer = AdamW8bit(groups_of(parameters), betas=(0.8, 0.9))
    with torch.compiler.set_stance("force_eager"):
        for step in range(1, STEPS + 1):
            for parameter, gradient in zip(parameters, values(step, SHAPES), strict=True):
                parameter.grad = gradient
            optimizer.step()
    assert all(torch.equal(mine, its) for mine, its in zip(expected, parameters, strict=True))


ODD = [(33, 896), (50, 100), (70, 134), (4304, 4)]


def in_small_slices() -> list[torch.Tensor]:
    with mock.patch.object(adam8bit, "_SLICE", 1000):  # of a block's multiples: 768
        return after_steps(SHAPES)[0]


@pytest.fixture(scope="module")
def found():
    """Return each rank's parameters after steps, and the bytes of its state."""
    cases = {ranks: (ranks, after_steps, SHAPES) for ranks in (1, 2, 3, 4)}
    cases |= {("odd", ranks): (ranks, after_steps, ODD) for ranks in (1, 2, 3)}
    return run_cases({**cases, "slices": (1, in_small_slices)})


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_steps_over_shards_have_the_bits_of_steps_on_one_process(ranks, expected, found):
    numbers = sum(torch.Size(shape).numel() for shape in SHAPES[:4])
    for parameters, held in found[ranks]:
        assert all(torch.equal(mine, its) for mine, its in zip(parameters, expected, strict=True))
        if ranks == 1:
            assert held == 2 * numbers + 2 * 4 * numbers // 256 + 2 * 4 * (768 + 6)


def test_a_step_is_the_same_in_slices(expected, found):
    assert all(torch.equal(mine, its) for mine, its in zip(found["slices"][0], expected, strict=True))


def test_blocks_divide_rows_of_every_width_so_that_any_ranks_have_the_same_bits(found):
    rows = {256: 256, 4096: 256, 896: 224, 2880: 240, 13696: 214, 100: 100, 4304: 0, 63: 0, 8: 0, 67: 67}
    assert {width: block_size(torch.Size((4096, width))) for width in rows} == rows
    assert [block_size(torch.Size(shape)) for shape in ((8192,), (15, 256), (16, 256), (4, 4, 256))] == [0, 0, 256, 256]
    one, *others = (found["odd", ranks][0][0] for ranks in (1, 2, 3))
    for parameters in others:
        assert all(torch.equal(mine, its) for mine, its in zip(parameters, one, strict=True))


def of_adamw(optimizer: str) -> list[torch.Tensor]:
    parameters = [nn.Parameter(tensor) for tensor in values(0, SHAPES)]
    chosen = SimpleNamespace(**{**vars(options()), "optimizer": optimizer, "lr": 1e-2})
    built = built_optimizer(parameters, chosen)
    for step in range(1, 20):
        for parameter, gradient in zip(parameters, values(step % 3, SHAPES), strict=True):
            parameter.grad = gradient
        built.step()
    return [parameter.detach() for parameter in parameters]


def test_half_of_its_weights_stay_near_those_of_adamw_and_small_tensors_nearer():
    whole, eight = of_adamw("AdamW"), of_adamw("AdamW8bit")
    for number, (mine, its) in enumerate(zip(eight, whole, strict=True)):
        moved = (its - values(0, SHAPES)[number]).abs().median()
        assert (mine - its).abs().median() < (0.1 if number < 4 else 1e-4) * moved


CHANGES = {
    "of adapters": ("model.lora_rank=64", "model.modules_to_save=[lm_head]"),
    "offloaded": ("engine.param_offload=true", "engine.optimizer_offload=true"),
    "of fp16": ("+engine.mixed_precision={param_dtype: fp16}",),
    "of bf16": ("engine.model_dtype=bf16",),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the folder of runs of two ranks, resumed there and on one and four, and what a changed one told."""
    folder = tmp_path_factory.mktemp("runs")
    # A model whose matrices have blocks of 64, 96, and 256 numbers, and some of them none.
    sizes = {"hidden_size": 96, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 16}
    model = write_tiny_model(folder / "model", **sizes)
    more = (EIGHT, "optim.lr=1e-3", "trainer.total_training_steps=3", "trainer.save_freq=1")
    small = small_run(folder, model, [30] * 8, *more)
    run = [*small, "optim.weight_decay=0.5", "optim.decay=matrices", "optim.lr_of={layers.0: 2}"]
    begun = {"whole": run, **{name: [*small, *change, "optim.clip_grad=0.1"] for name, change in CHANGES.items()}}
    cases = {name: (2, train_twice, given, folder / name, folder / f"{name} resumed") for name, given in begun.items()}
    changed = [*run, "trainer.allow_resume_mismatch=[optim.optimizer]", "optim.optimizer=AdamW"]
    cases["alone"] = (1, resume_run, run, folder / "whole", folder / "alone", 2)
    cases["begun"] = (2, stopped_at, folder / "whole", folder / "other", 2)
    cases["other"] = (1, heard, fit, [*changed, into(folder / "other")])
    found = run_cases(cases, {"four": (4, resume_run, run, folder / "whole", folder / "four", 2)})
    return folder, found["other"][0]


@pytest.mark.slow
def test_a_resume_is_exact_also_of_its_state_on_another_number_of_ranks(runs):
    folder, told = runs
    whole = folder / "whole"
    assert differences(folder / "whole resumed", whole, 3) == []
    state, last = tensors_of(whole / "global_step_2"), tensors_of(whole / "global_step_3")
    assert {tensor.dtype for name, tensor in state.items() if name.endswith("_codes")} == {torch.uint8}
    for again in (folder / "alone", folder / "four"):
        assert metrics(again)[3, "train/loss"] == pytest.approx(metrics(whole)[3, "train/loss"], rel=1e-5)
        found = tensors_of(again / "global_step_3")
        for name in last:
            if name.endswith("_codes"):  # gradients of other ranks differ in their last bits
                assert (found[name] != last[name]).float().mean() < 1e-3
    assert "Missing key in checkpoint state_dict: optimizer." in told


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_run_and_its_resume_are_equal_under_other_options(name, runs):
    whole = runs[0] / name
    assert differences(runs[0] / f"{name} resumed", whole, 3) == []
    of_codes = [name for name in tensors_of(whole / "global_step_3") if name.endswith("_codes")]
    assert any("lm_head" in name for name in of_codes)
    assert ("lora_A" in str(of_codes)) == (name == "of adapters")


def test_options_that_it_lacks_are_refused_in_one_line(tiny_model, tmp_path):
    run = [*small_run(tmp_path, tiny_model, [30] * 4), into(tmp_path / "run"), EIGHT]
    given = ["{fused: true}", "{eps: -1}", "{block_size: 128}", "{eps: 1e-9}"]
    told = refusals(run, [[f"optim.override_optimizer_config={each}"] for each in given])
    for line, got in zip(told, ("{'fused': True}", "{'eps': -1}", "{'block_size': 128}"), strict=False):
        assert names(line, "optim.override_optimizer_config", "AdamW8bit", got)
    assert told[3] == ""
