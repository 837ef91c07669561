"""Tests of code that runs on a CUDA GPU: `make test-gpu`. Without a GPU they are skipped.

GPU_TESTS_ON=cpu runs the tests that have a CPU form on the CPU with sdpa, as a check of the tests themselves.
"""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

if os.environ.get("GPU_TESTS_ON") != "cpu" and torch.cuda.is_available():
    os.environ["VERL_PLATFORM"] = "nvidia"  # tests/conftest.py set cpu; verl is not imported yet


@pytest.fixture(scope="session", autouse=True)
def device():
    """Return the GPU, or the CPU if that was asked for."""
    if os.environ.get("GPU_TESTS_ON") == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


@pytest.fixture
def gpu(device):
    """Require a GPU, for tests without a CPU form."""
    if device.type != "cuda":
        pytest.skip("needs a CUDA GPU")
    return device


@pytest.fixture(scope="session")
def one_rank(device, tmp_path_factory):
    """Open a process group of this process alone."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=0,
        world_size=1,
        timeout=timedelta(minutes=5),
    )
    yield
    dist.destroy_process_group()
