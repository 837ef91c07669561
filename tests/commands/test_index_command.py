"""`verl-ext index`: exit codes, one-line errors, and a run that is interrupted."""

import signal
from pathlib import Path

import pytest

from tests.lib.chat_templates import tiny_tokenizer
from tests.lib.errors import names
from verl_ext.commands.index import main
from verl_ext.data.stream.megatron.index import IndexWriter


def test_a_run_ends_with_a_table_and_a_bad_record_with_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "a.txt").write_text("the cat\n")
    (tmp_path / "b.jsonl").write_text('{"question": "the cat?", "answer": "sat"}\n')
    arguments = ["sources={a:a.txt,b:b.jsonl}", "text_key=[question,answer]", "output_dir=out", "model.path=model"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert main(arguments) == 0
    told = capsys.readouterr().out
    assert [line.split()[:2] for line in told.splitlines()[1:3]] == [["a", "1"], ["b", "1"]]
    assert told.endswith("written to out\n")
    (tmp_path / "a.txt").write_bytes(b"the \xff")
    assert main([*arguments, "overwrite=true"]) == 1
    told = capsys.readouterr().err
    assert names(told, "error: a.txt", "byte 5", "not_utf8")
    assert told.count("\n") == 1  # no progress bar
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == ["a.bin", "a.idx", "b.bin", "b.idx", "report.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b.jsonl", "model", "out"]


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
