"""Prompts with expected answers, and their scores."""

import json

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.lib.errors import refused
from tests.lib.tokenized_data import write_tokenized
from verl_ext.answers import AnswerOptions, Prompts
from verl_ext.answers.scores import number_of, scorer
from verl_ext.commands.command_line import read_options
from verl_ext.commands.tokenize import TokenizeOptions, tokenize
from verl_ext.data.tokenized.arrow import TokenizedData
from verl_ext.trainer.answers import Scored, mean_scores

CHAT = [
    {"role": "user", "content": "w1 w2"},
    {"role": "assistant", "content": "w3"},
    {"role": "user", "content": "w4"},
    {"role": "assistant", "content": "w5 w6"},
]


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


def _file(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_the_prompt_of_a_chat_is_what_its_template_renders_before_the_last_answer(tokenizer, tmp_path):
    path = _file(tmp_path / "maths.jsonl", {"messages": CHAT}, {"question": "w7", "answer": "w8"})
    first, second = Prompts.read(AnswerOptions(prompts=path), tokenizer).items
    expected = tokenizer.apply_chat_template(CHAT[:3], add_generation_prompt=True, return_dict=False)
    assert (first.ids, first.expected, first.category) == (expected, "w5 w6", "maths")
    asked = [{"role": "user", "content": "w7"}]
    assert second.ids == tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    assert second.record == {"question": "w7", "answer": "w8"}


def _tokenized(folder, tokenizer, *options):
    """Tokenize chats whose messages are in the column `chat`; return the folder."""
    source = _file(folder.with_suffix(".jsonl"), {"chat": CHAT})
    given = [f"sources={{a:{source}}}", f"output_dir={folder}", f"model.path={tokenizer.name_or_path}"]
    tokenize(read_options(TokenizeOptions, [*given, "columns={messages: chat}", "num_workers=1", *options]))
    return str(folder)


def test_the_prompt_of_a_chat_follows_the_options_of_the_training_data(tokenizer, tmp_path):
    template = tmp_path / "dated.jinja"
    template.write_text("{{ strftime_now('w%d') }} {{ style }} " + tokenizer.chat_template)
    folder = _tokenized(
        tmp_path / "data",
        tokenizer,
        f"chat_template={template}",
        "chat_date=2026-01-11",
        "apply_chat_template_kwargs={style: w9}",
        "reasoning=drop",
    )
    thought = [CHAT[0], {**CHAT[1], "content": "<think>w8</think>w3"}, *CHAT[2:]]
    path = _file(tmp_path / "a.jsonl", {"chat": thought})
    (prompt,) = Prompts.read(AnswerOptions(prompts=path), tokenizer, [str(tmp_path), folder]).items
    row = TokenizedData([folder]).block(0, 1)["input_ids"].tolist()
    assert prompt.ids == row[: len(prompt.ids)]
    assert prompt.ids[:2] == tokenizer.convert_tokens_to_ids(["w11", "w9"])
    assert (prompt.question, prompt.expected) == ("w4", "w5 w6")
    own = AnswerOptions(prompts=path, apply_chat_template_kwargs={"style": "w1"}, chat_date="2026-01-12")
    (other,) = Prompts.read(own, tokenizer, [folder]).items
    assert other.ids[:2] == tokenizer.convert_tokens_to_ids(["w12", "w1"])
    plain = _file(tmp_path / "b.jsonl", {"messages": CHAT})
    with refused("columns.messages", "eval.columns={}"):
        Prompts.read(AnswerOptions(prompts=plain), tokenizer, [folder])
    assert len(Prompts.read(AnswerOptions(prompts=plain, columns={}), tokenizer, [folder]).items) == 1


@pytest.mark.parametrize(
    ("given", "things"),
    [
        ({"chat_date": "now"}, ("eval.chat_date", "now")),
        ({"chat_template": "{% x"}, ("eval.chat_template", "line 1")),
        ({"apply_chat_template_kwargs": {"tokenize": True}}, ("eval.apply_chat_template_kwargs", "tokenize")),
        ({"columns": {"mesages": "m"}}, ("eval.columns", "mesages", "nearest: messages")),
        ({"prompts": "no_such.jsonl"}, ("eval.prompts", "no_such.jsonl")),
    ],
)
def test_options_of_prompts_that_cannot_be_used_are_one_line(given, things, tokenizer, tmp_path):
    path = _file(tmp_path / "a.jsonl", {"messages": CHAT})
    with refused(*things):
        Prompts.read(AnswerOptions(**{"prompts": path, **given}), tokenizer)


def test_answers_end_with_the_end_of_a_turn_that_ends_a_chat_beside_the_tokenizers(tokenizer, tmp_path):
    path = _file(tmp_path / "a.jsonl", {"messages": CHAT})
    other = AutoTokenizer.from_pretrained(tokenizer.name_or_path, eos_token="<|pad|>")
    two_ends = (  # as gpt-oss's <|end|>, which also ends its reasoning, and <|return|>
        "{% for m in messages %}{{ m.role }} {{ m.content }}"
        "{{ '<|im_end|>' if loop.last and m.role == 'assistant' else '<|im_start|>' }} {% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    for options in (AnswerOptions(prompts=path), AnswerOptions(prompts=path, chat_template=two_ends)):
        assert set(Prompts.read(options, other).stops) == set(other.convert_tokens_to_ids(["<|pad|>", "<|im_end|>"]))


def test_the_prompt_of_a_tokenized_document_ends_before_its_last_targets(tokenizer, tmp_path):
    ids, mask = [5, 6, 7, 8, 9, 10, 2, 11], [0, 0, 1, 1, 0, 1, 1, 0]
    document = {"input_ids": np.array(ids), "loss_mask": np.array(mask), "category_ids": 2 * np.array(mask)}
    folder = write_tokenized(tmp_path / "data", [document], {1: "code", 2: "maths"})
    prompts = Prompts.read(AnswerOptions(prompts=folder), tokenizer)
    (prompt,) = prompts.items
    assert (prompt.ids, prompt.expected, prompt.category) == (ids[:5], tokenizer.decode([10]), "maths")
    assert prompts.stops == (2,)


@pytest.mark.parametrize(
    ("score", "expected"), [("number", "w10"), ("number", "#### w"), ("contains", "<think>w</think> ")]
)
def test_an_expected_answer_that_a_score_cannot_compare_is_refused(score, expected, tokenizer, tmp_path):
    path = _file(tmp_path / "a.jsonl", {"messages": [CHAT[0], {**CHAT[1], "content": expected}]})
    options = AnswerOptions(prompts=path, score=score)
    if expected == "w10":
        assert len(Prompts.read(options, tokenizer).items) == 1
    else:
        with refused(f"{path}:1", f"eval.score={score}"):
            Prompts.read(options, tokenizer)
    document = {"input_ids": np.array([5, 6, 7, 2]), "loss_mask": np.array([0, 0, 0, 1]), "category_ids": np.zeros(4)}
    folder = write_tokenized(tmp_path / "data", [document])
    with refused("row 0", f"eval.score={score}"):
        Prompts.read(AnswerOptions(prompts=folder, score=score), AutoTokenizer.from_pretrained(tokenizer.name_or_path))


def test_a_text_is_gone_on_with_without_a_template_and_has_no_score(tiny_model, tmp_path):
    base = AutoTokenizer.from_pretrained(tiny_model)
    base.chat_template = None
    path = _file(tmp_path / "a.jsonl", {"text": "w1 w2 w3", "kind": "own"}, {"text": "w4"})
    prompts = Prompts.read(AnswerOptions(prompts=path, category_field="kind"), base)
    first, second = prompts.items
    assert [prompt.expected for prompt in prompts.items] == [None, None]
    assert (first.ids, first.category, second.category) == (base("w1 w2 w3")["input_ids"], "own", "a")
    assert prompts.stops == (base.eos_token_id,)
    assert scorer("exact")(first.record, first.expected, "w4") is None
    scored = [Scored(0, "own", None, None), Scored(1, "a", 1.0, None)]
    assert mean_scores(scored) == {"a": 1.0, "": 1.0}
    chat = _file(tmp_path / "b.jsonl", {"messages": CHAT})
    with refused("eval.chat_template"):
        Prompts.read(AnswerOptions(prompts=chat), base)


def test_categories_are_those_of_the_option_or_of_a_field_and_samples_the_first(tokenizer, tmp_path):
    path = _file(tmp_path / "a.jsonl", {"messages": CHAT, "kind": "own"}, {"messages": CHAT})
    options = AnswerOptions(prompts={"named": [path]}, category_field="kind")
    assert [prompt.category for prompt in Prompts.read(options, tokenizer).items] == ["own", "named"]
    assert len(Prompts.read(AnswerOptions(prompts=path, max_samples=1), tokenizer).items) == 1


@pytest.mark.parametrize(
    ("record", "thing"),
    [
        ({"messages": CHAT[:1]}, "assistant turn"),
        ({"text": ""}, "empty"),
        ({"messages": CHAT[1:2]}, "nothing"),
        ({"messages": [CHAT[0], {**CHAT[1], "content": "", "tool_calls": [{"name": "f"}]}]}, "words"),
        ({"messages": [CHAT[0], {**CHAT[1], "content": "<think>x</think>"}]}, "words"),
    ],
)
def test_a_record_without_prompt_or_answer_is_refused_with_its_line(record, thing, tokenizer, tmp_path):
    path = _file(tmp_path / "a.jsonl", {"messages": CHAT}, record)
    with refused("eval.prompts", f"{path}:2", thing):
        Prompts.read(AnswerOptions(prompts=path), tokenizer)


@pytest.mark.parametrize(
    ("given", "things"),
    [
        ({"score": "exakt"}, ("eval.score", "exakt", "nearest: exact")),
        ({"score": "no.such.module:f"}, ("eval.score", "pkg://no.such.module")),
        ({"score": "math:coshh"}, ("eval.score", "coshh", "nearest: cosh")),
        ({"prompts": {"a": {"b": "c"}}}, ("eval.prompts", "{'a': {'b': 'c'}}")),
        ({"prompts": None, "freq": 5}, ("eval.prompts", "eval.freq=5", None)),
    ],
)
def test_wrong_options_are_one_line(given, things):
    with refused(*things):
        AnswerOptions(**{"prompts": "a.jsonl", **given})


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("It is 3 + 4 = 7.\n#### 7", "7"), ("#### 1,234.50 dollars of 9", "1234.5"), ("12 apples, then 15", "15")),
        *(("The sum is -8.", "-8"), ("from 3-4", "4"), ("costs $.50", "0.5"), ("none", None), ("####", None)),
    ],
)
def test_the_number_of_a_text_is_its_result_as_gsm8k_writes_it_or_its_last_one(text, number):
    found = number_of(text)
    assert (None if found is None else float(found)) == (None if number is None else float(number))


