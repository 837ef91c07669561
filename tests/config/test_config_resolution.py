"""The machine settles the values that a config leaves open, and a notice says so."""

from pathlib import Path

import pytest
import torch

from tests.lib.checked import changed
from tests.lib.errors import refused
from verl_ext.checkpoint.resume import OutputAction, check_output
from verl_ext.config.compose import compose, compose_run
from verl_ext.config.resolve import BF16, FP32, with_device
from verl_ext.config.run import Machine, RunConfig


def decided(config, accelerator=None) -> RunConfig:
    return with_device(RunConfig.from_composed(config, Machine(1, accelerator)))


@pytest.fixture(scope="module")
def default():
    return compose([])


@pytest.mark.parametrize(
    ("asked", "accelerator", "device", "precision"),
    [
        *(("auto", None, "cpu", FP32), ("auto", "cuda", "cuda", BF16)),
        *(("cpu", None, "cpu", FP32), ("cuda", "cuda", "cuda", BF16)),
        ("cuda", None, "cuda", BF16),  # refused by check_run
    ],
)
def test_device_and_precision_follow_the_accelerator(default, asked, accelerator, device, precision):
    config = decided(changed(default, [f"trainer.device={asked}"]), accelerator)
    assert (config.trainer.device, config.values["trainer"]["device"]) == (device, device)
    assert config.engine.mixed_precision == config.values["engine"]["mixed_precision"] == precision


@pytest.mark.parametrize(
    ("listed", "visible", "build", "why"),
    [
        ("GPU 0: NVIDIA H200 (UUID: GPU-1)", None, None, "a build without CUDA"),
        ("GPU 0: NVIDIA H200 (UUID: GPU-1)", "", "13.0", "driver on your system is too old (CUDA_VISIBLE_DEVICES=)"),
        ("No devices found.", None, "13.0", None),
    ],
)
def test_a_gpu_that_torch_cannot_start_is_refused(default, tmp_path, monkeypatch, listed, visible, build, why):
    def init():
        raise RuntimeError("The NVIDIA driver on your system is too old\nmore lines")

    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{listed}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.cuda, "init", init)
    if why is None:
        assert decided(default).notices == ()
    else:
        with refused("trainer.device=auto", "trainer.device=cpu", "parallel=cpu", why):
            decided(default)
    assert decided(changed(default, ["trainer.device=cpu"])).trainer.device == "cpu"
    assert decided(default, "cuda").notices == ()


def test_an_npu_and_an_unknown_device_are_refused(default):
    with refused("trainer.device", "NPUs", "cuda", "cpu"):
        decided(default, "npu")
    with refused("trainer.device", "auto, cpu, cuda", "gpu"):
        decided(changed(default, ["trainer.device=gpu"]))


@pytest.mark.parametrize("given", ["abc", "3", "null"])
def test_overrides_of_a_models_config_are_a_mapping(given):
    with refused("model.override_config", given):
        compose([f"model.override_config={given}"])


def test_paths_are_texts_the_home_directory_is_written_out_and_an_empty_path_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = compose(["trainer.default_local_dir=20260301", "model.path=7", "data.train_dir=~/data", "data.val_dir="])
    assert (config.trainer.default_local_dir, config.model.path, config.data.val_dir) == ("20260301", "7", None)
    assert config.data.train_dir == str(Path.home() / "data")
    assert check_output(RunConfig.from_composed(config)).action is OutputAction.FRESH


def test_a_precision_that_is_given_is_kept_and_what_it_leaves_out_is_that_of_the_device(default):
    config = changed(default, ["engine.mixed_precision.param_dtype=fp16"])
    assert decided(config, "cuda").engine.mixed_precision == {**BF16, "param_dtype": "fp16"}
    config = changed(default, ["engine.mixed_precision.reduce_dtype=fp32", "engine.mixed_precision.param_dtype=null"])
    assert decided(config).engine.mixed_precision == FP32


def test_liger_is_switched_off_without_a_gpu_and_said(default):
    composed = changed(default, ["model.use_liger=True"])
    config = decided(composed)
    assert (config.model_options.use_liger, config.values["model"]["use_liger"]) == (False, False)
    (notice,) = config.notices
    assert notice == "model.use_liger=true is off here: liger's kernels need a GPU, and trainer.device is cpu"
    config = decided(composed, "cuda")
    assert (config.model_options.use_liger, config.notices) == (True, ())


def test_flash_attention_2_becomes_the_packed_backend():
    config, notices = compose_run(["model.override_config.attn_implementation=flash_attention_2"])
    assert config.attention.backend == "flash_attn"
    assert config.model.override_config.attn_implementation == "verl_ext_packed"
    assert len(notices) == 1
    assert "attention.backend=flash_attn" in notices[0]


@pytest.mark.parametrize(
    ("name", "backend", "things"),
    [
        *((name, "auto", ("attention.backend=auto", "flash_attn", "varlen")) for name in ("sdpa", "verl_ext_pakced")),
        ("flash_attention_2", "sdpa", ("attention.backend=sdpa",)),
    ],
)
def test_attention_that_would_mix_documents_or_is_another_one_is_refused(name, backend, things):
    with refused(*things, name):
        compose([f"model.override_config.attn_implementation={name}", f"attention.backend={backend}"])


def test_padded_rows_are_packs_of_one_document_padded_to_max_length():
    data = compose(["data=pretrain", "data.rows=padded", "data.max_length=48"]).data
    assert (data.max_tokens, data.strategy, data.pad_mode) == (48, "none", "right")
