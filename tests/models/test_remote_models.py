"""A model with code from its folder is trained if it keeps the documents of a pack apart, and refused otherwise."""

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from tests.lib.checked import support_problems
from tests.lib.engine_steps import DOCUMENTS, PACKS, engine_steps
from tests.lib.errors import names
from tests.lib.ranks import run_ranks
from tests.lib.reference import Reference, load_eager
from tests.lib.remote_code import add_code
from verl_ext.config.check import read_hf_config


@pytest.fixture
def folder(tmp_path, tiny_model):
    """Write a model's folder whose code changes the embeddings by an expression."""

    def write(output):
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 256, "head_dim": 16}
        config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2)
        Qwen3ForCausalLM(config).save_pretrained(tmp_path)
        AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path)
        add_code(tmp_path, output)
        return str(tmp_path)

    return write


def test_remote_code_that_keeps_documents_apart_is_accepted(folder):
    assert support_problems(read_hf_config(folder("2 * output"), trusted=True)) == []


def test_remote_code_that_mixes_documents_is_refused_in_one_line(folder):
    (problem,) = support_problems(read_hf_config(folder("output.cumsum(1)"), trusted=True))
    assert names(problem, "model.path: HouseConfig", "documents of a pack")
    assert "\n" not in problem


@pytest.mark.slow
def test_remote_code_is_trained_as_plain_hugging_face_runs_it(folder):
    path = folder("2 * output")
    (steps,) = run_ranks(engine_steps, 1, {"house": path}, 1, 1, ["model.trust_remote_code=true"])
    expected = Reference(load_eager(path, trust_remote_code=True), DOCUMENTS).step(PACKS, "token", {})
    expected.assert_taken(steps["house"], gradients=1e-4, floor=0)
