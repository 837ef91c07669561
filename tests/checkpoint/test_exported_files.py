"""What an export has beside trained weights: ends, templates, and tensors that the model's class does not load."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Gemma4TextConfig

from tests.lib.tiny_model import write_tiny_model
from verl_ext.checkpoint.source import ExportFiles
from verl_ext.checkpoint.untrained import Untrained
from verl_ext.config.compose import compose
from verl_ext.config.resolve import worker_config
from verl_ext.data.tokenized.reports import TrainedChats
from verl_ext.options import plain

OTHER = "{% for m in messages %}{{ m.content }} <|im_end|> {% endfor %}"
MTP = {"mtp.fc.weight": torch.rand(3, 5), "mtp.norm.weight": torch.rand(5), "mtp.steps": torch.tensor([7])}


def files_of(source, folder, chats, *overrides):
    """Write the files of an export beside its weights into a folder, and return it."""
    config = compose([f"model.path={source}", "data.train_dir=unused", "parallel=cpu", *overrides])
    options: Any = worker_config(plain(config), total_steps=1).model_config
    module = AutoModelForCausalLM.from_pretrained(source)
    ExportFiles(SimpleNamespace(model_config=options, module=module, _is_lora=False), chats).write(folder)
    return folder


@pytest.mark.parametrize(
    ("eos", "end", "written"),
    [
        (5, "<|im_end|>", [5, 2]),
        ([5, 6], "<|im_end|>", [5, 6, 2]),
        (None, "<|pad|>", [2, 0]),  # the tokenizer's own end stays
        (2, "<|im_end|>", None),
        (5, "w2", None),  # a word, which would stop plain text
    ],
)
def test_an_end_that_was_trained_is_added_to_those_of_the_config_if_it_is_a_special_token(eos, end, written, tmp_path):
    source = write_tiny_model(tmp_path / "model")
    (source / "generation_config.json").unlink()
    config = AutoConfig.from_pretrained(source)
    config.eos_token_id = eos
    config.save_pretrained(source)
    path = files_of(source, tmp_path / "out", TrainedChats(ends=(end,))) / "generation_config.json"
    assert (json.loads(path.read_text())["eos_token_id"] if path.exists() else None) == written


@pytest.mark.parametrize("tokens", ["[]", "[new]"])
def test_a_template_of_the_data_takes_the_place_of_all_of_the_sources(tokens, tmp_path):
    source = write_tiny_model(tmp_path / "model")
    (source / "chat_template.jinja").unlink()
    described = json.loads((source / "tokenizer_config.json").read_text())
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    (source / "tokenizer_config.json").write_text(json.dumps({**described, "chat_template": named}))
    (source / "chat_template.json").write_text(json.dumps({"chat_template": "a"}))
    chosen = f"model.new_tokens={tokens}"
    before = AutoTokenizer.from_pretrained(files_of(source, tmp_path / "same", TrainedChats(("b",)), chosen))
    assert before.chat_template == {"default": "a", "tool_use": "b"}
    out = files_of(source, tmp_path / "out", TrainedChats((OTHER,)), chosen)
    after = AutoTokenizer.from_pretrained(out)
    assert after.chat_template == OTHER
    assert "chat_template" not in json.loads((out / "tokenizer_config.json").read_text())
    assert [path.name for path in out.glob("*template*")] == ["chat_template.jinja"]
    assert (before.pad_token, len(before)) == (after.pad_token, len(after))


def test_a_tokenizer_without_padding_stays_so_also_with_new_tokens(tmp_path):
    source = write_tiny_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(source)
    for tokens in ("[]", "[new]"):
        out = files_of(source, tmp_path / tokens, TrainedChats(), f"model.new_tokens={tokens}")
        written = AutoTokenizer.from_pretrained(out)
        assert (written.pad_token, len(written)) == (None, len(tokenizer) + len(tokens[1:-1].split()))


def test_an_export_names_no_code_that_was_not_trained(tmp_path):
    source = write_tiny_model(tmp_path / "model")
    config = json.loads((source / "config.json").read_text())
    named = {**config, "auto_map": {"AutoModelForCausalLM": "modeling_own.Model"}}
    (source / "config.json").write_text(json.dumps(named))
    out = files_of(source, tmp_path / "out", TrainedChats())
    assert json.loads((out / "config.json").read_text()) == config


def write_export(folder, size=4):
    """Write shards of two tensors, as an export has them."""
    model = AutoModelForCausalLM.from_pretrained(write_tiny_model(folder))
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size=size)
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def indexed(folder):
    """Return the tensors of a folder by its index, whose files must be all that are there."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {name: load_file(folder / name) for name in set(index["weight_map"].values())}
    assert files.keys() == {path.name for path in folder.glob("*.safetensors")}
    assert len({path.stat().st_mode for path in folder.glob("model*")}) == 1
    assert index["metadata"]["total_size"] == sum(x.nbytes for file in files.values() for x in file.values())
    return {name: files[file][name] for name, file in index["weight_map"].items()}


