"""Exports compute what training computed, for each kind of adapter, by training and by `verl-ext export`."""

import json
import shutil

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV3Config, GPT2Config, MixtralConfig

from tests.lib.errors import names
from tests.lib.ranks import in_turn, run_ranks
from tests.lib.remote_code import add_code
from tests.lib.tiny_model import VOCABULARY, write_tiny_model
from tests.lib.tokenized_data import random_documents, write_tokenized
from tests.lib.training import metrics, plain_losses, stopped_at, train_alone
from verl_ext.__main__ import main as judge_main
from verl_ext.checkpoint.layout import saved_folders
from verl_ext.commands.export import main

pytestmark = pytest.mark.slow

_MLA = {
    **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    "num_key_value_heads": 4,  # as many as query heads, which transformers 5.24 counts on
}
_ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16}
MODELS = {
    "qwen3": {},
    "biased": {"attention_bias": True},
    "tied": {"tie_word_embeddings": True},
    "mixtral": {"config_class": MixtralConfig, "num_local_experts": 4},
    "deepseek_v3": {"config_class": DeepseekV3Config, "first_k_dense_replace": 1, **_MLA, **_ROUTED},
    "gpt2": {"config_class": GPT2Config, "n_inner": 64, "activation_function": "gelu"},
}
LORA = ("model=lora", "model.lora_rank=4")
ALONE = "checkpoint.save_lora_only=true"
WHOLE = "model.modules_to_save=[embed_tokens,lm_head]"
# {run: (model, adapter's own config or None, overrides)}
RUNS = {
    **{name: (name, None, []) for name in MODELS if name != "biased"},
    **{f"lora of {name}": (name, None, [*LORA]) for name in ("qwen3", "tied", "mixtral", "gpt2")},
    "lora of deepseek_v3": ("deepseek_v3", None, [*LORA, "model.target_modules=[q_b_proj,o_proj]"]),
    "experts": (
        "mixtral",
        None,
        [*LORA, "model.target_modules=[q_proj]", "model.target_parameters=[experts.down_proj]"],
    ),
    "both weights of experts": (
        "mixtral",
        None,
        [*LORA, "model.target_modules=[q_proj]", "model.target_parameters=[experts.down_proj,experts.gate_up_proj]"],
    ),
    "adapters alone": ("qwen3", None, [*LORA, ALONE]),
    "dora": ("qwen3", None, [*LORA, ALONE, "model.use_dora=true", "model.use_rslora=true", "model.lora_dropout=0.2"]),
    "given dora": ("qwen3", {"use_dora": True}, [ALONE]),
    "dora of gpt2": ("gpt2", None, [*LORA, "model.use_dora=true"]),
    "one layer": ("qwen3", None, [*LORA, "model.target_modules=[q_proj]", "model.layers_to_transform=[1]"]),
    "embeddings and head": ("qwen3", None, [*LORA, ALONE, WHOLE]),
    "embeddings and head of tied": ("tied", None, [*LORA, WHOLE]),
    "embeddings of tied": ("tied", None, [*LORA, "model.modules_to_save=[embed_tokens]"]),
    "rslora": ("qwen3", {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}}, []),
    "bias of factors": ("biased", {"lora_bias": True, "target_modules": ["q_proj"]}, []),
    "bias": ("biased", {"bias": "all", "target_modules": ["q_proj"]}, [ALONE]),
    "head": ("qwen3", {"modules_to_save": ["lm_head"]}, [ALONE]),
    "head of tied": ("tied", {"modules_to_save": ["lm_head"]}, []),
    "embeddings": ("qwen3", {"modules_to_save": ["embed_tokens"]}, []),
    "tokens": ("qwen3", {"trainable_token_indices": [5, 7]}, [ALONE]),
    "tokens of tied": ("tied", {"trainable_token_indices": [5, 7]}, []),
}
FULL = [name for name in RUNS if name in MODELS]
# The source of the run "house": a base model with code of its own, whose tokenizer has no template.
GENERATION = {"temperature": 0.9, "eos_token_id": [4, 0], "repetition_penalty": 1.05}  # no do_sample: save would refuse
TEMPLATE = "{% for m in messages %}{{ m.content }} <|im_end|> {% endfor %}"
HOUSE = [*LORA, "model.trust_remote_code=true"]


def write_house(folder):
    write_tiny_model(folder)
    add_code(folder, "2 * output")
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    (folder / "chat_template.jinja").unlink()
    for name in ("tokenizer.model", "merges.txt"):
        (folder / name).write_text(name)


def write_adapter(base, folder, **config):
    given = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, **config}
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(task_type="CAUSAL_LM", **given))
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def documents():
    return random_documents(np.random.default_rng(0), [40, 30, 20, 60], VOCABULARY, 1)


