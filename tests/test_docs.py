"""README.md, CONTRIBUTING.md and docs/ are right: commands run on small data, code runs, names and links exist.

A bash block that cannot run on a CPU in seconds says `# needs GPUs` or `# needs data`: the tests then compose its
training commands, and run its data commands with smaller values. A command that no test handles is a failure.
"""

import importlib
import itertools
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import hydra
import pytest

import verl_ext.data
from benchmarks.harness import tables_of, words_of
from tests.chat_server import chat_server
from tests.ranks import run_ranks
from tests.test_babilong_files import write_forms
from tests.test_joined_documents import write_encoder
from tests.test_launch import launch_by
from tests.training import metrics, train_alone
from verl_ext.__main__ import COMMANDS, main
from verl_ext.answers.scores import BUILT_IN
from verl_ext.commands.command_line import read_options
from verl_ext.commands.train import SourceKeys
from verl_ext.config.compose import compose
from verl_ext.config.schema import is_known
from verl_ext.endpoint.quality import DIMENSIONS
from verl_ext.losses.modes import MODES
from verl_ext.options import options_of
from verl_ext.packing.strategies import STRATEGIES
from verl_ext.tools.judging.grid import GridOptions
from verl_ext.tools.show.audit import CHECKS

ROOT = Path(__file__).resolve().parent.parent
MARKS = ("# needs GPUs", "# needs data")
# Smaller values for the data commands on the pages.
SMALLER = {"model": "tiny", "model.path": "MODEL", "samples": "2", "sizes": "[0k]", "backend": "local"}


def texts(*patterns: str) -> dict[str, str]:
    paths = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


PAGES = texts("README.md", "CONTRIBUTING.md", "docs/*.md")
OTHERS = texts("CHANGELOG.md", "benchmarks/README.md", "recipes/*/README.md")


@dataclass(frozen=True)
class Command:
    """One command of a bash block, and whether its block is marked as one that needs GPUs or data."""

    words: tuple[str, ...]
    is_marked: bool

    @property
    def environment(self) -> dict[str, str]:
        return dict(word.split("=", 1) for word in self.words[: self.words.index(self.program)])

    @property
    def program(self) -> str:
        return next(word for word in self.words if not re.match(r"[A-Z_]+=", word))

    @property
    def overrides(self) -> list[str]:
        return [word for word in self.words if re.match(r"[+~]*[a-z][\w.]*=", word)]

    @property
    def module(self) -> str:
        """Return the module that the command starts with -m."""
        return self.words[self.words.index("-m") + 1]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE)


