"""Answers of sharded models on real ranks equal those of plain transformers' `generate` on the whole model."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.ranks import run_ranks
from tests.small_models import packed_and_plain
from tests.tiny_model import write_tiny_model
from verl_ext.answers.generation import Sampling

pytestmark = pytest.mark.slow

FAMILIES = ("qwen3", "gpt2", "qwen3_5_text", "nemotron_h", "lfm2", "jamba", "gpt_oss", "gemma2")
TOKENS = 6
LORA = ("model=lora", "model.lora_rank=4", "model.lora_alpha=8")
_draw = torch.Generator().manual_seed(1)
# More prompts than a rank's share of one batch, of many lengths: three for rank 0, two for rank 1.
PROMPTS = [torch.randint(4, 120, (n,), generator=_draw).tolist() for n in (23, 4, 17, 9, 40)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_model):
    """Write a small model of each family, and return the folders by name."""
    written = {"qwen3": tiny_model}
    for name in FAMILIES[1:]:
        folder = tmp_path_factory.mktemp(name)
        packed_and_plain(name)[1].save_pretrained(folder)
        AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
        written[name] = folder
    return written


def _plain_answers(folder, stops=()):
    """Return the answers of transformers' own generate to each prompt alone, with eager attention."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": TOKENS}
        output = model.generate(ids, **given, eos_token_id=list(stops) or None, pad_token_id=0)[0, len(prompt) :]
        ends = [place for place, token in enumerate(output.tolist()) if token in stops]
        answers.append(output[: ends[0] if ends else None].tolist())
    return answers


def _answers(folders, layout, stops):
    """Return this rank's answers by name, and whether parameters, random state and module stayed unchanged."""
    from tests.packed_engine import build_worker

    rank, found, untouched = torch.distributed.get_rank(), {}, {}
    sequence_parallel, overrides = layout
    for name, folder in folders.items():
        engine = build_worker(folder, sequence_parallel, overrides).engine
        weights = {key: value.to_local().clone() for key, value in engine.module.named_parameters()}
        random, config = torch.get_rng_state(), engine.module.config._attn_implementation
        with engine.eval_mode():
            sampling = Sampling(TOKENS, tuple(stops.get(name, ())))
            found[name] = engine.generate_answers(PROMPTS[rank::2], sampling)
        with engine.eval_mode():
            again = engine.generate_answers(PROMPTS[rank::2], sampling)
        engine.module.reshard()
        same = [torch.equal(value.to_local(), weights[key]) for key, value in engine.module.named_parameters()]
        untouched[name] = (
            *(all(same), torch.equal(torch.get_rng_state(), random), again == found[name]),
            engine.module.config._attn_implementation == config,
        )
    return found, untouched


@pytest.mark.parametrize("layout", [(1, ()), (2, ())], ids=["data_parallel", "ulysses"])
def test_answers_of_shards_are_those_of_the_whole_model(folders, layout):
    expected = {name: _plain_answers(folder) for name, folder in folders.items()}
    # An end token that only some answers contain ends rows at different times, on one rank long before the other.
    stops = {"qwen3": (expected["qwen3"][0][1], expected["qwen3"][2][0], expected["qwen3"][4][0])}
    expected["qwen3"] = _plain_answers(folders["qwen3"], stops["qwen3"])
    assert len(set(map(tuple, expected["gpt2"]))) > 1
    for rank, (found, untouched) in enumerate(run_ranks(_answers, 2, folders, layout, stops)):
        for name in folders:
            assert found[name] == expected[name][rank::2], name
            assert untouched[name] == (True, True, True, True), name


def test_answers_with_adapters_are_those_of_the_model_around_them(folders):
    folder = {"qwen3": folders["qwen3"]}
    expected = _plain_answers(folder["qwen3"])  # fresh adapters change nothing
    for rank, (found, untouched) in enumerate(run_ranks(_answers, 2, folder, (1, LORA), {})):
        assert found["qwen3"] == expected[rank::2]
        assert all(untouched["qwen3"])


def _drawn(folder):
    from tests.packed_engine import build_worker

    engine = build_worker(folder).engine
    with engine.eval_mode():
        return [
            engine.generate_answers(PROMPTS[:2], Sampling(TOKENS, temperature=1.0, seed=seed)) for seed in (1, 1, 2)
        ]


def test_drawn_answers_follow_from_their_seed(folders):
    (first, again, other), *_ = run_ranks(_drawn, 1, folders["qwen3"])
    assert first == again != other


def test_an_ignored_penalty_of_the_models_own_settings(tmp_path):
    """generation_config.json may hold a repetition penalty, which greedy answers ignore."""
    folder = write_tiny_model(tmp_path)
    expected = _plain_answers(folder)
    config = AutoModelForCausalLM.from_pretrained(folder).generation_config
    config.repetition_penalty = 5.0
    config.save_pretrained(folder)
    assert _plain_answers(folder) != expected
    (found, _), *_ = run_ranks(_answers, 1, {"one": folder}, (1, ()), {})
    assert found["one"] == expected[0::2]
