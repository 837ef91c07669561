"""Answers of an OpenAI-compatible server, such as vLLM, in the model's place."""

import asyncio
from dataclasses import dataclass, replace
from typing import ClassVar

from verl_ext.answers.options import AnswerOptions
from verl_ext.answers.prompts import Prompt
from verl_ext.endpoint.answer import FAILED, TOO_LONG, Answer
from verl_ext.endpoint.client import Client, EndpointOptions, SamplingOptions
from verl_ext.endpoint.store import NoStore
from verl_ext.options import DataError, UsageError, choice_problem

_SECONDS = 600.0  # for an answer
_RETRIES = 2  # few, because the ranks of a run wait


class ServerFailed(ValueError):
    """The one-line error of a server that gives no usable answer."""


@dataclass(frozen=True)
class _Endpoint(EndpointOptions):
    """The server that the `eval` node names."""

    prefix: ClassVar[str] = "eval"


class Server:
    """The server of `eval.base_url` and its model; nothing is stored."""

    def __init__(self, options: AnswerOptions) -> None:
        """Find the model. Raises ServerFailed."""
        self._kwargs = options.apply_chat_template_kwargs or {}
        self._endpoint = _Endpoint(
            base_url=options.base_url,
            model=options.model,
            concurrency=options.batch_size,
            retries=_RETRIES,
            timeout=_SECONDS,
        )
        self._sampling = SamplingOptions(options.temperature, options.top_p, options.max_new_tokens, seed=None)
        try:
            served = asyncio.run(self._models())
        except (UsageError, DataError) as error:
            raise ServerFailed(str(error)) from error
        if options.model is None and served is None:
            needed = "must list its models at /models, or eval.model must name one"
            raise ServerFailed(f"eval.base_url={options.base_url} {needed}; it does not, got null")
        if options.model is None and len(served or ()) != 1:
            names = ", ".join(served or ()) or "none"
            raise ServerFailed(f"eval.model is required: {options.base_url} serves {names}; got null")
        model = options.model or (served or [""])[0]
        if served and (problem := choice_problem("eval.model", model, served)):
            raise ServerFailed(f"{problem} at {options.base_url}")
        self._endpoint = replace(self._endpoint, model=model)

    async def _models(self) -> list[str] | None:
        async with Client(self._endpoint, NoStore()) as client:
            return client.models

    def answers(self, prompts: list[Prompt]) -> list[str]:
        """Return each prompt's answer, from concurrent requests; raise ServerFailed."""
        try:
            answers = asyncio.run(self._ask(prompts))
        except (UsageError, DataError) as error:
            raise ServerFailed(str(error)) from error
        for answer in answers:
            if answer.outcome in (FAILED, TOO_LONG):
                raise ServerFailed(f"eval.base_url={self._endpoint.base_url} gave no answer; got {answer.reason}")
        return [answer.raw for answer in answers]  # cut and refused answers are scored as they are

    async def _ask(self, prompts: list[Prompt]) -> list[Answer]:
        async with Client(self._endpoint, NoStore()) as client:

            async def ask(number: int, prompt: Prompt) -> Answer:
                question = (str(number), "answer")
                if prompt.messages is None:
                    return await client.complete(*question, prompt.ids, self._sampling)
                kwargs = {**prompt.template_kwargs, **self._kwargs}
                extra, tools = {"chat_template_kwargs": kwargs} if kwargs else {}, prompt.tools or ()
                return await client.ask(*question, prompt.messages, self._sampling, tools=tools, extra_body=extra)

            return list(await asyncio.gather(*(ask(*each) for each in enumerate(prompts))))
