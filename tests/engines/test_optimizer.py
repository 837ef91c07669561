"""The implementation of Adam that a run takes; its steps over FSDP2's shards leave no objects behind."""

import gc
import os
import re

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.lib.ranks import run_cases
from verl_ext.engines.optimizer import implementation, step_problem, take_threads

OPTIM = {"optimizer": "AdamW", "optimizer_impl": "torch.optim", "override_optimizer_config": None}


@pytest.mark.parametrize(
    ("optim", "run", "chosen"),
    [
        ({}, {"device": "cuda", "version": "2.13.0+cu130"}, "fused"),
        ({}, {"device": "cuda", "version": "2.12.0"}, "fused"),
        ({}, {"device": "cuda", "version": "2.11.0"}, "foreach"),
        ({}, {"device": "cuda", "version": "2.13.0", "half": True}, "foreach"),
        ({}, {"device": "cuda", "version": "2.11.0", "offloads": True}, "fused"),
        ({}, {"device": "cpu"}, "loop"),
        ({"override_optimizer_config": {"fused": True}}, {"device": "cpu"}, "fused"),
        ({"override_optimizer_config": {"foreach": True}}, {"device": "cuda", "version": "2.13.0"}, "foreach"),
        ({"override_optimizer_config": {"foreach": False}}, {"device": "cuda", "version": "2.13.0"}, "loop"),
        ({"override_optimizer_config": {"eps": 1e-9}}, {"device": "cuda", "version": "2.13.0"}, "fused"),
        ({"optimizer": "Muon"}, {"device": "cuda", "version": "2.13.0"}, "fused"),
        ({"optimizer_impl": "torchao.optim"}, {"device": "cuda"}, None),
    ],
)
def test_the_users_word_comes_before_device_and_version(optim, run, chosen):
    assert implementation({**OPTIM, **optim}, **run) == chosen


def test_a_machine_that_tells_no_affinity_gives_a_rank_its_share_of_all_cores(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    before = torch.get_num_threads()
    try:
        take_threads()
        assert torch.get_num_threads() == max(before, 3)
    finally:
        torch.set_num_threads(before)


def _problems(names: list[str]) -> list[str | None]:
    return [step_problem(lambda p, name=name: getattr(torch.optim, name)(p, lr=0.1)) for name in names]


def _steps(options: dict) -> tuple[int, list[torch.Tensor]]:
    """Return the number of objects that 30 steps left behind, and the parameters after them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    for part in (*model, model):
        fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model(torch.randn(2, 8)).sum().backward()

    def objects(steps: int) -> int:
        for _ in range(steps):
            optimizer.step()
            schedule.step()
        gc.collect()
        return len(gc.get_objects())

    before = objects(10)
    left = objects(30) - before
    return left, [parameter.full_tensor().detach() for parameter in model.parameters()]


SOUND = ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "SGD"]


@pytest.fixture(scope="module")
def found():
    cases = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
    cases = {name: (2, _steps, options) for name, options in cases.items()}
    return run_cases({**cases, "problems": (2, _problems, [*SOUND, "Adafactor", "Rprop"])})


def test_optimizers_that_take_no_steps_over_shards_are_found_by_any_number_of_ranks_and_by_none(found):
    for problems in _problems([*SOUND, "Adafactor", "Rprop"]), *found["problems"]:
        assert problems[:-2] == [None] * len(SOUND)
        # torch 2.11 has another reason for the second.
        assert all(re.search("require placement changes|sharding strategy", problem) for problem in problems[-2:])


@pytest.mark.skipif(torch.__version__ < "2.12", reason="every implementation leaves objects behind there")
def test_steps_over_shards_leave_no_objects_behind_and_agree(found):
    for left, parameters in (found["foreach"][0], found["fused"][0]):
        assert left < 30  # fewer than one per step
        torch.testing.assert_close(parameters, found["loop"][0][1], rtol=1e-5, atol=1e-7)
