"""A run in one YAML file stands for the words of a command line, and a run writes a file that starts it again."""

import os
import re
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tests.lib.errors import names, refused
from verl_ext.__main__ import main
from verl_ext.config.check import data_problems
from verl_ext.config.compose import compose, compose_run
from verl_ext.config.key_table import keys_of
from verl_ext.config.keys import KEYS
from verl_ext.config.resolve import resolve_run
from verl_ext.config.run import Machine
from verl_ext.config.run_file import expanded, run_file, trainer_words
from verl_ext.overrides import Item, override_words

RUN = """
recipe: quickstart
nproc: 2
data:
  sources: {chats: chats.jsonl, "数学": [parts/*.jsonl, hf://datasets/owner/name]}
  val_sources: {held out: owner/name}
  max_tokens: 1024
model.path: Qwen/Qwen3-0.6B
optim: {lr: 1e-5, betas: [0.9, 0.95]}
trainer: {default_local_dir: out, project_name: "1"}
turns: last
chat_template: template.jinja
model.override_config: {rope_theta: "${oc.env:THETA,1e6}"}
"""


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    """Return a run's file in a folder with its data, which is not the working directory."""
    (tmp_path / "job" / "parts").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for name in ("chats.jsonl", "parts/1.jsonl", "template.jinja"):
        (tmp_path / "job" / name).write_text("{}")
    (tmp_path / "job" / "run.yaml").write_text(RUN, encoding="utf-8")
    return tmp_path / "job" / "run.yaml"


def values(words) -> dict:
    return {item.key: item.parsed() for item in map(Item.read, words)}


def test_a_file_says_what_its_words_say_with_paths_from_its_folder(file):
    folder = file.parent
    assert values(expanded([str(file)])) == {
        "recipe": "quickstart",
        "nproc": 2,
        "data.sources": {
            "chats": f"{folder}/chats.jsonl",
            "数学": [f"{folder}/parts/*.jsonl", "hf://datasets/owner/name"],
        },
        "data.val_sources": {"held out": "hf://datasets/owner/name"},
        "data.max_tokens": 1024,
        "model.path": "Qwen/Qwen3-0.6B",
        "optim.lr": 1e-5,
        "optim.betas": [0.9, 0.95],
        "trainer.default_local_dir": f"{folder}/out",
        "trainer.project_name": "1",
        "turns": "last",
        "chat_template": f"{folder}/template.jinja",
        "model.override_config.rope_theta": "${oc.env:THETA,1e6}",
    }


def test_later_words_win_and_replace_the_names_of_sources(file):
    later = ["optim.lr=2e-5", "data.sources={code:code.jsonl}", "+data.max_tokens=64", "--config-dir=mine"]
    words = expanded([str(file), *later])
    assert words[-4:] == later
    keys = [word.partition("=")[0].lstrip("+") for word in words]
    assert len(set(keys)) == len(keys)
    assert "data.sources" in keys
    assert not [key for key in keys if key.startswith("data.sources.")]


def test_a_trainers_command_line_takes_the_file_without_nproc(file):
    assert "nproc" not in values(trainer_words([str(file)]))
    assert trainer_words(["data.train_dir=x", "nproc=2"]) == ["data.train_dir=x", "nproc=2"]


word = st.from_regex(r"[a-z]{1,6}", fullmatch=True)
leaf = st.one_of(
    st.none(), st.booleans(), st.integers(-9, 9), st.floats(-1e9, 1e9), st.text("aZ1 '\"{}[],:=$\\%é#-.", max_size=8)
)
nodes = st.dictionaries(st.tuples(word, word), st.one_of(leaf, st.lists(leaf, max_size=3)), min_size=1, max_size=4)


@settings(max_examples=40)
@given(nodes)
def test_the_file_of_a_run_gives_its_words_again(tmp_path_factory, options):
    words = override_words({f"{node}.{key}": value for (node, key), value in options.items()})
    folder = tmp_path_factory.mktemp("run")
    text = run_file(words, 4, folder)
    assert text is not None
    (folder / "run.yaml").write_text(text, encoding="utf-8")
    again = expanded([str(folder / "run.yaml")])
    assert values(again) == {"trainer.default_local_dir": str(folder), **values([*words, "nproc=4"])}
    assert run_file(again, 4, folder) == text


