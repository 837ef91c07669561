"""A run with memory goes on as it began: other answers, another memory or other weights to train are refused."""

import contextlib
import io

import pytest

from tests.babilong_data import write_babilong
from tests.ranks import run_ranks
from tests.test_chunked_engine import TITANS
from tests.training import SMALL, train
from verl_ext.config import compose
from verl_ext.trainer.preparation import prepare


def _trained_and_refused(options, changes):
    """What is told of each change to a run that has saved a checkpoint; "" where it is allowed."""
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
        ("model.memory.variant=mal",): "model.memory is",
        ("model.memory.heads=4",): "model.memory is",
        ("model.train=memory",): "model.train is memory, but the run in",
        ("trainer.eval_only=true", f"data.val_dir={other}"): "",
        ("trainer.eval_only=true", f"data.val_dir={other}", "model.memory.layers=[0]"): "model.memory is",
    }
    told = run_ranks(_trained_and_refused, 1, options, [[*longer, *change] for change in changes])[0]
    for line, expected in zip(told, changes.values(), strict=True):
        assert (expected in line) if expected else ("error" not in line), line
        assert line.count("error: ") == bool(expected)
