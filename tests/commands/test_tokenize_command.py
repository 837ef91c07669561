"""`verl-ext tokenize` as a user starts it: exit codes, one-line errors, and a run that is killed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import load_from_disk

from tests.lib.chat_templates import CHATML, tiny_tokenizer
from tests.lib.errors import names
from tests.lib.project import ROOT
from tests.lib.ranks import forked
from tests.lib.training import wait_for
from verl_ext.__main__ import main
from verl_ext.files import OutputFolder

pytestmark = pytest.mark.slow


def test_run_ends_with_a_table_and_a_bad_record_with_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    (tmp_path / "in.jsonl").write_text('{"text": "the cat"}\n')
    (tmp_path / "bad.jsonl").write_text('{"text": "the cat"}\n{"txt": 1}\n')
    words = ["sources={a:in.jsonl}", "output_dir=out", "model.path=model"]
    good = [sys.executable, "-m", "verl_ext", "tokenize", *words]
    done = subprocess.run(good, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0), done.stderr
    assert done.stdout.splitlines()[1].split()[:2] == ["a", "1"]
    assert len(load_from_disk(str(tmp_path / "out"))) == 1
    monkeypatch.chdir(tmp_path)
    assert main(["tokenize", "sources={a:bad.jsonl}", "output_dir=out2", "model.path=model"]) == 1
    assert names(capsys.readouterr().err.splitlines()[-1], "error: bad.jsonl:2", "txt")
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
    arguments = [f"sources={{a:{tmp_path}/in.jsonl}}", f"output_dir={tmp_path}/out", f"model.path={tmp_path}/model"]
    process = forked(main, ["tokenize", *arguments, "num_workers=1"])
    wait_for(lambda: process.exitcode is not None or list(tmp_path.glob(".out.unfinished-*")))
    assert process.exitcode is None
    process.kill()
    process.join(60)
    assert not (tmp_path / "out").exists()
    (left,) = tmp_path.glob(".out.unfinished-*")
    host, number = left.name.rsplit("-", 1)
    beside = f"{host[:-1]}{'0' if host[-1] != '0' else '1'}"  # a container
    elsewhere = left.with_name(f"{beside}-{number}")
    elsewhere.mkdir()
    with OutputFolder(str(tmp_path / "out"), overwrite=False):
        assert {path.name.rsplit("-")[-1] for path in tmp_path.glob(".out.unfinished-*")} == {str(os.getpid()), number}
    elsewhere.rmdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "model"]


SCRIPT = """
import sys
from pathlib import Path

import verl_ext.text.tokenizing as tokenizing
from tests.lib.chat_templates import tiny_tokenizer
from verl_ext.data import MultiDocDataset, PreTrainDataset
from verl_ext.text import workers

print("started")
tokenizing.WORKER_BYTES, cache = 1, Path(sys.argv[1])
workers.available_cpus = tokenizing.available_cpus = lambda: 2
for tokenizing.THREADS_BYTES in (0, 1 << 30):  # in processes, then in this one
    options = {"cache_dir": str(cache / str(tokenizing.THREADS_BYTES))}
    packs = PreTrainDataset(tiny_tokenizer(), "texts.jsonl", 16, **options)
    stream = MultiDocDataset("texts.jsonl", tiny_tokenizer(), 8, max_tokens=900, **options)
"""


def test_a_script_without_a_guard_tokenizes_in_processes_what_it_does_alone(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "the cat sat on the mat " * (number % 9)}) for number in range(300)]
    (tmp_path / "texts.jsonl").write_text("\n".join(line for line in lines if "cat" in line))
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "script.py", str(tmp_path / "cache")]
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, "started\n"), done.stderr
    found = [
        {path.name: path.read_bytes() for path in folder.rglob("*") if path.suffix in (".arrow", ".bin", ".idx")}
        for folder in (tmp_path / "cache").iterdir()
    ]
    assert found[0] == found[1]
    assert len(found[0]) == 3
