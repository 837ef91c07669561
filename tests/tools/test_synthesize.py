"""`verl-ext synthesize`: records for `tokenize`, the same in any order of answers, and a line for each mistake."""

import json
import re
import sqlite3

import pytest
import yaml

from tests.lib.chat_server import chat_server, completion
from tests.lib.document_texts import write_lines
from tests.lib.errors import names
from tests.lib.synthesized import records_of, report_of, words
from verl_ext.commands.tokenize import TokenizeOptions, tokenize
from verl_ext.tools.endpoint.store import Store

pytestmark = pytest.mark.slow


@pytest.fixture
def documents(tmp_path):
    """Write 12 documents, 4 in each interval (100–200, 200–300, 300–400 tokens), plus one shorter and one longer."""
    lengths = [120, 220, 320] * 4 + [50, 500]
    records = [{"text": f"{words(length, i)}"} for i, length in enumerate(lengths)]
    return write_lines(tmp_path / "documents.jsonl", records)


def longalign_reply(request):
    content = request["messages"][0]["content"]
    if content.endswith("2: …"):
        return "Here they are:\n1: First?\n**2.** Second?\n3) Third?\n4: Fourth?\n5: Fifth?"
    return f"The answer to {content.rpartition(chr(10))[2]}"


def test_longalign_records_begin_with_the_same_bytes_and_are_read_by_tokenize(
    synthesize, tmp_path, documents, tiny_model
):
    with chat_server(longalign_reply) as server:
        assert synthesize(server, documents, "records=6", "endpoint.concurrency=1") == 0
    records = records_of(tmp_path)
    lengths = sorted(record["provenance"]["document_tokens"] for record in records)
    assert lengths == [120, 120, 220, 220, 320, 320]
    texts = [json.loads(line)["text"] for line in documents.read_text().splitlines()]
    for record in records:
        user, assistant = record["messages"]
        document, question = user["content"].rsplit("\n\n", 1)
        assert document in texts
        assert re.fullmatch(r"(First|Second|Third|Fourth|Fifth)\?", question)
        assert assistant["content"] == f"The answer to {question}"
        assert record["provenance"]["usage"] == {"prompt_tokens": 20, "cached_tokens": 0, "completion_tokens": 10}
    asked = [request["messages"][0]["content"] for request in server.requests]
    starts = [text for content in asked for text in texts if content.startswith(f"{text}\n\n")]
    assert len(starts) == len(asked) == 12
    assert starts[::2] == starts[1::2]  # the two requests of a document follow each other
    assert len(set(starts)) == 6
    options = {"sources": {"long": str(tmp_path / "out")}, "output_dir": str(tmp_path / "tokenized"), "num_workers": 1}
    options |= {"model": {"path": str(tiny_model)}, "category_field": "category"}
    tokenized = tokenize(TokenizeOptions.read(options))
    assert set(tokenized.categories) == {record["category"] for record in records}
    assert tokenized.total.documents == 6


def test_longalign_keeps_several_questions_of_a_document_and_pays_for_each_once(
    synthesize, tmp_path, documents, tiny_model
):
    with chat_server(longalign_reply) as server:
        assert synthesize(server, documents, "records=6", "near_duplicates=null") == 0
        assert synthesize(server, documents, "records=6", "near_duplicates=null", "questions=3", "overwrite=true") == 0
    assert len(server.requests) == 6 * 4  # of the second run, the answers to two more questions of each document
    users = [record["messages"][0]["content"].rsplit("\n\n", 1) for record in records_of(tmp_path)]
    asked = [tuple(question for text, question in users if text == document) for document, _ in users[::3]]
    assert all(len(set(of_document)) == 3 for of_document in asked)
    assert [text for text, _ in users[0::3]] == [text for text, _ in users[1::3]] == [text for text, _ in users[2::3]]
    report = report_of(tmp_path)
    assert (report["outcomes"], report["records"]) == ({"done": 6}, 18)
    totals = [record["provenance"]["usage"]["prompt_tokens"] for record in records_of(tmp_path)]
    assert totals == [20, 10, 10] * 6


def test_a_question_without_an_answer_leaves_those_of_its_document_and_is_counted(
    synthesize, tmp_path, documents, capsys
):
    def refuses(request):
        content = request["messages"][0]["content"]
        return "I cannot help with this request." if content.endswith("Third?") else longalign_reply(request)

    with chat_server(refuses) as server:
        assert synthesize(server, documents, "records=6", "questions=5") == 0
        assert report_of(tmp_path)["questions_without_record"] == {"refused": 6}
        assert "24 records; questions without a record: 6 refused" in capsys.readouterr().out
    questions = [record["messages"][0]["content"].rsplit("\n\n", 1)[1] for record in records_of(tmp_path)]
    assert sorted(questions) == sorted(["First?", "Second?", "Fourth?", "Fifth?"] * 6)


