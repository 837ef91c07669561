"""`drop_empty_reasoning` removes empty thinking blocks from a share of chats, as MiniMind-3 does."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.lib.chat_templates import CHATML, GLM, PREFILLED_THINKING, QWEN3, tiny_tokenizer
from tests.lib.chat_turns import CALLS, END, Tokenized, call, turn
from tests.lib.errors import refused
from verl_ext.commands.command_line import read_options
from verl_ext.commands.tokenize import TokenizeOptions, tokenize
from verl_ext.options import DataError, UsageError

BLOCK = "<think>\n\n</think>\n\n"
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "<think>\n\n</think>\n\n{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}"
    "\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat(*said: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]}


@pytest.mark.parametrize("template", [PREFILLED_THINKING, QWEN3, MARKED])
def test_a_drawn_chat_has_the_text_that_minimind_makes_of_it(chatml: Path, template: str) -> None:
    # post_processing_chat of dataset/lm_dataset.py removes the block anywhere in the rendered text.
    record = chat("sit", "the cat", "on", "the mat")
    found = Tokenized(chatml, template, record, drop_empty_reasoning=1.0)
    rendered = found.tokenizer.apply_chat_template(record["messages"], chat_template=template, tokenize=False)
    assert BLOCK in rendered
    assert found.text == rendered.replace(BLOCK, "")
    assert found.learnt == ["the cat" + END, "the mat" + END]
    assert found.counts.dropped_blocks == 1


def test_reasoning_with_words_stays_and_calls_lose_their_block(chatml: Path) -> None:
    said = turn("the cat", reasoning_content="sat")
    assert Tokenized(chatml, QWEN3, said, drop_empty_reasoning=1.0).text == Tokenized(chatml, QWEN3, said).text
    calling = Tokenized(chatml, QWEN3, turn("", tool_calls=[call(on="mat")]), drop_empty_reasoning=1.0)
    assert BLOCK not in calling.text
    assert calling.learnt == [CALLS + END]


def test_blocks_that_a_record_writes_go_too(chatml: Path) -> None:
    found = Tokenized(chatml, CHATML, chat("sit", BLOCK + "the cat"), drop_empty_reasoning=1.0)
    assert found.text == Tokenized(chatml, CHATML, chat("sit", "the cat")).text
    one_line = Tokenized(chatml, GLM, turn("the cat"), drop_empty_reasoning=1.0)
    assert "think" not in one_line.text
    assert one_line.learnt == ["the cat<|end|>"]


def test_a_chat_in_which_the_user_writes_such_a_block_keeps_all(chatml: Path) -> None:
    record = chat(BLOCK + "sit", "the cat")
    found = Tokenized(chatml, QWEN3, record, drop_empty_reasoning=1.0)
    assert found.text == Tokenized(chatml, QWEN3, record).text
    assert found.counts.dropped_blocks == 0


def test_weighted_characters_beside_a_block_are_refused(chatml: Path) -> None:
    detail = [{"begin_offset": 0, "end_offset": 30, "train": True}]
    with refused("message 2", "weights", "characters", error=DataError):
        Tokenized(chatml, CHATML, turn(BLOCK + "the cat", train_detail=detail), drop_empty_reasoning=1.0)


def test_a_share_of_chats_is_drawn_by_their_text_alone(tmp_path: Path) -> None:
    tiny_tokenizer(QWEN3).save_pretrained(tmp_path / "model")
    records = [chat(f"the cat {i}", "sat") for i in range(600)]

    def kept(name: str, lines: list[dict[str, Any]], share: float, workers: int) -> set[str]:
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
        base = [f"sources={{a:{tmp_path}/{name}.jsonl}}", f"output_dir={tmp_path / name}", f"num_workers={workers}"]
        options = [*base, f"model.path={tmp_path / 'model'}", f"drop_empty_reasoning={share}", "preview=0"]
        report = tokenize(read_options(TokenizeOptions, options))
        from datasets import load_from_disk

        ids = load_from_disk(str(tmp_path / name))["input_ids"]
        texts = {tiny_tokenizer().decode(row) for row in ids}
        with_block = {text.replace(BLOCK, "") for text in texts if BLOCK in text}
        assert f"of {600 - len(with_block)} chats drawn" in report.table()
        return with_block

    most = kept("most", records, 0.8, 1)
    assert 80 <= len(most) <= 160  # 120 ± 4 standard deviations
    assert kept("again", records[::-1], 0.8, 2) == most
    assert most < kept("half", records, 0.5, 1)


@pytest.mark.parametrize(("value", "limit"), [("1.2", 1), ("-1.0", 0), ("many", "number")])
def test_a_wrong_share_is_one_line(value: str, limit: Any) -> None:
    base = ["sources={a:in.jsonl}", "output_dir=out", "model.path=m"]
    with refused("drop_empty_reasoning", value, limit, error=UsageError):
        read_options(TokenizeOptions, [*base, f"drop_empty_reasoning={value}"])
