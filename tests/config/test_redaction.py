"""Secrets do not reach what is printed or written."""

import json
from unittest.mock import Mock

import pytest

from verl_ext.commands.command_line import command, read_options
from verl_ext.commands.report import reported_options
from verl_ext.commands.tokenize import TokenizeOptions
from verl_ext.config.compose import compose
from verl_ext.config.run import RunConfig
from verl_ext.options import DataError
from verl_ext.redaction import redacted, redacted_text
from verl_ext.trainer.hooks import tracking

SECRET = "s3cr3tV4lue"


@pytest.mark.parametrize(
    "text",
    [
        f"got trainer.wandb_api_key={SECRET}",
        f"+hf_token={SECRET} is no key",
        f"https://me:{SECRET}@host/a.jsonl cannot be read",
        f"https://host/a.parquet?X-Amz-Credential={SECRET}&X-Amz-Date=1",
        f"https://host/a?v=2&X-Goog-Signature={SECRET}",
        f"https://host/a?sv=1&token={SECRET}",
        f"password: {SECRET}",
        "hf_abcdefghijklmnopqrstuvwxyzABCDEF",
        "sk-abcdefghijklmnopqrstuvwxyz",
    ],
)
def test_a_secret_in_a_text_is_masked(text):
    assert SECRET not in redacted_text(text)
    assert "abcdefghijkl" not in redacted_text(text)
    assert "***" in redacted_text(text)


@pytest.mark.parametrize(
    "text",
    [
        "data.max_tokens=131072 trainer.answer_tokens=4 special_tokens_in_text=keep model.tokenizer_path=/a/b",
        "eos_token=</s> pad_token: <pad>",
        "step 4: loss 2.1; row 5 of /data/train@2, https://host/a?v=2",
        "model.path=null hf_token=null",
        "tokenizer must have an eos_token, which it lacks",
    ],
)
def test_what_is_no_secret_stays(text):
    assert redacted_text(text) == text


def test_values_are_masked_by_their_names_and_the_environment(monkeypatch):
    monkeypatch.setenv("MY_SERVICE_API_KEY", SECRET)
    values = {
        "trainer": {"wandb_api_key": "x", "seed": 1, "logger": ["a", f"b{SECRET}"]},
        "hf_token": "",
        "tokens": "a",
    }
    masked = {"trainer": {"wandb_api_key": "***", "seed": 1, "logger": ["a", "b***"]}, "hf_token": "", "tokens": "a"}
    assert redacted(values) == masked


def test_a_commands_error_and_report_name_no_secret(capsys, tmp_path):
    def fail(options):
        raise DataError(f"https://me:{SECRET}@host/a.jsonl: cannot be read")

    arguments = ["sources.a=a.jsonl", f"output_dir={tmp_path}/out", f"model.path={tmp_path}"]
    assert command("tokenize", TokenizeOptions, fail, "")(arguments) == 1
    assert SECRET not in capsys.readouterr().err

    options = read_options(TokenizeOptions, [f"sources.a='https://host/a.jsonl?token={SECRET}'", *arguments[1:]])
    assert SECRET not in json.dumps(reported_options(options))


def test_trackers_are_given_no_secret(monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(tracking, "Tracking", lambda *args, **kwargs: given.append(kwargs["config"]) or Mock(logger={}))
    secret = f"model.override_config={{hf_token:{SECRET}}}"
    config = compose([f"data.train_dir={tmp_path}", "model.path=m", f"trainer.default_local_dir={tmp_path}", secret])
    tracking.open_tracking(RunConfig.from_composed(config), 0)
    text = json.dumps(given, default=str)
    assert '"max_tokens": 8192' in text
    assert SECRET not in text
