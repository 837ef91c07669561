"""`verl-ext synthesize task=preferences`: the best of several answers against others, by scores of a plain loop."""

import json
import random
from functools import partial

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

from tests.lib.chat_server import chat_server, completion
from tests.lib.document_texts import write_lines
from tests.lib.errors import names, refused
from tests.lib.synthesized import records_of as synthesized_records
from tests.lib.synthesized import report_of
from verl_ext.commands.tokenize import TokenizeOptions, tokenize
from verl_ext.text.read.bad_record import BadRecord
from verl_ext.tools.endpoint.quality import DIMENSIONS
from verl_ext.tools.synthesis.asked_prompts import asked_prompt
from verl_ext.tools.synthesis.preferences import AnswerPairOptions
from verl_ext.tools.word_count import length_score

pytestmark = pytest.mark.slow


@pytest.fixture
def choose(synthesize):
    return partial(synthesize, task="preferences")


QUESTIONS = [f"question {n} about w{n}" for n in range(6)]


records_of = partial(synthesized_records, task="preferences")


def answer_to(request):
    """Answer with a number of words that follows from the question and the seed."""
    draw = random.Random(f"{request['messages'][-1]['content']} {request['seed']}")
    return " ".join(["word"] * draw.randrange(3, 60))


def judge(request):
    """Answer; rate an answer by its number of words."""
    content = request["messages"][-1]["content"]
    if "[Answer]" not in content:
        return answer_to(request)
    words = content.partition("[Answer]\n")[2].partition("\n[End")[0].split()
    return f"It is long. [[{1 + len(words) * 9 / 60:.2f}]]"


@pytest.fixture
def prompts(tmp_path):
    return write_lines(tmp_path / "prompts.jsonl", [{"prompt": text, "category": "chat"} for text in QUESTIONS])


def judged(server, kind="judge"):
    endpoint = {"base_url": server.url, "model": "tiny", "retries": 0}
    return [f"scorer.kind={kind}", *(f"scorer.endpoint.{key}={value}" for key, value in endpoint.items())]


@pytest.mark.parametrize("pair", ["best_worst", "best_random", "all", "best"])
def test_the_best_answer_stands_against_the_others_of_the_choice(choose, tmp_path, prompts, tiny_model, pair):
    with chat_server(judge) as server:
        assert choose(server, prompts, *judged(server), f"pair={pair}", "answers=5") == 0
        requests = len(server.requests)
        assert choose(server, prompts, *judged(server), f"pair={pair}", "answers=5", "overwrite=true") == 0
        assert len(server.requests) == requests  # all of it is in the store
    asked = [request for request in server.requests if "[Answer]" not in request["messages"][-1]["content"]]
    assert {request["temperature"] for request in asked} == {1.0}
    records = records_of(tmp_path)
    assert len(records) == len(QUESTIONS)
    ranks = set()
    for record, question in zip(records, QUESTIONS, strict=True):
        answers = {answer_to(request) for request in asked if request["messages"][-1]["content"] == question}
        longest, shortest = max(answers, key=len), min(answers, key=len)
        if pair == "best":
            assert record["messages"] == [
                {"role": "user", "content": question},
                {"role": "assistant", "content": longest},
            ]
            continue
        assert record["prompt"] == [{"role": "user", "content": question}]
        if pair == "all":
            texts = [each["answer"] for each in record["answers"]]
            assert texts == sorted(answers, key=len, reverse=True)
            continue
        ((chosen,), (rejected,)) = record["chosen"], record["rejected"]
        assert chosen == {"role": "assistant", "content": longest}
        ranks.add(sorted(answers, key=len).index(rejected["content"]))
        assert rejected["content"] == shortest or pair == "best_random"
        assert record["score_chosen"] > record["score_rejected"]
        assert record["category"] == "chat"
    assert len(ranks) > 1 or pair != "best_random"
    options = {"sources": {"own": str(tmp_path / "out")}, "output_dir": str(tmp_path / "tokenized"), "num_workers": 1}
    made = tokenize(TokenizeOptions.read({**options, "model": {"path": str(tiny_model)}, "category_field": "category"}))
    assert made.total.preferences["units"] == (0 if pair == "best" else len(QUESTIONS))
    facts = report_of(tmp_path)["preferences"]
    pairs = 0 if pair == "best" else made.total.preferences["pairs"]
    assert (facts["pairs"], sum(facts["gaps"].values())) == (pairs, pairs)
    assert facts["chosen_longer"] == (1 if pairs else None)


