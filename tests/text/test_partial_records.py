"""Records that lack something: no text becomes a target that the whole record would not have made one."""

import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.lib.errors import refused
from verl_ext.text.read.bad_record import BadRecord
from verl_ext.text.read.json_records import TableRow
from verl_ext.text.records.content import PlainText
from verl_ext.text.records.messages import Chat
from verl_ext.text.records.preference import Preference
from verl_ext.text.records.records import parse_record

ANSWERS = [{"answer": word, "rank": rank} for rank, word in enumerate(("best", "worse"))]
SQUAD = {"text": ["squad says"]}
FAMILIES = (  # fields that make a record a preference
    *((good, bad) for good in ("chosen", "chosen_response") for bad in ("rejected", "rejected_response")),
    *(("rejected_response",), ("rejected_messages",), ("completions",), ("answers",), ("kto_tag",), ()),
)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def chat(name: str) -> list[dict[str, str]]:
    return [user(f"{name} asks"), said(f"{name} says"), user(f"{name} asks again"), said(f"{name} ends")]


def forms(name: str) -> st.SearchStrategy[Any]:
    return st.sampled_from([f"the {name}", said(f"the {name}"), [said(f"the {name}")]])


TEXTS = ("instruction", "input", "output", "response", "completion", "prompt", "question", "answer", "query")
VALUES: dict[str, st.SearchStrategy[Any]] = {
    **{name: st.just(f"the {name}") for name in (*TEXTS, "inputs", "targets", "text", "context", "system")},
    **{name: st.sampled_from([chat(name), chat(name)[:3]]) for name in ("messages", "conversations", "conversation")},
    "data": st.just(["data asks", "data says"]),
    "chat": st.just("USER: chat asks\n\n\nASSISTANT: chat says"),
    "history": st.just([["history asks", "history says"]]),
    "loss_weight": st.sampled_from([0.5, 2.0]),
    "id": st.just(7),
    "chosen": forms("chosen") | st.just([*chat("common")[:3], said("whole chosen")]),
    "rejected": forms("rejected") | st.just([*chat("common")[:3], said("whole rejected")]),
    "rejected_messages": st.just([said("the rejected messages")]),
    **{name: forms(name) for name in ("chosen_response", "rejected_response")},
    "completions": st.just(ANSWERS),
    "answers": st.sampled_from([ANSWERS, SQUAD]),
    "kto_tag": st.booleans(),
}


def targets(record: dict[str, Any]) -> set[str] | None:
    """Return the texts that a record makes targets; None for a bad record."""
    try:
        content = parse_record(record).content
    except BadRecord:
        return None
    if isinstance(content, PlainText):
        return {str(content.text)}
    chats = content.answers if isinstance(content, Preference) else [content]
    return {json.dumps(each.messages[at]) for each in chats for at in each.targets}


@settings(max_examples=300, deadline=None)
@given(data=st.data(), family=st.sampled_from(FAMILIES), make=st.sampled_from([dict, TableRow]))
def test_no_text_becomes_a_target_because_a_field_is_null_or_missing(data: Any, family: Any, make: Any) -> None:
    others = [name for name in VALUES if not any(name in each for each in FAMILIES)]
    names = data.draw(st.sets(st.sampled_from(others), min_size=1, max_size=4))
    names |= {*family}
    whole = make({name: data.draw(VALUES[name]) for name in sorted(names)})
    expected = targets(whole)
    assume(expected is not None)
    nulls = data.draw(st.sets(st.sampled_from(sorted(names))))
    changed = make({name: None if name in nulls else value for name, value in whole.items()})
    # Without a preference's own fields, or the chat that holds its answer, a record may be another one that is whole.
    if family and not isinstance(whole[family[0]], bool) and whole[family[0]] != SQUAD:
        kept = {"messages", "conversations", data.draw(st.sampled_from(family))}
        if "rejected_response" in kept & {*family} and names & {"messages", "conversations"}:
            kept.add(family[0])  # a chat and the answer it is preferred to are a whole record
        for name in data.draw(st.sets(st.sampled_from(sorted(names)))) - kept:
            del changed[name]
    assert (targets(changed) or set()) <= (expected or set()), (whole, changed)


