"""`verl-ext tokenize` as a user starts it: exit codes, one-line errors, and a run that is killed."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from datasets import load_from_disk

from tests.test_tokenize_templates import CHATML, tiny_tokenizer
from verl_ext.files import OutputFolder

pytestmark = pytest.mark.slow


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "verl_ext", "tokenize", *arguments]


def test_run_ends_with_a_table_and_a_bad_record_with_code_1(tmp_path: Path) -> None:
    tiny_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    (tmp_path / "in.jsonl").write_text('{"text": "the cat"}\n')
    (tmp_path / "bad.jsonl").write_text('{"text": "the cat"}\n{"txt": 1}\n')
    good = command("sources={a:in.jsonl}", "output_dir=out", "model.path=model")
    done = subprocess.run(good, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0), done.stderr
    assert done.stdout.splitlines()[1].split()[:2] == ["a", "1"]
    assert len(load_from_disk(str(tmp_path / "out"))) == 1
    bad = command("sources={a:bad.jsonl}", "output_dir=out2", "model.path=model")
    done = subprocess.run(bad, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: bad.jsonl:2: no known shape among the fields: txt;")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl", "in.jsonl", "model", "out"]


@pytest.mark.parametrize("trusted", [False, True])
def test_torch_is_imported_only_for_a_tokenizers_own_code(tmp_path: Path, trusted: bool) -> None:
    tiny_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    (tmp_path / "in.jsonl").write_text('{"text": "the cat"}\n')
    program = (
        "import sys; from verl_ext.commands.tokenize import main\n"
        "print(main(sys.argv[1:]), 'transformers' in sys.modules, 'torch' in sys.modules)"
    )
    arguments = ["sources={a:in.jsonl}", "output_dir=out", "model.path=model", "num_workers=1"]
    command = [sys.executable, "-c", program, *arguments, f"model.trust_remote_code={trusted}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == f"0 True {trusted}", done.stderr


def test_killed_run_leaves_nothing_that_loads_and_the_next_cleans_up(tmp_path: Path) -> None:
    tiny_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    (tmp_path / "in.jsonl").write_text('{"text": "the cat sat on the mat"}\n' * 2_000_000)  # minutes of work
    arguments = command("sources={a:in.jsonl}", "output_dir=out", "model.path=model", "num_workers=1")
    process = subprocess.Popen(arguments, cwd=tmp_path, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob(".out.unfinished-*")):
        assert time.monotonic() < deadline
        with contextlib.suppress(subprocess.TimeoutExpired):
            assert process.wait(timeout=0.02) is None
    process.kill()
    process.wait(timeout=60)
    assert not (tmp_path / "out").exists()
    (left,) = tmp_path.glob(".out.unfinished-*")
    host, number = left.name.rsplit("-", 1)
    elsewhere = left.with_name(
        f"{host[:-1]}{'0' if host[-1] != '0' else '1'}-{number}"
    )  # of a container beside this one
    elsewhere.mkdir()
    with OutputFolder(str(tmp_path / "out"), overwrite=False):
        assert {path.name.rsplit("-")[-1] for path in tmp_path.glob(".out.unfinished-*")} == {str(os.getpid()), number}
    elsewhere.rmdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "model"]
