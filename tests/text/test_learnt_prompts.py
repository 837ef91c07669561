"""`prompts=learn` makes targets of a whole chat, and `weights` gives factors to what patterns match in its turns."""

from pathlib import Path
from typing import Any

import pytest

from tests.lib.chat_templates import CHATML, QWEN3, tiny_tokenizer
from tests.lib.chat_turns import CALLS_2, END, EVERYTHING, FIELD, Tokenized, turn
from tests.lib.errors import refused
from verl_ext.commands.command_line import read_options
from verl_ext.commands.tokenize import TokenizeOptions
from verl_ext.options import DataError

OF_CALLS = {"(?s)<tool_call>.*?</tool_call>": 2.0}
SAID = turn("Thought: mat Action: sit Observation: the cat Thought: world")
SAYS = {"Action:.*?(?=Observation:)": 2.0, "Observation:": 2.0, "(?<=Observation:).*?(?=Thought:)": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("learnt")
    tiny_tokenizer().save_pretrained(path)
    return path


def weighed(found: Tokenized) -> dict[float, str]:
    """Return the text of each weight, 0 for context."""
    result, texts = found.result, dict[float, list[int]]()
    weights = result.loss_mask * (1.0 if result.weights is None else result.weights)
    for token, weight in zip(result.input_ids.tolist(), weights.tolist(), strict=True):
        texts.setdefault(weight, []).append(token)
    return {weight: found.tokenizer.decode(ids) for weight, ids in texts.items()}


def test_prompts_are_targets_but_for_the_first_token_which_nothing_predicts(folder):
    found = Tokenized(folder, CHATML, turn("the cat"), prompts="learn")
    assert weighed(found) == {0.0: "<|im_start|>", 1.0: found.text.removeprefix("<|im_start|>")}
    assert (
        found.counts.target_kinds["prompt"]
        == len(found.result.input_ids)
        - 1
        - found.counts.target_kinds["answer"]
        - found.counts.target_kinds["end_of_turn"]
    )
    assert Tokenized(folder, CHATML, turn("the cat")).counts.target_kinds["prompt"] == 0


def test_reasoning_that_is_context_stays_so_between_prompts_that_are_learnt(folder):
    found = Tokenized(folder, QWEN3, FIELD, prompts="learn", reasoning="context")
    assert weighed(found)[0.0] == "<|im_start|><think>\nsat there\n</think>\n\n"


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [*turn("a")["messages"], *turn("b", training=False)["messages"]]},
        {"messages": [*turn("a", weight=0.5)["messages"]]},
        {
            "prompt": turn("a")["messages"][:1],
            "chosen": turn("a")["messages"][1:],
            "rejected": turn("b")["messages"][1:],
        },
    ],
)
def test_chats_that_say_what_is_learnt_and_answers_to_compare_are_refused_with_prompts(record, folder):
    with refused("prompts", "weighted_prompts", error=DataError):
        Tokenized(folder, CHATML, record, prompts="learn")


@pytest.mark.parametrize(
    ("template", "record", "weights", "texts"),
    [
        (QWEN3, EVERYTHING, OF_CALLS, {2.0: CALLS_2.replace("</tool_call>\n", "</tool_call>")}),
        (QWEN3, EVERYTHING, {**OF_CALLS, "mat": 3}, {6.0: "mat"}),
        (QWEN3, EVERYTHING, {".*": 0.5}, {1.0: f"\n\n\n\n\n\n\n\n\n\n{END}"}),
        (CHATML, SAID, SAYS, {2.0: "Action: sit Observation:", 1.0: f"Thought: mat Thought: world{END}"}),
        (CHATML, turn("the cat"), {"user": 9, "hello": 9}, {1.0: f"the cat{END}"}),
    ],
)
def test_what_a_pattern_matches_in_a_turn_has_its_factor_and_the_turns_end_has_none(
    template: str, record: dict[str, Any], weights: dict[str, float], texts: dict[float, str], folder: Path
):
    found = weighed(Tokenized(folder, template, record, weights=weights))
    assert {weight: found.get(weight) for weight in texts} == texts


@pytest.mark.parametrize(
    ("option", "things"),
    [
        ("weights={'(': 2}", ("weights", "(: 2")),
        ("weights={a: -1}", ("weights", "a: -1")),
        ("weights={a: true}", ("weights", "a: true")),
        ("weights={a: '2'}", ("weights", "a: 2")),
        ("turns=last", ("turns", "prompts=learn", "last")),
    ],
)
def test_patterns_and_turns_that_cannot_be_are_refused(option, things, tmp_path):
    words = ["sources={a: x.jsonl}", f"output_dir={tmp_path}/out", "model.path=M", "prompts=learn", option]
    with refused(*things):
        read_options(TokenizeOptions, words)


def test_a_pattern_on_the_command_line_is_read_as_it_stands(tmp_path):
    words = ["sources={a: x.jsonl}", f"output_dir={tmp_path}/out", "model.path=o/n"]
    pattern = next(iter(OF_CALLS))
    assert read_options(TokenizeOptions, [*words, f"weights={{'{pattern}': 2.0}}"]).weights == OF_CALLS