def test_length_and_quality_make_the_score_of_a_text(choose, tmp_path):
    source = write_lines(tmp_path / "prompts.jsonl", [{"prompt": "Write 200 words about a river."}])
    lengths = iter((200, 150, 20, 420))

    def reply(request):
        content = request["messages"][-1]["content"]
        if "<Response>" not in content:
            return " ".join(["word"] * next(lengths))
        words = len(content.partition("<Response>")[2].partition("</Response>")[0].split())
        return json.dumps(dict.fromkeys(DIMENSIONS, 5 if words == 150 else 2))

    with chat_server(reply) as server:
        assert choose(server, source, *judged(server, "writing"), "endpoint.concurrency=1") == 0
    (record,) = records_of(tmp_path)
    expected = {words: (length_score(200, words) + (100 if words == 150 else 25)) / 2 for words in (200, 150, 20, 420)}
    best, worst = max(expected, key=expected.get), min(expected, key=expected.get)
    assert [len(record[side][0]["content"].split()) for side in ("chosen", "rejected")] == [best, worst]
    assert (record["score_chosen"], record["score_rejected"]) == pytest.approx((expected[best], expected[worst]))
    means = report_of(tmp_path)["preferences"]["mean_scores"]
    assert means["S_q"] == pytest.approx((100 + 3 * 25) / 4)
    assert means["S_l"] == pytest.approx(sum(length_score(200, words) for words in expected) / 4, abs=0.01)


@pytest.fixture
def reward_model(tmp_path, tiny_model):
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_labels": 1, "pad_token_id": 0}
    Qwen3ForSequenceClassification(Qwen3Config(**sizes, **heads)).save_pretrained(tmp_path / "reward")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "reward")
    return tmp_path / "reward"


def test_a_reward_model_sees_question_and_answer_without_the_document(choose, tmp_path, reward_model, capsys):
    document, question = " ".join(f"w{n % 90}" for n in range(300)), "what is w5 ?"
    spans = {"spans": [[0, len(document)]]}
    chat = [{"role": "user", "content": f"{document}\n\n{question}"}, {"role": "assistant", "content": "w1 w2"}]
    source = write_lines(tmp_path / "prompts.jsonl", [{"messages": chat, "provenance": spans}])

    def reply(request):
        return " ".join(f"w{random.Random(request['seed'] + n).randrange(100)}" for n in range(6))

    given = [
        "scorer.kind=reward",
        f"scorer.path={reward_model}",
        "scorer.max_tokens=100",
        "keep_given=true",
        "answers=3",
    ]
    with chat_server(reply) as server:
        assert choose(server, source, *given) == 0
    (record,) = records_of(tmp_path)
    model = Qwen3ForSequenceClassification.from_pretrained(reward_model).eval()
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    scores = {}
    for text in ["w1 w2", *map(reply, server.requests)]:
        shown = [{"role": "user", "content": question}, {"role": "assistant", "content": text}]
        ids = tokenizer.apply_chat_template(shown, tokenize=True, return_dict=True, return_tensors="pt")
        scores[text] = float(model(**ids).logits[0, 0].detach())
    best, worst = max(scores, key=scores.get), min(scores, key=scores.get)
    assert [record[side][0]["content"] for side in ("chosen", "rejected")] == [best, worst]
    assert (record["score_chosen"], record["score_rejected"]) == pytest.approx((scores[best], scores[worst]))
    assert record["prompt"] == chat[:1]
    # A score that is no number is none; the scores of other weights are not taken for theirs.
    with torch.no_grad():
        model.score.weight.fill_(float("nan"))
    model.save_pretrained(tmp_path / "broken")
    tokenizer.save_pretrained(tmp_path / "broken")
    broken = [*given, f"scorer.path={tmp_path / 'broken'}", "overwrite=true"]
    capsys.readouterr()
    with chat_server(reply) as server:
        for _ in range(2):  # nor is it kept in the store as one
            assert choose(server, source, *broken) == 1
            assert names(capsys.readouterr().err, "1 unparsable", "nan")
    # With the document the question is too long to be scored, and nothing of it is cut.
    with chat_server(reply) as server:
        assert choose(server, source, *given, "scorer.context=whole", "overwrite=true") == 1


