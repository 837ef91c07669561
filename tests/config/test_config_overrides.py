"""The command line: old names are translated, needless plus signs dropped, typos reported with the nearest name."""

import sys

import pytest
from omegaconf import OmegaConf

from tests.lib.errors import refused
from tests.lib.ranks import only_rank
from verl_ext.config import schema
from verl_ext.config.compose import compose, compose_run, prepare_overrides
from verl_ext.trainer.start import compose_and_run

# The original training script, with its shell variables filled in.
SEED_COMMAND = [
    *("+data.train_dir=/data/train", "+data.max_tokens=131072", "optim.lr=3e-5", "data.train_batch_size=2"),
    *("data.micro_batch_size=1", "data.micro_batch_size_per_gpu=1", "data.custom_cls.path=sft_data_packer.py"),
    *("data.custom_cls.name=SFTDataSet", "model.partial_pretrain=/models/qwen", "model.use_liger=True"),
    *("trainer.default_local_dir=/runs/out", "trainer.project_name=task", "trainer.experiment_name=task"),
    *("trainer.logger=['console']", "ulysses_sequence_parallel_size=8", "use_remove_padding=true"),
]


def test_the_seed_command_is_translated_word_for_word(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config, notices = compose_run(SEED_COMMAND)
    assert (config.data.train_dir, config.data.max_tokens) == ("/data/train", 131072)
    assert (config.data.train_batch_size, config.data.micro_batch_size_per_gpu) == (2, 1)
    assert (config.data.custom_cls.path, config.optim.lr, config.model.path) == (None, 3e-5, "/models/qwen")
    assert (config.model.use_remove_padding, config.model.use_liger) == (True, True)
    assert config.engine.ulysses_sequence_parallel_size == 8
    assert (config.trainer.logger, config.trainer.default_local_dir) == (["console"], "/runs/out")
    said = "\n".join(notices)
    assert len(notices) == len(set(notices)) == 8
    assert "model.partial_pretrain (verl ≤ 0.6) is read as model.path" in said
    assert "ulysses_sequence_parallel_size (verl ≤ 0.6) is read as engine.ulysses_sequence_parallel_size" in said
    assert "use_remove_padding (verl ≤ 0.6) is read as model.use_remove_padding" in said
    assert "data.micro_batch_size=1 is left out: verl 0.2 to 0.6 did not read it" in said
    assert "+data.train_dir: the key exists" in said
    assert "+data.max_tokens: the key exists" in said
    assert "data.custom_cls.path=sft_data_packer.py does not exist: verl_ext.data.SFTDataSet is used" in said
    (tmp_path / "sft_data_packer.py").write_text("class SFTDataSet: pass\n")
    custom = compose_run(SEED_COMMAND)[0].data.custom_cls
    assert (custom.path, custom.name) == ("sft_data_packer.py", "SFTDataSet")


# Every key of sft_trainer.yaml in verl 0.4.1, 0.5.0 and 0.6.1 that has the same name and meaning today.
UNCHANGED_SINCE_VERL_0_4 = """
data: custom_cls.name custom_cls.path micro_batch_size_per_gpu train_batch_size train_max_samples val_max_samples
model: enable_gradient_checkpointing external_lib lora_alpha lora_rank target_modules trust_remote_code
model: use_liger
optim: betas clip_grad lr lr_scheduler_type lr_warmup_steps lr_warmup_steps_ratio min_lr_ratio num_cycles optimizer
optim: optimizer_impl override_optimizer_config total_training_steps weight_decay
trainer: default_hdfs_dir default_local_dir device experiment_name logger max_ckpt_to_keep n_gpus_per_node nnodes
trainer: project_name resume_from_path resume_mode save_freq seed test_freq total_epochs total_training_steps
"""


def test_other_keys_of_verl_0_4_to_0_6_are_read_as_they_are():
    for line in UNCHANGED_SINCE_VERL_0_4.strip().splitlines():
        node, _, names = line.partition(": ")
        for name in names.split():
            assert prepare_overrides([f"{node}.{name}=1"]) == ([f"++{node}.{name}=1"], [])


@pytest.mark.parametrize("key", ["engine.strategy", "model.strategy"])
def test_fsdp1_is_read_as_fsdp2_with_a_notice(key):
    config, notices = compose_run([f"{key}=fsdp", "model.path=M", "data.train_dir=D"])
    assert config.engine.strategy == "fsdp2"
    assert [notice for notice in notices if notice.startswith(f"{key}=fsdp is read as engine.strategy=fsdp2")]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("model.partial_pretrain=/m", "model.path=/m"),
        ("model.strategy=fsdp2", "engine.strategy=fsdp2"),
        ("model.fsdp_config.model_dtype=bf16", "engine.model_dtype=bf16"),
        ("model.fsdp_config.wrap_policy.min_num_params=5", "++engine.wrap_policy.min_num_params=5"),
        ("optim.warmup_steps_ratio=0.1", "optim.lr_warmup_steps_ratio=0.1"),
        ("optim.lr_scheduler=cosine", "optim.lr_scheduler_type=cosine"),
        ("trainer.resume_path=/x", "trainer.resume_from_path=/x"),
        ("trainer.checkpoint.save_contents=[model]", "checkpoint.save_contents=[model]"),
        ("trainer.checkpoint.load_contents=[model]", "checkpoint.load_contents=[model]"),
        ("ulysses_sequence_parallel_size=2", "engine.ulysses_sequence_parallel_size=2"),
        ("+use_remove_padding=true", "model.use_remove_padding=true"),
    ],
)
def test_names_of_verl_0_6_become_todays(old, new):
    overrides, notices = prepare_overrides([old])
    assert overrides == ["++" + new.lstrip("+")]
    assert len(notices) == 3 + old.startswith("+")  # the others are of verl's defaults and its rate
    assert "verl ≤ 0.6" in notices[0]