def commands(page: str) -> list[Command]:
    found = []
    for block in blocks(page, "bash"):
        is_marked = any(mark in block for mark in MARKS)
        lines = block.replace("\\\n", " ").splitlines()
        found += [Command(tuple(words), is_marked) for line in lines if (words := shlex.split(line, comments=True))]
    return found


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Make a folder with the pages' inputs: train.jsonl, code.json, web.jsonl, pairs.jsonl, books/, MODEL, data/train.

    It also has bAbI's files and what pages show: chats.jsonl of the README's record, and blocks with `# NAME.py`.
    """
    folder = tmp_path_factory.mktemp("inputs")
    for block in (block for page in PAGES for block in blocks(page, "python")):
        if name := re.match(r"# (\w+\.py)\n", block):
            (folder / name[1]).write_text(block, encoding="utf-8")
    pair = {"prompt": "What stands near the river?", "chosen": "The old bridge.", "rejected": "A tower."}
    (folder / "pairs.jsonl").write_text(f"{json.dumps(pair)}\n" * 40)
    (folder / "chats.jsonl").write_text(blocks("README.md", "json")[0] * 40)
    sums = [{"question": f"What is {i} + {j}?", "answer": f"It is {i + j}."} for i in range(8) for j in range(5)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, sums)))
    code = [{"instruction": f"Print {i}.", "input": "", "output": f"print({i})"} for i in range(30)]
    (folder / "code.json").write_text(json.dumps(code))
    web = [{"text": f"A short page about rivers, bridges and harvest number {i}."} for i in range(30)]
    (folder / "web.jsonl").write_text("\n".join(map(json.dumps, web)))
    (folder / "books").mkdir()
    for i in range(6):
        (folder / "books" / f"{i}.txt").write_text(f"Chapter {i}. The old bridge stood near the river. " * 12)
    write_forms(folder / "tasks_1-20_v1-2" / "en-10k")
    small = "config={num_hidden_layers: 1, hidden_size: 32, intermediate_size: 64, initializer_range: 0.2}"
    tokenizer = ("tokenizer.train_on=[web.jsonl,books/]", "tokenizer.vocab_size=400")
    sources = "sources={gsm8k:train.jsonl,code:code.json}"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["init-model", "model=tiny", "output_dir=MODEL", small, *tokenizer]) == 0
        assert main(["tokenize", sources, "output_dir=data/train", "model.path=MODEL", "num_workers=1"]) == 0
    return folder


@pytest.fixture
def folder(inputs, tmp_path, monkeypatch):
    """Make a copy of those inputs, and enter it."""
    copy = tmp_path / "work"
    shutil.copytree(inputs, copy)
    monkeypatch.chdir(copy)
    return copy


def run_command(*words: str) -> None:
    """Run a command in this process; those that start ranks or plan on an imagined machine have one of their own."""
    if words[0] in ("plan", "train"):
        subprocess.run([sys.executable, "-m", "verl_ext", *words], check=True, timeout=400)
    else:
        assert main(words) == 0


def run_data_command(command: Command) -> None:
    _, name, *words = command.words
    if name in ("migrate", "plan"):
        run_command(name, *words)
        return
    if name == "train":  # two steps, without the GPUs that a page may assume
        small = ["parallel=cpu", "nproc=1", "data.cache_dir=cache", "trainer.total_training_steps=2"]
        kept = [word for word in words if word.partition("=")[0] not in ("parallel", "nproc")]
        kept = ["model.path=MODEL" if word.startswith("model.path=") else word for word in kept]  # no name on the Hub
        run_command(name, *kept, *small)
        return
    if name == "show":
        needed = [words[0], *(word.partition("=")[2] for word in words if word.startswith(("val=", "against=")))]
        if all(map(os.path.exists, needed)):
            run_command(name, *words)
        return
    given = dict(word.split("=", 1) for word in words)
    if name == "judge":
        run_judge(given)
        return
    if name == "grid":  # its folders are those of other pages' runs
        assert {"judged", "score", "output_dir"} <= given.keys() <= options_of(GridOptions).keys()
        return
    if name == "synthesize":
        is_scored = given.get("task") == "preferences"  # whose answers must differ

        def reply(request: dict[str, int]) -> str:
            return f"Answer {request['seed']}" if is_scored else "1: What stands near the river?"

        with chat_server(reply) as server:
            small = {"intervals": "[8,4096]", "near_duplicates": "null"}
            if is_scored:
                Path("scorer.py").write_text("def number(messages, answer):\n    return int(answer.split()[-1])\n")
                small |= {"scorer.kind": "scorer.py:number", "scorer.path": "null"}
            if given.get("task") == "glm_long_documents":
                books = {"sources": "{books:books/}", "encoder.path": str(write_encoder(Path("encoder"), "MODEL"))}
                small |= {**books, "class_field": "null"}
            else:
                small |= {"endpoint.base_url": server.url, "endpoint.model": "tiny", "records": "null"}
            run_command(name, *(f"{key}={value}" for key, value in {**given, **small}.items()))
        return
    smaller = {key: SMALLER[key] for key in given if command.is_marked and key in SMALLER}
    run_command(name, *(f"{key}={value}" for key, value in {**given, **smaller, "overwrite": "true"}.items()))


def run_judge(given: dict[str, str]) -> None:
    """Run a command of LongBench-Write with one case of our own, and one small model in place of each."""
    Path("cases.jsonl").write_text(json.dumps({"prompt": "Write 100 words.", "type": "Story", "length": 100}))
    is_shipped = given["cases"] == "shipped"
    models = {key: "MODEL" for key in given if key.startswith("models.")}
    verdict = json.dumps(dict.fromkeys(DIMENSIONS, 3))
    verdict += "[[3]]" if is_shipped else ""
    with chat_server(lambda _: verdict) as server:
        small = {"lengths": "[20]", "limit": "1"} if is_shipped else {"cases": "cases.jsonl"}
        small |= {"judge.base_url": server.url, "max_tokens": "8"}
        run_command("judge", *(f"{key}={value}" for key, value in {**given, **models, **small}.items()))


def run_module(command: Command) -> None:
    if command.module == "benchmarks":
        check_benchmark(command)
        return
    if command.module == "verl.trainer.sft_trainer":
        with hydra.initialize_config_module("verl.trainer.config", version_base=None):
            config = hydra.compose("sft_trainer_engine", overrides=command.overrides)
        assert config.data.custom_cls.path == "pkg://verl_ext.data"
        assert hasattr(verl_ext.data, config.data.custom_cls.name)
        return
    on_ray = command.module == "verl_ext.fsdp_sft_trainer_ray" and command.is_marked
    assert on_ray or command.module == "verl_ext.fsdp_sft_trainer"
    if command.is_marked:
        config = compose(command.overrides)
        assert config.model.path
        assert config.data.get("train_dir") or config.data.get("blend")
    else:
        run_ranks(train, 1, os.getcwd(), command.overrides)
        logged = metrics(Path("run"))
        assert [step for step, name in logged if name == "train/loss"] == [1, 2, 3, 4]
        for name in {name for _, name in logged}:
            general = re.sub(r"/(gsm8k|code)_", "/<category>_", name)
            assert f"`{general}`" in PAGES["docs/metrics.md"], f"{name} is not in docs/metrics.md"


def train(folder: str, overrides: list[str]) -> None:
    os.chdir(folder)
    train_alone(overrides)


def check_benchmark(command: Command) -> None:
    """Check that the benchmark has the tables and options, and the trainer the overrides."""
    name, *words = command.words[command.words.index("benchmarks") + 1 :]
    module = importlib.import_module(f"benchmarks.{name}")
    assert {table for flag, table in itertools.pairwise(words) if flag == "--table"} <= {*tables_of(module)}
    with patch("torch.cuda.is_available", lambda: True):
        options = read_options(module.Options, command.overrides)
    assert compose(["model.path=MODEL", *words_of(options.overrides)]).model.path


def check_launcher(command: Command) -> None:
    """Compose the overrides of the last line of a dry run."""
    arguments = command.words[command.words.index(command.program) + 1 :]
    code, output, errors = launch_by(ROOT / command.program, *arguments, **command.environment)
    assert code == 0, errors
    words = tuple(shlex.split(output.splitlines()[-1]))
    assert words[0] in ("torchrun", "ray", "env")
    if command.overrides:
        run_module(Command(words, is_marked=True))


def check_sbatch(command: Command) -> None:
    script = next(word for word in command.words if word.endswith(".sbatch"))
    assert os.access(ROOT / script, os.X_OK)
    assert compose(command.overrides).model.path


def check_manifest(command: Command) -> None:
    assert command.words[1:3] == ("apply", "-f")
    assert (ROOT / command.words[3]).is_file()


def check_make(command: Command) -> None:
    assert re.search(rf"^{command.words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def check_pip(command: Command) -> None:
    for extra in re.findall(r"\[(\w+)]", command.words[-1]):
        assert re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


def check_pytest(command: Command) -> None:
    assert command.module == "pytest"
    assert all((ROOT / word).is_file() for word in command.words if word.startswith("tests/"))


def check_harness(command: Command) -> None:
    """Check that the named task is one of the folder's, as lm-eval is not installed here."""
    given = dict(zip(command.words, command.words[1:], strict=False))
    tasks = [path.read_text(encoding="utf-8") for path in (ROOT / given["--include_path"]).glob("*.yaml")]
    assert any(f"task: {given['--tasks']}\n" in task for task in tasks)


