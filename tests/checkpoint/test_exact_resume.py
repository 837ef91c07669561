"""A resumed run equals an uninterrupted one to the last bit, for every dataset and kind of model, at any step."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from tests.lib.babilong_data import write_babilong
from tests.lib.document_texts import random_words, write_jsonl
from tests.lib.ranks import run_cases
from tests.lib.tiny_model import VOCABULARY
from tests.lib.titans_run import TITANS
from tests.lib.tokenized_data import random_documents, write_tokenized
from tests.lib.training import differences, into, stopped_at, train
from verl_ext.checkpoint.layout import saved_folders

pytestmark = pytest.mark.slow

# name: (ranks, steps of the run, steps after which it is resumed)
CASES = {
    "packed, a mixture, saved aside": (2, 4, (1, 2)),  # an epoch has 2 steps: inside one, and between two
    "tied weights, sequence parallel": (2, 3, (2,)),
    "adapters alone": (2, 2, (1,)),
    "a stream of documents": (1, 3, (1,)),
    "texts": (1, 3, (2,)),
    "questions, the memory alone is trained": (1, 2, (1,)),
}


@pytest.fixture(scope="module")
def cases(tiny_model, tmp_path_factory):
    """Return the overrides of each case."""
    folder = tmp_path_factory.mktemp("cases")
    rng = np.random.default_rng(0)
    documents = random_documents(rng, rng.integers(5, 60, 24), VOCABULARY, 2)
    packed = write_tokenized(folder / "packed", documents, {1: "maths", 2: "code"})
    texts = write_jsonl(folder / "texts.jsonl", random_words((7, 1, 30, 12, 15, 16, 40, 3, 9) * 3, seed=1))
    babilong = write_babilong(folder / "qa1" / "1k.json", 6, 70)
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(**sizes, eos_token_id=2)).save_pretrained(folder / "gpt2")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder / "gpt2")
    small, sft, cache = f"model.path={tiny_model}", f"data.train_dir={packed}", f"data.cache_dir={folder / 'cache'}"
    half = "data.mixture={sources: {all: {tokens: 400}}}"
    lora = ("model=lora", "model.lora_rank=4", "checkpoint.save_lora_only=true")
    overrides = (
        [sft, small, half, f"data.val_dir={packed}", "checkpoint.async_save=true"],
        [sft, f"model.path={folder / 'gpt2'}", "engine.ulysses_sequence_parallel_size=2"],
        [sft, small, *lora],
        ["data=multidoc", f"data.train_dir={texts}", cache, small, "data.seq_len=16", "data.max_tokens=16"],
        ["data=pretrain", f"data.train_dir={texts}", cache, small, "data.over_length=split"],
        [*TITANS, f"data.train_dir={babilong}", cache, small, "model.train=memory", "data.train_ratio=1"],
    )
    return dict(zip(CASES, overrides, strict=True))


def whole_and_resumed(overrides: list[str], whole: Path, steps: int, resumed: tuple[int, ...]) -> None:
    """Run a case without interruption, and again from each checkpoint to resume."""
    length = ("trainer.save_freq=1", "trainer.test_freq=-1", f"trainer.total_training_steps={steps}")
    for step in (0, *resumed):
        run = whole if step == 0 else whole.with_name(f"{whole.name}_{step}")
        if step:
            stopped_at(whole, run, step)
        kept = ["trainer.max_ckpt_to_keep=2"] if step else []
        assert train([*overrides, *length, *kept, into(run)]).progress.total_steps == steps


def folder_of(name: str) -> str:
    return name.replace(" ", "_").replace(",", "")


@pytest.fixture(scope="module")
def done(cases, tmp_path_factory):
    """Return the folder of all runs."""
    folder = tmp_path_factory.mktemp("runs")
    run_cases(
        {
            name: (ranks, whole_and_resumed, cases[name], folder / folder_of(name), *steps)
            for name, (ranks, *steps) in CASES.items()
        }
    )
    return folder


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_equals_an_uninterrupted_one_to_the_last_bit(name, done):
    _, steps, resumed = CASES[name]
    whole = done / folder_of(name)
    for step in resumed:
        run = whole.with_name(f"{whole.name}_{step}")
        assert not differences(run, whole, steps)
        # checkpoints from before the resume count towards what is kept
        assert [path.name for path in saved_folders(run)] == [f"global_step_{step}" for step in (steps - 1, steps)]
