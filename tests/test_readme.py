"""What the README tells a user to type: its make targets, its command lines, and the quickstart itself."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from verl_ext.commands.command_line import read_options
from verl_ext.commands.index import IndexOptions
from verl_ext.commands.init_model.command import InitModelOptions
from verl_ext.commands.tokenize import TokenizeConfig, load_config
from verl_ext.config import compose

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def commands(containing: str) -> list[list[str]]:
    """The words after the program's name of every command of a bash block that holds `containing`."""
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", README, re.DOTALL)).replace("\\\n", " ")
    lines = [line for line in blocks.splitlines() if containing in line]
    assert lines, f"no command of the README holds {containing}"
    last = containing.split()[-1]
    return [shlex.split(line, comments=True)[shlex.split(line).index(last) + 1 :] for line in lines]


def test_the_make_targets_that_it_names_exist():
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"`make ([a-z]+)`|^make ([a-z]+)", README, re.MULTILINE))
    targets = {name for pair in named for name in pair if name}
    assert {"quickstart", "test", "lint", "bench"} <= targets
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_its_training_commands_compose():
    packed, chunked, streamed = (compose(words) for words in commands("verl_ext.fsdp_sft_trainer"))
    assert (packed.data.max_tokens, packed.engine.ulysses_sequence_parallel_size) == (131072, 8)
    assert (chunked.data.max_tokens, chunked.engine.ulysses_sequence_parallel_size) == (32768, 1)
    assert (streamed.data.max_tokens, [path for _, path in streamed.data.blend]) == (4096, ["index/books", "index/web"])


def test_its_tokenise_command_is_understood(tiny_model):
    for words in commands("verl-ext tokenize"):
        config = load_config([word.replace("=MODEL", f"={tiny_model}") for word in words])
        assert isinstance(config, TokenizeConfig)
        assert list(config.source_patterns()) == ["gsm8k", "code"]


def test_its_pretraining_commands_are_understood(tiny_model, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (words,) = commands("verl-ext index")
    index = read_options(IndexOptions, [word.replace("=model", f"={tiny_model}") for word in words])
    assert list(index.sources) == ["books", "web"]
    (words,) = commands("verl-ext init-model")
    assert read_options(InitModelOptions, words).model == "minimind_104m"


def test_the_files_that_it_links_exist():
    assert all((ROOT / link).exists() for link in re.findall(r"\]\((?!http|#)([^)]+)\)", README))


def test_the_quickstart_ends_with_a_table_curves_and_an_answer(tmp_path):
    done = subprocess.run(
        [ROOT / "recipes/quickstart/run.sh", tmp_path / "run", "trainer.total_training_steps=12"],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    told = done.stdout.split("What came of it.")[1]
    for category in ("arithmetic", "documents", "ordering"):
        assert category in told
        assert (tmp_path / "run" / f"loss_{category}.png").stat().st_size > 0
    assert "Answered" in told
