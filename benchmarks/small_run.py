"""A small model and the trainer's own steps on it, without upstream's output."""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from tokenizers import Tokenizer, models

from verl_ext.config import compose
from verl_ext.options import UsageError
from verl_ext.trainer.batch import StepBatch
from verl_ext.trainer.setup import prepare
from verl_ext.trainer.trainer import SFTTrainer, StepOutcome, UpcomingStep

VOCABULARY = 1024
HEAD = 64


def write_model(folder: Path, hidden: int, layers: int, positions: int) -> None:
    """Save a Qwen3 with random weights in fp32, and a tokenizer that verl can load.

    It has query heads of size 64, half as many key/value heads, and an MLP of 3 × hidden.

    Raises:
        UsageError: If `hidden` does not divide into whole heads.
    """
    if hidden < 2 * HEAD or hidden % (2 * HEAD):
        raise UsageError(f"hidden must be a multiple of {2 * HEAD}; got {hidden}")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD,
        num_key_value_heads=hidden // HEAD // 2,
        head_dim=HEAD,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder, VOCABULARY)


def write_tokenizer(folder: Path, words: int) -> None:
    """Save a tokenizer of made-up words."""
    vocabulary = Tokenizer(models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="w0", eos_token="w1")
    tokenizer.save_pretrained(folder)


def build_trainer(folder: Path, output: Path, *overrides: str) -> SFTTrainer:
    """Build a trainer of `folder`/model on the tokenized `folder`/data, on the CPU."""
    where = (f"data.train_dir={folder / 'data'}", f"model.path={folder / 'model'}", "parallel=cpu")
    own = ("data.num_workers=0", f"trainer.default_local_dir={output}", *overrides)
    return SFTTrainer(prepare(compose((*where, *own))))


def take_step(trainer: SFTTrainer, batch: StepBatch, summed: bool = True) -> StepOutcome:
    """Take the trainer's own optimizer step; every rank joins with its own batch."""
    counts = trainer.engine.is_mp_src_rank_with_outputs()
    return trainer.train_step(UpcomingStep(batch, counts, trainer.hosts), summed=summed)


def no_progress_bars() -> None:
    """Turn off the progress bars of transformers and datasets from now on."""
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()


@contextlib.contextmanager
def quiet() -> Iterator[Any]:
    """Silence verl's and transformers' reports of sizes, NUMA and progress while an engine is built."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            yield
    finally:
        logging.disable(before)
