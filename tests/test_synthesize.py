"""`verl-ext synthesize`: records for `tokenize`, the same in any order of answers, and a line for each mistake."""

import json
import random
import re
import sqlite3
import threading

import pytest
import yaml

from tests.chat_server import chat_server, completion
from verl_ext.commands.tokenize import TokenizeOptions, tokenize
from verl_ext.endpoint.quality import DIMENSIONS
from verl_ext.endpoint.store import Store
from verl_ext.tools.synthesis.asked_prompts import asked_prompt
from verl_ext.tools.synthesis.command import main

pytestmark = pytest.mark.slow

PLAN = (
    "# Plan\nParagraph 1 - Main Point: one - Word Count: 200\n**Paragraph 2** - Main Point: two - Word Count: 200 words"
)


def words(count, seed=0):
    draw = random.Random(seed)
    return " ".join(f"w{draw.randrange(120)}" for _ in range(count))


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


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


@pytest.fixture
def run(tmp_path, tiny_model):
    """Return a function that runs the command on a file or folder, and returns its exit code."""

    def run(server, source, *given, task="longalign", out="out"):
        options = {
            **{"task": task, "output_dir": tmp_path / out, "sources": f"{{docs:{source}}}", "endpoint.model": "tiny"},
            **{"endpoint.base_url": server.url, "endpoint.retries": 0, "intervals": "[100,200,300,400]"},
            **({} if task == "agentwrite" else {"model.path": tiny_model}),
        }
        pairs = {**options, **dict(each.split("=", 1) for each in given)}
        return main([f"{key}={value}" for key, value in pairs.items()])

    return run


def records_of(tmp_path, task="longalign", out="out"):
    return [json.loads(line) for line in (tmp_path / out / f"{task}.jsonl").read_text().splitlines()]


def report_of(tmp_path):
    return yaml.safe_load((tmp_path / "out" / "report.yaml").read_text())


def test_longalign_records_begin_with_the_same_bytes_and_are_read_by_tokenize(run, tmp_path, documents, tiny_model):
    with chat_server(longalign_reply) as server:
        assert run(server, documents, "records=6", "endpoint.concurrency=1") == 0
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


def test_longalign_keeps_several_questions_of_a_document_and_pays_for_each_once(run, tmp_path, documents, tiny_model):
    with chat_server(longalign_reply) as server:
        assert run(server, documents, "records=6", "near_duplicates=null") == 0
        assert run(server, documents, "records=6", "near_duplicates=null", "questions=3", "overwrite=true") == 0
    assert len(server.requests) == 6 * 4  # of the second run, the answers to two more questions of each document
    users = [record["messages"][0]["content"].rsplit("\n\n", 1) for record in records_of(tmp_path)]
    asked = [tuple(question for text, question in users if text == document) for document, _ in users[::3]]
    assert all(len(set(of_document)) == 3 for of_document in asked)
    assert [text for text, _ in users[0::3]] == [text for text, _ in users[1::3]] == [text for text, _ in users[2::3]]
    report = report_of(tmp_path)
    assert (report["outcomes"], report["records"]) == ({"done": 6}, 18)
    totals = [record["provenance"]["usage"]["prompt_tokens"] for record in records_of(tmp_path)]
    assert totals == [20, 10, 10] * 6


def test_a_question_without_an_answer_leaves_those_of_its_document_and_is_counted(run, tmp_path, documents, capsys):
    def refuses(request):
        content = request["messages"][0]["content"]
        return "I cannot help with this request." if content.endswith("Third?") else longalign_reply(request)

    with chat_server(refuses) as server:
        assert run(server, documents, "records=6", "questions=5") == 0
        assert report_of(tmp_path)["questions_without_record"] == {"refused": 6}
        assert "24 records; questions without a record: 6 refused" in capsys.readouterr().out
    questions = [record["messages"][0]["content"].rsplit("\n\n", 1)[1] for record in records_of(tmp_path)]
    assert sorted(questions) == sorted(["First?", "Second?", "Fourth?", "Fifth?"] * 6)


