"""A run with memory resumes as it began: other answers, another memory or other trained weights are refused."""

import contextlib
import io

import pytest
import torch

from tests.babilong_data import write_babilong
from tests.ranks import run_ranks
from tests.titans_run import TITANS
from tests.training import SMALL, train, train_alone
from verl_ext.config import compose
from verl_ext.models.qwen_titans import read_memory_checkpoint
from verl_ext.trainer.setup import prepare

pytestmark = pytest.mark.slow


def _trained_and_refused(options, changes):
    """Return the error for each change of a run that has saved a checkpoint; "" if it is allowed."""
    train(options)
    told = []
    for change in changes:
        words = io.StringIO()
        with contextlib.redirect_stderr(words), contextlib.suppress(SystemExit):
            prepare(compose([*SMALL, "trainer.logger=[file]", *options, *change]))
        told.append(words.getvalue())
    return told


@pytest.fixture
def options(tmp_path, tiny_model):
    files = write_babilong(tmp_path / "qa1" / "1k.json", 6, 70)
    return [
        *TITANS,
        *(f"data.train_dir={files}", f"data.cache_dir={tmp_path / 'cache'}", f"model.path={tiny_model}"),
        *("data.train_ratio=1", "trainer.total_training_steps=1", f"trainer.default_local_dir={tmp_path / 'out'}"),
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
    told = run_ranks(_trained_and_refused, 1, options, [[*longer, *change] for change in changes])[0]
    for line, expected in zip(told, changes.values(), strict=True):
        assert (expected in line) if expected else ("error" not in line), line
        assert line.count("error: ") == bool(expected)


@pytest.mark.parametrize(("steps_then", "step"), [(1, 2), (3, 3)])
def test_the_final_memory_is_of_the_step_that_its_weights_are_of(options, tmp_path, steps_then, step):
    path, saved = tmp_path / "out" / "final_memory_checkpoint.pt", []
    for steps in (2, steps_then):
        path.unlink(missing_ok=True)
        run_ranks(train_alone, 1, [*options, f"trainer.total_training_steps={steps}"])
        saved.append(read_memory_checkpoint(path))
    assert [content["global_step"] for content in saved] == [2, step]
    before, after = (content["memory_state_dict"] for content in saved)
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items()) == (step == 2)
