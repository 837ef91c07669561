"""Null, a wrong type and an old name's value are each refused in a line by every option that does not take them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf, open_dict
from safetensors.torch import save_file
from transformers import Qwen3Config

from tests.checked import checked
from verl_ext.config import compose, schema
from verl_ext.config.run import NODES, RunConfig
from verl_ext.config.weights import ModelOptions
from verl_ext.data.dataset import DataOptions
from verl_ext.data.sft import SFTOptions
from verl_ext.engines.schedule import ScheduleOptions
from verl_ext.legacy import DEPRECATED, RENAMED, RENAMED_NODES
from verl_ext.values import Option, Options, options_of, plain

OURS: tuple[type[Options], ...] = (*NODES, DataOptions, SFTOptions, ScheduleOptions, ModelOptions)
# A value that no option of the type takes, beside null.
WRONG: dict[Any, Any] = {int: "many", float: [1], bool: "maybe", str: [1], list: {"a": 1}, dict: "abc"}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    (folder / "data").mkdir()
    heads = {"num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 96}
    Qwen3Config(max_position_embeddings=512, num_hidden_layers=1, **heads).save_pretrained(folder / "model")
    save_file({"w": torch.zeros(1)}, folder / "model" / "model.safetensors")
    paths = {"data.train_dir": "data", "model.path": "model", "trainer.default_local_dir": "out"}
    return compose([*(f"{key}={folder / name}" for key, name in paths.items()), "parallel=cpu"])


def with_values(config, values: Mapping[str, Any]):
    config = config.copy()
    with open_dict(config):
        for key, value in values.items():
            OmegaConf.update(config, key, value, merge=False, force_add=True)
    return config


def lines(config) -> list[str]:
    with pytest.raises(ValueError, match=r"\S") as raised:
        RunConfig.from_composed(config)
    return str(raised.value).splitlines()


def refused_value(option: Option, kind: str) -> Any:
    """Return a value of a kind that the option must refuse; ... if there is none."""
    if kind == "null":
        return ... if option.nullable or option.default is None else None
    if kind == "wrong type":
        return WRONG.get(getattr(option.type, "__origin__", option.type), ...)
    if kind == "too large":
        return ... if option.most is None else option.most * 2
    if option.choices:
        return "nonsense"
    if option.least is not None:
        return option.least - 1
    return option.above if option.above is not None else ...


@pytest.mark.parametrize("options", OURS, ids=lambda options: options.__name__)
@pytest.mark.parametrize("kind", ["null", "wrong type", "out of bounds", "too large"])
def test_every_option_that_does_not_take_a_value_refuses_it_in_a_line(good, options, kind):
    """All options of a node have such a value at once, and each has one line, with its key and the value."""
    fields = options_of(options).items()
    values = {f"{options.prefix}.{name}": refused_value(option, kind) for name, option in fields}
    values = {key: value for key, value in values.items() if value is not ...}
    found = lines(with_values(good, values)) if values else []
    for key, value in values.items():
        (line,) = [line for line in found if line.startswith((f"{key} must be ", f"{key} is required"))]
        got = line.partition("; got ")[2].partition(" (nearest")[0]
        assert got in ("null" if value is None else str(value), f"{value}.0")


OLD = {
    **RENAMED,
    **DEPRECATED,
    **{
        f"{old}.{name}": f"{new}.{name}"
        for (old, new), name in zip(RENAMED_NODES.items(), ("model_dtype", "save_contents"), strict=True)
    },
}


@pytest.mark.parametrize("old", OLD)
@pytest.mark.parametrize("value", ["null", "-7", "0", "[1]", "nonsense"])
def test_an_old_name_is_what_todays_name_is(old, value):
    """The same typed options, or the same lines: bounds, choices, resume rules and schedule see today's name alone."""

    def outcome(word: str) -> Any:
        try:
            run = RunConfig.from_composed(compose([word]))
        except ValueError as error:
            return str(error)
        return dataclasses.replace(run, notices=())

    if value == "null" and outcome(f"{old}=null") == outcome("data.seed=42"):
        return  # null of the old name asks for nothing
    assert outcome(f"{old}={value}") == outcome(f"{OLD[old]}={value}")


def test_an_old_name_leaves_nothing_behind_for_verl_to_apply():
    config = compose(["optim.warmup_style=cosine", "optim.grad_clip=0.5", "optim.lr_warmup_steps=null"])
    optim = plain(config.optim)
    assert (optim["lr_scheduler_type"], optim["clip_grad"], optim["lr_warmup_steps"]) == ("cosine", 0.5, -1)
    assert (optim.get("warmup_style"), optim.get("grad_clip")) == (None, None)


def test_an_old_name_in_a_file_is_read_or_refused(good):
    assert (
        compose(["optim.lr_scheduler_type=linear", "optim.warmup_style=constant"]).optim.lr_scheduler_type == "linear"
    )
    for values, line in (
        ({"data.max_length": 7}, "data.max_length must be given on the command line"),
        ({"data.train_files": "x"}, "data.train_files must be given on the command line"),
        ({"model.partial_pretrain": "x"}, "unknown key model.partial_pretrain; nearest: model.path"),
    ):
        with pytest.raises(ValueError, match=line):
            schema.check_keys(with_values(good, values))


@pytest.mark.slow
@pytest.mark.parametrize("value", [None, {"a": 1}, "abc", -7.5, ""], ids=str)
def test_no_value_of_any_option_is_a_traceback_before_weights_are_read(good, value):
    known = schema.known_keys()
    for key in sorted(known - {key.rpartition(".")[0] for key in known}):
        try:
            checked(with_values(good, {key: value}), 1)
        except ValueError as error:
            refusal = str(error)
        else:
            continue  # a text may have any value, and the keys of Megatron's engine are free
        name = DEPRECATED.get(key, key)
        assert any(part in refusal for part in (name, name.rpartition(".")[0])), f"{key}: {refusal}"