def test_files_of_one_name_are_told_apart(run, tmp_path):
    for folder in ("a", "b"):
        (tmp_path / "docs" / folder).mkdir(parents=True)
        (tmp_path / "docs" / folder / "book.txt").write_text(words(150, ord(folder)))
    with chat_server(longalign_reply) as server:
        assert run(server, tmp_path / "docs") == 0
    items = [record["provenance"]["item"] for record in records_of(tmp_path)]
    assert items == ["docs/book.txt:1", "docs/book.txt#2:1"]


def test_records_do_not_depend_on_the_number_of_requests_and_cost_nothing_again(run, tmp_path, documents, capsys):
    (tmp_path / "prices.yaml").write_text("tiny: {input: 1000, output: 10000}\n")
    given = ("records=9", f"endpoint.prices={tmp_path}/prices.yaml")
    with chat_server(longalign_reply) as server:
        run(server, documents, *given, "endpoint.concurrency=1")
        assert "cost 1.08" in capsys.readouterr().out  # 18 requests of 10 prompt tokens and 5 output tokens
        run(server, documents, *given, "endpoint.concurrency=8", out="other")
        assert records_of(tmp_path) == records_of(tmp_path, out="other")
        before = len(server.requests)
        run(server, documents, *given, f"store={tmp_path}/out.answers.sqlite", out="third")
        assert len(server.requests) == before
    assert records_of(tmp_path) == records_of(tmp_path, out="third")


def test_what_is_left_out_is_counted(run, tmp_path, capsys):
    copy = words(250, 3)
    benchmark = write_lines(tmp_path / "benchmark.jsonl", [{"prompt": words(40, 9), "shots": [words(30, 8)]}])
    texts = [words(150, 1), copy, f"{copy} w1 w2", f"{words(100, 5)} {words(30, 8)}", words(20, 6), words(900, 7), ""]
    source = write_lines(tmp_path / "documents.jsonl", [{"text": text} for text in texts])
    with chat_server(longalign_reply) as server:
        assert run(server, source, f"decontaminate=[{benchmark}]") == 1
        assert "documents.jsonl:7" in capsys.readouterr().err
        given = (f"decontaminate=[{benchmark}]", "on_bad_record=skip", "over_length=truncate")
        assert run(server, source, *given) == 0
    left_out = {"near_duplicate": 1, "contaminated": 1, "too_short": 1, "truncated": 1, "no_text": 1}
    assert report_of(tmp_path)["left_out"] == left_out
    assert report_of(tmp_path)["outcomes"] == {"done": 3}
    longest = max(records_of(tmp_path), key=lambda record: record["provenance"]["document_tokens"])
    assert longest["provenance"]["document_tokens"] == 400
    assert longest["messages"][0]["content"].startswith(words(900, 7)[:1000])


def test_items_without_an_answer_end_the_run_above_a_share_and_are_listed_below(run, tmp_path, documents, capsys):
    def reply(request):
        content = request["messages"][0]["content"]
        return completion("half", "length") if len(content) > 1000 else longalign_reply(request)

    with chat_server(reply) as server:
        assert run(server, documents) == 1
        error = capsys.readouterr().err
        assert "max_failed_share" in error
        assert "cut" in error
        assert not (tmp_path / "out").exists()
        before = len(server.requests)
        assert run(server, documents, "max_failed_share=0.7") == 0
        assert len(server.requests) == before
    report = report_of(tmp_path)
    assert report["outcomes"]["cut"] == len(report["without_record"]) > 0
    assert report["outcomes"]["done"] == len(records_of(tmp_path))
    assert "half" not in (tmp_path / "out" / "longalign.jsonl").read_text()


def agentwrite_reply(request):
    content = request["messages"][0]["content"]
    if "Divide the work" in content:
        return PLAN
    return "Paragraph 2: " + "word " * 200


