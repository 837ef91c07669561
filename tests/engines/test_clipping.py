"""The norm of gradients is that of fp64 on any number of ranks, and clipping scales by it."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.lib.ranks import run_cases
from verl_ext.engines.clipping import clip_gradients

SHAPES = [(1000, 1500), (7,), (3, 5), (1,)]  # no number of ranks here divides all; some ranks hold nothing
DTYPES = (torch.float32, torch.bfloat16)
MESHES = [(2,), (4,), (2, 2)]  # ranks that shard; replicas of shards
LIMIT = 0.25


def _gradients(dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.rand(shape, dtype=torch.float64).to(dtype) for shape in SHAPES]


def _clipped_of_each(shape: tuple[int, ...]) -> dict[torch.dtype, tuple[float, list[torch.Tensor]]]:
    return {dtype: _clipped(shape, dtype) for dtype in DTYPES}


def _clipped(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[float, list[torch.Tensor]]:
    """Return the norm and the clipped gradients over ranks that shard, or that replicate shards."""
    model = nn.ParameterList(torch.zeros(x, dtype=dtype) for x in SHAPES)
    names = ("replicas", "shards")[-len(shape) :]
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    for parameter, gradient in zip(model, _gradients(dtype), strict=True):
        parts = gradient.chunk(shape[-1])
        own = parameter.device_mesh.get_local_rank(names[-1])
        part = parts[own] if own < len(parts) else gradient[:0]
        parameter.grad = torch.distributed.tensor.DTensor.from_local(
            part.clone(), parameter.device_mesh, parameter.placements, shape=gradient.shape, stride=gradient.stride()
        )
    norm = clip_gradients(model.parameters(), LIMIT, "cpu")
    return norm.item(), [parameter.grad.full_tensor() for parameter in model.parameters()]


@pytest.fixture(scope="module")
def answers():
    return run_cases({mesh: (math.prod(mesh), _clipped_of_each, mesh) for mesh in MESHES})


@pytest.mark.parametrize("mesh", MESHES)
def test_the_norm_over_ranks_is_that_of_fp64_and_the_factor_has_full_precision(mesh, answers):
    for dtype in DTYPES:
        gradients = _gradients(dtype)
        exact = torch.cat([gradient.double().flatten() for gradient in gradients]).norm().item()
        for norm, clipped in (answer[dtype] for answer in answers[mesh]):
            assert norm == pytest.approx(exact, rel=1e-12)
            for found, gradient in zip(clipped, gradients, strict=True):
                expected = (gradient.double() * (LIMIT / (exact + 1e-6))).to(dtype)
                torch.testing.assert_close(found, expected, rtol=torch.finfo(dtype).eps, atol=0.0)


def test_gradients_below_the_limit_and_parameters_without_one_stay_as_they_are():
    small, none = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    small.grad = torch.full((3,), 0.01)
    assert clip_gradients([small, none], LIMIT, "cpu").item() == pytest.approx(0.01 * 3**0.5, rel=1e-7)
    assert small.grad.tolist() == torch.full((3,), 0.01).tolist()
    assert none.grad is None