@pytest.mark.parametrize(
    ("name", "expected", "answer", "score"),
    [
        ("exact", "a b", " a b\n", 1),
        ("exact", "a b", "a b c", 0),
        ("exact", "<think>x</think>a", "<think>it may be b</think>\n\na", 1),
        ("number", "so\n#### 1,000", "It makes 1000.0", 1),
        ("number", "#### 72", "72 and then 73", 0),
        ("number", "#### 5", "none", 0),
        ("contains", "Paris", "It is PARIS.", 1),
        ("contains", "Paris", "<think>Paris?</think>London", 0),
    ],
)
def test_built_in_scores(name, expected, answer, score):
    assert scorer(name)({}, expected, answer) == score


def test_a_scorer_of_ones_own_is_given_the_record_and_the_answer(tmp_path):
    path = tmp_path / "own.py"
    path.write_text("def half(record, answer):\n    return 0.5 * (record['x'] == answer)\n")
    own = scorer(f"{path}:half")
    assert own({"x": "garden"}, "", "<think>kitchen</think>garden") == 0.5  # without its reasoning
    assert (own({"x": "a"}, "", "a"), own({"x": "a"}, "", "b")) == (0.5, 0.0)
    with refused(f"eval.score={path}:half", "KeyError: 'x'"):
        own({}, "", "a")
