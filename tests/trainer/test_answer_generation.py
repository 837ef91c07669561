"""Answers of sharded models on real ranks equal those of plain transformers' `generate` on the whole model."""

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig

from tests.lib.packed_engine import build_worker
from tests.lib.ranks import run_cases
from tests.lib.small_models import write_small_models
from tests.lib.tiny_model import write_tiny_model
from verl_ext.answers.generation import Sampling, generate

pytestmark = pytest.mark.slow

FAMILIES = ("qwen3", "gpt2", "qwen3_5_text", "nemotron_h", "lfm2", "jamba", "gpt_oss", "gemma2")
TOKENS = 6
LORA = ("model=lora", "model.lora_rank=4", "model.lora_alpha=8")
_draw = torch.Generator().manual_seed(1)
# More prompts than a rank's share of one batch, of many lengths: three for rank 0, two for rank 1.
PROMPTS = [torch.randint(4, 120, (n,), generator=_draw).tolist() for n in (23, 4, 17, 9, 40)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_model):
    small = write_small_models(FAMILIES[1:], tmp_path_factory.mktemp("small"), tiny_model)
    return {"qwen3": tiny_model, **small}


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


def _drawn(folder):
    engine = build_worker(folder).engine
    with engine.eval_mode():
        return [
            engine.generate_answers(PROMPTS[:2], Sampling(TOKENS, temperature=1.0, seed=seed)) for seed in (1, 1, 2)
        ]


LAYOUTS = {"data_parallel": (1, ()), "ulysses": (2, ()), "adapters": (1, LORA)}


@pytest.fixture(scope="module")
def penalized(tmp_path_factory):
    """Write a model whose generation_config.json holds a repetition penalty; return it and its answers without one."""
    folder = write_tiny_model(tmp_path_factory.mktemp("penalized"))
    expected = _plain_answers(folder)
    config = AutoModelForCausalLM.from_pretrained(folder).generation_config
    config.repetition_penalty = 5.0
    config.save_pretrained(folder)
    assert _plain_answers(folder) != expected
    return folder, expected


@pytest.fixture(scope="module")
def answered(folders, penalized):
    """Return the expected answers of each family, and those of ranks by layout; adapters have Qwen3 alone."""
    expected = {name: _plain_answers(folder) for name, folder in folders.items()}
    # An end token that only some answers contain ends rows at different times, on one rank long before the other.
    stops = {"qwen3": (expected["qwen3"][0][1], expected["qwen3"][2][0], expected["qwen3"][4][0])}
    expected |= {"qwen3": _plain_answers(folders["qwen3"], stops["qwen3"])}
    models = {name: {"qwen3": folders["qwen3"]} if name == "adapters" else folders for name in LAYOUTS}
    cases = {name: (2, _answers, models[name], layout, stops) for name, layout in LAYOUTS.items()}
    cases |= {"drawn": (1, _drawn, folders["qwen3"]), "penalized": (1, _answers, {"one": penalized[0]}, (1, ()), {})}
    return expected, run_cases(cases)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_answers_of_shards_are_those_of_the_whole_model_also_with_fresh_adapters_around_it(answered, layout):
    expected, found = answered
    assert len(set(map(tuple, expected["gpt2"]))) > 1
    for rank, (answers, untouched) in enumerate(found[layout]):
        assert answers == {name: expected[name][rank::2] for name in answers}
        assert set(untouched.values()) == {(True, True, True, True)}


def test_drawn_answers_follow_from_their_seed_and_greedy_ones_ignore_the_models_own_penalty(answered, penalized):
    ((first, again, other),), ((found, _),) = (answered[1][name] for name in ("drawn", "penalized"))
    assert first == again != other
    assert found["one"] == penalized[1][0::2]


def test_a_mixture_whose_config_asks_for_a_router_loss_answers_as_without_it(tmp_path):
    folder = write_tiny_model(tmp_path, config_class=MixtralConfig, num_local_experts=4)
    expected = _plain_answers(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, output_router_logits=True).eval()
    assert generate(model, PROMPTS, Sampling(TOKENS), "cpu") == expected
    assert model.config.output_router_logits