def test_defaults_of_verl_that_train_otherwise_are_said_for_packs_and_taken_for_rows():
    said = "not given, and another default in verl: "
    _, notices = prepare_overrides(
        ["model.partial_pretrain=m", "optim.lr_scheduler=constant", "optim.lr_warmup_steps=3", "data.max_tokens=64"]
    )
    assert notices[-2:] == [
        f"{said}data.train_batch_size=256 trainer.total_epochs=4 optim.betas=[0.9,0.95] "
        "data.micro_batch_size_per_gpu=4",
        "optim.lr is not given: 1e-5 is verl's default, which `verl-ext migrate` writes into the command: a run has no "
        "default",
    ]
    assert not any(said in notice for notice in prepare_overrides(["model.path=m"])[1])
    assert not any(said in notice for notice in prepare_overrides(["recipe=quickstart", "model.partial_pretrain=m"])[1])
    config, notices = compose_run(["data.max_length=64", "data.train_batch_size=2", "trainer.total_training_steps=9"])
    assert (config.trainer.total_epochs, config.data.train_batch_size, config.optim.lr) == (4, 2, None)
    assert notices[-2] == "not given, so verl's defaults: trainer.total_epochs=4"
    assert notices[-1].startswith("optim.lr is not given: 0.001 is verl's default")


# Keys without a new name beside a budget of packs: the override, its replacement, and a word of the reason.
WITHOUT_A_NAME_TODAY = [
    ("data.truncation=left", "data.over_length", "data.max_tokens"),
    ("trainer.val_freq=1", "trainer.test_freq", "validate"),
    ("trainer.hub.push_to_hub=true", None, "uploaded"),
    ("eval.base_url=http://host:8000/v1", None, "verl-ext judge task=prompts"),
]


@pytest.mark.parametrize(("override", "instead", "why"), WITHOUT_A_NAME_TODAY)
def test_an_option_without_an_equivalent_is_refused_and_left_out_where_its_successor_is_given(override, instead, why):
    key, _, value = override.partition("=")
    with refused(key, value, why, instead or "leave it out"):
        prepare_overrides([override, "data.max_tokens=64"])
    if instead:
        overrides, notices = prepare_overrides([override, "data.max_tokens=64", f"{instead}=7"])
        assert overrides == ["++data.max_tokens=64", f"++{instead}=7"]
        assert notices[0].startswith(f"{key} is left out: {instead} is given")


