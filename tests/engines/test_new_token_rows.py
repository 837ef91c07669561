"""Rows of new tokens: steps equal those of plain transformers with the same rows, runs resume and export them whole."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.lib.errors import names
from tests.lib.packed_engine import build_worker, token_step
from tests.lib.ranks import run_cases
from tests.lib.reference import Reference, documents_of_answers, fill_adapters, load_eager
from tests.lib.tiny_model import VOCABULARY, write_tiny_model
from tests.lib.tokenized_data import random_documents, write_tokenized
from tests.lib.training import differences, into, metrics, plain_losses, refusals, train_twice
from verl_ext.commands.export import main as export

pytestmark = pytest.mark.slow

WORDS = "model.new_tokens=['w3 w5','<call>']"  # the pieces of the first are two words, of the second none
SPECIAL = "model.new_special_tokens=['w1']".replace("w1", "w7 w8 w9")
PIECES = {VOCABULARY: [7, 9], VOCABULARY + 1: [], VOCABULARY + 2: [11, 12, 13]}  # four special tokens stand before w0
DOCUMENTS = documents_of_answers(19, 5, 12, 7, 8, 3)
for number, document in enumerate(DOCUMENTS):  # each document reads and writes new tokens
    document.input_ids[1], document.input_ids[-1] = VOCABULARY + number % 3, VOCABULARY + (number + 1) % 3
PACKS = [DOCUMENTS[at : at + 2] for at in (0, 2, 4)]
MODELS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "padded": {"vocab_size": VOCABULARY + 40},  # rows that no token has yet
}
ROWS = {"untied": VOCABULARY + 64, "tied": VOCABULARY + 64, "padded": VOCABULARY + 40}
LORA = ["model.lora_rank=4", "model.lora_alpha=8", "model.target_modules=[q_proj,down_proj]"]
KINDS = {**{name: (name, []) for name in MODELS}, **{f"lora of {name}": (name, LORA) for name in MODELS}}
LAYOUTS = {"one rank": (1, 1), "two ranks": (2, 1), "two ranks of a pack": (2, 2)}


@torch.no_grad()
def resized(folder, rows: int, model: Any = None) -> Any:
    """Return plain transformers' model with the rows of new tokens, made by hand."""
    model = load_eager(str(folder)) if model is None else model
    old = len(model.get_input_embeddings().weight)
    if rows > old:
        model.resize_token_embeddings(rows, mean_resizing=False)
    for part in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
        average = part[:old].double().mean(0)
        part[old:] = average
        for number, pieces in PIECES.items():
            part[number] = part[pieces].double().mean(0) if pieces else average
    return model


def steps(folders: dict[str, str], sequence_parallel: int):
    """Return a step of each kind."""
    found = {}
    for kind, (model, overrides) in KINDS.items():
        engine = build_worker(folders[model], sequence_parallel, [WORDS, SPECIAL, *overrides]).engine
        fill_adapters(engine.module)
        found[kind] = engine.cheapest_head, token_step(engine, PACKS)
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: str(write_tiny_model(tmp_path_factory.mktemp(name), **config)) for name, config in MODELS.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_equals_that_of_plain_transformers_with_the_same_rows(kind, layout, folders, runs):
    name, overrides = KINDS[kind]
    model = resized(folders[name], ROWS[name])
    if overrides:
        ends = ["model.embed_tokens"] if name == "tied" else ["model.embed_tokens", "lm_head"]
        rows = {end: list(PIECES) for end in ends}
        lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], trainable_token_indices=rows)
        model = get_peft_model(model, lora).eval()
        fill_adapters(model)
    expected = Reference(model, DOCUMENTS).step(PACKS, "token", {})
    head, step = runs[1][layout][0][kind]
    assert head == "fused"
    expected.assert_taken(step)


WHOLE = "checkpoint.save_contents=[model,optimizer,extra,hf_model]"
STEPS = ("trainer.total_training_steps=2", "trainer.save_freq=1", "trainer.val_before_train=false")
# {run: (model, overrides)}
RUNS = {
    **{name: (name, [WHOLE]) for name in MODELS},
    **{f"lora of {name}": (name, [*LORA, WHOLE]) for name in MODELS},
    "adapters alone": ("untied", [*LORA, "checkpoint.save_lora_only=true"]),
    "whole": ("untied", [*LORA, "model.modules_to_save=[embed_tokens,lm_head]"]),
}


@pytest.fixture(scope="module")
def documents():
    return random_documents(np.random.default_rng(0), [40, 30, 20, 60] * 2, VOCABULARY + 3, 1)