def test_agentwrite_writes_paragraph_after_paragraph_and_keeps_the_right_length(run, tmp_path):
    tides = [{"prompt": f"Write {what} on tides."} for what in ("an essay of 400 words", "5,000 words", "a text")]
    source = write_lines(tmp_path / "prompts.jsonl", tides)
    with chat_server(agentwrite_reply) as server:
        assert run(server, source, task="agentwrite") == 0
        (record,) = records_of(tmp_path, "agentwrite")
        asked = [request["messages"][0]["content"] for request in server.requests]
        report = report_of(tmp_path)
        source = write_lines(tmp_path / "without.jsonl", tides[2:])
        assert run(server, source, "lengths=[400]", task="agentwrite", out="given") == 0
    paragraph = " ".join(["word"] * 200)
    assert record["messages"] == [
        {"role": "user", "content": tides[0]["prompt"]},
        {"role": "assistant", "content": f"{paragraph}\n\n{paragraph}"},
    ]
    assert record["provenance"]["words_written"] == 400
    of_essay = [content for content in asked if "400 words on tides" in content]
    assert [paragraph in content for content in of_essay] == [False, False, True]
    assert report["outcomes"] == {"done": 1, "length_score": 1, "no_length": 1}
    (record,) = records_of(tmp_path, "agentwrite", "given")  # an instruction without a length is given one
    assert record["messages"][0]["content"] == "Write a text on tides.\n\nWrite about 400 words."


def test_parallel_paragraphs_are_asked_for_at_once_from_the_plan_alone_and_keep_its_order(run, tmp_path):
    together = threading.Barrier(2)

    def reply(request):
        content = request["messages"][0]["content"]
        if "Divide the work" in content:
            return PLAN
        together.wait(timeout=60)  # the server has both requests before it answers one
        return " ".join([content.split("Main Point: ")[-1].split(" - ")[0]] * 200)

    source = write_lines(tmp_path / "prompts.jsonl", [{"prompt": "Write 400 words."}])
    with chat_server(reply) as server:
        assert run(server, source, "paragraphs=parallel", task="agentwrite") == 0
        before = len(server.requests)
        assert run(server, source, "paragraphs=parallel", "overwrite=true", task="agentwrite") == 0
    assert len(server.requests) == before == 3
    asked = [request["messages"][0]["content"] for request in server.requests[1:]]
    assert not any("one one" in content or "two two" in content for content in asked)
    (record,) = records_of(tmp_path, "agentwrite")
    assert record["messages"][1]["content"] == "\n\n".join([" ".join(["one"] * 200), " ".join(["two"] * 200)])


def test_both_forms_are_compared_over_the_same_plans_and_a_judge_scores_both(run, tmp_path):
    quality = json.dumps(dict.fromkeys(DIMENSIONS, 5))

    def reply(request):
        content = request["messages"][0]["content"]
        if "Divide the work" in content:
            return PLAN
        if "Breadth and Depth" in content:
            return quality
        is_alone = "at the same time" in content
        return " ".join(f"{'same' if is_alone else content[-40:-39]} {chr(97 + n % 26)}" for n in range(100))

    source = write_lines(tmp_path / "prompts.jsonl", [{"prompt": f"Write 400 words on {n}."} for n in "ab"])
    with chat_server(reply) as server:
        judge = ("scorer.kind=writing", f"scorer.endpoint.base_url={server.url}", "scorer.endpoint.model=tiny")
        assert run(server, source, "paragraphs=both", *judge, task="agentwrite") == 0
    forms = report_of(tmp_path)["forms"]
    assert [forms[form]["texts"] for form in ("sequential", "parallel")] == [2, 2]
    assert [forms[form]["score"] for form in ("sequential", "parallel")] == [100, 100]
    assert forms["parallel"]["repeated"] == 50  # the second paragraph is the first
    assert len(server.requests) == 2 * (1 + 2 + 2 + 2)
    assert all("same" not in record["messages"][1]["content"] for record in records_of(tmp_path, "agentwrite"))