def test_scores_of_the_records_need_no_server_and_ties_make_no_pair(choose, tmp_path, capsys):
    def scored(*scores):
        return {"prompt": "q", "answers": [{"answer": f"a{n}", "score": s} for n, s in enumerate(scores)]}

    source = write_lines(tmp_path / "s.jsonl", [scored(1, 3, 2), scored(2, 2), scored(5, 4.5), scored(1)])
    options = ["scorer.kind=given", "min_gap=1", "near_duplicates=null"]
    assert choose(None, source, *options) == 0
    (record,) = records_of(tmp_path)
    assert (record["chosen"][0]["content"], record["rejected"][0]["content"]) == ("a1", "a0")
    assert report_of(tmp_path)["outcomes"] == {"done": 1, "tie": 2, "few_answers": 1}
    assert "1 pairs" in capsys.readouterr().out
    # An empty answer is none, whatever its score.
    answers = [{"answer": text, "score": score} for text, score in ((" ", 9), ("good", 2), ("bad", 1))]
    source = write_lines(tmp_path / "s.jsonl", [{"prompt": "q", "answers": answers}])
    assert choose(None, source, *options, "overwrite=true") == 0
    (record,) = records_of(tmp_path)
    assert (record["chosen"][0]["content"], record["rejected"][0]["content"]) == ("good", "bad")
    assert report_of(tmp_path)["preferences"]["answers_left_out"] == {"empty": 1}


def test_a_function_of_the_users_scores_answers(choose, tmp_path, prompts, capsys):
    (tmp_path / "own.py").write_text(
        "def shorter(messages, answer):\n    return -len(answer) if messages[-1]['content'] else 0\n"
    )
    with chat_server(judge) as server:
        assert choose(server, prompts, f"scorer.kind={tmp_path}/own.py:shorter") == 0
        for record in records_of(tmp_path):
            assert len(record["chosen"][0]["content"]) < len(record["rejected"][0]["content"])
        (tmp_path / "bad.py").write_text("def nothing(messages, answer):\n    return None\n")
        given = (f"scorer.kind={tmp_path}/bad.py:nothing", "overwrite=true")
        assert choose(server, prompts, *given) == 1
    assert names(capsys.readouterr().err.splitlines()[-1], "scorer.kind", "TypeError")


def test_answers_that_cannot_be_used_are_left_out_and_counted(choose, tmp_path):
    source = write_lines(tmp_path / "prompts.jsonl", [{"prompt": "one"}, {"prompt": "two"}, {"prompt": "three"}])
    passage = " ".join(f"p{n}" for n in range(20))
    (tmp_path / "bench.txt").write_text(passage)
    replies = {
        "one": iter(
            ("good answer here", "bad", completion("half", "length"), "I'm sorry, but I can't help with that.")
        ),
        "two": iter((passage, "a b", "a b", "a b c")),
        "three": iter((completion("x", "length"),) * 4),
    }

    def reply(request):
        content = request["messages"][-1]["content"]
        return judge(request) if "[Answer]" in content else next(replies[content])

    given = [
        f"decontaminate=[{tmp_path}/bench.txt]",
        "max_failed_share=0.5",
        "near_duplicates=null",
        "endpoint.concurrency=1",
    ]
    with chat_server(reply) as server:
        assert choose(server, source, *judged(server), *given) == 0
    assert [record["chosen"][0]["content"] for record in records_of(tmp_path)] == ["good answer here", "a b c"]
    report = report_of(tmp_path)
    assert report["preferences"]["answers_left_out"] == {"contaminated": 1, "cut": 5, "equal": 1, "refused": 1}
    assert report["outcomes"] == {"done": 2, "cut": 1}
    assert report["stages"]["answer"]["requests"] == 12
    assert report["spent_without_record"] == {"cut": {"items": 1, "tokens": 4 * 15}}


