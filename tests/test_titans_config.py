"""Refusals of runs with long-term memory, in one line each, and the reading of their options."""

import json

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoConfig

from tests.babilong_data import write_babilong
from tests.checked import checked as checked_run
from tests.checked import typed
from tests.ranks import run_ranks
from verl_ext.config import compose, compose_run
from verl_ext.config.model import titans_config
from verl_ext.config.run import RunConfig
from verl_ext.config.schema import recipe_choice
from verl_ext.models.qwen_titans import (
    QwenTitansConfig,
    QwenTitansForCausalLM,
    save_memory_checkpoint,
)

pytestmark = pytest.mark.slow

MEMORY = ("model.memory.chunk_size=32", "model.memory.sub_chunk=16", "model.memory.heads=2", "model.memory.head_dim=8")


@pytest.fixture
def checked(tmp_path, tiny_model):
    """Call check_run on a sound run, changed by overrides."""
    files = write_babilong(tmp_path / "qa1" / "1k.json", 3, 20)

    def check(*overrides):
        sound = ["data=babilong", "model=qwen_titans", *MEMORY, "data.max_length=64", "data.train_batch_size=2"]
        sound.append("data.answer_reserve_tokens=8")
        where = [f"data.train_dir={files}", f"model.path={tiny_model}", f"trainer.default_local_dir={tmp_path}"]
        return checked_run(compose([*sound, *where, "parallel=cpu", *overrides]), 1).hf_config

    return check


def test_the_config_that_is_returned_has_the_memory(checked):
    config = checked("model.memory.layers=[0]")
    assert isinstance(config, QwenTitansConfig)
    assert (config.chunk_size, list(config.memory_options.layers)) == (32, [0])


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("data.max_length=65", "must be a multiple of model.memory.chunk_size=32; got 65 (nearest above: 96)"),
        (
            "engine.ulysses_sequence_parallel_size=2",
            "engine.ulysses_sequence_parallel_size must be 1 with model=qwen_titans",
        ),
        ("parallel.context_parallel_size=2", "parallel.context_parallel_size must be 1 with model=qwen_titans"),
        ("model.lora_rank=4", "model.lora_rank must be 0 with model=qwen_titans"),
        ("model.train=memry", "model.train must be one of all, memory; got memry (nearest: memory)"),
        ("model.memory.heads=two", "model.memory.heads must be a whole number; got two"),
        ("model.memory.layers=[7]", "model.memory.layers must lie in 0..1 for a base model of 2 layers; got [7]"),
        ("attention.backend=varlen", "attention.backend must be one of auto, sdpa, flash_attn; got varlen"),
        ("data.pad_mode=no_padding", "data.pad_mode must be right"),
        ("data.strategy=best_fit", "data.strategy must be none"),
        ("model.enable_activation_offload=true", "model.activation_offload=true is what works here; got true"),
        ("trainer.answer_tokens=-1", "trainer.answer_tokens must be at least 0; got -1"),
        ("trainer.log_every_batches=0", "trainer.log_every_batches must be at least 1; got 0"),
    ],
)
def test_a_mistake_is_one_line(checked, override, told):
    with pytest.raises(ValueError, match=r"\S") as raised:
        checked(override)
    assert any(told in line for line in str(raised.value).splitlines()), raised.value


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("+model.override_config.attn_implementation=eager", "attention.backend=auto has it; got eager"),
        ("+model.override_config.attn_implementation=verl_ext_packed", "auto has it; got verl_ext_packed"),
    ],
)
def test_what_packs_may_have_and_a_memory_may_not_is_told_in_one_line(checked, override, told):
    with pytest.raises(ValueError, match=r"\S") as raised:
        checked(override)
    (line,) = str(raised.value).splitlines()
    assert line.startswith(override.removeprefix("+").split("=")[0])
    assert told in line


def test_an_attention_other_than_that_of_the_chosen_backend_is_refused(checked):
    asked = "+model.override_config.attn_implementation="
    for known in ("sdpa", "flash_attention_2"):
        checked(asked + known)
    with pytest.raises(ValueError, match=r"attn_implementation must .* attention\.backend=sdpa has it; got flash_.*2$"):
        checked(asked + "flash_attention_2", "attention.backend=sdpa")


def test_a_base_that_is_no_qwen_is_refused(checked, tmp_path):
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ValueError, match=r"model\.path must hold a qwen2 or qwen3 model for model.memory; got llama"):
        checked(f"model.path={folder}")