CHAT = [user("q"), said("old"), user("and now?")]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"messages": CHAT, "chosen": said("good"), "rejected": None}, "no_pair"),
        ({"messages": CHAT, "chosen": None, "rejected": said("bad")}, "no_pair"),
        ({"messages": CHAT, "chosen": None, "rejected": None}, "no_pair"),
        ({"messages": CHAT, "chosen": said("good")}, "no_pair"),
        ({"messages": CHAT, "rejected": said("bad")}, "no_pair"),
        ({"messages": [*CHAT, said("good")], "rejected_response": None}, "no_pair"),
        ({"query": "q", "response": "good", "rejected_response": "bad"}, "no_pair"),  # ms-swift's form before 3.0
        ({"messages": [*CHAT, said("good")], "kto_tag": None}, "bad_label"),
        ({"prompt": "q", "completion": "c", "answers": [{"answer": "a", "rank": 1}, {"answer": "b"}]}, "bad_rank"),
        ({"prompt": "q", "completion": "c", "answers": [{"answer": "a", "score": None}]}, "bad_rank"),
        ({"prompt": "q", "completion": "good", "kto_tag": None}, "bad_label"),
        ({"question": "q", "answer": "a", "messages": None}, "null_field"),
        ({"messages": None, "text": "all of it"}, "null_field"),
        ({"instruction": "q", "output": None, "response": "a"}, "null_field"),
        ({"prompt": "q", "chosen": BadRecord("not_utf8", "x"), "rejected": BadRecord("not_utf8", "y")}, "not_utf8"),
    ],
)
def test_a_record_that_lacks_a_field_of_its_shape_is_bad(record: dict[str, Any], reason: str) -> None:
    with refused(reason, error=BadRecord):
        parse_record(record)


def test_a_table_of_several_kinds_of_records_is_read_without_its_nulls() -> None:
    columns = ("messages", "prompt", "chosen", "rejected", "kto_tag", "text")
    rows = [{"messages": chat("a")}, {"prompt": "q", "chosen": "good", "rejected": "bad"}, {"text": "t"}]
    rows += [{"messages": chat("a"), "kto_tag": False}]
    kinds = [type(parse_record({name: row.get(name) for name in columns}, drop_nulls=True).content) for row in rows]
    assert kinds == [Chat, Preference, PlainText, Preference]
    half = {"messages": CHAT, "chosen": "good", "rejected": None}
    with refused("no_pair", error=BadRecord):  # the other half is there
        parse_record(half, drop_nulls=True)
    # `columns` names the fields that are read, which have to be there as well.
    with refused("no_pair", error=BadRecord):
        parse_record({"messages": chat("a"), "good": "x", "bad": None}, {"chosen": "good", "rejected": "bad"})
    alone = parse_record({"messages": chat("a"), "chosen": None}, {"chosen": None})
    assert isinstance(alone.content, Chat)


PROMPTS = (
    "q",
    [user("q")],
    json.dumps([user("q")]),
    "\n\nHuman: q\n\nAssistant:",
    "\n\nHuman: a\n\nAssistant: b\n\nHuman: q\n\nAssistant:",
    "Human: who?",
)
REPLIES = ("yes", said("yes"), [said("yes")], json.dumps(said("yes")), json.dumps([said("yes")]))


@pytest.mark.parametrize("make", [dict, TableRow])
@pytest.mark.parametrize("prompt", PROMPTS, ids=range(len(PROMPTS)))
@pytest.mark.parametrize("reply", REPLIES, ids=range(len(REPLIES)))
def test_pairs_labels_and_plain_chats_read_a_prompt_and_its_answer_alike(make: Any, prompt: Any, reply: Any) -> None:
    other = json.loads(json.dumps(reply).replace("yes", "no"))
    pair = parse_record(make(prompt=prompt, chosen=reply, rejected=other))
    ranked = parse_record(make(prompt=prompt, answers=[{"answer": reply, "rank": 1}, {"answer": other, "rank": 2}]))
    label = parse_record(make(prompt=prompt, completion=reply, kto_tag=False))
    names = (("prompt", "response"), ("question", "answer"), ("query", "response"), ("input", "output"))
    plain = [parse_record(make({ask: prompt, say: reply})) for ask, say in names]
    plain += [parse_record(make(instruction=prompt, output=reply))] if isinstance(prompt, str) else []
    found = [each.content.answers[0] for each in (pair, ranked, label)] + [each.content for each in plain]
    assert all(each.messages == found[0].messages for each in found)
    assert all(list(each.targets) == [len(each.messages) - 1] for each in found)
    # JSON is decoded in tables, and where all texts of the record are JSON.
    is_json = make is TableRow or (isinstance(prompt, str) and prompt.startswith("["))
    expected = "yes" if not isinstance(reply, str) or is_json else reply
    assert found[0].messages[-1]["content"] == expected
    asked = {PROMPTS[5]: PROMPTS[5]}.get(prompt if isinstance(prompt, str) else "", "q")
    is_decoded = make is TableRow or (isinstance(reply, str) and reply != "yes")
    assert found[0].messages[-2]["content"] == (prompt if prompt == PROMPTS[2] and not is_decoded else asked)
    assert len({str(sorted(each.readings)) for each in (pair, ranked, label, *plain)}) == 1