def test_lengths_asked_for_and_written_are_spread_evenly(run, tmp_path):
    """Instructions with a length, a range, none and several; one text comes out longer than asked for."""
    asked = ["in 300 words", "in 250-350 words", "in 500 words", "in 600 words", "in 300 words, then 600 words"]
    asked.append("in 9000 words")
    prompts = [f"Write on {n} {length}." for n, length in enumerate(asked)] + [f"Write on {n}." for n in range(20)]
    source = write_lines(tmp_path / "prompts.jsonl", [{"prompt": prompt} for prompt in prompts])

    def reply(request):
        content = request["messages"][0]["content"]
        wanted = re.findall(r"(\d+)(?:-350)? words\.", content)[0]
        wanted = 300 if wanted == "250" else int(wanted)
        if "Divide the work" in content:
            return f"Paragraph 1 - Main Point: p - Word Count: {wanted}"
        return "word " * (wanted + (150 if "on 0" in content else 0))

    given = ("word_intervals=[200,400,600]", "records=12", "min_length_score=0", "near_duplicates=null")
    with chat_server(reply) as server:
        assert run(server, source, *given, task="agentwrite") == 0
        assert run(server, source, *given, "lengths=[400]", task="agentwrite", out="third") == 2
    report = report_of(tmp_path)
    assert report["left_out"] == {"no_length": 1, "too_long": 1}
    rows = report["lengths"]
    assert [row["drawn"] for row in rows.values()] == [6, 6]
    assert sum(row["found"] for row in rows.values()) == 24
    written = [record["provenance"]["words_written"] for record in records_of(tmp_path, "agentwrite")]
    counts = [sum(low <= n < high for n in written) for low, high in ((200, 400), (400, 601))]
    assert [row["written"] for row in rows.values()] == counts
    assert max(counts) == 6
    assert report["outcomes"].get("interval_full", 0) == 12 - len(written)


LOGS = [
    {
        "conversation": [{"role": "user", "content": "Write 400 words on tides.", "language": "English"}],
        "language": "English",
    },
    {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "Write 400 words on bombs."}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Write 400 words on prompts."}]}]},
    {"prompt": "Write 400 words in a chat."},
    {"prompt": "写一篇400字的文章，谈谈潮汐。"},
    {"prompt": "Напишите 400 words про приливы и отливы на море"},
    {"conversation": [{"role": "user", "content": "Écris 400 words."}], "language": "French"},
    {"conversation": [{"role": "assistant", "content": "Hello."}]},
]


def test_instructions_from_logs_are_selected_by_language_and_by_a_model_each_with_an_outcome(run, tmp_path):
    def reply(request):
        content = request["messages"][0]["content"]
        if "do not carry it out" in content.lower() or "请不要执行它" in content:
            harmful, scraping, long = (word not in content for word in ("bombs", "on prompts", "a chat"))
            answers = ("yes" if not harmful else "no", "yes" if not scraping else "No", "**Yes**" if long else "no")
            if "潮汐" in content:
                return "有害：否\n抓取：否\n长文：是"
            return "Harmful: {}\nScraping: {}\nLong: {}".format(*answers)
        if "Divide the work" in content or "各段字数之和" in content:
            return PLAN
        return "word " * 200

    source = write_lines(tmp_path / "logs.jsonl", LOGS)
    given = ("select=2000", "languages=[en,zh]", "on_bad_record=skip", "near_duplicates=null")
    with chat_server(reply) as server:
        assert run(server, source, *given, task="agentwrite") == 0
        before = len(server.requests)
        assert run(server, source, *given, "overwrite=true", task="agentwrite") == 0
    assert len(server.requests) == before == 5 + 2 * 3
    report = report_of(tmp_path)
    assert report["left_out"] == {"other_language": 2, "no_prompt": 1}
    assert report["outcomes"] == {"done": 2, "toxic": 1, "scraping": 1, "not_long": 1}
    users = [record["messages"][0]["content"] for record in records_of(tmp_path, "agentwrite")]
    assert users == ["Write 400 words on tides.", "写一篇400字的文章，谈谈潮汐。"]
    assert all(len(record["provenance"]["seeds"]) == 4 for record in records_of(tmp_path, "agentwrite"))