# Keys that ask for nothing here, whatever their value, beside packs of a tokenized folder.
ASKS_FOR_NOTHING = """
data.multiturn.enable=false data.chat_template=null data.balance_dp_token=True data.use_shm=True model.use_shm=true
data.use_dynamic_bsz=false model.fsdp_config.offload_params=True model.fsdp_config.cpu_offload=True model=hf_model
data.micro_batch_size=null data.micro_batch_size=4 data.apply_chat_template_kwargs={} data.val_files=null
data.train_files=x.parquet data.prompt_key=question data.messages_key=m data.ignore_input_ids_mismatch=True
data.val_batch_size=8 trainer.val_only=false trainer.hub.push_to_hub=false optim.grad_clip=null
"""


@pytest.mark.parametrize("override", ASKS_FOR_NOTHING.split())
def test_an_option_that_asks_for_nothing_is_left_out_with_a_notice(override):
    packs = ["data.train_dir=d", "data.max_tokens=64", "data.train_batch_size=1", "data.micro_batch_size_per_gpu=1"]
    overrides, notices = prepare_overrides([*packs, override])
    assert overrides == [f"++{word}" for word in packs]
    assert ["is left out: " in notice for notice in notices if "not given" not in notice] == [True]


@pytest.mark.parametrize(("old", "new"), [("error", "error"), ("right", "truncate"), ("'right'", "truncate")])
def test_truncation_is_read_as_what_happens_to_over_length_documents(old, new):
    overrides, notices = prepare_overrides(["data.max_tokens=64", f"data.truncation={old}"])
    assert overrides == ["++data.max_tokens=64", f"++data.over_length={new}"]
    assert notices[0] == f"data.truncation={old} is read as data.over_length={new}"


def test_offloading_needs_both_of_its_old_keys():
    old = ["model.fsdp_config.cpu_offload=True", "model.fsdp_config.offload_params=True"]
    overrides, notices = prepare_overrides(old)
    assert overrides == ["++engine.offload_policy=true"]
    assert notices[0] == f"{' '.join(old)} is read as engine.offload_policy=true"


def test_a_dataset_class_of_the_users_may_have_keys_of_its_own():
    own = ["data.custom_cls.path=pkg://mine", "data.custom_cls.name=Mine"]
    config, notices = compose_run([*own, "+data.mine=3", "data.max_length=7", "data.prompt_key=q"])
    assert (config.data.mine, config.data.max_length, config.data.prompt_key) == (3, 7, "q")
    assert config.data.custom_cls.path == "pkg://mine"
    assert notices == []
    with refused("data.mine"):
        compose(["+data.mine=3"])


@pytest.mark.parametrize("prefix", ["+", "++", ""])
def test_plus_signs_on_known_keys_work(prefix):
    config, notices = compose_run([f"{prefix}data.max_tokens=77", f"{prefix}parallel=cpu"])
    assert config.data.max_tokens == 77
    assert config.trainer.device == "cpu"
    assert len(notices) == (2 if prefix == "+" else 0)


def test_keys_that_only_a_dataclass_or_a_free_form_node_has_need_no_plus():
    words = ["engine.mixed_precision.param_dtype=fp32", "checkpoint.async_save=true", "loss.category_weights.code=2"]
    words += ["model.override_config.rope_theta=5", "optim.override_optimizer_config={eps: 1e-6}"]
    config = compose(words)
    assert config.engine.mixed_precision == {"param_dtype": "fp32"}
    assert config.checkpoint.async_save is True
    assert config.loss.category_weights == {"code": 2}
    assert config.model.override_config.rope_theta == 5
    assert config.model.override_config.attn_implementation == "verl_ext_packed"
    assert config.optim.override_optimizer_config.eps == 1e-6


@pytest.mark.parametrize("path", ["/part=1/data (2)", "/it's/here", "/a b/c", "/x:y/z@2", "/λ/data"])
def test_a_path_needs_no_quotes_for_hydras_grammar(path):
    config = compose([f"data.train_dir={path}", f"model.partial_pretrain={path}"])
    assert config.data.train_dir == path
    assert config.model.path == path


def test_flags_pass_untouched_a_primary_config_of_the_users_finds_ours_and_several_runs_are_refused(tmp_path):
    overrides, _ = prepare_overrides(["--cfg", "job", "data.max_tokens=5", "--config-dir=x"])
    assert overrides == ["--cfg", "job", "--config-dir=x", "++data.max_tokens=5"]
    (tmp_path / "team.yaml").write_text("defaults: [base]\n")
    overrides, _ = prepare_overrides(["-cn", "team", "--config-dir", str(tmp_path)])
    assert overrides[-1] == "hydra.searchpath=[pkg://verl_ext.conf,pkg://verl.trainer.config]"
    with refused("key=value", "--cfg"):
        compose(["--cfg", "job"])
    with refused("--multirun"):
        prepare_overrides(["-m", "loss=token,sequence"])