def test_an_answer_that_is_json_itself_stays_words_and_is_counted() -> None:
    good, bad = (json.dumps(said(text)) for text in ("Hi", "Yo"))
    ask = "A chat message as JSON, please."
    words = "JSON of messages as words"
    for record in (
        {"prompt": ask, "chosen": good, "rejected": bad},
        {"prompt": [user(ask)], "chosen": good, "rejected": bad},
        {"messages": [user(ask), said(good)], "rejected_response": bad},
        {"messages": json.dumps([user(ask), said(good)]), "rejected_response": bad},
        TableRow({"messages": [user(ask), said(good)], "rejected_response": bad}),
        TableRow({"prompt": ask, "chosen": good, "rejected": "no"}),
    ):
        parsed = parse_record(record)
        assert isinstance(parsed.content, Preference)
        assert parsed.content.answers[0].messages[-1]["content"] == good
        assert parsed.content.answers[1].messages[-1]["content"] == record.get("rejected", bad)
        assert parsed.readings == {words}
    whole = [json.dumps([user("q"), said(text)]) for text in ("a", "b")]
    parsed = parse_record({"prompt": "q", "chosen": whole[0], "rejected": whole[1]})  # they repeat the prompt
    assert [each.messages[-1]["content"] for each in parsed.content.answers] == ["a", "b"]
    assert parsed.readings == {"JSON of messages"}


def test_a_completion_that_repeats_its_prompt_is_the_whole_chat() -> None:
    for prompt in ("q", [user("q")], json.dumps([user("q")])):
        chats = [parse_record({"prompt": prompt, "completion": [user("q"), said("a")]}).content]
        chats += parse_record({"prompt": prompt, "completion": [user("q"), said("a")], "kto_tag": True}).content.answers
        for each in chats:
            assert (each.messages, list(each.targets)) == ([user("q"), said("a")], [1])
    other = parse_record({"prompt": [user("p"), said("b")], "completion": [user("q"), said("a")]}).content
    assert (len(other.messages), list(other.targets)) == (4, [3])


def test_cells_that_stand_for_nothing_are_counted_where_they_are_read() -> None:
    parsed = parse_record(TableRow({"instruction": "q", "input": "nan", "output": "NULL", "note": "NaN"}))
    assert parsed.readings == {"'nan' as a word", "'NULL' as a word"}
    assert not parse_record({"instruction": "q", "input": "nan", "output": "NULL"}).readings


WORDS = st.text('xy"\\é{[ ', min_size=1, max_size=3)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(WORDS, WORDS, min_size=1, max_size=3), st.lists(st.text('xy"\\é{[ z', max_size=6), min_size=1))
def test_texts_are_replaced_all_at_once_and_alike_in_json(texts: dict[str, str], parts: list[str]) -> None:
    def plain(text: str) -> str:
        """Replace from left to right, the longest first, and never what was put there."""
        out = ""
        while text:
            given = max((each for each in texts if text.startswith(each)), key=len, default="")
            out, text = out + texts.get(given, text[:1]), text[len(given) or 1 :]
        return out

    turns = [user(f"z{' '.join(parts)}"), said(f"z{parts[0]}")]
    expected = [{**turn, "content": plain(turn["content"])} for turn in turns]
    for messages in (turns, json.dumps(turns), json.dumps(turns, ensure_ascii=False)):
        content = parse_record({"messages": messages}, replace={**texts, "role?": "x"}).content
        assert isinstance(content, Chat)
        assert [message["content"] for message in content.messages] == [turn["content"] for turn in expected]