HANDLERS: dict[str, Callable[[Command], None]] = {
    "verl-ext": run_data_command,
    "torchrun": run_module,
    "launch/node.sh": check_launcher,
    "launch/ray.sh": check_launcher,
    "python": run_module,
    "sbatch": check_sbatch,
    "kubectl": check_manifest,
    "make": check_make,
    "pip": check_pip,
    "lm-eval": check_harness,
    ".venv/bin/python": check_pytest,
}


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "bash")])
def test_the_commands_of_a_page_work_one_after_the_other(page, folder):
    for command in commands(page):
        assert command.program in HANDLERS, f"{page}: nothing here checks {' '.join(command.words)}"
        HANDLERS[command.program](command)


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=[pytest.mark.slow] * ("training" in p)) for p in PAGES if blocks(p, "python")]
)
def test_the_code_of_a_page_runs(page, folder):
    for block in blocks(page, "python"):
        exec(compile(block, page, "exec"), {})


@pytest.mark.parametrize(
    ("page", "expected"),
    [("docs/training.md", (131072, 8)), ("docs/babilong_titans.md", (32768, 1)), ("docs/pretraining.md", (4096, 1))],
)
def test_the_first_large_training_command_of_a_page_means_what_the_page_says(page, expected):
    command = next(c for c in commands(page) if c.is_marked and c.program == "torchrun")
    config = compose(command.overrides)
    assert (config.data.max_tokens, config.engine.ulysses_sequence_parallel_size) == expected


