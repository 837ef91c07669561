"""A run with memory resumes as it began: other answers, another memory or other trained weights are refused."""

from pathlib import Path

import pytest
import torch

from tests.babilong_data import write_babilong
from tests.ranks import in_turn, run_ranks
from tests.titans_run import TITANS
from tests.training import into, refusals, train_alone
from verl_ext.models.qwen_titans import read_memory_checkpoint

pytestmark = pytest.mark.slow


@pytest.fixture
def options(tmp_path, tiny_model):
    files = write_babilong(tmp_path / "qa1" / "1k.json", 6, 70)
    return [
        *TITANS,
        *(f"data.train_dir={files}", f"data.cache_dir={tmp_path / 'cache'}", f"model.path={tiny_model}"),
        *("data.train_ratio=1", "trainer.total_training_steps=1", into(tmp_path / "out")),
    ]


def test_a_resume_on_other_data_or_another_memory_is_refused_before_a_model_is_loaded(options, tmp_path):
    other = write_babilong(tmp_path / "other" / "qa1" / "1k.json", 6, 60, seed=3)
    longer = ["trainer.total_training_steps=2"]
    changes = {
        ("model.memory.bptt_chunks=1",): "",
        (f"data.train_dir={other}",): "the digest of the documents in data.train_dir is",
        ("data.append_eos=true",): "the digest of the documents in data.train_dir is",
        ("model.memory.depth=2",): "model.memory is",
        ("model.memory.heads=4",): "model.memory is",
        ("model.train=memory",): "model.train is memory, but the run in",
        ("trainer.eval_only=true", f"data.val_dir={other}"): "",
        ("trainer.eval_only=true", f"data.val_dir={other}", "model.memory.layers=[0]"): "model.memory is",
    }
    calls = [(train_alone, options), (refusals, options, [[*longer, *change] for change in changes])]
    ((_, told),) = run_ranks(in_turn, 1, calls)
    for line, expected in zip(told, changes.values(), strict=True):
        assert (expected in line) if expected else (line == "")
        assert "\n" not in line


def test_the_final_memory_is_of_the_step_that_its_weights_are_of(options, tmp_path):
    path, calls = tmp_path / "out" / "final_memory_checkpoint.pt", []
    for steps in (2, 1, 3):  # the second ends without a step
        run = (train_alone, [*options, f"trainer.total_training_steps={steps}"])
        calls += [run, (read_memory_checkpoint, path), (Path.unlink, path)]
    saved = run_ranks(in_turn, 1, calls)[0][1::3]
    assert [content["global_step"] for content in saved] == [2, 2, 3]
    first, same, later = (content["memory_state_dict"] for content in saved)
    assert all(torch.equal(first[name], tensor) for name, tensor in same.items())
    assert not all(torch.equal(first[name], tensor) for name, tensor in later.items())
