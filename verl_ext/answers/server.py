"""Answers of an OpenAI-compatible server (vLLM, SGLang, `transformers serve`) in place of the model in training.

httpx is what the `openai` package itself runs on; two requests need no more.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from verl_ext.answers.options import AnswerOptions
from verl_ext.answers.prompts import Prompt
from verl_ext.values import choice_problem, first_line

_SECONDS = 600.0  # for an answer
_KEY_VARIABLE = "OPENAI_API_KEY"


class ServerFailed(ValueError):
    """A server that cannot be reached, or whose answer cannot be used, in one line."""


class Server:
    """A server of `eval.base_url`, and the model that answers there."""

    def __init__(self, options: AnswerOptions) -> None:
        """Connect, and find the model. Raises ServerFailed."""
        self._options = options
        key = os.environ.get(_KEY_VARIABLE)
        self._client = httpx.Client(
            base_url=str(options.base_url).rstrip("/") + "/",
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(_SECONDS, connect=10.0),
            transport=httpx.HTTPTransport(retries=2),
        )
        try:
            served = [str(model["id"]) for model in self._json("GET", "models")["data"]]
        except (LookupError, TypeError) as error:
            raise ServerFailed(
                f"eval.base_url={options.base_url} must list its models at /models; it does not"
            ) from error
        if options.model is None and len(served) != 1:
            names = ", ".join(served) or "none"
            raise ServerFailed(f"eval.model is required: {options.base_url} serves {names}; got null")
        if options.model is not None and (problem := choice_problem("eval.model", options.model, served)):
            raise ServerFailed(f"{problem} at {options.base_url}")
        self.model = options.model or served[0]

    def answers(self, prompts: list[Prompt]) -> list[str]:
        """Return the text of the answer to each prompt, all asked at once. Raises ServerFailed."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(self._answer, prompts))

    def _answer(self, prompt: Prompt) -> str:
        options = self._options
        asked: dict[str, Any] = {"model": self.model, "max_tokens": options.max_new_tokens}
        asked |= {"temperature": options.temperature, "top_p": options.top_p}
        if prompt.messages is None:
            answer = self._json("POST", "completions", {**asked, "prompt": list(prompt.ids)})
        else:
            asked |= {"messages": prompt.messages}
            if prompt.tools:
                asked["tools"] = prompt.tools
            if options.apply_chat_template_kwargs:
                asked["chat_template_kwargs"] = options.apply_chat_template_kwargs
            answer = self._json("POST", "chat/completions", asked)
        try:
            choice = answer["choices"][0]
            return str((choice["text"] if prompt.messages is None else choice["message"]["content"]) or "")
        except (LookupError, TypeError) as error:
            raise ServerFailed(f"eval.base_url={options.base_url} gave no answer; got {str(answer)[:200]}") from error

    def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            response = self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise ServerFailed(
                f"eval.base_url must be a server that answers; got {self._options.base_url} ({reason})"
            ) from error
        if response.is_error:
            got = f"{response.status_code} {response.text[:200]!r}"
            raise ServerFailed(f"eval.base_url={self._options.base_url} refuses {method} {path}; got {got}")
        try:
            return response.json()
        except ValueError as error:
            raise ServerFailed(
                f"eval.base_url={self._options.base_url} must answer in JSON; got {response.text[:80]!r}"
            ) from error