def test_a_memory_of_another_shape_or_no_memory_at_all_is_refused(checked, tiny_model, tmp_path):
    other = titans_config(AutoConfig.from_pretrained(tiny_model), {"heads": 1, "head_dim": 8, "chunk_size": 64})
    with torch.device("meta"):
        names = QwenTitansForCausalLM(other).memory_state_dict()
    path = tmp_path / "final_memory_checkpoint.pt"
    save_memory_checkpoint(path, {name: torch.zeros(tensor.shape) for name, tensor in names.items()}, 3)
    with pytest.raises(ValueError, match=r"model.memory_checkpoint: .*of shape \[1, .*the model \[2, "):
        checked(f"model.memory_checkpoint={path}")
    with pytest.raises(ValueError, match=r"model\.memory_checkpoint: a memory checkpoint must be a file; got"):
        checked(f"model.memory_checkpoint={path}.gone")


def test_the_settings_beside_a_memory_of_an_earlier_version_are_compared_by_todays_keys(checked, tiny_model, tmp_path):
    path = tmp_path / "final_memory_checkpoint.pt"
    config = checked()
    with torch.device("meta"):
        names = QwenTitansForCausalLM(config).memory_state_dict()
    save_memory_checkpoint(path, {name: torch.zeros(tensor.shape) for name, tensor in names.items()}, 3)
    for changes, told in (
        ({}, None),
        ({"heads": 9}, r"model\.memory\.heads must be 9"),
        ({"kind": "recurrent_tokens"}, "kind"),
    ):
        settings = {**config.memory, "kind": "titans", "tokens": 16, **changes}
        path.with_suffix(".json").write_text(json.dumps({name: settings[name] for name in ("heads", "kind", "tokens")}))
        if told is None:
            checked(f"model.memory_checkpoint={path}")
        else:
            with pytest.raises(ValueError, match=told):
                checked(f"model.memory_checkpoint={path}")


@pytest.mark.parametrize("word", ["model.memory.kind=recurrent_tokens", "+model.memory.kind=rmt"])
def test_memory_tokens_are_refused_in_one_line(word):
    with pytest.raises(ValueError, match=r"^model\.memory\.kind has no equivalent: [^\n]*; got \w+: leave it out$"):
        compose(["data=babilong", "model=qwen_titans", word])
    config, notices = compose_run(["model=qwen_titans", "model.memory.kind=titans", "model.memory.tokens=4"])
    assert not {"kind", "tokens"} & config.model.memory.keys()
    assert len(notices) == 2


def test_its_options_are_refused_on_another_model(tmp_path, tiny_model):
    config = compose([f"model.path={tiny_model}", f"data.train_dir={tmp_path}", "model.train=memory"])
    with pytest.raises(ValueError, match=r"model\.train is an option of model=qwen_titans; got memory without it"):
        checked_run(config, 1)


def test_an_exported_folder_keeps_its_memory_but_for_what_is_given(tiny_model):
    exported = titans_config(AutoConfig.from_pretrained(tiny_model), {"chunk_size": 64, "heads": 2, "depth": None})
    read = titans_config(exported, {"chunk_size": 128, "heads": None})
    assert (read.chunk_size, read.memory_options.heads) == (128, 2)


def _busy_share(overrides):
    from verl_ext.trainer.setup import prepare

    return prepare(compose(overrides)).data_report()["steps"]["busy"]


@pytest.mark.slow
def test_ranks_that_all_run_the_longest_row_wait_for_no_other(tmp_path, tiny_model):
    files = write_babilong(tmp_path / "qa1" / "1k.json", 6, 20)
    overrides = [
        *("data=babilong", "model=qwen_titans", *MEMORY, "data.max_length=64", "data.train_batch_size=2"),
        *("data.answer_reserve_tokens=8", f"data.train_dir={files}", f"model.path={tiny_model}", "data.train_ratio=1"),
        *(f"trainer.default_local_dir={tmp_path / 'run'}", "parallel=cpu"),
    ]
    assert run_ranks(_busy_share, 2, overrides) == [1.0, 1.0]


def test_batches_between_logs_become_steps():
    config = compose(["trainer.log_every_batches=80", "data.train_batch_size=64"])
    run = typed(config, 8)
    assert run.trainer.log_freq == 10  # ceil(80 / accumulation over 8)
    notices = run.notices
    assert "trainer.log_every_batches=80 is read as trainer.log_freq=10" in notices[0]
    config.trainer.log_every_batches = 81
    assert typed(config, 8).trainer.log_freq == 11


