"""Refusals of runs with long-term memory, in one line each, and the reading of their options."""

import json

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoConfig

from tests.lib.babilong_data import write_babilong
from tests.lib.checked import checked as checked_run
from tests.lib.checked import typed
from tests.lib.errors import refused
from tests.lib.ranks import run_ranks
from tests.lib.training import into, settle
from verl_ext.config.compose import compose, compose_run
from verl_ext.config.run import RunConfig
from verl_ext.titans import QwenTitansConfig, QwenTitansForCausalLM, save_memory_checkpoint
from verl_ext.titans.kind import titans_config

pytestmark = pytest.mark.slow

SOUND = (
    *("data=babilong", "model=qwen_titans", "data.max_length=64", "data.train_batch_size=2", "parallel=cpu"),
    *("data.max_tokens=${data.max_length}", "data.answer_reserve_tokens=8", "model.memory.chunk_size=32"),
    *("model.memory.sub_chunk=16", "model.memory.heads=2", "model.memory.head_dim=8", "optim.lr=1e-3"),
)


@pytest.fixture
def checked(tmp_path, tiny_model):
    """Call check_run on a sound run, changed by overrides."""
    files = write_babilong(tmp_path / "qa1" / "1k.json", 3, 20)

    def check(*overrides):
        where = [f"data.train_dir={files}", f"model.path={tiny_model}", into(tmp_path)]
        return checked_run(compose([*SOUND, *where, *overrides]), 1).hf_config

    return check


def test_the_config_that_is_returned_has_the_memory(checked):
    config = checked("model.memory.layers=[0]")
    assert isinstance(config, QwenTitansConfig)
    assert (config.chunk_size, list(config.memory_options.layers)) == (32, [0])


@pytest.mark.parametrize(
    ("override", "things"),
    [
        ("data.max_length=65", ("data.max_length", "model.memory.chunk_size=32", 65, "nearest above: 96")),
        ("engine.ulysses_sequence_parallel_size=2", ("engine.ulysses_sequence_parallel_size", "model=qwen_titans", 2)),
        ("parallel.context_parallel_size=2", ("parallel.context_parallel_size", "model=qwen_titans", 2)),
        ("model.lora_rank=4", ("model.lora_rank", "model=qwen_titans", 4)),
        ("model.memory.layers=[7]", ("model.memory.layers", "0..1", "2 layers", "[7]")),
        ("model.memory.layers=[] model.train=memory", ("model.memory.layers", "model.train=memory", "[]")),
        ("attention.backend=varlen", ("attention.backend", "auto, sdpa, flash_attn", "varlen")),
        ("data.pad_mode=no_padding", ("data.pad_mode", "right", "no_padding")),
        ("data.strategy=best_fit", ("data.strategy", "none", "best_fit")),
        ("model.enable_activation_offload=true", ("model.activation_offload=true", "got true")),
        ("trainer.eval_only=true trainer.overwrite=true", ("trainer.overwrite", "trainer.eval_only=true", "got true")),
        ("trainer.eval_only=true data.train_ratio=1", ("data.val_dir", "trainer.eval_only=true", None)),
    ],
)
def test_a_mistake_is_one_line(checked, override, things):
    with refused(*things, alone=False):
        checked(*override.split())


def test_an_attention_other_than_that_of_the_chosen_backend_is_refused(checked):
    asked = "model.override_config.attn_implementation="
    for known in ("sdpa", "flash_attention_2"):
        checked(f"+{asked}{known}")
    for name, backend in (("eager", "auto"), ("verl_ext_packed", "auto"), ("flash_attention_2", "sdpa")):  # packs may
        with refused(asked[:-1], f"attention.backend={backend}", name):
            checked(f"+{asked}{name}", f"attention.backend={backend}")


@pytest.fixture
def write_memory(tmp_path):
    """Return a function that writes a memory of a config's shapes, and returns its path."""

    def write(config):
        with torch.device("meta"):
            names = QwenTitansForCausalLM(config).memory_state_dict()
        path = tmp_path / "final_memory_checkpoint.pt"
        save_memory_checkpoint(path, {name: torch.zeros(tensor.shape) for name, tensor in names.items()}, 3)
        return path

    return write


def test_a_memory_of_another_shape_or_no_memory_at_all_is_refused(checked, tiny_model, write_memory):
    other = titans_config(AutoConfig.from_pretrained(tiny_model), {"heads": 1, "head_dim": 8, "chunk_size": 64})
    path = write_memory(other)
    with refused("model.memory_checkpoint", path, "[1, 8, 8]", "[2, 8, 8]"):
        checked(f"model.memory_checkpoint={path}")
    with refused("model.memory_checkpoint", f"{path}.gone"):
        checked(f"model.memory_checkpoint={path}.gone")