def test_tensors_are_untrained_that_a_class_ignores_and_lacks_but_for_those_that_the_user_leaves_out(tmp_path):
    source = write_tiny_model(tmp_path)
    file = source / "model.safetensors"
    more = ["model.layers.11.eh_proj.weight", "model.layers.12.eh_proj.weight", "mtp.w", "v_head.weight"]
    save_file(load_file(file) | {name: torch.rand(2) for name in more}, file, metadata={"format": "pt"})
    module = AutoModelForCausalLM.from_pretrained(source)
    module._keys_to_ignore_on_load_unexpected = {r"model\.layers\.1.*", "^mtp.*"}  # layer 1 is trained
    with torch.device("meta"):
        plain_model = type(module)(module.config)
    found = Untrained.of_source(str(source), module, lambda: plain_model, ["*.12.*"])
    assert (found.owner, found.path, found.names) == ("Qwen3ForCausalLM", str(source), [more[0], "mtp.w"])


def test_what_layers_of_gemma_4_share_is_untrained_where_the_source_has_it(tmp_path):
    kinds = ["sliding_attention", "full_attention"] * 2
    sizes = {"hidden_size_per_layer_input": 0, "layer_types": kinds, "num_kv_shared_layers": 2, "num_hidden_layers": 4}
    source = write_tiny_model(tmp_path, config_class=Gemma4TextConfig, **sizes)
    module, file = AutoModelForCausalLM.from_pretrained(source), source / "model.safetensors"
    assert Untrained.of_source(str(source), module, lambda: module, []) is None
    shared = [f"model.layers.{layer}.self_attn.{name}.weight" for layer in (2, 3) for name in ("k_norm", "k_proj")]
    save_file(load_file(file) | {name: torch.rand(2) for name in shared}, file, metadata={"format": "pt"})
    assert Untrained.of_source(str(source), module, lambda: module, []).names == shared


@pytest.mark.parametrize("kind", ["bin", "safetensors", "shards"])
@pytest.mark.parametrize("size", ["5GB", "20KB"])
def test_untrained_tensors_get_shards_of_their_own(kind, size, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    if kind == "bin":
        torch.save(MTP, source / "pytorch_model.bin")
    elif kind == "safetensors":
        save_file(MTP, source / "model.safetensors")
    else:
        for name, tensor in MTP.items():
            save_file({name: tensor}, source / f"{name}.safetensors")
        places = {"metadata": {}, "weight_map": {name: f"{name}.safetensors" for name in MTP}}
        (source / "model.safetensors.index.json").write_text(json.dumps(places))
    weights = write_export(out, size)
    Untrained("Class", str(source), [*MTP]).copy(out, shard_bytes=70)
    found = indexed(out)
    assert found.keys() == weights.keys() | MTP.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in (weights | MTP).items())
    assert not any(AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)[1]["missing_keys"])


def test_quantized_untrained_tensors_become_plain_and_others_of_the_type_that_is_asked_for(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    whole, scales = torch.randn(200, 300), torch.rand(2, 3) + 0.5
    each = scales.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    quantized = {"mtp.w": (whole / each).to(torch.float8_e4m3fn), "mtp.w_scale_inv": scales}
    save_file(MTP | quantized, source / "model.safetensors")
    write_export(out, "5GB")
    Untrained("Class", str(source), [*MTP, *quantized]).copy(out, dtype=torch.float16)
    found = {name: tensor for name, tensor in indexed(out).items() if "mtp" in name}
    assert torch.equal(found.pop("mtp.w"), (quantized["mtp.w"].float() * each).half())
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        name: torch.float16 if tensor.is_floating_point() else tensor.dtype for name, tensor in MTP.items()
    }


def test_untrained_tensors_that_are_gone_are_named(tmp_path, capsys):
    weights = write_export(tmp_path / "out", "5GB")
    untrained = Untrained("Class", str(tmp_path / "source"), [*MTP])
    untrained.write(tmp_path)
    Untrained.from_checkpoint(tmp_path).copy(tmp_path / "out")
    assert "Class does not load mtp.fc.weight and 2 more" in capsys.readouterr().err
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == weights.keys()
