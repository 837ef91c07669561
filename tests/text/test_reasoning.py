"""Reasoning is told apart from an answer by one rule, for servers, folders, files of answers and scores."""

import asyncio
import json

import pytest

from tests.lib.chat_server import completion
from verl_ext.answers.scores import scorer
from verl_ext.files import json_lines
from verl_ext.text.records.reasoning import REASONING_TAGS, decode_answer, split_reasoning
from verl_ext.tools.endpoint.answer import CUT, DONE, UNPARSABLE, answer_from_completion
from verl_ext.tools.endpoint.client import SamplingOptions
from verl_ext.tools.judging.under_test import Predictions


@pytest.mark.parametrize(("opener", "closer"), REASONING_TAGS)
@pytest.mark.parametrize(
    ("form", "thought", "answer"),
    [
        ("{a}\nthe kitchen\n{b}\n\nthe garden", "the kitchen", "the garden"),
        ("the kitchen\n{b}\n\nthe garden", "the kitchen", "the garden"),  # the prompt has the opening tag
        ("{a}{b}the garden", "", "the garden"),
        ("{a}\nthe kitchen or", "the kitchen or", ""),  # cut inside
        ("{a}one{b}\nthe\n{a}two{b}\ngarden", "one\ntwo", "the\ngarden"),
        ("It writes {a}x{b} there", "", "It writes {a}x{b} there"),
        ("the garden", "", "the garden"),
        ("", "", ""),
    ],
)
def test_reasoning_is_no_part_of_an_answer_wherever_it_comes_from(opener, closer, form, thought, answer, tmp_path):
    text, answer = (each.format(a=opener, b=closer) for each in (form, answer))
    reasoning, said = split_reasoning(text)
    assert (reasoning, said.split()) == (thought, answer.split())
    assert scorer("exact")({}, answer or "nothing", text) == bool(answer)
    served = answer_from_completion(completion(text))
    (tmp_path / "pred.jsonl").write_text(json.dumps({"prompt": "p", "response": text}))
    file = Predictions(str(tmp_path / "pred.jsonl"), "predictions.a")
    read = asyncio.run(file.ask("1", "answer", [{"role": "user", "content": "p"}], SamplingOptions()))
    for found in (served, read):
        assert (found.outcome, found.raw.split()) == (DONE if answer else UNPARSABLE, answer.split())
        assert found.reasoning == thought
    assert answer_from_completion(completion(text, "length")).outcome == CUT


def test_answers_of_a_file_may_hold_separators_that_end_no_line_of_json(tmp_path):
    rows = [{"case": str(number), "answer": f"a{text}b", "outcome": "done"} for number, text in enumerate("\u2028\x85")]
    (tmp_path / "answers.jsonl").write_text("\ufeff" + "".join(json_lines(rows)), encoding="utf-8")
    file = Predictions(str(tmp_path / "answers.jsonl"), "predictions.a")
    asked = [{"role": "user", "content": "p"}]
    found = [asyncio.run(file.ask(row["case"], "answer", asked, SamplingOptions())).text for row in rows]
    assert found == [row["answer"] for row in rows]


class Channels:
    """A tokenizer whose tags of channels are special tokens, as gpt-oss's are."""

    all_special_tokens = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>")
    all_special_ids = (0, 1, 2, 3)
    words = (*all_special_tokens, "analysis", "final", "kitchen", "garden", "assistant")

    def decode(self, tokens, skip_special_tokens=False):
        return "".join(self.words[token] for token in tokens if token > 3 or not skip_special_tokens)


def test_the_reasoning_of_channels_is_found_though_their_tags_are_special_tokens():
    said = "<|channel|> analysis <|message|> kitchen <|end|> <|start|> assistant <|channel|> final <|message|> garden"
    text = decode_answer(Channels(), [Channels.words.index(word) for word in said.split()])
    assert split_reasoning(text)[1] == "garden"