def test_files_of_one_name_are_told_apart(synthesize, tmp_path):
    for folder in ("a", "b"):
        (tmp_path / "docs" / folder).mkdir(parents=True)
        (tmp_path / "docs" / folder / "book.txt").write_text(words(150, ord(folder)))
    with chat_server(longalign_reply) as server:
        assert synthesize(server, tmp_path / "docs") == 0
    items = [record["provenance"]["item"] for record in records_of(tmp_path)]
    assert items == ["docs/book.txt:1", "docs/book.txt#2:1"]


def test_records_do_not_depend_on_the_number_of_requests_and_cost_nothing_again(
    synthesize, tmp_path, documents, capsys
):
    (tmp_path / "prices.yaml").write_text("tiny: {input: 1000, output: 10000}\n")
    given = ("records=9", f"endpoint.prices={tmp_path}/prices.yaml")
    with chat_server(longalign_reply) as server:
        synthesize(server, documents, *given, "endpoint.concurrency=1")
        assert "cost 1.08" in capsys.readouterr().out  # 18 requests of 10 prompt tokens and 5 output tokens
        synthesize(server, documents, *given, "endpoint.concurrency=8", out="other")
        assert records_of(tmp_path) == records_of(tmp_path, out="other")
        before = len(server.requests)
        synthesize(server, documents, *given, f"store={tmp_path}/out.answers.sqlite", out="third")
        assert len(server.requests) == before
    assert records_of(tmp_path) == records_of(tmp_path, out="third")


def test_what_is_left_out_is_counted(synthesize, tmp_path, capsys):
    copy = words(250, 3)
    benchmark = write_lines(tmp_path / "benchmark.jsonl", [{"prompt": words(40, 9), "shots": [words(30, 8)]}])
    texts = [words(150, 1), copy, f"{copy} w1 w2", f"{words(100, 5)} {words(30, 8)}", words(20, 6), words(900, 7), ""]
    source = write_lines(tmp_path / "documents.jsonl", [{"text": text} for text in texts])
    with chat_server(longalign_reply) as server:
        assert synthesize(server, source, f"decontaminate=[{benchmark}]") == 1
        assert "documents.jsonl:7" in capsys.readouterr().err
        given = (f"decontaminate=[{benchmark}]", "on_bad_record=skip", "over_length=truncate")
        assert synthesize(server, source, *given) == 0
    left_out = {"near_duplicate": 1, "contaminated": 1, "too_short": 1, "truncated": 1, "no_text": 1}
    assert report_of(tmp_path)["left_out"] == left_out
    assert report_of(tmp_path)["outcomes"] == {"done": 3}
    longest = max(records_of(tmp_path), key=lambda record: record["provenance"]["document_tokens"])
    assert longest["provenance"]["document_tokens"] == 400
    assert longest["messages"][0]["content"].startswith(words(900, 7)[:1000])


def test_items_without_an_answer_end_the_run_above_a_share_and_are_listed_below(
    synthesize, tmp_path, documents, capsys
):
    def reply(request):
        content = request["messages"][0]["content"]
        return completion("half", "length") if len(content) > 1000 else longalign_reply(request)

    with chat_server(reply) as server:
        assert synthesize(server, documents) == 1
        error = capsys.readouterr().err
        assert "max_failed_share" in error
        assert "cut" in error
        assert not (tmp_path / "out").exists()
        before = len(server.requests)
        assert synthesize(server, documents, "max_failed_share=0.7") == 0
        assert len(server.requests) == before
    report = report_of(tmp_path)
    assert report["outcomes"]["cut"] == len(report["without_record"]) > 0
    assert report["outcomes"]["done"] == len(records_of(tmp_path))
    assert "half" not in (tmp_path / "out" / "longalign.jsonl").read_text()


PUBLISHED_END = re.compile(
    r'\n\nGiven the above text, please propose 5 English [^.]*, in the following format: "1: ", "2: ", \.\.\.\Z'
)


def longalign_published(request):
    content = request["messages"][0]["content"]
    return "1. First?\n2. Second?" if PUBLISHED_END.search(content) else "An answer."


def test_a_selection_in_prose_is_unparsable_and_the_published_prompt_is_the_papers(
    synthesize, tmp_path, documents, capsys
):
    source = write_lines(tmp_path / "prompts.jsonl", [{"prompt": "Write 400 words."}])
    with chat_server(lambda _: "It seems fine to me.") as server:
        assert synthesize(server, source, "select=2000", task="agentwrite") == 1
        assert "1 unparsable" in capsys.readouterr().err
        assert synthesize(server, source, "prompts=published", task="agentwrite") == 2
        assert "prompts=published" in capsys.readouterr().err
        assert synthesize(server, source, "languages=[en]", "model.path=x", task="longalign") == 2
        assert names(capsys.readouterr().err, "languages=[en]", "agentwrite", "longalign")
    with chat_server(longalign_published) as server:
        assert synthesize(server, documents, "records=6", "prompts=published", out="published") == 0
    asked = [
        request["messages"][0]["content"]
        for request in server.requests
        if PUBLISHED_END.search(request["messages"][0]["content"])
    ]
    assert len(asked) == 6


