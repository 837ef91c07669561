"""Deviations of a step in half precision, and what is allowed."""

import pytest
import torch

BF16 = ("engine.mixed_precision={param_dtype:bf16,reduce_dtype:fp32,buffer_dtype:fp32}",)


def assert_close(found, want, loss: float, gradient: float) -> None:
    for name, value in want.report.items():
        assert found.report[name] == pytest.approx(value, rel=loss), name
    assert found.grad_norm == pytest.approx(want.grad_norm, rel=gradient)
    assert found.gradients.keys() == want.gradients.keys()
    for name, truth in want.gradients.items():
        off = deviation(found.gradients[name], truth)
        assert off < gradient, f"{name} is off by {off:.1e} of its norm"


def deviation(value: torch.Tensor, truth: torch.Tensor) -> float:
    return float((value.double() - truth.double()).norm() / truth.double().norm())
