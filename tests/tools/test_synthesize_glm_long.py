"""`verl-ext synthesize task=glm_long`: questions about stretches of long documents."""

import re
from functools import partial

import pytest

from tests.lib.chat_server import chat_server
from tests.lib.document_texts import write_lines
from tests.lib.errors import names
from tests.lib.synthesized import records_of, report_of, words
from verl_ext.tools.synthesis.asked_prompts import asked_prompt

pytestmark = pytest.mark.slow


@pytest.fixture
def ask(synthesize):
    return partial(synthesize, task="glm_long")


def glm_long_reply(request):
    content = request["messages"][0]["content"]
    if "difficult question" in content:
        return "Question: which?\nAnswer: both\nof them"
    return "a part" if "Summarize this part" in content else "the whole"


def test_glm_long_asks_within_the_window_and_records_the_whole_document(ask, tmp_path):
    texts = [words(600, i) for i in range(12)]
    source = write_lines(tmp_path / "documents.jsonl", [{"text": text} for text in texts])
    with chat_server(glm_long_reply) as server:
        assert ask(server, source, "intervals=[100,1000]", "window=128") == 0
    asked = [request["messages"][0]["content"] for request in server.requests]
    assert max(len(re.findall(r"\bw\d+", content)) for content in asked) == 128
    records = records_of(tmp_path, "glm_long")
    assert {record["category"] for record in records} == {"glm_long_chunk", "glm_long_chunks", "glm_long_summary"}
    for record, text in zip(records, texts, strict=True):
        user, assistant = (message["content"] for message in record["messages"])
        spans = [text[begin:end] for begin, end in record["provenance"].get("stretches", ())]
        assert user.startswith(f"{text}\n\n")
        # A scorer of answers that sees the question alone finds where it stands.
        assert f"{text}\n\n{asked_prompt(record, 'prompt', None).question}" == user
        if record["category"] == "glm_long_summary":
            assert assistant == "the whole"
            assert len(record["provenance"]["seeds"]) == 6  # 5 parts of 600 tokens, and the whole
        else:
            assert (user, assistant) == (f"{text}\n\nwhich?", "both\nof them")
            assert [len(span.split()) for span in spans] == [128 // len(spans)] * len(spans)
            assert any(all(span in content for span in spans) for content in asked)
        if record["category"] == "glm_long_chunks":
            begins = [begin * 4 // len(text) for begin, _ in record["provenance"]["stretches"]]
            assert begins == [0, 1, 2, 3]


def test_the_ways_of_glm_long_are_drawn_by_their_weights(ask, tmp_path, capsys):
    source = write_lines(tmp_path / "documents.jsonl", [{"text": words(600, i)} for i in range(24)])
    given = ("intervals=[100,1000]", "window=128", "near_duplicates=null")
    with chat_server(glm_long_reply) as server:
        assert ask(server, source, *given, "ways={chunk:1,chunks:0,summary:0}", out="one") == 0
        assert ask(server, source, *given, "ways={chunk:3,chunks:1}") == 0
        for ways in ("{chunk:0}", "{chunk:-1,chunks:2}", "{parts:1}", "{chunk:yes}"):
            assert ask(server, source, *given, f"ways={ways}", out="bad") == 2
            assert names(capsys.readouterr().err, "ways", "numbers")
    assert {record["category"] for record in records_of(tmp_path, "glm_long", "one")} == {"glm_long_chunk"}
    kinds = [record["category"] for record in records_of(tmp_path, "glm_long")]
    assert 12 < kinds.count("glm_long_chunk") < 24 == len(kinds)
    assert kinds.count("glm_long_summary") == 0


def test_an_answer_that_its_text_does_not_support_is_left_out_and_counted(ask, tmp_path):
    def reply(request):
        content = request["messages"][0]["content"]
        if "Judge strictly" not in content:
            return glm_long_reply(request)
        assert content.count("[Answer]") == 1
        assert "difficult" not in content
        return "It is not.\nSupported: no" if "the whole" in content else "Yes.\n**Supported:** yes"

    source = write_lines(tmp_path / "documents.jsonl", [{"text": words(600, i)} for i in range(12)])
    given = ("intervals=[100,1000]", "window=128", "grounded=true")
    with chat_server(reply) as server:
        assert ask(server, source, *given) == 0
        before = len(server.requests)
        assert ask(server, source, *given, "overwrite=true") == 0
        assert len(server.requests) == before
    report, records = report_of(tmp_path), records_of(tmp_path, "glm_long")
    assert report["outcomes"] == {"done": len(records), "ungrounded": 12 - len(records)}
    assert 0 < len(records) < 12
    assert all(len(record["provenance"]["seeds"]) == 2 for record in records)
    checked = [request["messages"][0]["content"] for request in server.requests if "Judge" in str(request)]
    spans = [record["provenance"]["stretches"] for record in records]
    texts = [record["messages"][0]["content"] for record in records]
    assert all(
        any(text[begin:end] in content for content in checked)
        for text, own in zip(texts, spans, strict=True)
        for begin, end in own
    )


def test_glm_long_asks_again_about_a_document_by_draws_of_their_own(ask, tmp_path):
    source = write_lines(tmp_path / "documents.jsonl", [{"text": words(600, i)} for i in range(12)])
    with chat_server(glm_long_reply) as server:
        assert ask(server, source, "intervals=[100,1000]", "window=128", out="one") == 0
        assert ask(server, source, "intervals=[100,1000]", "window=128", "questions=4") == 0
    one, several = records_of(tmp_path, "glm_long", "one"), records_of(tmp_path, "glm_long")
    by_item = [[each for each in several if each["provenance"]["item"] == r["provenance"]["item"]] for r in one]
    assert all(record in of_item for record, of_item in zip(one, by_item, strict=True))
    spans = [[str(each["provenance"].get("stretches")) for each in of_item] for of_item in by_item]
    assert all(len(set(of_item)) == len(of_item) for of_item in spans)
    assert len(several) > 2 * len(one)
    assert all([each["category"] for each in of_item].count("glm_long_summary") <= 1 for of_item in by_item)


def test_stretches_are_spread_over_the_documents_of_a_joined_text(ask, tmp_path):
    records = []
    for number in range(40):
        lengths = (400, 100, 90, 80, 70, 60)[: 2 + number % 5]
        text, spans = "", []
        for place, length in enumerate(lengths):
            text += "\n\n" if text else ""
            part = words(length, number + place)
            spans.append({"span": [len(text), len(text) + len(part)]})
            text += part
        records.append({"text": text, "provenance": {"documents": spans}})
    source = write_lines(tmp_path / "documents.jsonl", records)
    given = ("intervals=[100,1000]", "window=64", "near_duplicates=null")
    with chat_server(glm_long_reply) as server:
        assert ask(server, source, *given) == 0
    seen = set()
    for record in records_of(tmp_path, "glm_long"):
        if record["category"] == "glm_long_chunks":
            number = int(record["provenance"]["item"].rpartition(":")[2]) - 1
            spans = [each["span"] for each in records[number]["provenance"]["documents"]]
            of_documents = [
                sum(first <= begin and end <= last for begin, end in record["provenance"].get("stretches", ()))
                for first, last in spans
            ]
            assert sum(of_documents) == max(4, len(spans))
            assert max(of_documents) - min(of_documents) <= 1
            seen.add(len(spans))
    assert len(seen) > 2
