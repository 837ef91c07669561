"""`verl-ext synthesize task=agentwrite`: texts of the length asked for, from plans, of chosen instructions."""

import json
import re
import threading
from functools import partial

import pytest

from tests.lib.chat_server import chat_server, completion
from tests.lib.document_texts import write_lines
from tests.lib.synthesized import records_of, report_of
from verl_ext.tools.endpoint.quality import DIMENSIONS

pytestmark = pytest.mark.slow


@pytest.fixture
def write(synthesize):
    return partial(synthesize, task="agentwrite")


PLAN = (
    "# Plan\nParagraph 1 - Main Point: one - Word Count: 200\n**Paragraph 2** - Main Point: two - Word Count: 200 words"
)


def agentwrite_reply(request):
    return PLAN if "Divide the work" in request["messages"][0]["content"] else "Paragraph 2: " + "word " * 200


def test_agentwrite_writes_paragraph_after_paragraph_and_keeps_the_right_length(write, tmp_path):
    tides = [{"prompt": f"Write {what} on tides."} for what in ("an essay of 400 words", "5,000 words", "a text")]
    source = write_lines(tmp_path / "prompts.jsonl", tides)
    with chat_server(agentwrite_reply) as server:
        assert write(server, source) == 0
        (record,) = records_of(tmp_path, "agentwrite")
        asked = [request["messages"][0]["content"] for request in server.requests]
        report = report_of(tmp_path)
        source = write_lines(tmp_path / "without.jsonl", tides[2:])
        assert write(server, source, "lengths=[400]", out="given") == 0
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


def test_parallel_paragraphs_are_asked_for_at_once_from_the_plan_alone_and_keep_its_order(write, tmp_path):
    together = threading.Barrier(2)

    def reply(request):
        content = request["messages"][0]["content"]
        if "Divide the work" in content:
            return PLAN
        together.wait(timeout=60)  # the server has both requests before it answers one
        return " ".join([content.split("Main Point: ")[-1].split(" - ")[0]] * 200)

    source = write_lines(tmp_path / "prompts.jsonl", [{"prompt": "Write 400 words."}])
    with chat_server(reply) as server:
        assert write(server, source, "paragraphs=parallel") == 0
        before = len(server.requests)
        assert write(server, source, "paragraphs=parallel", "overwrite=true") == 0
    assert len(server.requests) == before == 3
    asked = [request["messages"][0]["content"] for request in server.requests[1:]]
    assert not any("one one" in content or "two two" in content for content in asked)
    (record,) = records_of(tmp_path, "agentwrite")
    assert record["messages"][1]["content"] == "\n\n".join([" ".join(["one"] * 200), " ".join(["two"] * 200)])


def test_both_forms_are_compared_over_the_same_plans_and_a_judge_scores_both(write, tmp_path):
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
        assert write(server, source, "paragraphs=both", *judge) == 0
    forms = report_of(tmp_path)["forms"]
    assert [forms[form]["texts"] for form in ("sequential", "parallel")] == [2, 2]
    assert [forms[form]["score"] for form in ("sequential", "parallel")] == [100, 100]
    assert forms["parallel"]["repeated"] == 50  # the second paragraph is the first
    assert len(server.requests) == 2 * (1 + 2 + 2 + 2)
    assert all("same" not in record["messages"][1]["content"] for record in records_of(tmp_path, "agentwrite"))


def test_lengths_asked_for_and_written_are_spread_evenly(write, tmp_path):
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
        assert write(server, source, *given) == 0
        assert write(server, source, *given, "lengths=[400]", out="third") == 2
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


def test_instructions_from_logs_are_selected_by_language_and_by_a_model_each_with_an_outcome(write, tmp_path):
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
        assert write(server, source, *given) == 0
        before = len(server.requests)
        assert write(server, source, *given, "overwrite=true") == 0
    assert len(server.requests) == before == 5 + 2 * 3
    report = report_of(tmp_path)
    assert report["left_out"] == {"other_language": 2, "no_prompt": 1}
    assert report["outcomes"] == {"done": 2, "toxic": 1, "scraping": 1, "not_long": 1}
    users = [record["messages"][0]["content"] for record in records_of(tmp_path, "agentwrite")]
    assert users == ["Write 400 words on tides.", "写一篇400字的文章，谈谈潮汐。"]
    assert all(len(record["provenance"]["seeds"]) == 4 for record in records_of(tmp_path, "agentwrite"))


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
def test_plans_and_paragraphs_that_cannot_be_used_make_no_record(write, tmp_path, capsys, plan, paragraph, outcome):
    def reply(request):
        return plan if "Divide the work" in request["messages"][0]["content"] else paragraph

    source = write_lines(tmp_path / "prompts.jsonl", [{"prompt": "Write 400 words."}])
    with chat_server(reply) as server:
        assert write(server, source) == 1
    assert f"1 {outcome}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_report_has_outcomes_by_stage_and_what_items_without_a_record_cost(write, tmp_path, capsys):
    def reply(request):
        content = request["messages"][0]["content"]
        if "Divide the work" in content:
            return PLAN if "tides" in content else "Paragraph 1 - Main Point: one - Word Count: 4000"
        return "I'm sorry, but I can't help with this." if "on bad tides" in content else "word " * 200

    prompts = [{"prompt": f"Write 400 words on {what}."} for what in ("tides", "bad tides", "ships", "planes")]
    source = write_lines(tmp_path / "prompts.jsonl", prompts)
    with chat_server(reply) as server:
        assert write(server, source, "near_duplicates=null", "max_failed_share=0.5") == 0
        printed = capsys.readouterr().out
        assert write(server, source, "near_duplicates=null", "max_failed_share=0.5", "overwrite=true") == 0
    report = report_of(tmp_path)
    assert report["stages"] == {"plan": {"requests": 4, "done": 4}, "write": {"requests": 3, "done": 3}}
    spent = {"length_score": {"items": 2, "tokens": 30}, "refused": {"items": 1, "tokens": 30}}
    assert report["spent_without_record"] == spent  # of stored answers too
    assert "record (agentwrite): … Write 400 words on tides. → word word" in printed