def test_a_part_of_the_training_files_is_for_validation_unless_all_are_trained_on():
    assert RunConfig.from_composed(compose(["data=babilong"])).dataset.splits_validation
    assert not RunConfig.from_composed(compose(["data=babilong", "data.train_ratio=1"])).dataset.splits_validation
    assert not RunConfig.from_composed(compose([])).dataset.splits_validation


def test_a_length_is_no_forgotten_option_where_rows_have_one():
    for chosen in ("data=babilong", "recipe=babilong_qa1_32k", "recipe=babilong_qa1_32k/debug"):
        config, notices = compose_run([chosen, "data.max_length=64"])
        assert config.data.max_tokens == 64
        assert notices == []
    config, _ = compose_run(["data.max_length=64"])
    assert (config.data.max_tokens, config.data.strategy) == (64, "none")
    assert recipe_choice("babilong_qa1_32k/debug", "model") == "qwen_titans"
    assert recipe_choice("quickstart", "data") is None


def test_evaluation_alone_needs_something_to_measure_and_no_permission_to_delete(checked):
    with pytest.raises(ValueError, match=r"trainer\.overwrite must be false with trainer.eval_only=true"):
        checked("trainer.eval_only=true", "trainer.overwrite=true")
    with pytest.raises(ValueError, match=r"data\.val_dir is required with trainer.eval_only=true; got null"):
        checked("trainer.eval_only=true", "data.train_ratio=1")
    config = compose(["trainer.eval_only=true", "data.val_dir=somewhere"])
    assert OmegaConf.select(config, "data.train_dir") == "somewhere"


def test_a_curriculum_is_not_sorted_by_cost():
    with pytest.raises(ValueError, match=r"data\.balance must be none with data\.shuffle=false"):
        RunConfig.from_composed(compose(["data.train_dir=folder", "data.shuffle=false"]))
    assert (
        RunConfig.from_composed(compose(["data=babilong", "data.train_dir=folder", "data.shuffle=false"])).data.shuffle
        is False
    )


def test_options_that_nothing_reads_are_refused(tmp_path, tiny_model, checked):
    packed = compose([f"model.path={tiny_model}", f"data.train_dir={tmp_path}", "data.truncate=right"])
    with pytest.raises(ValueError, match=r"data\.truncate is an option of data=babilong; got right without it"):
        checked_run(packed, 1)
    with pytest.raises(ValueError, match=r"model\.memory\.layers must name a layer with model\.train=memory"):
        checked("model.train=memory", "model.memory.layers=[]")
    with pytest.raises(ValueError, match=r"data\.val_dir is required with trainer\.eval_only=true; got null"):
        compose(["data=babilong", "trainer.eval_only=true"])


def test_a_memory_of_other_settings_is_refused_by_the_file_beside_it(checked, tiny_model, tmp_path):
    titans = checked()
    with torch.device("meta"):
        names = QwenTitansForCausalLM(titans).memory_state_dict()
    path = tmp_path / "final_memory_checkpoint.pt"
    save_memory_checkpoint(path, {name: torch.zeros(tensor.shape) for name, tensor in names.items()}, 3)
    checked(
        f"model.memory_checkpoint={path}", "model.memory.max_surprise=1"
    )  # the same shapes, so nothing distinguishes them
    path.with_suffix(".json").write_text(json.dumps({"max_surprise": 4.0}))
    checked(f"model.memory_checkpoint={path}")
    with pytest.raises(ValueError, match=r"model\.memory\.max_surprise must be 4\.0, as in .*; got 1"):
        checked(f"model.memory_checkpoint={path}", "model.memory.max_surprise=1")


@pytest.mark.parametrize(
    "content", [b"", b"{", b'"mal"', b"[1]", b"null", b"[]", b'""', b'[["variant", "mal"]]', b'{"variant": "\xff"}']
)
def test_settings_beside_a_memory_that_are_no_json_object_are_refused(checked, tmp_path, content):
    settings = tmp_path / "memory.json"
    settings.write_bytes(content)
    with pytest.raises(ValueError, match=r"\S") as raised:
        checked(f"model.memory_checkpoint={tmp_path / 'memory.pt'}")
    told = f"model.memory_checkpoint: the settings beside it must be a JSON object; got {settings}"
    assert str(raised.value) == told


def test_an_exported_model_with_memory_is_not_packed(tmp_path, tiny_model):
    titans_config(AutoConfig.from_pretrained(tiny_model), {"chunk_size": 64}).save_pretrained(tmp_path)
    config = compose([f"model.path={tmp_path}", f"data.train_dir={tmp_path}"])
    with pytest.raises(
        ValueError, match=r"model\.path holds a Qwen with long-term memory, which needs model=qwen_titans"
    ):
        checked_run(config, 1)