@pytest.mark.parametrize("words", ["={a:{c:2}} .a={b:1} .b=null", ".b=2 ={a:1}", ".a=1 =null .b=2"])
def test_words_about_the_same_node_compose_as_the_file_that_they_become(tmp_path, words):
    words = [f"model.override_config{word}" for word in words.split()]
    (tmp_path / "run.yaml").write_text(run_file(words, 1, tmp_path))
    again = trainer_words([str(tmp_path / "run.yaml")])
    assert compose(again).model.override_config == compose(words).model.override_config


def test_the_file_of_a_run_has_what_hydra_alone_cannot_read_and_paths_within_values(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "books.idx").touch()
    words = ["data=multidoc", "data.train_dir=~/x", "data.blend=[[1,index/books]]", "system={'数学':a}"]
    words += [
        "model.partial_pretrain=index",
        "trainer.hooks=[h.py:Hook,module:Hook]",
        "eval.score=s.py:right",
        "data.val_dir=a/${oc.env:B}",
    ]
    (tmp_path / "run.yaml").write_text(run_file([*words, "trainer.overwrite=true"], 1, tmp_path / "own"))
    assert values(expanded(["run.yaml"])) == {
        "data": "multidoc",
        "data.train_dir": "~/x",
        "data.blend": [[1, f"{tmp_path}/index/books"]],
        "data.val_dir": f"{tmp_path}/a/${{oc.env:B}}",
        "system": {"数学": "a"},
        "model.partial_pretrain": f"{tmp_path}/index",
        "trainer.hooks": [f"{tmp_path}/h.py:Hook", "module:Hook"],
        "eval.score": f"{tmp_path}/s.py:right",
        "trainer.default_local_dir": f"{tmp_path}/own",
        "nproc": 1,
    }


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--config-dir=mine", "recipe=own"], "--config-dir=mine"),
        (["~trainer.logger"], "~trainer.logger"),
        (["data.seed=1", "system='password: 1234'"], "system"),
    ],
)
def test_a_run_whose_words_no_file_holds_says_why(words, named):
    with refused(named) as why:
        run_file(words, 1, Path("run"))
    assert "1234" not in str(why.value)


# {the start of a path: where the path is then, in the folder of the file}
STARTS = {
    "": "{file}",
    "./": "{file}",
    "../": "{file}/..",
    "/": "",
    "${oc.env:RELATIVE}/": "{file}/sub",
    "${oc.env:NOT_SET,sub}/": "{file}/sub",
    "${oc.env:ABSOLUTE}/": "/root",
    "${trainer.project_name}/": "{file}/project",
    "${data.custom_cls.root}/": "/own",
    "${trainer.default_local_dir}/": "{file}/out",
    "../${oc.env:RELATIVE}/": "{file}/../sub",
}
files = word.map(lambda name: f"{name}.jsonl")  # no name of the Hub
PATHS = (
    *("data.train_dir", "data.val_dir", "data.sources.a", "data.cache_dir", "eval.prompts", "loss.custom_cls.path"),
    *("chat_templates", "data.mixture.sources.a.train_dir", "data.train_files", "trainer.default_hdfs_dir"),
    *("profiler.save_path", "trainer.resume_from_path"),
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(PATHS), st.tuples(st.sampled_from([*STARTS]), files), min_size=1), st.booleans())
def test_a_path_starts_at_the_file_whatever_its_references_are(tmp_path_factory, paths, nested):
    folder = tmp_path_factory.mktemp("job")
    options = {key: f"{start}{name}" for key, (start, name) in paths.items()}
    options |= {"trainer.default_local_dir": "out", "trainer.project_name": "project", "data.custom_cls.root": "/own"}
    tree = OmegaConf.create({})
    for key, value in options.items():
        OmegaConf.update(tree, key, value, force_add=True)
    (folder / "run.yaml").write_text(OmegaConf.to_yaml(tree) if nested else yaml.safe_dump(options))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RELATIVE", "sub")
        patch.setenv("ABSOLUTE", "/root")
        words = trainer_words([str(folder / "run.yaml")])
        for composed in (words, trainer_words([_written(run_file(words, 1, folder))])):
            config = OmegaConf.create({})
            for key, value in values(composed).items():
                OmegaConf.update(config, key, value, force_add=True)
            for key, (start, name) in paths.items():
                expected = os.path.normpath(f"{STARTS[start].format(file=folder)}/{name}")
                assert os.path.normpath(OmegaConf.select(config, key)) == expected


