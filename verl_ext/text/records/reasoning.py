"""The reasoning in a model's text, apart from its answer.

    <think> the sum of both </think> It is 4.      the usual form
    the sum of both </think> It is 4.              the prompt had the opening tag
    <think> the sum of                             cut inside the reasoning: there is no answer

It is one rule for servers, local models and files of answers. A block of reasoning begins at the start of a line,
because an answer may itself speak of the tags.
"""

import re
from collections.abc import Sequence
from typing import Any

# The tags around reasoning that templates and models write.
REASONING_TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("◁think▷", "◁/think▷"),
    ("<|channel>thought", "<channel|>"),
)
# gpt-oss: the messages of its other channels come before that of the final one.
_PAIRS = (*REASONING_TAGS, ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"))
_BLOCKS = {
    closer: (opener, re.compile(rf"(?:\A|(?<=\n))\s*{re.escape(opener)}(.*?){re.escape(closer)}\s*", re.DOTALL))
    for opener, closer in _PAIRS
}


def split_reasoning(text: str) -> tuple[str, str]:
    """Return the reasoning in a text, and the answer without it."""
    thoughts: list[str] = []
    for closer, (opener, block) in _BLOCKS.items():
        thoughts += block.findall(text)
        text = block.sub("", text)
        before, closed, after = text.rpartition(closer)
        if closed and opener not in before:
            thoughts.append(before)
            text = after
        elif text.lstrip().startswith(opener):
            thoughts.append(text.lstrip().removeprefix(opener))
            text = ""
    return "\n".join(thought.strip() for thought in thoughts), text


def decode_answer(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Return generated tokens' text, special tokens only in tags of reasoning."""
    special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    in_tags = {number for token, number in special.items() if any(token in tag for pair in _PAIRS for tag in pair)}
    if not in_tags:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))
    left_out = {*special.values()} - in_tags
    return str(tokenizer.decode([token for token in tokens if token not in left_out]))