@pytest.fixture(scope="module")
def runs(documents, tmp_path_factory):
    """Return the folder of all runs, of a step on two ranks, most of which training also exported."""
    folder = tmp_path_factory.mktemp("runs")
    for data in ("data", "chats"):
        write_tokenized(folder / data, documents)
    counts = {"end_of_turn": {"<|im_end|>": 4, "<|im_start|>": 2, "": 1}}
    report = {"chat_template": TEMPLATE, "end_of_chat": "<|im_end|>", "total": counts}
    (folder / "chats" / "report.json").write_text(json.dumps(report))
    for name, config in MODELS.items():
        write_tiny_model(folder / "models" / name, **config)
    router = folder / "models" / "deepseek_v3" / "model.safetensors"
    biased = load_file(router)
    biased |= {k: torch.randn_like(t) for k, t in biased.items() if k.endswith("score_correction_bias")}
    save_file(biased, router, metadata={"format": "pt"})
    write_house(folder / "models" / "house")
    torch.manual_seed(1)
    commands = []

    def add(name, model, data, *overrides):
        given = [f"data.train_dir={folder / data}", f"data.val_dir={folder / data}"]
        given += [f"model.path={folder / 'models' / model}", f'trainer.default_local_dir="{folder / name}"']
        steps = ("trainer.total_training_steps=1", "trainer.val_before_train=false")
        commands.append([*given, *overrides, *steps])

    whole = "checkpoint.save_contents=[model,optimizer,extra,hf_model]"
    for name, (model, adapter, overrides) in RUNS.items():
        if adapter is not None:
            write_adapter(folder / "models" / model, folder / "of" / name, **adapter)
            overrides = [*LORA, f'model.lora_adapter_path="{folder / "of" / name}"', *overrides]
        add(name, model, "data", *overrides, whole)
    add("shards", "qwen3", "data")  # the run "qwen3", without an export
    write_adapter(folder / "models" / "qwen3", folder / "of" / "unmergeable", lora_bias=True, target_modules=["q_proj"])
    add("unmergeable", "qwen3", "data", *LORA, f"model.lora_adapter_path={folder / 'of' / 'unmergeable'}")
    add("house", "house", "chats", *HOUSE)
    add("whole house", "house", "chats", *HOUSE, whole)
    run_ranks(in_turn, 2, [(train_alone, command) for command in commands])
    return folder


def export(checkpoint, output, *more):
    assert main([f'checkpoint="{checkpoint}"', f"output_dir={output}", *more]) == 0
    return output


@pytest.mark.parametrize("name", RUNS)
def test_it_computes_what_was_trained_merged_and_beside_its_base(name, runs, documents, tmp_path):
    model, _, overrides = RUNS[name]
    base, checkpoint = runs / "models" / model, runs / name / "global_step_1"
    trained = metrics(runs / name)[1, "val/loss"]
    assert trained != pytest.approx(plain_losses(base, documents)[0], rel=1e-3)
    merged = export(checkpoint, tmp_path / "merged", *([f"base={base}"] if ALONE in overrides else []))
    for folder in (checkpoint / "huggingface", merged):
        assert plain_losses(folder, documents)[0] == pytest.approx(trained, rel=1e-5)
    alone = [f'checkpoint="{checkpoint}"', f"output_dir={tmp_path / 'adapter'}", "form=adapter"]
    assert main(alone) == (name in FULL)
    if name not in FULL:
        whole = AutoModelForCausalLM.from_pretrained(merged).eval()
        beside = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter").eval()
        ids = torch.arange(5, 30)[None]
        torch.testing.assert_close(beside(ids).logits, whole(ids).logits, atol=1e-4, rtol=1e-4)
        config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
        asked = {key.removeprefix("model."): value for key, _, value in (entry.partition("=") for entry in overrides)}
        assert config["base_model_name_or_path"] == str(base)
        if isinstance(config["target_modules"], list):  # equal exports are equal files
            assert config["target_modules"] == sorted(config["target_modules"])
        for key, value in {"use_dora": "true", "use_rslora": "true", "lora_dropout": "0.2"}.items():
            if key in asked:
                assert json.dumps(config[key]) == value
        if "layers_to_transform" in asked:
            assert config["layers_to_transform"] == [1]
        if "modules_to_save" in asked:
            assert config["modules_to_save"] == asked["modules_to_save"].strip("[]").split(",")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", [*FULL, "lora of qwen3", "adapters alone", "dora"])
def test_in_half_precision_it_is_what_transformers_makes_of_the_whole_one(name, dtype, runs, tmp_path):
    checkpoint, ids = runs / name / "global_step_1", torch.arange(5, 30)[None]
    names_base = ALONE in RUNS[name][2] and dtype == "bfloat16"  # else it is that of adapter_config.json
    base = [f"base={runs / 'models' / RUNS[name][0]}"] if names_base else []
    half = AutoModelForCausalLM.from_pretrained(export(checkpoint, tmp_path / "out", f"dtype={dtype}", *base)).eval()
    expected = AutoModelForCausalLM.from_pretrained(checkpoint / "huggingface", dtype=getattr(torch, dtype)).eval()
    assert half.dtype == getattr(torch, dtype)
    for key, tensor in expected.state_dict().items():
        assert half.state_dict()[key].dtype == tensor.dtype, key
        assert torch.equal(half.state_dict()[key], tensor), key
    assert torch.equal(half(ids).logits, expected(ids).logits)