@pytest.mark.parametrize(
    ("given", "things"),
    [
        ({}, ("scorer.kind", "reward, writing, judge, given", "nothing")),
        ({"scorer": {"kind": "rewrd"}}, ("scorer.kind", "reward, writing", "rewrd")),
        ({"scorer": {"kind": "reward"}}, ("scorer.path", "scorer.kind=reward", "nothing")),
        ({"scorer": {"kind": "a:b", "path": "x"}}, ("scorer.path", "scorer.kind=reward", "x with a:b")),
        ({"scorer": {"kind": "judge"}}, ("scorer.endpoint.base_url", "nothing")),
        ({"scorer": {"kind": "a:b"}, "answers": 1}, ("answers", 2, "pair=best_worst", 1)),
        ({"scorer": {"kind": "a:b"}, "sampling": {"temperature": 0}}, ("sampling.temperature", 0)),
        ({"scorer": {"kind": "a:b"}, "min_scored": 5}, ("min_scored", "4 answers", 5)),
        ({"scorer": {"kind": "a:b"}, "min_scored": 1}, ("min_scored", 2, "pair=best_worst", 1)),
        ({"scorer": {"kind": "a:b"}, "prompts": "own.yaml"}, ("prompts", "scorer.kind=judge", "own.yaml with a:b")),
        ({"scorer": {"kind": "given"}}, ("endpoint.base_url", "scorer.kind=given", "http://localhost:1/v1")),
    ],
)
def test_a_mistake_in_the_options_of_preferences_is_one_line(given, things):
    common = {"task": "preferences", "sources": {"a": "a.jsonl"}, "output_dir": "out"}
    endpoint = {"endpoint": {"base_url": "http://localhost:1/v1", "model": "tiny"}}
    with refused(*things, alone=False):
        AnswerPairOptions.read({**common, **endpoint, **given})


@pytest.mark.parametrize(
    "score", [float("nan"), float("inf"), 10**400, True, "3"], ids=["nan", "infinite", "beyond float64", "bool", "text"]
)
def test_a_given_score_is_a_finite_number(score):
    with refused("answers", "finite", "no_score", error=BadRecord):
        asked_prompt({"prompt": "q", "answers": [{"answer": "a", "score": score}]}, "prompt", None)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALLED = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f"}}]},
    {"role": "tool", "content": "x"},
]


@pytest.mark.parametrize(
    ("record", "thing"),
    [
        ({"text": "q"}, "got None"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "user's message"),
        ({"prompt": "abc", "provenance": {"spans": [[0, 9]]}}, "3 characters"),
        ({"prompt": "abc", "provenance": {"spans": [[0, 3]]}}, "left"),
        ({"prompt": "q", "answers": [{"answer": "a"}]}, "'a' with None"),
        ({"messages": [*CALLED, {"role": "user", "content": "and?"}]}, "tools or calls"),
        ({"messages": CALLED[:1], "tools": [TOOL]}, "tools or calls"),
        ({"prompt": "q", "answers": [{"answer": "a\ud800", "score": 1}]}, "surrogate"),
        ({"prompt": "q", "category": "\udc00"}, "surrogate"),
        ({"messages": [{"role": "system", "content": "s", "tools": [TOOL]}, *CALLED[:1]]}, "tools or calls"),
    ],
)
def test_a_record_without_a_prompt_ends_the_run_with_its_place(choose, tmp_path, capsys, record, thing):
    source = write_lines(tmp_path / "bad.jsonl", [record])
    with chat_server(judge) as server:
        assert choose(server, source, *judged(server)) == 1
    assert names(capsys.readouterr().err.splitlines()[-1], "bad.jsonl:1", thing)