def test_prompts_are_chosen_by_language_and_replaced_by_a_file(synthesize, tmp_path, capsys):
    source = write_lines(tmp_path / "documents.jsonl", [{"text": "海潮 每天 涨落 两次 " * 30}])
    kinds = {kind: kind for kind in ("general", "summary", "reasoning", "extraction")}
    own, file = {"longalign": {"kinds": kinds, "questions": "ASK {kind}"}}, tmp_path / "prompts.yaml"
    with chat_server(lambda _: "1：潮汐是什么？") as server:
        assert synthesize(server, source) == 0
        assert "五个问题" in server.requests[0]["messages"][0]["content"]
        file.write_text(yaml.safe_dump(own))
        assert synthesize(server, source, f"prompts={file}", out="own") == 0
        assert "ASK" in server.requests[2]["messages"][0]["content"]
        own["longalign"]["questions"] = "no place"
        file.write_text(yaml.safe_dump(own))
        assert synthesize(server, source, f"prompts={file}", out="third") == 2
    assert "{kind}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (["endpoint.model=null"], "endpoint.model"),
        (["intervals=[300,200]"], "intervals"),
        (["sources={docs:missing.jsonl}"], "missing.jsonl"),
        (["endpoint.prices=prices.yaml"], "inptu"),
        (["store=store"], "version 9"),
        (["text_key=body"], "text_key=body"),
    ],
)
def test_mistakes_are_one_line(synthesize, tmp_path, documents, capsys, monkeypatch, given, error):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prices.yaml").write_text("tiny: {inptu: 1, output: 2}\n")
    Store("store").close()
    with sqlite3.connect("store") as database:
        database.execute("PRAGMA user_version = 9")
    with chat_server(longalign_reply) as server:
        code = synthesize(server, documents, *given)
    printed = capsys.readouterr().err
    assert code in (1, 2)
    assert re.search(rf"^error: .*{re.escape(error)}.*\n\Z", printed, re.MULTILINE)
    assert "Traceback" not in printed


def test_a_run_is_estimated_without_a_request_near_what_it_asks(synthesize, tmp_path, documents, capsys):
    (tmp_path / "prices.yaml").write_text("tiny: {input: 1000, output: 10000}\n")
    priced = f"endpoint.prices={tmp_path}/prices.yaml"
    with chat_server(longalign_reply) as server:
        assert synthesize(server, documents, "records=6", "questions=2", "estimate=true", priced) == 0
        assert not server.requests
        assert not (tmp_path / "out").exists()
        line = capsys.readouterr().out.splitlines()[-1]
        assert synthesize(server, documents, "records=6", "questions=2") == 0
    tokens = 2 * (120 + 220 + 320)  # of the six documents
    numbers = [int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*", line.partition(", cost")[0])]
    assert numbers == [18, 3 * tokens + 18 * 150, 2 * tokens, 6 * 200 + 12 * 400]
    assert len(server.requests) == numbers[0]
    prompts = [{"prompt": f"Write {words} words on {n}."} for n, words in enumerate((1000, 5000, "some"))]
    source, lines = write_lines(tmp_path / "prompts.jsonl", prompts), []
    for form in ("sequential", "parallel"):
        given = "estimate=true", f"paragraphs={form}"
        assert synthesize(server, source, *given, task="agentwrite", out="estimated") == 0
        line = capsys.readouterr().out.splitlines()[-1]
        lines.append([int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*", line)])
    assert lines[0][0] == lines[1][0] == 2 + 2 + 10  # two plans, two and ten paragraphs
    assert lines[0][3] == lines[1][3]
    assert lines[0][1] - lines[1][1] == 2 * (1400 // 4) + 10 * (7000 * 9 // 20)
    assert synthesize(None, source, "estimate=true", "scorer.kind=given", task="preferences", out="estimated") == 2


def test_a_number_of_records_is_drawn_where_the_intervals_together_have_it(synthesize, tmp_path, capsys):
    lengths = [150] + [250] * 4 + [350] * 6
    source = write_lines(tmp_path / "documents.jsonl", [{"text": words(n, i)} for i, n in enumerate(lengths)])
    with chat_server(longalign_reply) as server:
        items = []
        for count in (6, 7, 11):
            assert synthesize(server, source, f"records={count}", out=f"out{count}") == 0
            items.append({record["provenance"]["item"] for record in records_of(tmp_path, out=f"out{count}")})
        before = len(server.requests)
        assert synthesize(server, source, "records=12") == 1
        assert len(server.requests) == before
    assert names(capsys.readouterr().err.splitlines()[-1], "records", 11, 12)
    assert [len(drawn) for drawn in items] == [6, 7, 11]
    assert items[0] < items[1] < items[2]
