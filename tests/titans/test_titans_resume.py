"""A run with memory resumes as it began: other answers, another memory or other trained weights are refused."""

from pathlib import Path

import pytest
import torch

from tests.lib.babilong_data import write_babilong
from tests.lib.ranks import in_turn, run_ranks
from tests.lib.titans_run import TITANS
from tests.lib.training import into, refusals, train_alone
from verl_ext.titans import read_memory_checkpoint

pytestmark = pytest.mark.slow


CHANGES = {
    ("model.memory.bptt_chunks=1",): "",
    ("data.train_dir={other}",): "the digest of the documents in data.train_dir is",
    ("data.append_eos=true",): "the digest of the documents in data.train_dir is",
    ("model.memory.depth=2",): "model.memory is",
    ("model.memory.heads=4",): "model.memory is",
    ("model.train=memory",): "model.train is memory, but the run in",
    ("trainer.eval_only=true", "data.val_dir={other}"): "",
    ("trainer.eval_only=true", "data.val_dir={other}", "model.memory.layers=[0]"): "model.memory is",
}


@pytest.fixture(scope="module")
def done(tiny_model, tmp_path_factory):
    """Return the errors of a resume under each change, and the memory files of runs of 2, 1 and 3 steps in a folder."""
    folder = tmp_path_factory.mktemp("runs")
    files = write_babilong(folder / "qa1" / "1k.json", 6, 70)
    other = write_babilong(folder / "other" / "qa1" / "1k.json", 6, 60, seed=3)
    run = [*TITANS, f"data.train_dir={files}", f"data.cache_dir={folder / 'cache'}", f"model.path={tiny_model}"]
    run += ["data.train_ratio=1", "trainer.total_training_steps=1"]
    longer, first = "trainer.total_training_steps=2", [*run, into(folder / "first")]
    changes = [[longer, *(word.format(other=other) for word in change)] for change in CHANGES]
    path, calls = folder / "out" / "final_memory_checkpoint.pt", [(train_alone, first), (refusals, first, changes)]
    for steps in (2, 1, 3):  # the second ends without a step
        of_steps = [*run, f"trainer.total_training_steps={steps}", into(folder / "out")]
        calls += [(train_alone, of_steps), (read_memory_checkpoint, path), (Path.unlink, path)]
    ((_, told, *results),) = run_ranks(in_turn, 1, calls)
    return told, results[1::3]


def test_a_resume_on_other_data_or_another_memory_is_refused_before_a_model_is_loaded(done):
    for line, expected in zip(done[0], CHANGES.values(), strict=True):
        assert (expected in line) if expected else (line == "")
        assert "\n" not in line


def test_the_final_memory_is_of_the_step_that_its_weights_are_of(done):
    saved = done[1]
    assert [content["global_step"] for content in saved] == [2, 2, 3]
    first, same, later = (content["memory_state_dict"] for content in saved)
    assert all(torch.equal(first[name], tensor) for name, tensor in same.items())
    assert not all(torch.equal(first[name], tensor) for name, tensor in later.items())
