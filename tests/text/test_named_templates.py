"""Chat templates by their names in a folder, or in a folder of an installed package."""

import json
import sys
from pathlib import Path

import pytest

from tests.lib.errors import refused
from tests.lib.tiny_model import write_tiny_model
from verl_ext.commands.command_line import read_options
from verl_ext.commands.tokenize import TokenizeOptions, tokenize
from verl_ext.text.chat.options import ChatOptions
from verl_ext.text.encoder_chats import ChatEncoder

WORDS = "{% for m in messages %}{{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
CHAT = {"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("templates")
    for name, template in (("words", WORDS), ("chatml", f"a{WORDS}"), ("chatml.tools", f"b{WORDS}"), ("gemma", "c")):
        (folder / f"{name}.jinja").write_text(template)
    return folder


def assert_refused(*things: object, **given: str) -> None:
    with refused(*things):
        ChatOptions.read({"model": {"path": "owner/model"}, **given})


def test_a_name_finds_its_template_which_the_report_and_so_an_export_carry(folder, tmp_path):
    (tmp_path / "chats.jsonl").write_text(json.dumps(CHAT) + "\n")
    model, sources = write_tiny_model(tmp_path / "model"), "sources={a: " + str(tmp_path / "chats.jsonl") + "}"
    words = [sources, f"output_dir={tmp_path / 'data'}", f"model.path={model}"]
    report = tokenize(read_options(TokenizeOptions, [*words, "chat_template=words", f"chat_templates={folder}"]))
    assert report.as_dict()["chat_template"] == WORDS


def test_an_unknown_name_is_one_line_with_the_nearest(folder):
    things = ("chat_template", 4, f"chat_templates={folder}", "chatlm", "nearest: chatml")
    assert_refused(*things, chat_template="chatlm", chat_templates=str(folder))
    assert_refused("chat_template", "chatlm", "chat_templates=FOLDER", "NAME.jinja", chat_template="chatlm")


def test_a_folder_without_templates_or_without_a_name_is_one_line(folder, tmp_path):
    for empty in (str(tmp_path), str(tmp_path / "none"), "nowhere:templates", "json:templates"):
        assert_refused("chat_templates", empty, chat_template="words", chat_templates=empty)
    assert_refused("chat_template", f"chat_templates={folder}", None, chat_templates=str(folder))


def test_a_package_is_named_without_its_import_and_the_folder_decides_no_fingerprint(folder, tmp_path, monkeypatch):
    package = tmp_path / "of_templates" / "jinja"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "words.jinja").write_text(WORDS)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    model = {"path": str(write_tiny_model(tmp_path / "model"))}
    given = [{"chat_templates": str(folder)}, {"chat_templates": "of_templates:jinja"}]
    options = [ChatOptions.read({"model": model, "chat_template": "words", **each}) for each in given]
    assert len({ChatEncoder(each).fingerprint() for each in options}) == 1


def test_a_file_stays_one_beside_a_folder_of_templates(folder, tmp_path):
    file = Path(tmp_path / "own.jinja")
    file.write_text(WORDS)
    ChatOptions.read({"model": {"path": "owner/model"}, "chat_template": str(file), "chat_templates": str(folder)})
