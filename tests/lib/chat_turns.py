"""Turns with reasoning and calls, and what of them is learnt."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from verl_ext.commands.command_line import read_options
from verl_ext.commands.tokenize import TokenizeOptions
from verl_ext.options import DataError
from verl_ext.text.encoder_chats import ChatEncoder
from verl_ext.text.read.readers import Chunk


class Tokenized:
    """Return a record's tokens under one template and one set of options."""

    def __init__(self, folder: Path, template: str, *records: dict[str, Any], **options: Any) -> None:
        given = ["sources={chat:in.jsonl}", "output_dir=out", f"model.path={folder}"]
        encoder = ChatEncoder(replace(read_options(TokenizeOptions, given), chat_template=template, **options))
        self.tokenizer = encoder.tokenizer
        self.result = encoder.encode(Chunk(1, [(f"in.jsonl:{i}", record) for i, record in enumerate(records, 1)]))
        if self.result.failure:
            raise DataError(self.result.failure)
        self.counts = self.result.counts

    @property
    def text(self) -> str:
        return self.tokenizer.decode(self.result.input_ids)

    @property
    def learnt(self) -> list[str]:
        """Return the decoded runs of targets."""
        runs: list[list[int]] = []
        before = 0
        for token, target in zip(self.result.input_ids.tolist(), self.result.loss_mask.tolist(), strict=True):
            if target and not before:
                runs.append([])
            if target:
                runs[-1].append(token)
            before = target
        return [self.tokenizer.decode(run) for run in runs]


def call(name: str = "sit", **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def turn(content: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": content, **fields}]}


FIELD = turn("the cat", reasoning_content="sat there")
EVERYTHING = turn("the cat", reasoning_content="sat there", tool_calls=[call(on="mat"), call(on="world")])
CALLS = '<tool_call>\n{"name": "sit", "arguments": {"on": "mat"}}\n</tool_call>'


CALLS_2 = CALLS + "\n" + CALLS.replace("mat", "world")


END = "<|im_end|>"
