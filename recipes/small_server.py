"""Serve a small model's own answers from a CPU to recipes that ask a model for several answers to a prompt.

    python recipes/small_server.py PORT_FILE FOLDER

listens as recipes/scripted_model.py does, and serves the model `small`, a transformers folder with a chat template.
Requests that wait together become one batch. The draws of an answer follow from the request's own seed.
"""

import sys
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import torch
from scripted_model import Handler, serve
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList

BATCH = 64
Request = tuple[dict[str, Any], SimpleQueue[tuple[str, str]]]
waiting: SimpleQueue[Request] = SimpleQueue()


class Draws(LogitsProcessor):
    """Gumbel noise from a generator of each row: the likeliest token is then a draw."""

    def __init__(self, bodies: list[dict[str, Any]]) -> None:
        self._rows = [
            (body.get("temperature", 1.0), torch.Generator().manual_seed(body.get("seed") or 0)) for body in bodies
        ]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        noise = [-t * torch.empty(scores.shape[1]).exponential_(generator=draw).log() for t, draw in self._rows]
        return scores + torch.stack(noise)


class SmallHandler(Handler):
    """Answers of the model."""

    model = "small"

    def reply(self, body: dict[str, Any]) -> tuple[str, str]:
        """Return the answer to a request, and why it ended."""
        answered: SimpleQueue[tuple[str, str]] = SimpleQueue()
        waiting.put((body, answered))
        return answered.get()


def answer_batches(folder: str) -> None:
    """Answer the requests that wait together, for ever."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    while True:
        batch = [waiting.get()]
        while len(batch) < BATCH:
            try:
                batch.append(waiting.get(timeout=0.05))
            except Empty:
                break
        bodies = [body for body, _ in batch]
        chats = [body["messages"] for body in bodies]
        prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
        inputs = tokenizer(prompts, padding=True, add_special_tokens=False, return_tensors="pt")
        most = max(body.get("max_tokens") or 512 for body in bodies)
        found = model.generate(
            **inputs,
            max_new_tokens=most,
            do_sample=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            logits_processor=LogitsProcessorList([Draws(bodies)]),
        )[:, inputs["input_ids"].shape[1] :]
        for (_, answered), ids in zip(batch, found.tolist(), strict=True):
            ended = "stop" if tokenizer.eos_token_id in ids else "length"
            answered.put((tokenizer.decode(ids, skip_special_tokens=True), ended))


if __name__ == "__main__":
    Thread(target=answer_batches, args=(sys.argv[2],), daemon=True).start()
    serve(SmallHandler, sys.argv[1])