def test_the_settings_beside_a_memory_also_of_an_earlier_version_are_compared_by_todays_keys(checked, write_memory):
    config = checked()
    path, asked = write_memory(config), "model.memory.max_surprise=1"
    checked(f"model.memory_checkpoint={path}", asked)  # the same shapes, so nothing distinguishes them
    old = {"heads": config.memory["heads"], "kind": "titans", "tokens": 16}
    path.with_suffix(".json").write_text(json.dumps(old))
    checked(f"model.memory_checkpoint={path}")
    for settings, things in (
        ({**old, "heads": 9}, ("model.memory.heads", 9)),
        ({**old, "kind": "recurrent_tokens"}, ("model.memory.kind", "recurrent_tokens")),
        ({"max_surprise": 4.0}, ("model.memory.max_surprise", 4.0, 1)),
    ):
        path.with_suffix(".json").write_text(json.dumps(settings))
        words = [f"model.memory_checkpoint={path}", *([asked] if "max_surprise" in settings else [])]
        with refused(*things):
            checked(*words)


@pytest.mark.parametrize("word", ["model.memory.kind=recurrent_tokens", "+model.memory.kind=rmt"])
def test_memory_tokens_are_refused_in_one_line(word):
    with refused("model.memory.kind", word.partition("=")[2], "leave it out"):
        compose(["data=babilong", "model=qwen_titans", word])
    config, notices = compose_run(["model=qwen_titans", "model.memory.kind=titans", "model.memory.tokens=4"])
    assert not {"kind", "tokens"} & config.model.memory.keys()
    assert len(notices) == 2


def test_an_exported_folder_keeps_its_memory_but_for_what_is_given(tiny_model):
    exported = titans_config(AutoConfig.from_pretrained(tiny_model), {"chunk_size": 64, "heads": 2, "depth": None})
    read = titans_config(exported, {"chunk_size": 128, "heads": None})
    assert (read.chunk_size, read.memory_options.heads) == (128, 2)


def _busy_share(overrides):
    return settle(overrides).data_report()["steps"]["busy"]


def test_ranks_that_all_run_the_longest_row_wait_for_no_other(tmp_path, tiny_model):
    files = write_babilong(tmp_path / "qa1" / "1k.json", 6, 20)
    where = [f"data.train_dir={files}", f"model.path={tiny_model}", into(tmp_path / "run"), "data.train_ratio=1"]
    assert run_ranks(_busy_share, 2, [*SOUND, *where]) == [1.0, 1.0]


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


def test_evaluation_alone_needs_something_to_measure():
    config = compose(["trainer.eval_only=true", "data.val_dir=somewhere"])
    assert OmegaConf.select(config, "data.train_dir") == "somewhere"
    with refused("data.val_dir", "trainer.eval_only=true", None):
        compose(["data=babilong", "trainer.eval_only=true"])


def test_a_curriculum_is_not_sorted_by_cost():
    with refused("data.balance", "data.shuffle=false", "none"):
        RunConfig.from_composed(compose(["data.train_dir=folder", "data.shuffle=false"]))
    assert (
        RunConfig.from_composed(compose(["data=babilong", "data.train_dir=folder", "data.shuffle=false"])).data.shuffle
        is False
    )


def test_options_and_models_with_memory_are_refused_without_it(tmp_path, tiny_model):
    titans_config(AutoConfig.from_pretrained(tiny_model), {"chunk_size": 64}).save_pretrained(tmp_path)
    for path, word, things in (
        (tiny_model, "model.train=memory", ("model.train", "model=qwen_titans", "memory")),
        (tiny_model, "data.truncate=right", ("data.truncate", "data=babilong", "right")),
        (tmp_path, "data.seed=1", ("model.path", "model=qwen_titans")),
    ):
        with refused(*things, alone=False):
            checked_run(compose([f"model.path={path}", f"data.train_dir={tmp_path}", word]), 1)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"null", b'[["variant", "mal"]]', b'{"variant": "\xff"}'])
def test_settings_beside_a_memory_that_are_no_json_object_are_refused(checked, tmp_path, content):
    settings = tmp_path / "memory.json"
    settings.write_bytes(content)
    with refused("model.memory_checkpoint", settings, "JSON"):
        checked(f"model.memory_checkpoint={tmp_path / 'memory.pt'}")
