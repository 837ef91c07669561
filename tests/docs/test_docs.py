"""README.md, CONTRIBUTING.md and docs/ are right: commands run on small data, code runs, names and links exist.

A bash block that cannot run on a CPU in seconds says `# needs GPUs` or `# needs data`: the tests then compose its
training commands, and run its data commands with smaller values. A command that no test handles is a failure.
A line of a block that ends in `# exit code 1` shows how something is refused.
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

import verl_ext
import verl_ext.data
from benchmarks.harness import tables_of, words_of
from tests.lib.babilong_files import write_forms
from tests.lib.chat_server import chat_server
from tests.lib.encoders import write_encoder
from tests.lib.launchers import launch_by
from tests.lib.project import ROOT
from tests.lib.ranks import forked, run_ranks
from tests.lib.training import metrics, train_as_programs
from verl_ext.__main__ import COMMANDS, main
from verl_ext.answers.scores import BUILT_IN
from verl_ext.commands.command_line import read_options
from verl_ext.commands.train import SourceKeys, split
from verl_ext.config.compose import compose
from verl_ext.config.key_table import TABLE
from verl_ext.config.schema import is_known
from verl_ext.losses.modes import MODES
from verl_ext.options import options_of
from verl_ext.packing.strategies import STRATEGIES
from verl_ext.tools.endpoint.quality import DIMENSIONS
from verl_ext.tools.judging.grid import GridOptions
from verl_ext.tools.show.audit import CHECKS

MARKS = ("# needs GPUs", "# needs data")
# Smaller values for the data commands on the pages.
SMALLER = {"model": "tiny", "model.path": "MODEL", "samples": "2", "sizes": "[0k]", "backend": "local"}
WHOLE = {"sft.yaml", "loss.nll_weight=1"}  # of docs/tutorials/preferences.md: runs that its judge tells from each other
PLANNED: set[tuple[str, ...]] = set()


def texts(*patterns: str) -> dict[str, str]:
    paths = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


PAGES = texts("README.md", "CONTRIBUTING.md", "docs/**/*.md")
OTHERS = texts(
    "CHANGELOG.md", "benchmarks/README.md", "recipes/README.md", "recipes/*/README.md", "recipes/papers/*/README.md"
)
# Their tables name keys of earlier versions of verl.
EARLIER = ("docs/guides/verl/commands.md", "docs/reference/verl_options.md")


@dataclass(frozen=True)
class Command:
    """One command of a bash block, and whether its block is marked as one that needs GPUs or data."""

    words: tuple[str, ...]
    is_marked: bool
    exit_code: int = 0

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
        for line in lines:
            code = re.search(r"# exit code (\d+)$", line)
            if words := shlex.split(line, comments=True):
                found.append(Command(tuple(words), is_marked, int(code[1]) if code else 0))
    return found


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Make a folder with the pages' inputs: train.jsonl, code.json, web.jsonl, pairs.jsonl, books/, MODEL, data/train.

    It also has bAbI's files and what pages show: chats.jsonl of the README's record, and blocks that begin with a name.
    """
    folder = tmp_path_factory.mktemp("inputs")
    languages = ("python", "yaml", "json")
    for block in (block for page in PAGES for language in languages for block in blocks(page, language)):
        if name := re.match(r"# (\w+\.(py|yaml|jsonl?))\n", block):
            is_json = name[2].startswith("json")  # which has no comments
            (folder / name[1]).write_text(block.removeprefix(name[0]) if is_json else block, encoding="utf-8")
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


def run_command(*words: str, code: int = 0) -> None:
    """Run a command in this process, or a plan in a fork; ranks are forks as well.

    One plan has an imagined GPU, of the inputs that all pages have; the others are checked, and pack their data.
    """
    if words[0] == "train" and "dry_run=true" not in words:  # tests/commands/test_train_command.py starts the program
        parts = split(words[1:])
        for texts in parts.texts.values():
            texts.tokenize()
        lines = [["verl_ext.fsdp_sft_trainer", *parts.trainer_words, "data.num_workers=0"]]
        run_ranks(train_as_programs, parts.options.nproc or 1, lines, os.getcwd())
    elif words[0] != "plan":
        assert main(words) == code
    elif words not in PLANNED:
        of_inputs = {"data.train_dir=data/train", "model.path=MODEL"} <= {*words}
        process = forked(plan, os.getcwd(), [word for word in words if of_inputs or not word.startswith("plan.gpu")])
        process.join(400)
        assert process.exitcode == code
        PLANNED.update([words] * of_inputs)