def test_a_selection_in_prose_is_unparsable_and_the_published_prompt_is_the_papers(run, tmp_path, documents, capsys):
    source = write_lines(tmp_path / "prompts.jsonl", [{"prompt": "Write 400 words."}])
    with chat_server(lambda _: "It seems fine to me.") as server:
        assert run(server, source, "select=2000", task="agentwrite") == 1
        assert "1 unparsable" in capsys.readouterr().err
        assert run(server, source, "prompts=published", task="agentwrite") == 2
        assert "prompts=published" in capsys.readouterr().err
        assert run(server, source, "languages=[en]", "model.path=x", task="longalign") == 2
        assert "languages" in capsys.readouterr().err
    with chat_server(longalign_published) as server:
        assert run(server, documents, "records=6", "prompts=published", out="published") == 0
    asked = [
        request["messages"][0]["content"]
        for request in server.requests
        if PUBLISHED_END.search(request["messages"][0]["content"])
    ]
    assert len(asked) == 6


PUBLISHED_END = re.compile(
    r'\n\nGiven the above text, please propose 5 English [^.]*, in the following format: "1: ", "2: ", \.\.\.\Z'
)


def longalign_published(request):
    content = request["messages"][0]["content"]
    return "1. First?\n2. Second?" if PUBLISHED_END.search(content) else "An answer."


@pytest.mark.parametrize(
    ("plan", "paragraph", "outcome"),
    [
        ("First I would…", "text", "unparsable"),
        ("\n".join(f"Paragraph {i} - Main Point: p - Word Count: 200" for i in range(51)), "text", "plan_too_long"),
        (PLAN, "Paragraph 1:", "unparsable"),
        (PLAN, completion("half", "length"), "cut"),
        (PLAN, "I'm sorry, but I can't continue with this.", "refused"),
    ],
)
def test_plans_and_paragraphs_that_cannot_be_used_make_no_record(run, tmp_path, capsys, plan, paragraph, outcome):
    def reply(request):
        return plan if "Divide the work" in request["messages"][0]["content"] else paragraph

    source = write_lines(tmp_path / "prompts.jsonl", [{"prompt": "Write 400 words."}])
    with chat_server(reply) as server:
        assert run(server, source, task="agentwrite") == 1
    assert f"1 {outcome}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_prompts_are_chosen_by_language_and_replaced_by_a_file(run, tmp_path, capsys):
    source = write_lines(tmp_path / "documents.jsonl", [{"text": "海潮 每天 涨落 两次 " * 30}])
    kinds = {kind: kind for kind in ("general", "summary", "reasoning", "extraction")}
    own, file = {"longalign": {"kinds": kinds, "questions": "ASK {kind}"}}, tmp_path / "prompts.yaml"
    with chat_server(lambda _: "1：潮汐是什么？") as server:
        assert run(server, source) == 0
        assert "五个问题" in server.requests[0]["messages"][0]["content"]
        file.write_text(yaml.safe_dump(own))
        assert run(server, source, f"prompts={file}", out="own") == 0
        assert "ASK" in server.requests[2]["messages"][0]["content"]
        own["longalign"]["questions"] = "no place"
        file.write_text(yaml.safe_dump(own))
        assert run(server, source, f"prompts={file}", out="third") == 2
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
def test_mistakes_are_one_line(run, tmp_path, documents, capsys, monkeypatch, given, error):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prices.yaml").write_text("tiny: {inptu: 1, output: 2}\n")
    Store("store").close()
    with sqlite3.connect("store") as database:
        database.execute("PRAGMA user_version = 9")
    with chat_server(longalign_reply) as server:
        code = run(server, documents, *given)
    printed = capsys.readouterr().err.strip().splitlines()
    assert code in (1, 2)
    assert printed[-1].startswith("error: ")
    assert error in printed[-1]
    assert not any(line.startswith("Traceback") for line in printed)


