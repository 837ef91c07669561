"""The chat template and the ends of turns that a run reads from the reports of its data."""

import json

from tests.lib.errors import names
from verl_ext.config.compose import compose_run
from verl_ext.data.tokenized.reports import TrainedChats


def write(folder, report):
    folder.mkdir()
    (folder / "report.json").write_text(json.dumps(report))
    return str(folder)


def test_folders_of_one_template_give_it_and_the_ends_of_chats_that_were_trained(tmp_path):
    first = write(
        tmp_path / "a",
        {"chat_template": "T", "end_of_chat": "<end>", "total": {"end_of_turn": {"<end>": 3, "<part>": 1, "": 1}}},
    )
    second = write(
        tmp_path / "b", {"chat_template": "T", "end_of_chat": "<stop>", "total": {"end_of_turn": {"<part>": 1}}}
    )
    texts = write(tmp_path / "c", {"chat_template": None, "end_of_chat": None, "total": {"end_of_turn": {}}})
    (tmp_path / "d").mkdir()  # of another program
    chats = TrainedChats.of_folders([first, second, texts, str(tmp_path / "d")])
    assert (chats.template, chats.ends) == ("T", ("<end>",))
    assert list(chats.notices("data.train_dir")) == []


def test_folders_of_several_templates_leave_the_models_own_with_a_notice(tmp_path):
    folders = [write(tmp_path / name, {"chat_template": name, "total": {}}) for name in ("a", "b")]
    chats = TrainedChats.of_folders(folders)
    assert chats.template is None
    assert len(list(chats.notices("data.train_dir"))) == 1


def test_a_template_that_the_data_was_not_made_with_is_a_problem():
    made = TrainedChats(("T",))
    assert made.template_problem(None, "data.train_dir") is None
    assert made.template_problem("T", "data.train_dir") is None
    for chats in (made, TrainedChats(), TrainedChats(("S", "T"))):
        line = chats.template_problem("S", "data.train_dir") or ""
        assert names(line, "model.custom_chat_template", "data.train_dir")


def test_a_template_may_be_given_as_its_file(tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages }}")
    for given in (file, "'{{ messages }}'"):
        config, _ = compose_run([f"model.custom_chat_template={given}", "model.path=M", "data.train_dir=D"])
        assert config.model.custom_chat_template == "{{ messages }}"