@pytest.mark.parametrize("by", ["a run", "hf_model", "the command", "the command, of adapters"])
def test_it_has_the_code_the_template_and_the_ends_that_were_trained_and_the_tokenizers_files(by, runs, tmp_path):
    folder = runs / ("house" if by == "a run" else "whole house") / "global_step_1" / "huggingface"
    if by.startswith("the command"):
        form = "form=adapter" if "adapters" in by else "form=merged"
        folder = export(runs / "house", tmp_path / "out", "trust_remote_code=true", form)
    assert (folder / "merges.txt").read_text() == "merges.txt"
    assert (folder / "tokenizer.model").is_file()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == TEMPLATE
    if "adapters" in by:
        assert not (folder / "config.json").exists()
        return
    assert {path.name for path in folder.glob("*.py")} == {"modeling_house.py"}
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    expected = {**GENERATION, "eos_token_id": [*GENERATION["eos_token_id"], end]}
    assert json.loads((folder / "generation_config.json").read_text()) == expected
    if by != "a run":
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        assert type(model).__name__ == "HouseForCausalLM"


def test_shards_are_of_the_size_asked_for_and_the_last_checkpoint_of_a_run_is_taken(runs, tmp_path, capsys):
    stopped_at(runs / "shards", tmp_path / "run", 1)
    shutil.copytree(tmp_path / "run" / "global_step_1", tmp_path / "run" / "global_step_0")
    out = export(tmp_path / "run", tmp_path / "out", "shard_gb=2e-5")
    files = sorted(out.glob("*.safetensors"))
    found = {key: value for file in files for key, value in load_file(file).items()}
    expected = load_file(runs / "qwen3" / "global_step_1" / "huggingface" / "model.safetensors")
    assert len(files) > 1
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    assert {path.name for path in out.iterdir() if path.is_dir()} == set()
    assert json.loads((out / "export.json").read_text())["checkpoint"] == "global_step_1"


def test_what_cannot_be_exported_is_refused_in_one_line(runs, tmp_path, capsys):
    (cut,) = saved_folders(stopped_at(runs / "shards", tmp_path / "cut", 1))
    shard = cut / "state" / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    for name in ("empty", "stock"):
        (tmp_path / name).mkdir()
    (tmp_path / "stock" / "model_world_size_1_rank_0.pt").touch()
    other = write_tiny_model(tmp_path / "other", seed=1)
    alone = f'checkpoint="{runs / "dora"}"'
    for things, options in (
        (("checkpoint", tmp_path / "empty"), [f"checkpoint={tmp_path / 'empty'}"]),
        (("checkpoint", cut), [f"checkpoint={cut}"]),
        (("checkpoint", "state/", tmp_path / "stock"), [f"checkpoint={tmp_path / 'stock'}"]),
        (("base", "adapters", other), [alone, f"base={other}"]),
        (("form=adapter", "PEFT"), [f"checkpoint={runs / 'unmergeable'}"]),
        (("form", "merged", "adapter"), [f"checkpoint={runs / 'shards'}", "form=adapter"]),
        (("trust_remote_code", "code of its own"), [f"checkpoint={runs / 'house'}"]),
    ):
        capsys.readouterr()
        assert main([*options, f"output_dir={tmp_path / 'out'}"]) == 1
        error = capsys.readouterr().err
        assert "Traceback" not in error
        assert names(error.splitlines()[-1], "error", *things), error
        assert not (tmp_path / "out").exists()
    base = runs / "models" / RUNS["dora"][0]
    base.rename(base.with_suffix(".away"))  # so that adapter_config.json names nothing that is there
    try:
        assert main([alone, f"output_dir={tmp_path / 'out'}"]) == 1
        assert names(capsys.readouterr().err, "error: base", "adapters")
    finally:
        base.with_suffix(".away").rename(base)


def test_checkpoints_with_and_without_an_export_and_a_run_are_judged_as_the_exported_folder_is(runs, tmp_path, capsys):
    exported = runs / "qwen3" / "global_step_1" / "huggingface"
    models = {"folder": exported, "checkpoint": exported.parent, "shards": runs / "shards" / "global_step_1"}
    models["run"] = runs / "shards"
    (tmp_path / "hay.txt").write_text("w1 w2 w3 w4. " * 40)
    given = ["judge", "task=needle", f"cases={tmp_path / 'hay.txt'}", f"model.path={exported}", "max_tokens=6"]
    given += ["needle.lengths=[40]", "needle.depths=[0,50]", f"output_dir={tmp_path / 'judged'}"]
    assert judge_main([*given, *(f"models.{name}={path}" for name, path in models.items())]) == 0, capsys.readouterr()
    said = []
    for name in models:
        rows = map(json.loads, (tmp_path / "judged" / name / "answers.jsonl").read_text().splitlines())
        said.append([(row["case"], row["answer"], row["outcome"]) for row in rows])
    assert all(answers == said[0] for answers in said)
    assert all(answer for _, answer, _ in said[0])