def plan(folder: str, words: list[str]) -> None:
    os.chdir(folder)
    sys.exit(main(words))


def run_data_command(command: Command) -> None:
    _, name, *words = command.words
    if name in ("env", "migrate", "plan"):
        run_command(name, *words)
        return
    if name == "train":  # two steps, without the GPUs that a page may assume
        kept = [word for word in words if "nproc=2" in words or word.partition("=")[0] not in ("parallel", "nproc")]
        small = [] if "nproc=2" in words else ["parallel=cpu", "nproc=1"]
        small += [] if WHOLE & {*words} else ["trainer.total_training_steps=2"]
        run_command(name, *map(with_local_model, kept), *small, code=command.exit_code)
        return
    if name == "chat":  # with the small model in place of a run's, which may have no template
        kept = [word for word in words[1:] if "=" in word and not word.startswith(("prompt=", "max_new_tokens="))]
        run_command(name, "MODEL", *kept, "prompt=hi", "max_new_tokens=4")
        return
    if name == "show":
        paths = [word for word in words if "=" not in word and word not in ("run", "data")][:1]
        paths += [word.partition("=")[2] for word in words if word.startswith(("val=", "against="))]
        if not command.is_marked or all(map(os.path.exists, paths)):
            run_command(name, *map(with_local_model, words), code=command.exit_code)
        return
    if name == "recipes":
        assert main(command.words[1:]) == 0
        return
    if name == "export" and "=" not in words[0]:
        words[0] = f"checkpoint={words[0]}"
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
            small = {"near_duplicates": "null"} | ({} if is_scored else {"intervals": "[8,4096]"})
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
    words = [f"{key}={value}" for key, value in {**given, **smaller, "overwrite": "true"}.items()]
    run_command(name, *words, code=command.exit_code)


def with_local_model(word: str) -> str:
    """Return an override with the small model in place of a name on the Hub."""
    key, _, value = word.partition("=")
    return "model.path=MODEL" if key == "model.path" and not os.path.isdir(value) else word


def run_judge(given: dict[str, str]) -> None:
    """Run a command with cases of our own where the page has none, and one small model in place of each that is not."""
    if os.path.isdir(given.get("models.after", "")):
        run_command("judge", *(f"{key}={value}" for key, value in given.items()))
        models = json.loads(Path(given["output_dir"], "results.json").read_text())["models"]
        assert [models[name]["figures"]["all"]["score"]["mean"] for name in ("before", "after")] == [0, 1]
        return
    Path("cases.jsonl").write_text(json.dumps({"prompt": "Write 100 words.", "type": "Story", "length": 100}))
    models = {key: "MODEL" for key in given if key.startswith("models.")}
    with chat_server(lambda _: json.dumps(dict.fromkeys(DIMENSIONS, 3))) as server:
        small = {"cases": "cases.jsonl"}
        if given["task"] == "prompts":
            small |= {"cases": "train.jsonl", "limit": "2", "max_tokens": "8"}
            small |= {"endpoint.base_url": server.url} if "endpoint.base_url" in given else {}
        else:
            small |= {"judge.base_url": server.url, "max_tokens": "8"}
        run_command("judge", *(f"{key}={value}" for key, value in {**given, **models, **small}.items()))


def run_module(command: Command) -> None:
    if command.words[1].endswith(".py"):  # a script that a page shows or a recipe brings
        subprocess.run([sys.executable, *command.words[1:]], check=True, timeout=100)
        return
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
        more = ["data.num_workers=0", "trainer.logger=[console,file]"]
        run_ranks(train_as_programs, 1, [[*command.words, *more]], os.getcwd())
        logged = metrics(Path("run"))
        assert [step for step, name in logged if name == "train/loss"] == [1, 2, 3, 4]
        for name in {name for _, name in logged}:
            general = re.sub(r"/(gsm8k|code)_", "/<category>_", name)
            assert f"`{general}`" in PAGES["docs/reference/metrics.md"], f"{name} is not in docs/reference/metrics.md"


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
    [("training/run", (131072, 8)), ("babilong/titans", (32768, 1)), ("pretraining/start", (4096, 1))],
)
def test_the_first_large_training_command_of_a_page_means_what_the_page_says(page, expected):
    command = next(c for c in commands(f"docs/guides/{page}.md") if c.is_marked and c.program == "torchrun")
    config = compose(command.overrides)
    assert (config.data.max_tokens, config.engine.ulysses_sequence_parallel_size) == expected


