"""The tokenizing benchmark at a small size: it runs whole commands beside the tokenizer; no timing is asserted."""

import pytest

from benchmarks import tokenizing

pytestmark = pytest.mark.slow


def test_every_command_has_its_ratio(tmp_path):
    options = tokenizing.arguments(["--chats", "60", "--repeats", "1", "--workers", "1", "--backends", "local"])
    result = tokenizing.measure(options, tmp_path)
    assert result["chats"] == 60
    (turn,) = result["commands"]["local 1"]
    assert 0 < turn["ratio_with_start"] == turn["encode_batch"] / turn["command"]
    assert tokenizing.report(result).splitlines()[-1].startswith("local 1")


def test_records_without_their_tokenizer_are_refused(capsys):
    with pytest.raises(SystemExit):
        tokenizing.arguments(["--records", "chats.jsonl"])
    assert "--records must come with --tokenizer" in capsys.readouterr().err
