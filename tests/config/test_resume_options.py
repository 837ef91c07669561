"""The definitions of options that a resumed run must share with its checkpoint say so."""

import pytest

from tests.lib.checked import typed
from tests.lib.errors import refused
from verl_ext.checkpoint.identity import Identity, options_that, shared_options, upstream_options
from verl_ext.checkpoint.resume import begins_anew
from verl_ext.config.compose import compose
from verl_ext.config.model import PackedModel
from verl_ext.config.run import TrainerOptions
from verl_ext.config.schema import dataset_families
from verl_ext.data.packs.options import DataOptions
from verl_ext.data.packs.packed import PackedDataset
from verl_ext.engines.schedule import OptimOptions
from verl_ext.losses import LossOptions
from verl_ext.titans.kind import QwenTitansModel

OF_EVERY_FAMILY = {"train_batch_size", "seed", "drop_last", "shuffle", "balance", "cost"}
OF_PACKS = OF_EVERY_FAMILY | {"max_tokens", "strategy", "over_length", "mixture"}


@pytest.mark.parametrize("family", dataset_families().values())
def test_the_options_that_decide_the_packs_are_shared_in_every_family_that_has_them(family):
    keys = set(options_that("same", [DataOptions, family.Options]))
    splits = {"train_ratio"} if hasattr(family.Options, "train_ratio") else set()
    documents = (
        {"shuffle_documents", "category_names", "share_prefixes", "share_least"}
        if issubclass(family, PackedDataset)
        else set()
    )
    assert keys == {f"data.{name}" for name in OF_PACKS | splits | documents}


def test_a_longer_stream_may_change_what_the_data_is_and_how_much_of_it_is_drawn():
    families = dataset_families()
    assert options_that("may_grow", [DataOptions, families["multidoc"].Options]) == [
        *("data.train_dir", "data.num_samples")
    ]
    assert options_that("may_grow", [DataOptions, families["packed"].Options]) == ["data.train_dir"]


def test_the_seed_the_loss_and_the_memorys_part_are_shared():
    assert options_that("same", [TrainerOptions, LossOptions]) == [
        *("trainer.seed", "loss.mode", "loss.category_weights", "loss.documents_per_pack", "loss.by_probability")
    ]
    adapters = ("lora_dropout", "use_rslora", "use_dora", "layers_to_transform", "layers_pattern", "modules_to_save")
    own = ("freeze", "new_tokens", "new_special_tokens", "quantization", "quantization_nested")
    of_model = {f"model.{name}" for name in (*own, *adapters)}
    assert set(options_that("same", [QwenTitansModel])) == {*of_model, "model.train"}
    assert set(options_that("same", [PackedModel])) == of_model


def test_values_are_those_of_the_configuration_and_verls_own_keys_are_there():
    values = typed(compose(["data.max_tokens=64", "optim.lr=1e-3", "parallel=cpu"])).values
    shared = shared_options(values, [DataOptions, dataset_families()["packed"].Options])
    assert (shared["data.max_tokens"], shared["data.seed"]) == (64, 42)
    assert shared_options(values, [OptimOptions])["optim.lr"] == 1e-3
    upstream = upstream_options(values)
    assert upstream["optim.weight_decay"] == 0.01
    assert {key.partition(".")[0] for key in upstream} == {"model", "optim", "engine"}


def test_a_partial_load_says_what_begins_anew():
    assert list(begins_anew(["model", "optimizer", "extra"])) == []
    weights, moments, schedule = begins_anew([])
    assert (weights, moments) == ("the weights are those of model.path", "the optimizer's state begins empty")
    assert list(begins_anew(["model"])) == [moments, schedule]
    assert list(begins_anew(["optimizer"], evaluates=True)) == [weights]  # the measured ones
    assert list(begins_anew(["model"], evaluates=True)) == []


def test_weights_that_an_earlier_version_did_not_know_are_no_difference():
    key = "the weights in model.path"
    run = Identity({key: "1 file of 8 bytes (ab)"}, {}, "run")
    run.check({key: "nothing"})
    with refused("trainer.allow_resume_mismatch=[model.path]", key, "1 file of 8 bytes (cd)"):
        run.check({key: "1 file of 8 bytes (cd)"})
