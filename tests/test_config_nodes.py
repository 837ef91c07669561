"""Typed nodes: what each refuses, in one line with the dotted key and the value."""

import pytest
from omegaconf import OmegaConf

from verl_ext.config import compose
from verl_ext.config import schema as nodes
from verl_ext.config.schema import AttentionConfig, DataConfig, LossConfig, TrainerConfig


@pytest.mark.parametrize(
    ("build", "line"),
    [
        (lambda: LossConfig(mode="tokn"), "loss.mode must be one of token, sequence, sqrt, pack, longwriter; got tokn"),
        (lambda: LossConfig(mode="tokn"), "(nearest: token)"),
        (lambda: LossConfig(documents_per_pack=0), "loss.documents_per_pack must be at least 1; got 0"),
        (lambda: LossConfig(documents_per_pack=2.5), "loss.documents_per_pack must be a whole number; got 2.5"),
        (lambda: LossConfig(category_weights={"code": -1}), "loss.category_weights.code must be finite and at least 0"),
        (lambda: LossConfig(category_weights={"code": float("nan")}), "must be finite and at least 0; got nan"),
        (lambda: LossConfig(category_weights={"code": "x"}), "loss.category_weights.code must be a number; got x"),
        (lambda: LossConfig(category_weights=[1]), "loss.category_weights must map categories to weights; got [1]"),
        (lambda: AttentionConfig(backend="flash"), "attention.backend must be one of auto, flash_attn, varlen, sdpa"),
        (lambda: DataConfig(), "data.train_dir is required"),
        (lambda: DataConfig("d", max_tokens=0), "data.max_tokens must be at least 2; got 0"),
        (lambda: DataConfig("d", max_tokens="abc"), "data.max_tokens must be a whole number; got abc"),
        (lambda: DataConfig("d", max_tokens=None), "data.max_tokens must be a whole number; got null"),
        (lambda: DataConfig("d", train_batch_size=0), "data.train_batch_size must be at least 1; got 0"),
        (
            lambda: DataConfig("d", micro_batch_size_per_gpu=0),
            "data.micro_batch_size_per_gpu must be at least 1; got 0",
        ),
        (lambda: DataConfig("d", num_workers=-1), "data.num_workers must be at least 0; got -1"),
        (lambda: DataConfig("d", seed=-1), "data.seed must be at least 0; got -1"),
        (lambda: DataConfig("d", drop_last="maybe"), "data.drop_last must be true or false; got maybe"),
        (
            lambda: DataConfig("d", strategy="bestfit"),
            "data.strategy must be one of best_fit, next_fit, none, sorted_batch; got bestfit (nearest: best_fit)",
        ),
        (lambda: DataConfig("d", over_length="cut"), "data.over_length must be one of error, drop, truncate, split"),
        (lambda: DataConfig("d", pad_mode="left"), "data.pad_mode must be one of no_padding, right; got left"),
        (lambda: DataConfig("d", balance="sort"), "data.balance must be one of sorted, none; got sort"),
        (lambda: DataConfig("d", balance_group=0), "data.balance_group must be at least 1; got 0"),
        (lambda: DataConfig("d", balance_group=9), "data.balance_group must be at most data.train_batch_size=8; got 9"),
        (lambda: DataConfig("d", cost="time"), "data.cost must be one of flops, tokens; got time"),
        (lambda: DataConfig("d", prefetch_factor=0), "data.prefetch_factor must be at least 1; got 0"),
        (lambda: DataConfig("d", pin_memory="x"), "data.pin_memory must be true or false; got x"),
        (lambda: DataConfig("d", mixture={"sources": {"a": {"weight": 1}}, "scal": 2}), "unknown key data.mixture.sc"),
        (
            lambda: DataConfig(mixture={"sources": {"a": {"tokens": 1}}}),
            "data.train_dir is required: the folder that `verl-ext tokenize` wrote; got ",
        ),
        (lambda: TrainerConfig(), "trainer.default_local_dir is required"),
        (lambda: TrainerConfig("d", log_freq=0), "trainer.log_freq must be at least 1; got 0"),
        (lambda: TrainerConfig("d", max_skipped_steps=-1), "trainer.max_skipped_steps must be at least 0; got -1"),
        (lambda: TrainerConfig("d", nccl_timeout=0), "trainer.nccl_timeout must be at least 1; got 0"),
        (lambda: TrainerConfig("d", nccl_timeout=0.5), "trainer.nccl_timeout must be a whole number; got 0.5"),
        (lambda: TrainerConfig("d", seed=-1), "trainer.seed must be at least 0; got -1"),
        (lambda: TrainerConfig("d", total_epochs=0), "trainer.total_epochs must be at least 1; got 0"),
        (lambda: TrainerConfig("d", total_training_steps=0), "trainer.total_training_steps must be at least 1; got 0"),
        (lambda: TrainerConfig("d", save_freq="often"), "trainer.save_freq must be a whole number of steps or after_"),
        (lambda: TrainerConfig("d", test_freq=1.5), "trainer.test_freq must be a whole number of steps or after_each"),
        (lambda: TrainerConfig("d", resume_mode="no"), "trainer.resume_mode must be one of auto, disable, resume_path"),
        (lambda: TrainerConfig("d", device="gpu"), "trainer.device must be one of auto, cpu, cuda; got gpu"),
        (lambda: TrainerConfig("d", overwrite="sure"), "trainer.overwrite must be true or false; got sure"),
        (lambda: TrainerConfig("d", logger=["consol"]), "got consol (nearest: console)"),
        (lambda: TrainerConfig("d", logger=[]), "trainer.logger must be a list of loggers"),
        (
            lambda: TrainerConfig("d", profile_interval=[3, 1]),
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
        DataConfig("d", max_tokens=0, strategy="x")


def test_verl_builds_our_nodes_from_the_composed_config():
    config = compose(["loss=longwriter", "loss.category_weights={code: 2, 7: 0.5}", "attention.backend=sdpa"])
    loss = nodes.loss_config(config)
    assert isinstance(loss, LossConfig)
    assert (loss.mode, loss.documents_per_pack) == ("longwriter", 30)
    assert loss.category_weights == {"code": 2.0, "7": 0.5}
    assert nodes.attention_config(config) == AttentionConfig(_target_="", backend="sdpa")


def test_errors_of_nodes_built_by_verl_stay_one_line():
    config = compose(["loss.mode=tokens"])
    with pytest.raises(ValueError, match=r"^loss\.mode must be one of [^\n]*$"):
        nodes.loss_config(config)


def test_typed_views_hold_the_values_of_the_composed_config():
    config = compose(["data.train_dir=d", "trainer.experiment_name=7", "trainer.test_freq=after_each_epoch"])
    data, trainer = nodes.data_config(config), nodes.trainer_config(config)
    assert (data.train_dir, data.max_tokens, data.strategy) == ("d", 8192, "best_fit")
    assert (trainer.experiment_name, trainer.default_local_dir) == ("7", "checkpoints/verl_ext/7")
    assert (trainer.test_freq, trainer.logger) == ("after_each_epoch", ["console"])


def test_a_mixture_whose_sources_name_their_folders_needs_no_other():
    assert DataConfig(mixture={"sources": {"a": {"tokens": 1, "train_dir": "d"}}}).train_dir == ""


def test_a_missing_mandatory_value_is_told_by_its_key():
    with pytest.raises(ValueError, match=r"^data\.train_dir is required"):
        nodes.data_config(compose([]))


def test_category_weights_may_be_null_or_absent():
    assert LossConfig().category_weights is None
    assert nodes.loss_config(
        OmegaConf.create({"loss": {"_target_": "verl_ext.config.schema.LossConfig"}})
    ) == LossConfig(_target_="")