@pytest.fixture(scope="module")
def runs(documents, folders, tmp_path_factory):
    """Return the folder of all runs on two ranks, whole and resumed after a step; and each rank's steps of a layout."""
    folder = tmp_path_factory.mktemp("runs")
    data = write_tokenized(folder / "data", documents)
    cases = {name: (ranks, steps, folders, of_pack) for name, (ranks, of_pack) in LAYOUTS.items()}
    for name, (model, overrides) in RUNS.items():
        run = [f"data.train_dir={data}", f"data.val_dir={data}", f"model.path={folders[model]}", WORDS, SPECIAL]
        cases[name] = (2, train_twice, [*run, *STEPS, *overrides], folder / name, folder / f"resumed {name}")
    return folder, run_cases(cases)


def exported(runs, name, *more):
    """Return the folder of a run's export."""
    output = runs[0] / " ".join(["export of", name, *more])
    if not output.exists():
        assert export([f'checkpoint="{runs[0] / name}"', f'output_dir="{output}"', *more]) == 0
    return output


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_equals_the_whole_one_in_every_bit(name, runs):
    assert differences(runs[0] / f"resumed {name}", runs[0] / name, 2) == []


@pytest.mark.parametrize("name", [name for name in RUNS if name != "adapters alone"])
def test_an_export_is_the_trained_model_with_its_rows_and_tokens(name, runs, folders, documents):
    model_name, overrides = RUNS[name]
    folder = exported(runs, name)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert plain_losses(folder, documents)[0] == pytest.approx(metrics(runs[0] / name)[2, "val/loss"], rel=1e-5)
    assert model.config.vocab_size == len(model.get_input_embeddings().weight) == ROWS[model_name]
    assert model.config.tie_word_embeddings == (model_name == "tied")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("w0 w3 w5 <call> w7 w8 w9")["input_ids"] == [4, *PIECES]
    assert [tokenizer.decode(list(PIECES), skip_special_tokens=True), len(tokenizer)] == ["w3 w5 <call>", 131]
    begun = resized(folders[model_name], ROWS[model_name])
    for get in ("get_input_embeddings", "get_output_embeddings"):
        moved = (getattr(model, get)().weight - getattr(begun, get)().weight).abs().amax(1)
        assert (moved[list(PIECES)] > 1e-3).all()
        if overrides[0] == LORA[0] and name != "whole":  # all other rows are those that the run began with
            moved[list(PIECES)] = 0
            assert (moved[:VOCABULARY] == 0).all()
            assert (moved < 1e-6).all()


@pytest.mark.parametrize("name", [name for name in RUNS if "lora" in name or name == "adapters alone"])
def test_exported_adapters_compute_the_same_beside_their_base_with_a_row_for_each_token(name, runs, folders):
    model_name = RUNS[name][0]
    folder = exported(runs, name, "form=adapter")
    base = AutoModelForCausalLM.from_pretrained(folders[model_name])
    tokens = len(AutoTokenizer.from_pretrained(folder))
    if tokens > base.config.vocab_size:
        base.resize_token_embeddings(tokens)  # its new rows are random, and the adapters replace them
    ids = torch.tensor([[5, *PIECES, 9, *PIECES]])
    more = [f"base={folders[model_name]}"] if name == "adapters alone" else []
    with torch.no_grad():
        found = PeftModel.from_pretrained(base, folder).eval()(ids).logits[..., :tokens]
        merged = AutoModelForCausalLM.from_pretrained(exported(runs, name, *more)).eval()(ids).logits[..., :tokens]
    again = runs[0] / f"merged adapters of {name}"
    words = (f'checkpoint="{folder}"', f"base={folders[model_name]}", f'output_dir="{again}"')
    assert export(words) == 0
    with torch.no_grad():
        folded = AutoModelForCausalLM.from_pretrained(again).eval()(ids).logits[..., :tokens]
    assert torch.allclose(found, merged, atol=1e-5)
    assert torch.allclose(found, folded, atol=1e-5)
    assert json.loads((folder / "adapter_config.json").read_text())["trainable_token_indices"]


def test_a_resume_with_other_tokens_is_refused(runs, folders):
    run = [f"data.train_dir={runs[0] / 'data'}", f"model.path={folders['padded']}", *STEPS, into(runs[0] / "padded")]
    changes = [[WORDS], [WORDS.replace("<call>", "<cell>"), SPECIAL]]
    told = refusals(run, changes)
    assert names(told[0], "model.new_special_tokens", "[]")
    assert names(told[1], "model.new_tokens", "['w3 w5', '<cell>']")