def _written(text: str) -> str:
    """Return a file with the text, in a folder of its own."""
    file = Path(tempfile.mkdtemp(), "run.yaml")
    file.write_text(text)
    return str(file)


def test_a_tokenized_folder_is_no_name_of_the_hub(file):
    for node, key in (("packed", "train_dir"), ("pretrain", "train_dir"), ("multidoc", "blend")):
        path = "[[1, owner/name]]" if key == "blend" else "owner/name"
        file.write_text(
            f"data: {node}\ndata.{key}: {path}\ndata.max_tokens: 1024\nmodel.path: {file.parent}\noptim.lr: 1\n"
        )
        config, _ = compose_run(trainer_words([str(file)]))
        lines = [*data_problems(resolve_run(config, Machine(1)))]
        assert [line for line in lines if line.startswith(f"data.{key} ") and f"{file.parent}/owner/name" in line], (
            lines
        )


def test_a_choice_stands_beside_the_keys_of_its_node(file):
    words = ["data=pretrain", "data.max_tokens=64", "loss=sqrt"]
    assert OmegaConf.create(run_file(words, 1, Path("/run"))) == {
        "data": "pretrain",
        "data.max_tokens": 64,
        "loss": "sqrt",
        "nproc": 1,
        "trainer": {"default_local_dir": "/run"},
    }


def test_every_option_whose_meaning_is_a_file_or_folder_starts_at_the_file():
    rows = [*keys_of("train"), *keys_of("tokenize")]
    named = {row.key for row in rows if re.search(r"\b([Ff]older|[Ff]iles?|path)\b", row.meaning)}
    of_tokenize = {"sources", "output_dir"}  # data.sources and data.cache_dir take their place
    others = {"model.allow_weight_mismatch", "eval.category_field", "trainer.logger", "trainer.overwrite"}
    others |= {"trainer.eval_only", "optim.optimizer_impl"}
    others |= {"engine.qat.quantization_config_path"}  # of a training for quantization, which is refused
    others |= {"val_share", "format"} | of_tokenize
    assert named - {key.name for key in KEYS if key.path} - others == set()


NUMBERS = ["1e-5", "1E5", "+1e3", "1.e5", "1.5e3", "1_0e5", "1e+05", ".5e-3", "1.5", "1_000", "0x1F", "017", ".inf"]
WORDS = ["1e", "1_e5", "e5", "1.0.0", "2024-01-01", "no", "~"]


@pytest.mark.parametrize("word", [*NUMBERS, *WORDS])
def test_a_value_is_what_hydra_reads_in_a_configuration(file, word):
    expected = OmegaConf.create(f"value: {word}").value
    file.write_text(f"optim.lr: {word}\nmodel.override_config: {{1e3: 1, 007: 2}}\n")
    found = values(expanded([str(file)]))
    assert (found["optim.lr"], type(found["optim.lr"])) == (expected, type(expected))
    assert found["model.override_config"] == {"1e3": 1, "007": 2}


def test_a_recipe_that_is_a_whole_run_is_a_base_whose_paths_start_at_the_file(file):
    file.write_text("recipe: qwen3_8b_sft\ndata.sources: {own: own.jsonl}\noptim.lr: 2e-5\n")
    found = values(trainer_words([str(file)]))
    assert [key for key in found if key.startswith("data.sources")] == ["data.sources.own"]
    assert (found["optim.lr"], found["trainer.default_local_dir"]) == (2e-5, f"{file.parent}/out")
    assert "nproc=8" in expanded(["recipe=qwen3_8b_sft"])


