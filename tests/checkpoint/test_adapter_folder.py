"""`verl-ext export` merges adapter folders of PEFT that other trainers wrote, and refuses those that do not fit."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.lib.errors import names
from tests.lib.tiny_model import VOCABULARY, write_tiny_model
from verl_ext.__main__ import main

ROWS = VOCABULARY + 12
KINDS = {
    "plain": {"target_modules": "all-linear"},
    "dora": {"target_modules": ["q_proj"], "use_dora": True, "modules_to_save": ["embed_tokens"]},
    "new tokens": {"target_modules": ["q_proj"]},
    "new tokens of a whole head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "new tokens of adapters": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
}
OF_TIED = {
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "both as one": {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    "rows": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]},
    "whole head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


def adapted(base, folder, name, **saving):
    """Write an adapter folder; return its model."""
    model = AutoModelForCausalLM.from_pretrained(base)
    if name.startswith("new tokens"):
        model.resize_token_embeddings(ROWS)
        tokenizer = AutoTokenizer.from_pretrained(base)
        tokenizer.add_tokens([f"new{number}" for number in range(12)])
        tokenizer.save_pretrained(folder)
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, **(KINDS | OF_TIED)[name]))
    torch.manual_seed(1)
    for parameter_name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_A" not in parameter_name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder, **saving)
    return model.eval()


@pytest.mark.parametrize("name", KINDS)
def test_a_merged_folder_computes_what_peft_computes_with_its_tokenizer(name, base, tmp_path):
    model = adapted(base, tmp_path / "adapter", name)
    given = [f"base={base}"] if name == "plain" else []  # else that of adapter_config.json
    assert main(["export", f"checkpoint={tmp_path}/adapter", f"output_dir={tmp_path}/merged", *given]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    ids = torch.arange(merged.config.vocab_size)[None, -40:]
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
        plain = AutoModelForCausalLM.from_pretrained(base).eval()
        assert not torch.allclose(plain(ids[:, :9]).logits, model(ids[:, :9]).logits[..., :VOCABULARY], atol=1e-2)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert len(tokenizer) == (ROWS if name.startswith("new tokens") else VOCABULARY)
    assert tokenizer.chat_template


@pytest.mark.parametrize("has_tables", [False, "auto"])
@pytest.mark.parametrize("name", OF_TIED)
def test_adapters_at_one_end_of_tied_weights_change_that_end_alone(name, has_tables, tied, tmp_path):
    model = adapted(tied, tmp_path / "adapter", name, save_embedding_layers=has_tables)
    assert main(["export", f"checkpoint={tmp_path}/adapter", f"output_dir={tmp_path}/merged"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    ids = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_rows_of_new_tokens_that_are_in_no_file_are_refused(base, tmp_path, capsys):
    adapted(base, tmp_path / "adapter", "new tokens of a whole head", save_embedding_layers=False)
    assert main(["export", f"checkpoint={tmp_path}/adapter", f"output_dir={tmp_path}/merged"]) == 1
    assert names(capsys.readouterr().err, "model.embed_tokens", "new tokens")


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float32"])
def test_the_weights_have_the_bases_type_or_another_and_are_rounded_once(dtype, base, tmp_path):
    half = AutoModelForCausalLM.from_pretrained(base).bfloat16()
    half.generation_config.max_new_tokens = 9
    half.save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "base")
    model = adapted(tmp_path / "base", tmp_path / "adapter", "plain").float().merge_and_unload()
    words = [f"checkpoint={tmp_path}/adapter", f"output_dir={tmp_path}/merged", *([f"dtype={dtype}"] if dtype else [])]
    assert main(["export", *words]) == 0
    found = load_file(tmp_path / "merged/model.safetensors")
    expected = model.to(getattr(torch, dtype or "bfloat16")).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    settings = [(tmp_path / name / "generation_config.json").read_text() for name in ("base", "merged")]
    assert settings[0] == settings[1]


def test_weights_beyond_float16_are_refused_there(base, tmp_path, capsys):
    model = AutoModelForCausalLM.from_pretrained(base)
    model.model.norm.weight.data[3] = 1e5
    model.save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "base")
    adapted(tmp_path / "base", tmp_path / "adapter", "plain")
    assert main(["export", f"checkpoint={tmp_path}/adapter", f"output_dir={tmp_path}/out", "dtype=float16"]) == 1
    assert names(capsys.readouterr().err, "dtype", "float16", "model.norm.weight")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "things"),
    [
        (["form=adapter"], ("form", "merged", "got adapter")),
        (["push_to=o/n"], ("push_to", "adapters", "o/n")),
        (["license=mit"], ("license", "adapters", "mit")),
        ([], ("base", "base_model_name_or_path")),
    ],
)
def test_options_of_a_run_of_ones_own_are_refused_for_an_adapter_folder(words, things, base, tmp_path, capsys):
    adapted(base, tmp_path / "adapter", "plain")
    if not words:
        (tmp_path / "adapter/adapter_config.json").write_text("{}")
    assert main(["export", f"checkpoint={tmp_path}/adapter", f"output_dir={tmp_path}/merged", *words]) == 2
    assert names(capsys.readouterr().err, *things)


def test_a_base_that_is_not_there_is_named(base, tmp_path, capsys):
    adapted(base, tmp_path / "adapter", "plain")
    words = [f"checkpoint={tmp_path}/adapter", f"output_dir={tmp_path}/merged", f"base={tmp_path}/gone"]
    assert main(["export", *words]) == 1
    assert names(capsys.readouterr().err, f"{tmp_path}/gone")


def test_a_checkpoint_of_adapters_whose_config_lies_in_it_too_is_no_such_folder(base, tmp_path, capsys):
    adapted(base, tmp_path / "adapter", "plain")
    (tmp_path / "adapter/adapter_model.safetensors").unlink()
    assert main(["export", f"checkpoint={tmp_path}/adapter", f"output_dir={tmp_path}/merged"]) == 1
    assert names(capsys.readouterr().err, "checkpoint", "whole", f"{tmp_path}/adapter")
