"""Checkpoints with a vision tower train on text as in plain transformers, and their towers stay unchanged."""

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    CLIPImageProcessorPil,
    LlavaProcessor,
)

from tests.lib.checked import changed, checked
from tests.lib.errors import refused
from tests.lib.packed_engine import build_worker, token_step
from tests.lib.ranks import run_cases
from tests.lib.reference import Reference, documents_of_answers
from tests.lib.small_models import packed_and_plain, write_small_models
from tests.lib.tiny_model import VOCABULARY
from tests.lib.tokenized_data import random_documents, write_tokenized
from tests.lib.training import into, tensors_of, train_alone
from verl_ext.commands.export import main as export
from verl_ext.config.compose import compose
from verl_ext.config.weights import check_weights
from verl_ext.layers.towers import freeze, outside_text, text_parts
from verl_ext.parallel.shards import DocumentLayout

FAMILIES = (  # their gradients on packs: test_model_types.py
    *("gemma3", "gemma4", "glm4v", "idefics3", "internvl", "lfm2_vl", "llava", "mistral3", "qwen2_5_vl"),
    *(("llama4",) if transformers.__version__ != "5.24.0" else ()),  # there its forward of texts raises
    *("qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"),
)


def _is_outside(name, outside):
    return f"{name}.".startswith(tuple(f"{part}." for part in outside))


def test_a_class_that_leaves_its_embeddings_and_head_to_a_part_has_no_part_that_is_none(monkeypatch):
    model = packed_and_plain("gemma3")[1]
    whole = text_parts(model)
    for name in ("get_input_embeddings", "get_output_embeddings"):
        monkeypatch.setattr(model, name, lambda: None)
    assert text_parts(model) == whole[:-2]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_reaches_all_but_the_tower(family):
    model, _ = packed_and_plain(family)
    outside = outside_text(model)
    assert outside, f"{family} has no tower here"
    layout = DocumentLayout.from_lengths([13, 18], "cpu")
    ids, positions = torch.arange(3, 34)[None], torch.cat([torch.arange(13), torch.arange(18)])[None]
    model(input_ids=ids, position_ids=positions, document_layout=layout, use_cache=False).logits.sum().backward()
    reached = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert reached
    assert not [name for name in reached if _is_outside(name, outside)]


DOCUMENTS = documents_of_answers(21, 2, 13, 30, 9, 17)
PACKS = [DOCUMENTS[:3], DOCUMENTS[3:]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_model):
    families = ("gemma3", "qwen2_5_vl", "qwen3_5")
    return write_small_models(families, tmp_path_factory.mktemp("towers"), tiny_model)


def _steps(folders, ulysses):
    steps = {}
    for family, folder in folders.items():
        engine = build_worker(folder, ulysses).engine
        assert engine.cheapest_head == "fused"
        steps[family] = token_step(engine, PACKS)
    return steps


RUNS = {
    "full": ["model.freeze=[layers.0]"],
    "tiles": ["model.tile_tokens=16", "model.activation_offload=true"],
    "lora": ["model=lora", "model.lora_rank=4"],
}
LAYOUTS = [(1, 1), (1, 2), (2, 2)]


@pytest.fixture(scope="module")
def llava(tmp_path_factory, tiny_model):
    """Write a model of transformers' class, with a processor, and its tokenizer; return their folders."""
    folder = tmp_path_factory.mktemp("llava")
    source, tokens = folder / "source", folder / "tokenizer"
    packed_and_plain("llava")[1].save_pretrained(source)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model, extra_special_tokens={"image_token": "<|unk|>"})
    LlavaProcessor(CLIPImageProcessorPil(), tokenizer, patch_size=4).save_pretrained(source)
    tokenizer.save_pretrained(tokens)
    return source, tokens


