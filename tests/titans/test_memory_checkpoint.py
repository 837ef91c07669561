"""The file of a trained memory: its content, its writing, and refused files."""

import os

import pytest
import torch

from tests.lib.errors import refused
from tests.lib.tiny_titans import CHUNK, random_tokens, tiny_titans
from verl_ext.titans import load_memory_checkpoint, read_memory_checkpoint, save_memory_checkpoint


def test_a_memory_moves_onto_a_fresh_base_with_the_same_logits(tmp_path):
    trained, fresh = tiny_titans(), tiny_titans(perturbed=False)
    path = tmp_path / "run" / "final_memory_checkpoint.pt"
    save_memory_checkpoint(path, trained.memory_state_dict(), 7)
    ids = random_tokens(1, 2 * CHUNK)
    assert not torch.equal(fresh(ids).logits, trained(ids).logits)
    assert load_memory_checkpoint(fresh, path) == 7
    assert torch.equal(fresh(ids).logits, trained(ids).logits)


def test_it_holds_the_memorys_parameters_and_the_step_alone(tmp_path):
    model, path = tiny_titans(), tmp_path / "memory.pt"
    save_memory_checkpoint(path, model.memory_state_dict(), 3)
    content = torch.load(path, weights_only=True)
    assert set(content) == {"memory_state_dict", "global_step"}
    names = set(content["memory_state_dict"])
    assert names == {name for name, _ in model.named_parameters() if ".long_term_memory." in name or "_gate." in name}
    assert all(not tensor.requires_grad for tensor in content["memory_state_dict"].values())
    assert [file.name for file in tmp_path.iterdir()] == ["memory.pt"]


def test_a_failed_save_leaves_the_last_file_which_may_be_read_by_whom_the_umask_lets(tmp_path, monkeypatch):
    path, before = tmp_path / "memory.pt", os.umask(0o027)
    try:
        save_memory_checkpoint(path, tiny_titans().memory_state_dict(), 1)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640

    def fail(content, file):
        file.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="no space left"):
        save_memory_checkpoint(path, {}, 2)
    assert [file.name for file in tmp_path.iterdir()] == ["memory.pt"]
    assert read_memory_checkpoint(path)["global_step"] == 1


def test_a_state_of_one_slice_of_a_tensor_saves_that_slice(tmp_path):
    whole = torch.zeros(1000, 1000)
    save_memory_checkpoint(tmp_path / "memory.pt", {"memory.1.memory_gate.bias": whole[0]}, 1)
    assert (tmp_path / "memory.pt").stat().st_size < 10_000


class _Unsafe:
    pass


@pytest.mark.parametrize(
    ("content", "things"),
    [
        (None, ("a file",)),
        *((content, ("torch.save", "whole")) for content in (b"", b"not a checkpoint", "cut", _Unsafe())),
        ([1], ("memory_state_dict and global_step", "list")),
        ({"memory_state_dict": {}}, ("memory_state_dict and global_step", "holds memory_state_dict")),
        ({"memory_state_dict": {"a": 1}, "global_step": 1}, ("memory_state_dict", "tensors")),
        ({"memory_state_dict": {}, "global_step": "1"}, ("global_step", "'1'")),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path, content, things):
    path = tmp_path / "memory.pt"
    if content == "cut":
        save_memory_checkpoint(path, tiny_titans().memory_state_dict(), 1)
        path.write_bytes(path.read_bytes()[:-500])
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with refused(path, *things):
        read_memory_checkpoint(path)


@pytest.mark.parametrize(
    ("other", "things"),
    [
        ({"layers": [0, 1]}, ("unknown memory.0.long_term_memory.initial_w1", "12 more")),
        ({"layers": [2]}, ("lacks memory.1.long_term_memory.initial_w1", "12 more")),
        ({"depth": 1}, ("lacks memory.1.long_term_memory.initial_w2",)),
        ({"heads": 3}, ("memory.1.long_term_memory.initial_w1", "[3, 6, 12]", "[2, 6, 12]")),
    ],
)
def test_a_memory_of_another_model_is_refused_before_anything_changes(tmp_path, other, things):
    path, model = tmp_path / "memory.pt", tiny_titans()
    save_memory_checkpoint(path, tiny_titans(**other).memory_state_dict(), 1)
    before = {name: tensor.clone() for name, tensor in model.memory_state_dict().items()}
    with refused(*things):
        load_memory_checkpoint(model, path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.memory_state_dict().items())
