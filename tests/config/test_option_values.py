"""Values of a composed config reach the options of their nodes, also by an old name; no value is a traceback."""

from collections.abc import Mapping
from typing import Any, get_origin

import pytest
from omegaconf import OmegaConf, open_dict

from tests.lib.checked import checked, sound_run
from tests.lib.errors import refused
from verl_ext.attention import AttentionOptions
from verl_ext.config import schema
from verl_ext.config.compose import compose, prepare_overrides
from verl_ext.config.keys import DEPRECATED, RENAMED, RENAMED_NODES
from verl_ext.config.run import NODES, RunConfig, TrainerOptions
from verl_ext.config.weights import ModelNode
from verl_ext.data.packs.options import DataOptions
from verl_ext.data.packs.sft_options import SFTOptions
from verl_ext.engines.schedule import OptimOptions
from verl_ext.options import Options, options_of, plain, spell

OURS: tuple[type[Options], ...] = (*NODES, DataOptions, SFTOptions, OptimOptions, ModelNode)
# A value that no option of the type takes, beside null.
WRONG: dict[Any, Any] = {int: "many", float: [1], bool: "maybe", str: [1], list: {"a": 1}, dict: "abc"}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return sound_run(tmp_path_factory.mktemp("run"))


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


@pytest.mark.parametrize("kind", ["null", "wrong type"])
def test_every_node_of_a_config_is_read_by_its_options(good, kind):
    """All options of a node have such a value at once; each has one line with its key and the value."""
    for options in OURS:
        fields = options_of(options).items()
        wrong = {name: None if kind == "null" else WRONG.get(get_origin(e.type) or e.type, ...) for name, e in fields}
        takes_null = [name for name, e in fields if kind == "null" and (e.nullable or e.default is None)]
        values = {f"{options.prefix}.{name}": wrong[name] for name in wrong if name not in takes_null}
        values = {key: value for key, value in values.items() if value is not ...}
        found = lines(with_values(good, values)) if values else []
        for key, value in values.items():
            (line,) = [line for line in found if line.split()[0] == key]
            assert line.partition("; got ")[2].partition(" (nearest")[0] == spell(value)


OLD = {
    **RENAMED,
    **DEPRECATED,
    **{
        f"{old}.{name}": f"{new}.{name}"
        for (old, new), name in zip(RENAMED_NODES.items(), ("model_dtype", "save_contents"), strict=True)
    },
}


@pytest.mark.parametrize("old", OLD)
def test_an_old_name_is_what_todays_name_is(old):
    """The same override, or the same lines: bounds, choices, resume rules and schedule see today's name alone."""

    def prepared(word: str) -> Any:
        try:
            return prepare_overrides([word])[0]
        except ValueError as error:
            return str(error)

    for value in ("-7", "0", "[1]", "nonsense", "null"):
        asked = prepared(f"{old}={value}")
        assert asked == prepared(f"{OLD[old]}={value}") or (value == "null" and asked == [])


def test_an_old_name_leaves_nothing_behind_for_verl_to_apply():
    config = compose(["optim.warmup_style=cosine", "optim.grad_clip=0.5", "optim.lr_warmup_steps=null"])
    optim = plain(config.optim)
    assert (optim["lr_scheduler_type"], optim["clip_grad"], optim["lr_warmup_steps"]) == ("cosine", 0.5, -1)
    assert (optim.get("warmup_style"), optim.get("grad_clip")) == (None, None)


def test_an_old_name_in_a_file_is_read_or_refused(good):
    assert (
        compose(["optim.lr_scheduler_type=linear", "optim.warmup_style=constant"]).optim.lr_scheduler_type == "linear"
    )
    for values, things in (
        ({"data.max_length": 7}, ("data.max_length", "command line")),
        ({"data.train_files": "x"}, ("data.train_files", "command line")),
        ({"model.partial_pretrain": "x"}, ("model.partial_pretrain", "nearest: model.path")),
    ):
        with refused(*things):
            schema.check_keys(with_values(good, values))


@pytest.mark.parametrize(
    ("build", "things"),
    [
        (lambda: DataOptions(balance_group=9), ("data.balance_group", "data.train_batch_size=8", 9)),
        (lambda: SFTOptions(mixture={"sources": {"a": {"weight": 1}}, "scal": 2}), ("data.mixture.scal",)),
        (lambda: TrainerOptions(save_freq="often"), ("trainer.save_freq", "after_each_epoch", "often")),
        (lambda: TrainerOptions(save_freq=[10, [5]]), ("trainer.save_freq", "list", "[10, [5]]")),
        (lambda: TrainerOptions(logger=["consol"]), ("trainer.logger", "consol", "nearest: console")),
        (lambda: TrainerOptions(logger=[]), ("trainer.logger", "[]")),
        (lambda: TrainerOptions(length_bins=[8, 8]), ("trainer.length_bins", "ascending", "[8, 8]")),
        (lambda: TrainerOptions.read({"early_stop": 3}), ("trainer.early_stop", "keys", 3)),
        (lambda: TrainerOptions(profile_interval=[3, 1]), ("trainer.profile_interval", "first step", "[3, 1]")),
    ],
)
def test_values_that_do_not_fit_each_other_are_refused_by_key_and_value(build, things):
    with refused(*things):
        build()


def test_the_composed_config_becomes_typed_options():
    words = ["loss=longwriter", "loss.category_weights={code: 2, 7: 0.5}", "attention.backend=sdpa", "data.train_dir=d"]
    words += ["trainer.experiment_name=7", "trainer.test_freq=after_each_epoch"]
    run = RunConfig.from_composed(compose(words))
    assert (run.loss.mode, run.loss.documents_per_pack) == ("longwriter", 30)
    assert run.loss.category_weights == {"code": 2.0, "7": 0.5}
    assert run.attention == AttentionOptions("sdpa")
    assert (run.data.train_dir, run.dataset.max_tokens, run.dataset.strategy) == ("d", 8192, "best_fit")
    assert (run.trainer.experiment_name, run.trainer.default_local_dir) == ("7", "checkpoints/verl_ext/7")
    assert (run.trainer.test_freq, run.trainer.logger) == ("after_each_epoch", ["console"])
    for more, needs in (({}, True), ({"train_dir": "d"}, False)):  # a source may name its folder
        assert SFTOptions(mixture={"sources": {"a": {"tokens": 1, **more}}}).needs_train_dir is needs


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