@pytest.fixture(scope="module")
def done(folders, llava, data, tmp_path_factory):
    """Return the folder of runs of two steps with weight decay, which training also exported, and steps by layout."""
    folder = tmp_path_factory.mktemp("runs")
    documents = random_documents(np.random.default_rng(0), [40, 30, 20, 60, 25], VOCABULARY, 1)
    own = write_tokenized(folder / "data", documents)
    contents = "checkpoint.save_contents=[model,optimizer,extra,hf_model]"
    usual = ["trainer.logger=[console]", "optim.weight_decay=0.1", "trainer.total_training_steps=2"]
    common = [*usual, f"data.train_dir={own}", f"model.path={folders['qwen2_5_vl']}", contents]
    alone = [*usual, f"data.train_dir={data}", f"model.path={llava[0]}", f"model.tokenizer_path={llava[1]}"]
    cases = {(ulysses, ranks): (ranks, _steps, folders, ulysses) for ulysses, ranks in LAYOUTS}
    cases |= {name: (2, train_alone, [*common, *more, into(folder / name)]) for name, more in RUNS.items()}
    cases["llava"] = (1, train_alone, [*alone, into(folder / "llava")])
    return folder, run_cases(cases)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_of_the_engine_equals_plain_transformers(layout, folders, done):
    steps = done[1][layout][0]
    for family, folder in folders.items():
        plain = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        outside = outside_text(plain)
        for name, parameter in plain.eval().named_parameters():
            parameter.requires_grad_(not _is_outside(name, outside))
        Reference(plain, DOCUMENTS).step(PACKS, "token", {}).assert_taken(steps[family], gradients=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_a_run_leaves_the_tower_as_it_is_to_the_last_bit(run, done, folders, tmp_path):
    before = AutoModelForImageTextToText.from_pretrained(folders["qwen2_5_vl"], dtype=torch.float32)
    outside = outside_text(before)
    checkpoint = done[0] / run / "global_step_2"
    saved = tensors_of(checkpoint)
    trained = {name.removeprefix("optimizer.").rpartition(".")[0] for name in saved if name.startswith("optimizer.")}
    assert trained
    assert not [name for name in trained if ".visual." in name], "the tower has adapters or a state"
    assert export([f"checkpoint={checkpoint}", f"output_dir={tmp_path / 'out'}"]) == 0
    by_training = load_file(checkpoint / "huggingface" / "model.safetensors")
    by_command = load_file(tmp_path / "out" / "model.safetensors")
    assert by_training.keys() == by_command.keys()
    for folder in (checkpoint / "huggingface", tmp_path / "out"):
        given = {"dtype": torch.float32, "output_loading_info": True}
        after, loading = AutoModelForImageTextToText.from_pretrained(folder, **given)
        assert not any(loading.values()), loading
        both = zip(before.named_parameters(), after.parameters(), strict=True)
        changed = {name for (name, x), y in both if not torch.equal(x, y)}
        assert changed
        assert not [name for name in changed if _is_outside(name, outside)]
        if run == "full":
            kept = {name for name, _ in before.named_parameters() if "language_model.layers.0." in name}
            assert changed == trained
            assert trained == {n for n, _ in before.named_parameters() if not _is_outside(n, outside)} - kept


@pytest.mark.slow
def test_an_export_has_the_processor_of_its_source_where_verl_loads_none(done, llava, tmp_path):
    assert export([f"checkpoint={done[0] / 'llava'}", f"output_dir={tmp_path / 'out'}"]) == 0
    processor = AutoProcessor.from_pretrained(tmp_path / "out")
    assert isinstance(processor, LlavaProcessor)
    assert processor.to_dict() == AutoProcessor.from_pretrained(llava[0]).to_dict()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    documents = random_documents(np.random.default_rng(0), [40, 30], VOCABULARY, 1)
    return write_tokenized(tmp_path_factory.mktemp("data"), documents)


@pytest.fixture(scope="module")
def composed(folders, data):
    return compose([f"data.train_dir={data}", f"model.path={folders['gemma3']}", "parallel=cpu", "optim.lr=1e-3"])


def test_a_notice_counts_what_is_frozen(folders, composed):
    model = AutoModelForImageTextToText.from_pretrained(folders["gemma3"])
    inside = model.model.language_model.num_parameters()
    (notice,) = checked(composed, 1).notices
    assert notice.startswith(f"{model.num_parameters() - inside:,} of {model.num_parameters():,} parameters are frozen")
    assert "model.vision_tower, model.multi_modal_projector" in notice
    assert notice.endswith(f"{inside:,} are trained")


LORA = "model.lora_rank=8"


@pytest.mark.parametrize(
    ("overrides", "things"),
    [
        (["model.freeze=[vision_towr]"], ("model.freeze", "vision_towr", "nearest: vision_tower")),
        ([LORA, "model.freeze=[lm_head]"], ("model.freeze", "model.lora_rank", "['lm_head']")),
        (
            ["model.lora_rank=8", "model.target_modules=[patch_embedding]"],
            ("model.target_modules", "text model", "patch_embedding"),
        ),
        (
            ["model.lora_rank=8", "model.target_modules=[embed_tokens]"],
            ("model.target_modules", "model.language_model.embed_tokens"),
        ),
        (["model.override_config={sliding_windw:8}"], ("nearest: model.override_config.sliding_window",)),
    ],
)
def test_a_mistake_is_one_line(overrides, things, composed):
    with refused(*things):
        checked(changed(composed, overrides), 1)


def test_keys_of_the_text_model_are_overridden_by_their_names(composed):
    keys = "model.override_config={max_position_embeddings:1024,text_config:{rms_norm_eps:1e-3}}"
    text = checked(changed(composed, [keys]), 1).hf_config.get_text_config()
    assert (text.max_position_embeddings, text.rms_norm_eps) == (1024, 1e-3)


def test_a_checkpoint_without_its_tower_is_refused_in_one_line(folders, tmp_path):
    model = AutoModelForImageTextToText.from_pretrained(folders["gemma3"])
    weights = {name: tensor for name, tensor in model.state_dict().items() if ".language_model." in name}
    model.save_pretrained(tmp_path, state_dict=weights)

    with refused("lacks 2", "model.multi_modal_projector.*, model.vision_tower.*", "model.allow_weight_mismatch="):
        check_weights(type(model), model.config, str(tmp_path), [], {})


def test_freezing_names_modules_or_parameters_by_their_ends():
    _, model = packed_and_plain("gemma3")
    freeze(model, ["layers.[01]", "embed_tokens"])
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    text = {name for name in frozen if not _is_outside(name, outside_text(model))}
    assert outside_text(model) == ["model.vision_tower", "model.multi_modal_projector"]
    assert {name.split(".")[3] for name in text if ".layers." in name} == {"0", "1"}
    assert "model.language_model.embed_tokens.weight" in text
    with refused("model.freeze", "embed_token", "nearest: embed_tokens"):
        freeze(model, ["embed_token"])
    with refused("model.freeze", "['model', 'lm_head']"):
        freeze(model, ["model", "lm_head"])


def test_what_stands_after_an_exclamation_mark_is_trained_and_nothing_else():
    _, model = packed_and_plain("gemma3")
    last = model.config.get_text_config().num_hidden_layers - 1
    freeze(model, ["!layers.-1", "!language_model.norm", "mlp"])
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {
        name
        for name, _ in model.named_parameters()
        if (f".language_model.layers.{last}." in name and ".mlp." not in name)
        or name.endswith("language_model.norm.weight")
    }
    with refused("model.freeze", "!layers.-9"):
        freeze(model, ["!layers.-9"])
