"""The copies in host memory from which a checkpoint is written while training continues."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.ranks import run_ranks
from verl_ext.checkpoint.state import HostCopies


def copies_of_a_step_and_the_next() -> bool:
    mesh = dist.init_device_mesh("cpu", (2,))
    state = {"weight": distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]), "step": torch.tensor(3.0)}
    copies = HostCopies()
    first = copies.copy(state)
    copies.wait()
    copies.hold_device()
    state["weight"].to_local().add_(1)
    state["step"].add_(1)
    assert isinstance(first["weight"], DTensor)
    assert first["weight"].full_tensor().tolist() == [0, 1, 2, 3, 4]  # not the value after the optimizer's step
    assert first["step"] == 3
    places = {"weight": first["weight"].to_local().data_ptr(), "step": first["step"].data_ptr()}
    second = copies.copy(state)
    assert second["weight"].full_tensor().tolist() == [1, 2, 3, 4, 5]
    assert second["step"] == 4
    assert places == {"weight": second["weight"].to_local().data_ptr(), "step": second["step"].data_ptr()}
    return True


def test_copies_stay_as_they_were_made_and_keep_their_memory_for_the_next_save():
    assert run_ranks(copies_of_a_step_and_the_next, 2) == [True, True]
