"""Texts that hold names of special tokens."""

import json
from typing import Any

from tokenizers import Tokenizer

from tests.lib.chat_templates import tiny_tokenizer
from verl_ext.text.chat.options import ChatOptions
from verl_ext.text.chat.renderer import ChatRenderer
from verl_ext.text.read.bad_record import BadRecord, RecordOptions
from verl_ext.text.records.records import parse_record
from verl_ext.text.text_encoder import TextEncoder, mask_from_offsets
from verl_ext.text.tokens.tokenizer import ModelOptions

NO_MODEL = ModelOptions(".")  # the tests give their own tokenizer
TOKENIZER = tiny_tokenizer()
TOKENIZER.add_tokens(["<think>", "</think>"])  # added but not special, like Qwen3's
START, END = TOKENIZER.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])


def without_special_tokens() -> Tokenizer:
    """Return the same tokenizer model with no added tokens except <think> and </think>."""
    fields = json.loads(TOKENIZER.backend_tokenizer.to_str())
    fields["added_tokens"] = [token for token in fields["added_tokens"] if not token["special"]]
    return Tokenizer.from_str(json.dumps(fields))


PLAIN = without_special_tokens()


def encoded_chat(
    tokenizer: Any,
    record: dict[str, Any],
    on_found: str = "encode",
) -> tuple[list[int], list[int], int]:
    """Return a chat's (ids, mask, names of special tokens encoded as text)."""
    encoder = TextEncoder(tokenizer, RecordOptions(on_found))
    options = ChatOptions(model=NO_MODEL, special_tokens_in_text=on_found, empty_reasoning="learn")
    (chat,) = ChatRenderer(tokenizer, encoder.special, options).render(parse_record(record).content)
    (encoded,) = encoder.encode_chats([chat])
    if isinstance(encoded, BadRecord):
        raise encoded
    return (
        encoded.ids.tolist(),
        mask_from_offsets(chat.text, encoded.offsets, chat.spans)[0].tolist(),
        (encoded.special_tokens),
    )


def chat_of(*contents: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]}
