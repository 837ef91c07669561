"""What a person types first: a rate must be given, keys have help and completion, and mistakes are told at once."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.lib.checked import changed, checked, sound_run, typed
from tests.lib.errors import names, refused
from verl_ext.__main__ import main
from verl_ext.config import key_table, schema
from verl_ext.config.run_file import expanded
from verl_ext.overrides import Item
from verl_ext.tools.judging.command import main as judge
from verl_ext.trainer.report import what_runs

DATA = ("data.train_dir=data", "model.path=model")


@pytest.fixture(scope="module")
def composed(tmp_path_factory):
    return sound_run(tmp_path_factory.mktemp("run"))


def test_a_training_without_a_rate_is_refused_with_the_usual_ones_and_a_measurement_needs_none(composed):
    without = changed(composed, ["optim.lr=null"])
    with refused("optim.lr", 0.001, "1e-5 to 5e-5", None):
        checked(without)
    data = composed.data.train_dir
    measures = changed(without, ["trainer.eval_only=true", f"data.val_dir={data}"])
    assert checked(measures).hf_config is not None
    with refused("optim.lr", 0, 0.0):
        typed(changed(composed, ["optim.lr=0"]))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "rate 0.001, constant · no warm-up · decay 0.01 on all"),
        (
            ["optim.lr_scheduler_type=cosine", "optim.min_lr_ratio=0.1", "optim.lr_warmup_steps_ratio=0.03"],
            "rate 0.001, cosine to 0.0001 · warm-up 0.03 of the steps · decay 0.01 on all",
        ),
        (
            ["optim.lr_scheduler_type=linear", "optim.lr_warmup_steps=7", "optim.weight_decay=0"],
            "rate 0.001, linear to 0 · warm-up 7 steps · no decay",
        ),
    ],
)
def test_the_first_line_of_a_run_says_rate_schedule_warm_up_and_decay(composed, words, told):
    assert what_runs(typed(changed(composed, words)), "sdpa", "fused").endswith(f" · {told}")


def help_of(capsys, *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def test_the_help_of_train_shows_the_keys_that_are_used_most_and_those_of_a_topic(capsys):
    most = help_of(capsys, "train", "--help")
    assert [key for key in key_table.MOST_USED if f"\n  {key} " not in most] == []
    assert "\n  data.balance " not in most
    node = help_of(capsys, "train", "--help", "data")
    assert "\n  data.balance " in node
    assert "\n  data.sources " in node  # of the command itself
    assert "optim.lr" not in node
    (key, *meaning) = help_of(capsys, "train", "--help", "optim.lr=1e-5").splitlines()
    assert key == "optim.lr=required"
    assert "1e-4 to 2e-4 for adapters" in " ".join(" ".join(meaning).split())
    every = help_of(capsys, "plan", "--help", "all")
    assert all(f"\n  {row.key} " in every for row in key_table.keys_of("train"))
    assert main(["train", "--help", "optm.lr"]) == 2
    assert names(capsys.readouterr().err, "optm.lr", "nearest: optim.lr")


def test_the_table_knows_the_keys_and_choices_that_the_configuration_has():
    for group in schema.groups():
        runs = {file.parent.name for file in (key_table.conf_folder() / group).glob("*/run.yaml")}
        assert key_table.choices(group) == sorted({*schema.options(group)} | runs)
    for row in key_table.keys_of("train"):
        if not row.key.startswith(key_table.OF_TRAIN) and row.key != "data.cache_dir":
            assert schema.is_known(row.key) or row.key in schema.groups(), row.key


MISTAKES = [
    (["train", *DATA, "optim.lrr=1"], ("optim.lrr", "nearest: optim.lr")),
    (["train", *DATA], ("optim.lr", None)),
    (["train", *DATA, "optim.lr=null"], ("optim.lr", None)),
    (["train", *DATA, "optim={lr: fast}"], ("optim.lr", "number", "fast")),
    (["train", *DATA, "optim.lr=1", "loss.mode=sum"], ("loss.mode", "sequence", "sum")),
    (["train", *DATA, "--config", "run.yaml"], ("--config", "run.yaml first")),
    (["train", *DATA, "recipe=quikstart"], ("recipe=quikstart", "nearest: quickstart")),
    (["train", *DATA, "optim.lr=1", "turns=last"], ("turns", "data.sources", "turns=last")),
    (["train", *DATA, "optim.lr=1", "trainer.early_stop=[1]"], ("trainer.early_stop", "[1]")),
    (["launch", *DATA, "optim.lr=1", "paralel=cpu"], ("paralel", "nearest: parallel")),
    (["launch", *DATA], ("optim.lr", None)),
    (["launch", "optim.lr=1", "data.sources={a:b}"], ("data.sources.a", "`verl-ext train`")),
    (["launch", "backend=slurm"], ("backend", "torchrun, ray, ray_job", "slurm")),
    (["launch", "backend=ray", *DATA], ("optim.lr", None)),
    (["plan", *DATA, "optim.lrr=1"], ("optim.lrr", "nearest: optim.lr")),
    (["plan", "model", "--plan.gpu", "H100-80G"], ("key=value", "--plan.gpu", "plan.gpu=H100-80G")),
    (["tokenize", "--output_dir", "x"], ("key=value", "--output_dir", "output_dir=x")),
    (["export", "--checkpoint=x"], ("key=value", "--checkpoint=x", "checkpoint=x")),
    (["completion", "csh"], ("shell", "bash, zsh, fish", "csh")),
]


@pytest.mark.parametrize(("words", "things"), MISTAKES, ids=[" ".join(words) for words, _ in MISTAKES])
def test_a_mistake_is_told_in_one_line_before_anything_is_imported_that_takes_seconds(words, things, capsys):
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert names(line, "error", *things), line


def test_output_that_nobody_reads_ends_without_a_traceback():
    (line,) = subprocess.getoutput(f"{sys.executable} -m verl_ext train --help all | head -1").splitlines()
    assert line.startswith("usage:")


def test_early_refusals_help_of_keys_and_completion_import_no_torch():
    code = f"""
