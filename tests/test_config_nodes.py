"""Typed nodes: each refusal is one line with the dotted key and the value."""

import pytest

from verl_ext.attention import AttentionOptions
from verl_ext.config import compose
from verl_ext.config.run import RunConfig, TrainerOptions
from verl_ext.data.options import DataOptions
from verl_ext.data.sft import SFTOptions


@pytest.mark.parametrize(
    ("build", "line"),
    [
        (lambda: DataOptions(balance_group=9), "data.balance_group must be at most data.train_batch_size=8; got 9"),
        (lambda: SFTOptions(mixture={"sources": {"a": {"weight": 1}}, "scal": 2}), "unknown key data.mixture.sc"),
        (lambda: TrainerOptions(save_freq="often"), "trainer.save_freq must be a whole number of steps or after_"),
        (lambda: TrainerOptions(save_freq=[10, [5]]), r"or a list of both; got [10, [5]]"),
        (lambda: TrainerOptions(logger=["consol"]), "got consol (nearest: console)"),
        (lambda: TrainerOptions(logger=[]), "trainer.logger must be a list of loggers"),
        (
            lambda: TrainerOptions(profile_interval=[3, 1]),
            "trainer.profile_interval must be [first step, last step]",
        ),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_key_and_value(build, line):
    with pytest.raises(ValueError, match=r"\S") as raised:
        build()
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)


def test_all_mistakes_of_a_node_are_told_together():
    with pytest.raises(ValueError, match=r"data\.max_tokens.*\n(.*\n)*.*data\.strategy"):
        SFTOptions(max_tokens=0, strategy="x")


def test_the_composed_config_becomes_typed_options():
    overrides = [
        "loss=longwriter",
        "loss.category_weights={code: 2, 7: 0.5}",
        "attention.backend=sdpa",
        "data.train_dir=d",
    ]
    run = RunConfig.from_composed(
        compose([*overrides, "trainer.experiment_name=7", "trainer.test_freq=after_each_epoch"])
    )
    assert (run.loss.mode, run.loss.documents_per_pack) == ("longwriter", 30)
    assert run.loss.category_weights == {"code": 2.0, "7": 0.5}
    assert run.attention == AttentionOptions("sdpa")
    assert (run.data.train_dir, run.dataset.max_tokens, run.dataset.strategy) == ("d", 8192, "best_fit")
    assert (run.trainer.experiment_name, run.trainer.default_local_dir) == ("7", "checkpoints/verl_ext/7")
    assert (run.trainer.test_freq, run.trainer.logger) == ("after_each_epoch", ["console"])


def test_a_mixture_whose_sources_name_their_folders_needs_no_other():
    assert not SFTOptions(mixture={"sources": {"a": {"tokens": 1, "train_dir": "d"}}}).needs_train_dir
    assert SFTOptions(mixture={"sources": {"a": {"tokens": 1}}}).needs_train_dir
