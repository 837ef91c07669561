"""`verl-ext init-model`: the folder, its weights and ids, mistakes, and an interrupted run."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.lib.errors import names, refused
from tests.lib.tiny_model import SMALL_CONFIG, write_tiny_model
from verl_ext.__main__ import main
from verl_ext.commands.command_line import read_options
from verl_ext.files import OutputFolder
from verl_ext.options import UsageError
from verl_ext.tools.init_model.command import InitModelOptions, init_model

pytestmark = pytest.mark.slow

TEXT = "The cat sat on the mat. The dog sat on the cat.\n" * 20


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def made(text, tmp_path_factory) -> Path:
    """Run the command: return the folder of a 2-layer Qwen3 with a tokenizer trained on `text`."""
    folder = tmp_path_factory.mktemp("made") / "model"
    make(folder, f"tokenizer.train_on={text}")
    return folder


def make(folder: Path, *options: str) -> str:
    return init_model(read_options(InitModelOptions, ["model=tiny", f"output_dir={folder}", SMALL_CONFIG, *options]))


def assert_refused(folder: Path, options: list[str], *things: object) -> None:
    """Assert that the command names some things and leaves no folder."""
    with refused(*things):
        init_model(read_options(InitModelOptions, [f"output_dir={folder}", *options]))
    assert not folder.exists()


def test_plain_transformers_loads_the_folder_and_predicts_about_uniformly_by_the_tokenizers_ids(made):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(made), AutoTokenizer.from_pretrained(made)
    text = tokenizer(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        loss = model(text, labels=text).loss
    assert abs(loss.item() - math.log(len(tokenizer))) < 1
    assert tokenizer.decode(text[0]) == TEXT
    assert model.config.vocab_size == len(tokenizer)
    assert model.model.layers[0].mlp.up_proj.weight.std().item() == pytest.approx(0.1, rel=0.05)  # initializer_range
    ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    assert ids == {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    assert ids == {name: getattr(model.config, name) for name in ids}
    assert ids == {name: getattr(model.generation_config, name) for name in ids}


def test_the_same_seed_and_text_write_the_same_bytes_and_another_seed_other_weights(made, text, tmp_path):
    make(tmp_path / "again", f"tokenizer.train_on={text}")
    make(tmp_path / "other", f"tokenizer.train_on={text}", "seed=1")
    for file in made.iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()
    other = (tmp_path / "other" / "model.safetensors").read_bytes()
    assert other != (made / "model.safetensors").read_bytes()


def test_a_copied_tokenizer_gives_the_same_files_and_parameters_are_told_exactly(made, tmp_path):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    told = make(tmp_path / "copy", f"tokenizer.path={made}")
    assert torch.rand(1) == expected
    for name in ("tokenizer.json", "chat_template.jinja", "model.safetensors", "config.json"):
        assert (tmp_path / "copy" / name).read_bytes() == (made / name).read_bytes()
    model = AutoModelForCausalLM.from_pretrained(made)
    total, embedding = model.num_parameters(), model.get_input_embeddings().weight.numel()
    assert f"{total:,} parameters, {total - embedding:,} without embeddings" in told
    record = json.loads((made / "init_model.json").read_text())
    assert (record["parameters"], record["parameters_without_embeddings"]) == (total, total - embedding)


def test_bfloat16_weights_are_the_float32_ones_rounded(made, tmp_path):
    make(tmp_path / "half", f"tokenizer.path={made}", "dtype=bfloat16")
    half, full = (AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "half", made))
    assert half.dtype == torch.bfloat16
    for mine, theirs in zip(half.parameters(), full.parameters(), strict=True):
        assert torch.equal(mine, theirs.to(torch.bfloat16))


def test_a_larger_vocabulary_stays_and_null_makes_it_the_tokenizers(tmp_path):
    model = write_tiny_model(tmp_path / "given", vocab_size=150)
    options = [f"model={model}", f"output_dir={tmp_path / 'out'}", f"tokenizer.path={model}", "overwrite=true"]
    told = init_model(read_options(InitModelOptions, options))
    assert "note: 150 rows of the vocabulary, of which the tokenizer uses 128" in told
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 150
    told = init_model(read_options(InitModelOptions, [*options, "config.vocab_size=null"]))
    assert "rows of the vocabulary" not in told
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 128


@pytest.mark.parametrize(
    ("options", "things"),
    [
        (["model="], ("model", "config.json", "")),
        (["model=tini"], ("model", "tini", "nearest: tiny")),
        (["model=tiny", "config.hiden_size=8"], ("config.hiden_size", "qwen3", "nearest: config.hidden_size")),
        (["model=tiny", "config.initializer_range=nan"], ("config.initializer_range", 0, "nan")),
        (["model=tiny", "config.hidden_size=194"], ("config.hidden_size=194", "head_dim", 48.5)),
        (["model=gpt2_124m", "config.hidden_size=100"], ("config.hidden_size=100", "`embed_dim`", "num_heads")),
        (["model=tiny", "config.num_key_value_heads=3"], ("config.num_key_value_heads (3)", 4)),
        (["model=tiny", "config.head_dim=5"], ("config.head_dim", "even", 5)),
        (["model=tiny", "config.num_hidden_layers=0"], ("config.num_hidden_layers", 1, 0)),
        (["model=tiny", "config.hidden_act=sulu"], ("qwen3", "config.hidden_act=sulu", "KeyError")),
        (["model=tiny", "config.rope_parameters=3"], ("qwen3", "config.rope_parameters=3")),
        (["model=tiny", "config.eos_token_id=1"], ("config", "eos_token_id")),
        (["model=tiny", "config.vocab_size=100"], ("config.vocab_size", "tokenizer's 128", 100)),
        (
            ["model=tiny", "config={num_hidden_layers: 4, hidden_size: 65536, intermediate_size: 4194304}"],
            ("config", "memory"),
        ),
    ],
)
def test_a_mistake_in_the_model_is_one_line(tiny_model, tmp_path, options, things):
    assert_refused(tmp_path / "out", [f"tokenizer.path={tiny_model}", *options], *things)


def test_mistakes_in_a_config_file_are_one_line(tiny_model, tmp_path):
    tokenizer = f"tokenizer.path={tiny_model}"
    for name, content, thing in (
        ("vision.json", '{"model_type": "vit"}', "model_type vit"),
        ("none.json", "{}", "model_type"),
        ("broken.json", "{", "broken.json"),
    ):
        (tmp_path / name).write_text(content)
        assert_refused(tmp_path / "out", [f"model={tmp_path / name}", tokenizer], "model", thing)
    assert_refused(tmp_path / "out", [f"model={tmp_path}", tokenizer], "model", "config.json", tmp_path)


def test_exactly_one_source_of_the_tokenizer_is_given(made, text, tmp_path):
    both = (f"tokenizer.path={made}", f"tokenizer.train_on={text}")
    folder, empty = tmp_path / "out", tmp_path / "empty"
    for options in (), both:
        assert_refused(folder, ["model=tiny", *options], "tokenizer.path", "tokenizer.train_on", "one")
    given = ["model=tiny", both[0], "tokenizer.vocab_size=300"]
    assert_refused(folder, given, "tokenizer.vocab_size", "tokenizer.path", 300)
    empty.mkdir()
    assert_refused(folder, ["model=tiny", f"tokenizer.path={empty}"], "tokenizer.path", empty)


def test_a_run_that_is_interrupted_leaves_the_folder_as_it_was(made, tmp_path, monkeypatch):
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    output = tmp_path / "model"
    make(output, f"tokenizer.path={made}")
    before = {file.name: file.read_bytes() for file in output.iterdir()}
    monkeypatch.setattr(OutputFolder, "publish", interrupted)
    for options in (f"output_dir={tmp_path / 'new'}",), (f"output_dir={output}", "overwrite=true", "seed=5"):
        with pytest.raises(KeyboardInterrupt):
            init_model(read_options(InitModelOptions, ["model=tiny", SMALL_CONFIG, f"tokenizer.path={made}", *options]))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert {file.name: file.read_bytes() for file in output.iterdir()} == before


def test_folders_of_others_are_not_replaced(made, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    options = ["model=tiny", f"tokenizer.path={made}", f"output_dir={tmp_path}"]
    for more in [], ["overwrite=true"]:
        with refused("output_dir", tmp_path, error=UsageError):
            read_options(InitModelOptions, [*options, *more])
    with refused("output_dir", made, error=UsageError):
        read_options(InitModelOptions, ["model=tiny", f"tokenizer.path={made}", f"output_dir={made}", "overwrite=true"])


def test_text_that_cannot_be_used_ends_the_command_with_code_1_and_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "bad.txt").write_bytes(b"abc\n\xff")
    monkeypatch.chdir(tmp_path)
    assert main(["init-model", "model=tiny", "output_dir=out", "tokenizer.train_on=bad.txt"]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert names(told.err.splitlines()[-1], "error: bad.txt", "byte 5")
    assert "Traceback" not in told.err
    assert [path.name for path in tmp_path.iterdir()] == ["bad.txt"]