import contextlib, os, sys
from verl_ext.__main__ import main
with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
    for words in {[*(words for words, _ in MISTAKES), ["train", "--help", "all"], ["completion", "zsh"]]!r}:
        main(words)
        assert "torch" not in sys.modules, words
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_what_only_another_verl_or_a_class_or_a_config_of_the_users_may_have_passes(monkeypatch):
    own = ["data.custom_cls.path=pkg://mine", "data.custom_cls.name=Mine", "data.mine=1", "optim.lr=1"]
    key_table.refuse_early(own)
    key_table.refuse_early(["--config-dir", "mine", "recipe=mine"])
    key_table.refuse_early(["trainer.eval_only=true"])
    key_table.refuse_early(
        ["model.partial_pretrain=m", "optim.lr=1", "hydra.verbose=true", "+loss.category_weights.x=2"]
    )
    monkeypatch.setattr(key_table, "version", lambda name: "0.9.9")
    key_table.refuse_early(["engine.of_another_verl=1", "optim.lr=1"])


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("verl-ext tra", ["train"]),
        ("verl-ext train optim.lr_sch", ["optim.lr_scheduler_type=", "optim.lr_schedule_span="]),
        ("verl-ext train x=1 parallel=u", ["ulysses2", "ulysses4", "ulysses8"]),
        ("verl-ext train recipe=quick", ["quickstart"]),
        ("verl-ext train model.path=run.y", ["run.yaml"]),
        ("verl-ext chat run", ["run.yaml"]),
        ("verl-ext plan plan.gpu_m", ["plan.gpu_memory="]),
    ],
)
def test_bash_completes_commands_keys_choices_and_files(line, words, tmp_path, capsys):
    (tmp_path / "run.yaml").touch()
    (tmp_path / "completion.bash").write_text(help_of(capsys, "completion", "bash"))
    typed_words = shlex.split(line)
    script = f"""
compopt() {{ :; }}
source completion.bash
COMP_LINE={line!r} COMP_POINT={len(line)} COMP_WORDS=({line}) COMP_CWORD={len(typed_words) - 1}
_verl_ext
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == words


@pytest.mark.parametrize("backend", ["torchrun", "ray", "ray_job"])
def test_launch_starts_a_node_of_each_backend_and_the_earlier_command_is_the_same(backend, capsys, monkeypatch):
    for name, value in {"DRY_RUN": "1", "RAY_AUTH_MODE": "disabled", "NPROC_PER_NODE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    words = [*DATA, "optim.lr=1e-5"]
    assert main(["launch", f"backend={backend}", *words]) == 0
    printed = capsys.readouterr().out
    assert printed.strip().endswith(shlex.join(words))
    earlier = {"torchrun": ["launch"], "ray": ["launch-ray", "node"], "ray_job": ["launch-ray", "submit"]}[backend]
    assert main([*earlier, *words]) == 0
    assert capsys.readouterr().out == printed


def test_a_model_is_the_first_word_of_judge(tmp_path, capsys):
    assert judge([str(tmp_path), "task=longbench_write", "cases=none.jsonl", f"output_dir={tmp_path / 'out'}"]) == 2
    assert names(capsys.readouterr().err, "cases", "none.jsonl")


AXOLOTL = """
base_model: owner/model
datasets: [{path: chats.jsonl, type: chat_template}]
sequence_len: 2048
gradient_accumulation_steps: 4
learning_rate: 2e-5
output_dir: out
"""
OF_VERL = (
    "torchrun --nproc_per_node=$RANKS -m verl.trainer.fsdp_sft_trainer data.train_files=$DATA/x/train.parquet "
    "data.val_files=null data.prompt_key=q data.response_key='a b' model.partial_pretrain=${MODEL:-owner/model} "
    "trainer.total_epochs=$EPOCHS data.train_batch_size=8"
)


def words_of(text: str) -> list[str]:
    """Return the overrides of a printed command."""
    return [word for word in shlex.split(text.replace("\\\n", " "), comments=True)[2:] if word.strip()]


@pytest.mark.parametrize("old", ["axolotl.yaml", OF_VERL], ids=["axolotl", "verl"])
def test_migrate_writes_a_file_that_is_the_run_of_the_command_that_it_prints(old, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    environment = {"RANKS": "2", "DATA": "/data", "MODEL": "owner/other", "EPOCHS": "3"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    Path("axolotl.yaml").write_text(AXOLOTL)
    Path("chats.jsonl").write_text("{}\n")
    assert main(["migrate", old, "nproc=2"] if old == "axolotl.yaml" else ["migrate", old]) == 0
    command = capsys.readouterr().out
    for name, value in environment.items():
        command = command.replace(f"${{{name}:-owner/model}}", value).replace(f"${name}", value)
    to = ["nproc=2", "to=run.yaml"] if old == "axolotl.yaml" else ["to=run.yaml"]
    assert main(["migrate", old, *to]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "verl-ext train run.yaml"
    assert all(line in Path("run.yaml").read_text() for line in printed[1:])
    assert settled(expanded(["run.yaml"])) == settled(words_of(command))
    assert main(["migrate", old, *to]) == 2
    assert names(capsys.readouterr().err, "to", "NAME.yaml", "run.yaml")


def settled(words: list[str]) -> dict:
    """Return the values of words with references resolved and paths absolute."""
    from omegaconf import OmegaConf

    config = OmegaConf.create({})
    for item in map(Item.read, words):
        OmegaConf.update(config, item.key, item.parsed(), force_add=True)
    values = dict(schema.leaves(OmegaConf.to_container(config, resolve=True)))
    paths = ("data.sources.chats", "trainer.default_local_dir")
    return {key: str(Path(value).absolute()) if key in paths else value for key, value in values.items()}


def test_what_only_a_shell_can_evaluate_is_in_no_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    old = "torchrun -m verl.trainer.sft_trainer data.train_dir=$(ls) model.path=m"
    assert main(["migrate", old, "to=run.yaml"]) == 2
    assert names(capsys.readouterr().err, "to", "shell", "data.train_dir=$(ls)")
    assert not Path("run.yaml").exists()


def test_remedies_of_a_plan_apply_where_they_can_help():
    from verl_ext.tools.plan.remedies import REMEDIES

    remedies = {remedy.key: remedy for remedy in REMEDIES}

    def config(optimizer, rank):
        return SimpleNamespace(
            optim=SimpleNamespace(optimizer=optimizer, optimizer_impl="torch.optim"),
            model_options=SimpleNamespace(lora_rank=rank, freeze=[]),
        )

    assert remedies["optim.optimizer"].applies(config("AdamW", 0))
    assert not remedies["optim.optimizer"].applies(config("Muon", 0))
    assert remedies["model.frozen_dtype"].applies(config("AdamW", 8))
    assert not remedies["model.frozen_dtype"].applies(config("AdamW", 0))