@pytest.mark.parametrize("page", PAGES)
def test_the_config_keys_that_a_page_names_exist(page):
    today = PAGES[page].partition("## Command lines of verl")[0]
    nodes = "data|loss|attention|model|engine|trainer|checkpoint|optim"
    keys = set(re.findall(rf"`[+~]?((?:{nodes})\.[a-z_.]*[a-z_])[`=]", today))
    keys -= {f"data.{name}" for name in options_of(SourceKeys)}  # those of `verl-ext train` alone
    assert not {key for key in keys if not is_known(key)}


@pytest.mark.parametrize("page", PAGES | OTHERS)
def test_links_lead_to_files_and_headings_that_exist(page):
    text = (PAGES | OTHERS)[page]
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        path, _, heading = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page}: {link}"
        if heading:
            titles = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}  # GitHub's
            assert heading in anchors, f"{page}: {link}"


@pytest.mark.parametrize("page", PAGES)
def test_the_files_and_make_targets_that_a_page_names_exist(page):
    text = PAGES[page]
    named = re.findall(r"`(?:python |pytest )?((?:verl_ext|tests|benchmarks|recipes|conf|launch)/[^`\s]*)", text)
    missing = [path for path in named if not re.search(r"[A-Z<*]{2}|…", path) and not (ROOT / path).exists()]
    assert not missing
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{name}:", makefile, re.MULTILINE) for name in re.findall(r"`make ([\w-]+)", text))


def test_the_readme_fits_on_a_screen_and_lists_every_recipe_command_and_page():
    readme = PAGES["README.md"]
    assert len(readme.splitlines()) <= 100
    recipes = [path.parent.name for path in ROOT.glob("recipes/*/README.md")]
    assert all(f"(recipes/{name}/README.md)" in readme for name in recipes)
    assert all(f"({page})" in readme for page in PAGES if page.startswith("docs/"))
    assert all(f"`verl-ext {name}`" in PAGES["docs/data.md"] or name == "tokenize" for name in COMMANDS)


def test_the_architecture_page_draws_every_room():
    drawn = set(re.findall(r"\w+", blocks("docs/architecture.md", "")[0]))
    rooms = {path.stem for path in (ROOT / "verl_ext").iterdir() if path.suffix in ("", ".py")}
    assert rooms - drawn <= {"__init__", "__pycache__", "conf"}


def test_the_configuration_page_is_what_the_options_say():
    made = runpy.run_path(str(ROOT / "docs" / "make_configuration.py"))["page"]()
    assert made == (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8"), "python docs/make_configuration.py"


def test_each_name_of_a_table_in_the_code_stands_on_its_page():
    pages = {"docs/loss.md": MODES, "docs/packing.md": STRATEGIES, "docs/answers.md": BUILT_IN, "docs/data.md": CHECKS}
    for page, names in pages.items():
        assert [name for name in names if f"`{name}" not in PAGES[page]] == [], page
    assert {f"{name}.yaml" for name in MODES} - set(os.listdir(ROOT / "conf" / "loss")) == set()
