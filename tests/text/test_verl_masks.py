"""The masks of chats, compared with verl's own SFT dataset, MultiTurnSFTDataset."""

import itertools
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.lib.chat_templates import CHATML, QWEN3, tiny_tokenizer
from tests.lib.chat_turns import END, Tokenized
from tests.lib.stock_verl import needs_stock_verl

pytestmark = needs_stock_verl

CHATS = [["sit", "the cat"], ["the cat", "sat on", "the", " mat"], ["{cat}", "a\n\nb", "é中", "0", "sit", "on"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(CHATML).save_pretrained(path)
    return path


def record(said: list[str]) -> dict[str, Any]:
    roles = itertools.cycle(("user", "assistant"))
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]}


def of_verl(path: Path, template: str, said: list[str], **config: Any) -> tuple[list[int], list[int]]:
    """Return the tokens and the mask that verl gives a chat."""
    from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

    pd.DataFrame([record(said)]).to_parquet(path / "chats.parquet")
    config = {"pad_mode": "no_padding", "max_length": 4096, **config}
    row = MultiTurnSFTDataset(str(path / "chats.parquet"), tiny_tokenizer(template), config)[0]
    return row["input_ids"].tolist(), row["loss_mask"].tolist()


@pytest.mark.parametrize("said", CHATS)
def test_the_same_tokens_but_the_line_end_after_a_turn_is_learnt_by_verl_alone(
    tmp_path: Path, folder: Path, said: list[str]
) -> None:
    theirs, mask = of_verl(tmp_path, CHATML, said)
    ours = Tokenized(folder, CHATML, record(said))
    assert ours.result.input_ids.tolist() == theirs
    end, line_end = (ours.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (END, "\n"))
    after = [[before, token] == [*end, *line_end] for before, token in itertools.pairwise(theirs)]
    expected = [flag * (not is_after) for flag, is_after in zip(mask, [False, *after], strict=True)]
    assert sum(mask) - sum(expected) == len(said) // 2
    assert ours.result.loss_mask.tolist() == expected


@pytest.mark.parametrize("template", [CHATML, QWEN3], ids=["ChatML", "Qwen3"])
def test_the_words_that_a_command_of_verls_is_told_give_its_mask(tmp_path: Path, folder: Path, template: str) -> None:
    for said in CHATS if template == CHATML else CHATS[:1]:
        words = {"end_of_turn": f"{END}\n", "empty_reasoning": "learn"}
        ours = Tokenized(folder, template, record(said), **words)
        assert (ours.result.input_ids.tolist(), ours.result.loss_mask.tolist()) == of_verl(tmp_path, template, said)


@pytest.mark.parametrize("eos", [END, "<|endoftext|>"])
def test_the_words_for_pairs_give_the_response_and_eos_token_after_the_generation_prompt(
    folder: Path, eos: str
) -> None:
    tokenizer = tiny_tokenizer(QWEN3)
    turns = "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n{% else %}"
    turns += "<|im_start|>assistant\n{{ m.content }}" + eos + "{% endif %}{% endfor %}"
    turns += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    template, words = (QWEN3, {"drop_empty_reasoning": 1.0}) if eos == END else (turns, {})
    prompt = tokenizer.apply_chat_template(record(["sit"])["messages"], add_generation_prompt=True, tokenize=False)
    given = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    ours = Tokenized(folder, template, {"prompt": "sit", "response": "the cat"}, **words)
    learnt = given + sum(ours.result.loss_mask)
    assert tokenizer.decode(ours.result.input_ids[:learnt]) == f"{prompt}the cat{eos}"
    assert ours.result.loss_mask[:learnt].tolist() == [0] * given + [1] * (learnt - given)


def test_a_template_without_that_line_end_has_verls_mask(tmp_path: Path, folder: Path) -> None:
    closed = CHATML.replace("<|im_end|>\n", "<|im_end|>")
    for said in CHATS:
        theirs, mask = of_verl(tmp_path, closed, said)
        ours = Tokenized(folder, closed, record(said))
        assert (ours.result.input_ids.tolist(), ours.result.loss_mask.tolist()) == (theirs, mask)


def test_turns_that_depend_on_the_chat_are_refused_by_verl_or_learnt_with_an_empty_block(
    tmp_path: Path, folder: Path
) -> None:
    said = ["sit", "the cat", "on", "the mat"]
    with pytest.raises(AssertionError, match="ignore_input_ids_mismatch"):
        of_verl(tmp_path, QWEN3, said)
    ids, mask = of_verl(tmp_path, QWEN3, said, ignore_input_ids_mismatch=True)
    learnt = [token for token, flag in zip(ids, mask, strict=True) if flag]
    block = "<think>\n\n</think>\n\n"
    assert tiny_tokenizer().decode(learnt) == f"{block}the cat{END}\n{block}the mat{END}\n"
    assert Tokenized(folder, QWEN3, record(said)).learnt == ["the cat" + END, "the mat" + END]