MISTAKES = {
    "a tab": ("nproc: 2\n\tdata: 1\n", ["run.yaml:2", "YAML"]),
    "a key twice": ("nproc: 2\nnproc: 3\n", ["run.yaml:2", "nproc"]),
    "a nested and a dotted key": ("optim: {lr: 1}\noptim.lr: 2\n", ["optim.lr", "nested", "dotted"]),
    "a list for a node": ("optim: [1, 2]\n", ["optim", "[1, 2]"]),
    "nothing for a node": ("optim:\n", ["optim", None]),
    "a list": ("- a\n- b\n", ["run.yaml", "keys"]),
    "two recipes": ("recipe: quickstart\ndefaults: [recipe: gsm8k_code]\n", ["recipe", "once"]),
    "a choice twice": ("loss: sqrt\ndefaults: [loss: sequence]\n", ["loss", "once"]),
    "a text": ("just words\n", ["run.yaml", "keys"]),
    "a mapping as defaults": ("defaults: {a: b}\n", ["defaults", "list"]),
    "axolotl": ("base_model: m\ndatasets: []\n", ["axolotl", "verl-ext migrate"]),
    "TRL": ("model_name_or_path: m\ndataset_name: d\n", ["TRL", "verl-ext migrate"]),
    "LLaMA-Factory": ("model_name_or_path: m\nstage: sft\n", ["LLaMA-Factory", "verl-ext migrate"]),
    "bytes": (b"\xff\xfe\x00", ["run.yaml", "YAML"]),
}


@pytest.mark.parametrize(("content", "things"), MISTAKES.values(), ids=MISTAKES)
def test_a_file_that_is_not_a_run_is_refused_in_one_line(file, capsys, content, things):
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["train", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert names(line, *things), line


@pytest.mark.parametrize(
    ("words", "things"),
    [
        (["none.yaml"], ["none.yaml", "nothing there"]),
        (["sft", "model.path=m"], ["key=value", "sft"]),
        (["data.train_dir=d", "--optim.lr", "1e-5"], ["--optim.lr", "optim.lr=1e-5"]),
        (["data.train_dir=d", "--optim.lr=1e-5"], ["optim.lr=1e-5"]),
        (["data.train_dir=d", "optim.lr"], ["optim.lr"]),
    ],
)
def test_words_that_are_no_overrides_are_refused_before_anything_starts(words, things, capsys):
    assert main(["train", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert names(line, *things), line


@pytest.mark.parametrize("key", ["model.path", "chat_template"])
def test_a_path_beside_the_working_directory_and_not_the_file_is_refused(file, capsys, key):
    Path("model").mkdir()
    file.write_text(f"{key}: model\n")
    assert main(["train", str(file)]) == 2
    assert names(capsys.readouterr().err, key)


def test_a_file_with_a_base_has_its_differences_alone_and_sources_of_its_own(file):
    other = file.parent / "other" / "small.yaml"
    other.parent.mkdir()
    other.write_text("base: ../run.yaml\ndata: {sources: {code: code.jsonl}, max_tokens: 64}\nparallel: cpu\n")
    whole, mine = (values(expanded([str(each)])) for each in (file, other))
    assert whole.pop("data.sources") != mine["data.sources.code"] == str(other.parent / "code.jsonl")
    changed = {"data.sources.code", "data.max_tokens", "parallel"}
    assert {key: value for key, value in mine.items() if key not in changed} == {
        key: value for key, value in whole.items() if key not in changed
    }
    assert (mine["data.max_tokens"], mine["parallel"]) == (64, "cpu")


def test_a_base_that_is_not_another_file_is_one_line(file):
    for text, things in {
        f"base: {file.name}": (file, "base", f"got {file.name}"),
        "base: 7": (file, "base", 7),
        "base: none.yaml": (f"{file.parent}/none.yaml", "nothing there"),
    }.items():
        file.write_text(text)
        with refused(*things):
            expanded([str(file)])


def test_a_tokenized_folder_takes_the_place_of_all_that_it_would_be_made_of(file):
    file.write_text("data: {sources: {a: a.jsonl}, val_share: 0.1, max_tokens: 64}")
    words = expanded([str(file), "data.train_dir=tokenized"])
    assert words == ["data.max_tokens=64", "data.train_dir=tokenized"]


def test_a_file_may_choose_in_its_defaults_beside_the_keys_of_the_node(file):
    file.write_text("defaults: [{model: lora}]\nmodel: {path: owner/name, lora_rank: 4}\noptim.lr: 1e-4\n")
    mine = values(expanded([str(file)]))
    assert (mine["model"], mine["model.path"], mine["model.lora_rank"]) == ("lora", "owner/name", 4)
