"""Chats with tool calls, and the special tokens of the templates that write them."""

from typing import Any

TOKENS = ("<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "[CALLS]")


def agent_chat(*calls: dict[str, Any], content: str = "", **fields: Any) -> dict[str, Any]:
    """Return a record: a question, an assistant's turn with calls, a result for each call, and a plain answer."""
    calling = {"role": "assistant", "content": content, "tool_calls": [{"function": call} for call in calls], **fields}
    results = [{"role": "tool", "content": f"done {number}"} for number in range(len(calls))]
    return {"messages": [{"role": "user", "content": "sit"}, calling, *results, {"role": "assistant", "content": "ok"}]}
