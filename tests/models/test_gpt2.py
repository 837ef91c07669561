"""GPT-2 has learned positions, no key/value heads in its config, and no "ForCausalLM" in its name."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from tests.lib.ranks import run_cases
from tests.lib.tokenized_data import random_documents, write_tokenized
from tests.lib.training import into, metrics, plain_losses, train_alone

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def gpt2(tiny_model, tmp_path_factory):
    """Write a two-layer GPT-2 of 64 positions without dropout, with the tiny model's tokenizer."""
    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    none = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
    GPT2LMHeadModel(GPT2Config(**sizes, **none, initializer_range=0.2, eos_token_id=2)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


def test_it_trains_as_plain_transformers_and_is_exported_as_itself(gpt2, tmp_path):
    documents = random_documents(np.random.default_rng(0), [64, 9, 30, 2, 17, 40], vocab=128, categories=2)
    data = write_tokenized(tmp_path / "data", documents)
    run = [f"data.train_dir={data}", f"model.path={gpt2}", "trainer.total_training_steps=1"]
    run.append("checkpoint.save_contents=[hf_model]")
    runs = {ranks: tmp_path / f"run_{ranks}" for ranks in (1, 2)}
    sizes = {ranks: f"engine.ulysses_sequence_parallel_size={ranks}" for ranks in runs}
    run_cases({ranks: (ranks, train_alone, [*run, sizes[ranks], into(folder)]) for ranks, folder in runs.items()})
    expected = plain_losses(gpt2, documents)
    for folder in runs.values():
        assert metrics(folder)[1, "train/loss"] == pytest.approx(expected[0], rel=1e-5)
        exported, loading = AutoModelForCausalLM.from_pretrained(
            folder / "global_step_1" / "huggingface", output_loading_info=True
        )
        assert type(exported) is GPT2LMHeadModel
        assert not loading["missing_keys"]