def glm_long_reply(request):
    content = request["messages"][0]["content"]
    if "difficult question" in content:
        return "Question: which?\nAnswer: both\nof them"
    return "a part" if "Summarize this part" in content else "the whole"


def test_glm_long_asks_within_the_window_and_records_the_whole_document(run, tmp_path):
    texts = [words(600, i) for i in range(12)]
    source = write_lines(tmp_path / "documents.jsonl", [{"text": text} for text in texts])
    with chat_server(glm_long_reply) as server:
        assert run(server, source, "intervals=[100,1000]", "window=128", task="glm_long") == 0
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


def test_the_ways_of_glm_long_are_drawn_by_their_weights(run, tmp_path, capsys):
    source = write_lines(tmp_path / "documents.jsonl", [{"text": words(600, i)} for i in range(24)])
    given = ("intervals=[100,1000]", "window=128", "near_duplicates=null")
    with chat_server(glm_long_reply) as server:
        assert run(server, source, *given, "ways={chunk:1,chunks:0,summary:0}", task="glm_long", out="one") == 0
        assert run(server, source, *given, "ways={chunk:3,chunks:1}", task="glm_long") == 0
        for ways in ("{chunk:0}", "{chunk:-1,chunks:2}", "{parts:1}", "{chunk:yes}"):
            assert run(server, source, *given, f"ways={ways}", task="glm_long", out="bad") == 2
            assert "ways must be numbers" in capsys.readouterr().err
    assert {record["category"] for record in records_of(tmp_path, "glm_long", "one")} == {"glm_long_chunk"}
    kinds = [record["category"] for record in records_of(tmp_path, "glm_long")]
    assert 12 < kinds.count("glm_long_chunk") < 24 == len(kinds)
    assert kinds.count("glm_long_summary") == 0


def test_an_answer_that_its_text_does_not_support_is_left_out_and_counted(run, tmp_path):
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
        assert run(server, source, *given, task="glm_long") == 0
        before = len(server.requests)
        assert run(server, source, *given, "overwrite=true", task="glm_long") == 0
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


