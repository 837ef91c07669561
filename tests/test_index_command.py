"""`verl-ext index` as a user starts it: exit codes, one-line errors, and a run that is interrupted."""

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.test_tokenize_templates import tiny_tokenizer
from verl_ext.commands.index import main
from verl_ext.data.megatron.index import IndexWriter


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "verl_ext", "index", *arguments]


def test_a_run_ends_with_a_table_and_a_bad_record_with_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "a.txt").write_text("the cat\n")
    (tmp_path / "b.jsonl").write_text('{"question": "the cat?", "answer": "sat"}\n')
    arguments = ["sources={a:a.txt,b:b.jsonl}", "text_key=[question,answer]", "output_dir=out", "model.path=model"]
    done = subprocess.run(command(*arguments), cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0), done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()[1:3]] == [["a", "1"], ["b", "1"]]
    assert done.stdout.endswith("written to out\n")
    (tmp_path / "a.txt").write_bytes(b"the \xff")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert main([*arguments, "overwrite=true"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: a.txt: text must be UTF-8; byte 5 is not (not_utf8; ")
    assert told.count("\n") == 1  # no bar
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == ["a.bin", "a.idx", "b.bin", "b.idx", "report.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b.jsonl", "model", "out"]


def test_the_command_is_loaded_without_torch() -> None:
    code = "import sys, verl_ext.commands.index as _; print(*{'torch', 'verl', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == ""


def test_an_interrupted_run_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "a.txt").write_text("the cat\n")
    arguments = [f"sources={{a:{tmp_path}/a.txt}}", f"output_dir={tmp_path}/out", f"model.path={tmp_path}/model"]
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert main(arguments) == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    def interrupted(writer: IndexWriter) -> None:
        assert len(list(tmp_path.glob(".out.unfinished-*/a.bin"))) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(IndexWriter, "close", interrupted)
    (tmp_path / "a.txt").write_text("sat\n")
    assert main([*arguments, "overwrite=true"]) == 130
    assert capsys.readouterr().err.endswith("error: interrupted; nothing was written\n")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "model", "out"]


def test_help_shows_the_options_and_a_typo_ends_with_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert main(["--help"]) == 0
    assert re.search(r"^  max_corpus_tokens +null +tokens after which a source", capsys.readouterr().out, re.MULTILINE)
    assert main(["souces={a:b}"]) == 2
    assert capsys.readouterr().err == "error: unknown key souces; nearest: sources\n"


def test_a_full_disk_is_one_line_with_the_folder_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], files_end_at: Any
) -> None:
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "a.txt").write_text("the cat " * 20_000)
    arguments = [f"sources={{a:{tmp_path}/a.txt}}", f"output_dir={tmp_path}/out", f"model.path={tmp_path}/model"]
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with files_end_at(1 << 16):
        assert main(arguments) == 1
    told = f"error: output_dir must be a folder that can be written; got {tmp_path}/out: File too large"
    assert capsys.readouterr().err.splitlines()[-1] == told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "model"]