@pytest.mark.parametrize(
    ("override", "things"),
    [
        ("data.max_tokenz=5", ("data.max_tokenz", "nearest: data.max_tokens")),
        ("lr=1", ("lr", "nearest: optim.lr")),
        ("paralel=cpu", ("paralel", "nearest: parallel")),
        ("loss={moed: sqrt}", ("loss.moed", "nearest: loss.mode")),
        ("model.partial_pretrian=x", ("model.partial_pretrian", "nearest: model.path")),
        ("engine.mixed_precision.parm_dtype=fp32", ("nearest: engine.mixed_precision.param_dtype",)),
        ("model.tokenizer=x", ("model.tokenizer", "nearest: model.tokenizer_path")),
        ("zzz=1", ("zzz",)),
        ("parallel=ulyses2", ("parallel=ulyses2", "nearest: ulysses2", "auto, cp16_ulysses8x2")),
        ("loss=squareroot", ("loss=squareroot", "apo_down, apo_zero, cpo, dpo")),
        ("data={max_length: 7}", ("data.max_length", "data.max_length=VALUE")),
        ("recipe=no_such_recipe", ("recipe=no_such_recipe",)),
        ("foo", ("key=value", "foo")),
        ("data.train_dir=[a", ("key=value", "data.train_dir=[a")),
        ("data train_dir=a", ("key=value", "data train_dir=a")),
        ("data.max_tokens=1,2", ("data.max_tokens", "1,2")),
        ("~data.max_tokens", ("data.max_tokens", "~data.max_tokens")),
        ("data.train_dir=${nope}", ("data.train_dir", "nope")),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(override, things):
    with refused(*things):
        compose([override])


def test_all_unknown_keys_of_a_command_line_are_told_together():
    with pytest.raises(ValueError, match=r"data\.max_tokenz.*\n.*optim\.lrr"):
        compose(["data.max_tokenz=5", "optim.lrr=1"])


def test_recipes_and_choices_of_a_config_folder_of_the_users_own_are_known(tmp_path):
    for path in ("recipe/mine/config.yaml", "recipe/own.yaml", "parallel/ours.yaml"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("# @package _global_\ndefaults: [auto]\n")
    words = ["recipe=mine", "recipe=own", "parallel=ours", "recipe=quickstart"]
    for flags in ([f"--config-dir={tmp_path}"], ["-cd", str(tmp_path)]):
        overrides, _ = prepare_overrides([*flags, *words])
        paths = ["recipe=mine/config", "recipe=own", "parallel=ours", "recipe=quickstart/config"]
        assert overrides[len(flags) :] == paths
    with refused("recipe=mnie", "nearest: mine", "glm_long/stage1_128k", "mine"):
        prepare_overrides(["--config-dir", str(tmp_path), "recipe=mnie"])


# A user's file of differences: (group, its head, its lines, what it sets, another key of the default).
HEADER = "# @package _global_"
OWN = [
    ("loss", ["defaults: [token]"], "mode: sequence\n", {"loss.mode": "sequence", "loss.head_block_mib": None}),
    ("data", ["defaults: [packed]"], "max_tokens: 333\n", {"data.max_tokens": 333, "data.strategy": "best_fit"}),
    ("model", ["defaults: [packed]"], "lora_rank: 4\n", {"model.lora_rank": 4, "model.use_remove_padding": True}),
    ("parallel", [HEADER, "defaults: [auto]"], "engine: {fsdp_size: 2}\n", {"engine.fsdp_size": 2}),
    ("recipe", [HEADER], "optim: {lr: 3e-4}\n", {"optim.lr": 3e-4, "loss.head_block_mib": None}),
    ("engine", ["defaults: [fsdp]"], "fsdp_size: 2\n", {"engine.fsdp_size": 2, "engine.strategy": "fsdp2"}),
    ("optim", ["defaults: [fsdp]"], "lr: 7e-4\n", {"optim.lr": 7e-4, "optim.clip_grad": 1.0}),
]


def composed_with(folder, words):
    """Return the trainer's config for words under --config-dir; flags go to Hydra's own command line."""
    overrides, _ = prepare_overrides([f"--config-dir={folder}", *words])
    paths = f"hydra.searchpath=[pkg://verl.trainer.config,file://{folder}]"
    config = schema.composed(schema.CONF, "sft", [*overrides[1:], paths])
    schema.check_keys(config)
    return config


@pytest.mark.parametrize(("group", "head", "text", "expected"), OWN)
def test_a_file_of_a_config_folder_adds_to_what_its_head_names(group, head, text, expected, tmp_path):
    file = tmp_path / group / "mine.yaml"
    file.parent.mkdir()
    file.write_text("\n".join([*head, text]))
    config = composed_with(tmp_path, [f"{group}=mine"])
    assert {key: OmegaConf.select(config, key) for key in expected} == expected


@pytest.mark.parametrize(("group", "head", "text", "expected"), OWN)
def test_a_file_of_a_config_folder_without_its_head_is_one_line_where_keys_are_missing(
    group, head, text, expected, tmp_path
):
    (tmp_path / group).mkdir()
    (tmp_path / group / "mine.yaml").write_text(text)
    with refused(f"{group}.{next(iter(expected))}" if HEADER in head else group):
        composed_with(tmp_path, [f"{group}=mine"])


def test_a_file_may_add_to_another_choice_than_the_default_and_an_unknown_key_of_it_is_one_line(tmp_path):
    (tmp_path / "loss").mkdir()
    (tmp_path / "loss/mine.yaml").write_text("defaults:\n  - sqrt\ndocuments_per_pack: 9\n")
    config = composed_with(tmp_path, ["loss=mine"])
    assert (config.loss.mode, config.loss.documents_per_pack) == ("sqrt", 9)
    (tmp_path / "loss/mine.yaml").write_text("defaults: [token]\nmoed: sequence\n")
    with refused("loss.moed", "nearest: loss.mode"):
        composed_with(tmp_path, ["loss=mine"])


def test_a_recipe_of_a_config_folder_chooses_files_of_it(tmp_path):
    for path, text in {
        "loss/mine.yaml": "defaults: [token]\nmode: sequence",
        "data/mine.yaml": "defaults: [packed]\nmax_tokens: 333",
        "recipe/mine/config.yaml": f"{HEADER}\ndefaults: [{{override /loss: mine}}, {{override /data: mine}}]",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(text)
    config = composed_with(tmp_path, ["recipe=mine"])
    assert (config.loss.mode, config.loss.head_block_mib, config.data.max_tokens) == ("sequence", None, 333)
    assert composed_with(tmp_path, ["recipe=mine", "loss=pack"]).loss.mode == "pack"


def test_a_loss_that_a_file_or_a_recipe_chooses_has_its_data(tmp_path):
    for path, text in {
        "loss/mine.yaml": "defaults: [dpo]\nbeta: 0.3",
        "recipe/mine/config.yaml": f"{HEADER}\nloss: {{mode: dpo}}",
        "team.yaml": "defaults: [base, {data: packed}, {loss: dpo}]",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    for words in (["loss=mine"], ["recipe=mine"], ["-cn", "team"], ["loss={mode: dpo}"]):
        overrides, notices = prepare_overrides([f"--config-dir={tmp_path}", *words])
        assert "data=preference" in overrides
        assert notices == ["loss=dpo compares answers, so data=preference packs them"]


@pytest.mark.slow
def test_the_trainers_command_takes_a_file_of_a_config_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "loss").mkdir()
    (tmp_path / "loss/mine.yaml").write_text("defaults: [token]\nmode: sequence\ncategory_weights: {code: 2}\n")
    words = ["--config-dir", str(tmp_path), "loss=mine", "--cfg", "job", "--package", "loss"]
    monkeypatch.setattr(sys, "argv", ["fsdp_sft_trainer"])
    with only_rank():
        compose_and_run(words, pytest.fail)
    printed = OmegaConf.create(capsys.readouterr().out.partition("# @package")[2].partition("\n")[2])
    assert (printed.mode, printed.category_weights, printed.head) == ("sequence", {"code": 2}, "fused")
