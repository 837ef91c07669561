"""Every shipped config composes into known keys, and a typo in YAML is reported with the nearest key."""

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf, open_dict

from tests.lib.errors import names, refused
from tests.lib.project import ROOT
from verl_ext.config import schema
from verl_ext.config.compose import compose, prepare_overrides
from verl_ext.config.key_table import first_below
from verl_ext.config.run import RunConfig, TrainerOptions
from verl_ext.config.upstream import upstream_problems
from verl_ext.losses import LossOptions
from verl_ext.options import plain

pytestmark = pytest.mark.slow

GROUP_FILES = sorted(
    path.relative_to(ROOT / "conf").as_posix()
    for group in ("data", "loss", "model", "parallel")
    for path in (ROOT / "conf" / group).glob("*.yaml")
)


@pytest.mark.parametrize(
    "word",
    [
        *(path.removesuffix(".yaml").replace("/", "=") for path in GROUP_FILES),
        *(f"recipe={name}" for name in ("null", *schema.options("recipe"))),
    ],
)
def test_every_config_and_recipe_composes_into_known_keys(word):
    config = compose([word])
    assert all(schema.is_known(key) for key in schema.value_keys(config))
    assert list(filter(None, upstream_problems(plain(config)))) == []
    LossOptions.read(config.loss)
    TrainerOptions.read(config.trainer)
    if not word.startswith("recipe"):  # a recipe may lack a folder that only its user knows
        RunConfig.from_composed(config)


def test_recipes_are_chosen_by_their_folder():
    assert {path.parent.name for path in ROOT.glob("recipes/**/config.yaml")} <= {*schema.options("recipe")}
    assert compose(["recipe=null"]).loss.mode == "token"


def test_the_config_is_verls_own_with_our_differences():
    config = compose([])
    with initialize_config_module("verl.trainer.config", version_base=None):
        upstream = hydra_compose("sft_trainer_engine")
    assert set(schema.value_keys(upstream)) - set(schema.value_keys(config)) == {"model.override_config"}
    assert config.model.path is None
    assert config.data.train_dir is None
    assert config.engine.strategy == "fsdp2"


def test_composing_leaves_a_running_hydra_application_as_it_was():
    with initialize_config_module("verl.trainer.config", version_base=None):
        running = GlobalHydra.instance().hydra
        assert compose(["loss=sqrt"]).loss.mode == "sqrt"
        assert GlobalHydra.instance().hydra is running
    assert compose(["loss=pack"]).loss.mode == "pack"


def test_a_recipe_chooses_groups_and_the_command_line_still_wins(tmp_path):
    recipe = tmp_path / "recipe" / "mine"
    recipe.mkdir(parents=True)
    (recipe / "config.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /model: lora\n  - override /parallel: ulysses2\n"
        "trainer:\n  experiment_name: mine\n"
    )
    path = f"hydra.searchpath=[pkg://verl.trainer.config,file://{tmp_path}]"
    with initialize_config_module("verl_ext.conf", version_base=None):
        config = hydra_compose("sft", overrides=[path, "recipe=mine/config"])
        chosen = hydra_compose("sft", overrides=[path, "recipe=mine/config", "model=packed", "parallel=cpu"])
    assert (config.model.lora_rank, config.engine.ulysses_sequence_parallel_size) == (32, 2)
    assert config.trainer.experiment_name == "mine"
    assert (chosen.model.lora_rank, chosen.engine.ulysses_sequence_parallel_size) == (0, 1)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("data.max_tokenz", "nearest: data.max_tokens"),
        ("model.partial_pretrain", "nearest: model.path"),
        ("trainer.max_tokens", "nearest: data.max_tokens"),
        ("trainer.foo", "trainer.foo"),  # the node itself would be no help
    ],
)
def test_a_typo_in_yaml_names_the_nearest_key(key, nearest):
    config = compose([])
    with open_dict(config):
        OmegaConf.update(config, key, 1, force_add=True)
    with refused(key, nearest) as raised:
        schema.check_keys(config)
    assert not names(str(raised.value), "nearest: trainer")


@pytest.mark.parametrize("word", ["trainer=null", "ray=1", "eval=[1]"])
def test_a_node_is_given_by_its_keys(word):
    key, _, given = word.partition("=")
    with refused(first_below(key, schema.known_keys()), given):
        compose([word])
    assert compose([f"{key}={{}}"]) == compose([])


def test_anything_may_stand_below_free_form_nodes():
    config = compose([])
    with open_dict(config):
        for node in ("model.override_config", "loss.category_weights", "eval.apply_chat_template_kwargs"):
            OmegaConf.update(config, f"{node}.whatever", 1, force_add=True)
    schema.check_keys(config)


def test_a_reference_that_leads_nowhere_is_one_line():
    config = compose([])
    config.trainer.project_name = "${no.such.key}"
    with refused("trainer.default_local_dir", "no.such.key"):  # which holds the project's name
        schema.check_keys(config)


def test_a_recipe_after_a_paper_is_chosen_by_its_own_name_also_as_the_base_of_a_users_file(tmp_path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [/recipe/longalign/config, _self_]\noptim: {weight_decay: 0.5}\n"
    )
    paths = f"hydra.searchpath=[pkg://verl.trainer.config,file://{tmp_path}]"
    words, _ = prepare_overrides([f"--config-dir={tmp_path}", "recipe=mine"])
    mine = schema.composed(schema.CONF, "sft", [*words[1:], paths])
    theirs = compose(["recipe=longalign"])
    assert (ROOT / "recipes" / "papers" / "longalign" / "config.yaml").is_file()
    assert (mine.loss.mode, mine.optim.lr, mine.optim.weight_decay) == ("sequence", theirs.optim.lr, 0.5)
    assert compose(["recipe=longalign/small"]).loss.mode == "sequence"