@pytest.mark.parametrize("page", PAGES)
def test_the_config_keys_that_a_page_names_exist(page):
    if page in EARLIER:
        return
    nodes = "data|loss|attention|model|engine|trainer|checkpoint|optim"
    keys = set(re.findall(rf"`[+~]?((?:{nodes})\.[a-z_.]*[a-z_])[`=]", PAGES[page]))
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


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "diff")])
def test_the_lines_of_a_diff_stand_in_its_file(page):
    for block in blocks(page, "diff"):
        for part in re.split(r"^\+\+\+ ", block, flags=re.MULTILINE)[1:]:
            name, _, lines = part.partition("\n")
            text = (ROOT / name).read_text(encoding="utf-8")
            for hunk in lines.split("@@\n"):
                assert re.sub("^.", "", hunk, flags=re.MULTILINE) in text, f"{page}: {name}: {hunk}"


@pytest.mark.parametrize("page", PAGES)
def test_the_files_and_make_targets_that_a_page_names_exist(page):
    text = PAGES[page]
    named = re.findall(r"`(?:python |pytest )?((?:verl_ext|tests|benchmarks|recipes|conf|launch)/[^`\s]*)", text)
    missing = [path for path in named if not re.search(r"[A-Z<*]{2}|…", path) and not (ROOT / path).exists()]
    assert not missing
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{name}:", makefile, re.MULTILINE) for name in re.findall(r"`make ([\w-]+)", text))


def test_the_readme_is_short_and_the_manual_lists_every_page():
    readme = PAGES["README.md"]
    manual = PAGES["docs/README.md"]
    assert len(readme.splitlines()) <= 150
    index = OTHERS["recipes/README.md"]
    recipes = [page.removeprefix("recipes/") for page in OTHERS if re.match(r"recipes/.+/README\.md", page)]
    assert [page for page in recipes if f"({page})" not in index] == []
    assert "(recipes/README.md)" in readme
    for page in PAGES.keys() - {"README.md", "CONTRIBUTING.md", "docs/README.md"}:
        index = Path(page).parent / "README.md"
        own = f"({Path(page).name})" in PAGES.get(index.as_posix(), "")
        assert own or f"({page.removeprefix('docs/')})" in manual, page
    commands = PAGES["docs/reference/commands.md"]
    assert all(f"`verl-ext {name}`" in commands or name == "tokenize" for name in COMMANDS)


def test_the_architecture_page_draws_every_room():
    drawn = set(re.findall(r"\w+", blocks("docs/why/architecture.md", "")[0]))
    rooms = {path.stem for path in (ROOT / "verl_ext").iterdir() if path.suffix in ("", ".py")}
    assert rooms - drawn <= {"__init__", "__pycache__", "conf"}


def test_the_pages_of_options_and_commands_are_what_the_code_says():
    made = runpy.run_path(str(ROOT / "docs" / "make_configuration.py"))
    reference = ROOT / "docs" / "reference"
    today = {path.relative_to(reference).as_posix() for path in reference.glob("*/*.md")}
    assert made["pages"]().keys() == today, "python docs/make_configuration.py"
    files = {reference / name: text for name, text in made["pages"]().items()} | {TABLE: made["table"]()}
    for file, text in files.items():
        assert text == file.read_text(encoding="utf-8"), f"{file}: python docs/make_configuration.py"


def test_the_page_of_public_names_has_each_of_them():
    page = PAGES["docs/reference/api.md"]
    shown = {name.rpartition(".")[2] for name in re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE)}
    used = {
        name
        for text in PAGES.values()
        for names in re.findall(r"^from verl_ext\.(?:data|losses|trainer\.hooks) import (.*)$", text, re.MULTILINE)
        for name in names.split(", ")
    }
    public = {*verl_ext.__all__, *verl_ext.data.__all__, *used} - {"__version__"}
    assert public - shown == set()
    for name in re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE):
        module, _, member = name.rpartition(".")
        assert getattr(importlib.import_module(module), member).__doc__


def test_each_name_of_a_table_in_the_code_stands_on_its_page():
    pages = {
        "docs/why/loss.md": MODES,
        "docs/guides/packing/packs.md": STRATEGIES,
        "docs/guides/answers.md": BUILT_IN,
        "docs/guides/data/audit.md": CHECKS,
    }
    for page, names in pages.items():
        assert [name for name in names if f"`{name}" not in PAGES[page]] == [], page
    assert {f"{name}.yaml" for name in MODES} - set(os.listdir(ROOT / "conf" / "loss")) == set()