def test_a_run_is_estimated_without_a_request_near_what_it_asks(run, tmp_path, documents, capsys):
    (tmp_path / "prices.yaml").write_text("tiny: {input: 1000, output: 10000}\n")
    priced = f"endpoint.prices={tmp_path}/prices.yaml"
    with chat_server(longalign_reply) as server:
        assert run(server, documents, "records=6", "questions=2", "estimate=true", priced) == 0
        assert not server.requests
        assert not (tmp_path / "out").exists()
        line = capsys.readouterr().out.splitlines()[-1]
        assert run(server, documents, "records=6", "questions=2") == 0
    tokens = 2 * (120 + 220 + 320)  # of the six documents
    numbers = [int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*", line.partition(", cost")[0])]
    assert numbers == [18, 3 * tokens + 18 * 150, 2 * tokens, 6 * 200 + 12 * 400]
    assert len(server.requests) == numbers[0]
    prompts = [{"prompt": f"Write {words} words on {n}."} for n, words in enumerate((1000, 5000, "some"))]
    source, lines = write_lines(tmp_path / "prompts.jsonl", prompts), []
    for form in ("sequential", "parallel"):
        given = "estimate=true", f"paragraphs={form}"
        assert run(server, source, *given, task="agentwrite", out="estimated") == 0
        line = capsys.readouterr().out.splitlines()[-1]
        lines.append([int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*", line)])
    assert lines[0][0] == lines[1][0] == 2 + 2 + 10  # two plans, two and ten paragraphs
    assert lines[0][3] == lines[1][3]
    assert lines[0][1] - lines[1][1] == 2 * (1400 // 4) + 10 * (7000 * 9 // 20)
    given = "estimate=true", "scorer.kind=given", "endpoint.base_url=null"
    assert run(server, source, *given, task="preferences", out="estimated") == 2


def test_the_report_has_outcomes_by_stage_and_what_items_without_a_record_cost(run, tmp_path, capsys):
    def reply(request):
        content = request["messages"][0]["content"]
        if "Divide the work" in content:
            return PLAN if "tides" in content else "Paragraph 1 - Main Point: one - Word Count: 4000"
        return "I'm sorry, but I can't help with this." if "on bad tides" in content else "word " * 200

    prompts = [{"prompt": f"Write 400 words on {what}."} for what in ("tides", "bad tides", "ships", "planes")]
    source = write_lines(tmp_path / "prompts.jsonl", prompts)
    with chat_server(reply) as server:
        assert run(server, source, "near_duplicates=null", "max_failed_share=0.5", task="agentwrite") == 0
        printed = capsys.readouterr().out
        assert (
            run(server, source, "near_duplicates=null", "max_failed_share=0.5", "overwrite=true", task="agentwrite")
            == 0
        )
    report = report_of(tmp_path)
    assert report["stages"] == {"plan": {"requests": 4, "done": 4}, "write": {"requests": 3, "done": 3}}
    spent = {"length_score": {"items": 2, "tokens": 30}, "refused": {"items": 1, "tokens": 30}}
    assert report["spent_without_record"] == spent  # of stored answers too
    assert "record (agentwrite): … Write 400 words on tides. → word word" in printed


def test_glm_long_asks_again_about_a_document_by_draws_of_their_own(run, tmp_path):
    source = write_lines(tmp_path / "documents.jsonl", [{"text": words(600, i)} for i in range(12)])
    with chat_server(glm_long_reply) as server:
        assert run(server, source, "intervals=[100,1000]", "window=128", task="glm_long", out="one") == 0
        assert run(server, source, "intervals=[100,1000]", "window=128", "questions=4", task="glm_long") == 0
    one, several = records_of(tmp_path, "glm_long", "one"), records_of(tmp_path, "glm_long")
    by_item = [[each for each in several if each["provenance"]["item"] == r["provenance"]["item"]] for r in one]
    assert all(record in of_item for record, of_item in zip(one, by_item, strict=True))
    spans = [[str(each["provenance"].get("stretches")) for each in of_item] for of_item in by_item]
    assert all(len(set(of_item)) == len(of_item) for of_item in spans)
    assert len(several) > 2 * len(one)
    assert all([each["category"] for each in of_item].count("glm_long_summary") <= 1 for of_item in by_item)


def test_a_number_of_records_is_drawn_where_the_intervals_together_have_it(run, tmp_path, capsys):
    lengths = [150] + [250] * 4 + [350] * 6
    source = write_lines(tmp_path / "documents.jsonl", [{"text": words(n, i)} for i, n in enumerate(lengths)])
    with chat_server(longalign_reply) as server:
        names = []
        for count in (6, 7, 11):
            assert run(server, source, f"records={count}", out=f"out{count}") == 0
            names.append({record["provenance"]["item"] for record in records_of(tmp_path, out=f"out{count}")})
        before = len(server.requests)
        assert run(server, source, "records=12") == 1
        assert len(server.requests) == before
    assert "records must be at most 11" in capsys.readouterr().err.splitlines()[-1]
    assert [len(drawn) for drawn in names] == [6, 7, 11]
    assert names[0] < names[1] < names[2]


def test_stretches_are_spread_over_the_documents_of_a_joined_text(run, tmp_path):
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
        assert run(server, source, *given, task="glm_long") == 0
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
