"""A client of one model behind an OpenAI-compatible endpoint.

    async with Client(EndpointOptions(base_url="http://localhost:8000/v1", model="Qwen3-8B"), store) as client:
        answer = await client.ask("books/12", "questions", messages, sampling, parse=five_questions)
        if answer.is_done:
            questions = answer.parsed

A few requests are open at a time, and an answer that the store has is not asked for again. The key of an answer is made
of the record, the stage, the messages, the model and the sampling, but not of the server's address. Put a text that
many questions share, such as a document, byte for byte at the start of the first message, because servers reuse the
cached prefix.
"""

import asyncio
import json
import os
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, ClassVar, TypeVar

from verl_ext.cache import fingerprint
from verl_ext.options import DataError, Options, UsageError, first_line, must, nearest_hint, one_line, option
from verl_ext.redaction import redacted_text
from verl_ext.tools.endpoint.answer import (
    DONE,
    FAILED,
    KEPT,
    REFUSED,
    TOO_LONG,
    UNPARSABLE,
    Answer,
    Unparsable,
    Usage,
    answer_from_completion,
    answer_from_embedding,
    with_embedding,
)
from verl_ext.tools.endpoint.price import Price, read_price
from verl_ext.tools.endpoint.store import Store

BODIES_TRIED = 3  # most replies with status 200 that cannot be read, for example from a proxy
POLL_SECONDS = 0.2  # between checks whether another process has got the answer to the same question
CHARACTERS_PER_SECOND, TOKENS_PER_SECOND = 2_000, 10  # speeds of a slow server, for the time-out of prompt and answer
# Error messages about a prompt that exceeds the context, moderation, a JSON schema, and a field that is not supported.
_TOO_LONG = re.compile(
    r"context.{0,12}(length|window|size|limit)|max\w*.{0,30}(tokens|length)|too (long|many tokens)|exceed.{0,40}token",
    re.IGNORECASE | re.DOTALL,
)
_MODERATED = re.compile(
    r"content.?(filter|policy|management|moderation|risk)|moderat|data_?inspection|safety|flagged|sensitive",
    re.IGNORECASE,
)
_BAD_SCHEMA = re.compile(r"status (400|422):.*(response_?format|schema|structured|guided|grammar)", re.IGNORECASE)
_BAD_FIELD = re.compile(r"unsupported|not supported|unknown|unrecognized|invalid.{0,20}param", re.IGNORECASE)

Messages = Sequence[Mapping[str, Any]]
AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True)
class EndpointOptions(Options):
    """The server and the model that are asked.

    The defaults name none, so commands call `endpoint_problems`.
    """

    prefix: ClassVar[str] = "endpoint"

    base_url: str | None = option(None, "OpenAI-compatible server, including its /v1: http://localhost:8000/v1")
    model: str | None = option(None, "the model's name on the server")
    key_variable: str = option("OPENAI_API_KEY", "environment variable with the key; a server without keys needs none")
    concurrency: int = option(4, "requests at a time", least=1)
    retries: int = option(
        8, "retries of a request after status 408, 409, 429 or 5xx, a broken connection or a timeout", least=0
    )
    timeout: float = option(
        120.0,
        f"seconds for a request, plus 1 for every {CHARACTERS_PER_SECOND:,} characters of the prompt and for every"
        f" {TOKENS_PER_SECOND} tokens of max_tokens",
        above=0,
    )
    max_failures: int = option(20, "consecutive failed requests that end the run", least=1)
    max_tokens_field: str = option(
        "max_tokens",
        "the request's field for sampling.max_tokens; OpenAI's thinking models want max_completion_tokens",
        choices=("max_tokens", "max_completion_tokens"),
    )
    extra_body: dict[str, Any] = option(
        {}, "further fields of every request, e.g. {chat_template_kwargs:{enable_thinking:false}}"
    )
    prices: str | None = option(
        None, "YAML file with prices per million tokens, for the cost: {MODEL: {input: 2.5, cached: 1.25, output: 10}}"
    )

    def endpoint_problems(self) -> Iterable[str]:
        """Yield a line for each unusable address, model, or key variable."""
        if not self.base_url or not re.match(r"https?://[^/]", self.base_url):
            yield must(f"{self.prefix}.base_url", "be a URL, http://HOST:PORT/v1", self.base_url or "nothing")
        if not self.model:
            yield must(f"{self.prefix}.model", "name a model of the server", "nothing")
        if not re.fullmatch(r"[A-Za-z_]\w*", self.key_variable) or self.key_variable.startswith("sk-"):
            yield must(f"{self.prefix}.key_variable", "be the name of an environment variable", "something else")

    def read_price(self) -> Price | None:
        """Return the price of the model, if there is a file of prices; raise UsageError for a mistake in it."""
        return None if self.prices is None else read_price(self.prices, self.model, f"{self.prefix}.prices")


@dataclass(frozen=True)
class SamplingOptions(Options):
    """How a model draws its answers; a null is not sent."""

    prefix: ClassVar[str] = "sampling"

    temperature: float | None = option(None, "sampling temperature; null: the server's default", least=0)
    top_p: float | None = option(None, "probability mass to sample from; null: the server's default", above=0, most=1)
    max_tokens: int | None = option(4096, "maximum number of tokens of an answer, including its reasoning", least=1)
    seed: int | None = option(42, "each request's seed is drawn from it and from the question; null: none is sent")


class Client:
    """A client of one model, used as async context by one loop.

    usage: the tokens of this process's requests. requests, retries, from_store: the numbers of questions that were
    sent, sent again, and answered from the store. asked, outcomes: the requests by stage, and the questions by stage
    and outcome, stored answers included; a question is asked again for its form. usage_of: the tokens of the answers
    about each record, stored ones included.
    """

    def __init__(self, options: EndpointOptions, store: Store) -> None:
        self.options, self.store, self.price = options, store, options.read_price()
        self.usage = Usage()
        self.requests = self.retries = self.from_store = 0
        self.asked: Counter[str] = Counter()
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.usage_of: dict[str, Usage] = {}
        self.without_usage = 0  # answers for which the server reported no token counts
        self.takes_schemas = True  # until the server refuses one
        self._failures = 0  # consecutive failed requests
        self.models: list[str] | None = None  # the models that the server lists; None if it has no list
        self._slots = asyncio.Semaphore(options.concurrency)

    async def __aenter__(self) -> "Client":
        """Open the connection; raise `DataError` without a server, `UsageError` for a key."""
        options = self.options
        try:
            from openai import AsyncOpenAI  # imported here because it takes a second
        except ImportError as error:
            needed = "needs a package: pip install 'verl-ext[synth]'"
            raise UsageError(f"{options.prefix} {needed}: {first_line(error)}") from error
        key = os.environ.get(options.key_variable) or "none"
        self._api = AsyncOpenAI(base_url=options.base_url, api_key=key, max_retries=options.retries)
        await self._check_server()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._api.close()

    async def ask(
        self,
        record: str,
        stage: str,
        messages: Messages,
        sampling: SamplingOptions,
        parse: Callable[[str], Any] | None = None,
        tries: int = 1,
        tools: Sequence[Mapping[str, Any]] = (),
        extra_body: Mapping[str, Any] | None = None,
        schema: Mapping[str, Any] | None = None,
    ) -> Answer:
        """Return the model's answer to `messages`, stored or new.

        Raises `UsageError` for a key or model that the server does not accept, and `DataError` if many requests in a
        row fail or the store cannot be written. The answer's outcome reports every other failure.

        Args:
            record: the name of the item that the question is about, the same in every run.
            stage: the name of the step: "plan", "write/3".
            messages: `{"role": …, "content": …}`.
            sampling: how the answer is drawn.
            parse: turns the text into `Answer.parsed`; if it raises `Unparsable`, the outcome is `unparsable`.
            tries: the most requests until an answer can be parsed, each with another seed.
            tools: the functions that the model may call.
            extra_body: further fields of this request, beside those of the options; mappings are joined.
            schema: of the JSON that the messages ask for; a server that takes it can give no other answer. It has no
                part in the answer's key.
        """
        request: dict[str, Any] = {"model": self.options.model, "messages": [dict(message) for message in messages]}
        if tools:
            request["tools"] = [dict(tool) for tool in tools]
        body = dict(self.options.extra_body)
        for name, value in (extra_body or {}).items():
            body[name] = {**body[name], **value} if isinstance(body.get(name), Mapping) else value
        if body:
            request["extra_body"] = body
        characters = sum(len(str(message.get("content"))) for message in messages)
        create = self._api.chat.completions.with_raw_response.create
        # Ask again, with another seed, only for an answer that the model gave and that does not have the form.
        for attempt in range(tries):
            answer = await self._sample(record, stage, attempt, create, request, characters, sampling, schema)
            if answer.is_done and parse is not None:
                try:
                    answer = replace(answer, parsed=parse(answer.text))
                except Unparsable as error:
                    answer = replace(answer, outcome=UNPARSABLE, reason=one_line(str(error)))
            if answer.outcome != UNPARSABLE:
                break
        self.outcomes[stage.partition("/")[0], answer.outcome] += 1
        return answer

    async def _sample(
        self,
        record: str,
        stage: str,
        attempt: int,
        create: Callable[..., Any],
        prompt: Mapping[str, Any],
        characters: int,
        sampling: SamplingOptions,
        schema: Mapping[str, Any] | None,
    ) -> Answer:
        """Return the answer to a request, with `sampling`'s fields added."""
        # The seed follows from the question, so that the same run asks the same again.
        seed = None
        if sampling.seed is not None:
            digest = blake2b(f"{sampling.seed}\0{record}\0{stage}\0{attempt}".encode(), digest_size=4).digest()
            seed = int.from_bytes(digest, "little") >> 1  # servers take 31 bits
        fields = {"temperature": sampling.temperature, "top_p": sampling.top_p, "seed": seed}
        fields[self.options.max_tokens_field] = sampling.max_tokens
        request = {**prompt, **{name: value for name, value in fields.items() if value is not None}}
        seconds = characters / CHARACTERS_PER_SECOND + (sampling.max_tokens or 0) / TOKENS_PER_SECOND

        async def send() -> Answer:
            answer = None
            if schema is not None and self.takes_schemas and "response_format" not in request.get("extra_body", {}):
                form = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}
                formed = {**request, "response_format": form}
                answer = await self._request(create, formed, seconds, answer_from_completion)
                self.takes_schemas = answer.outcome != FAILED or not _BAD_SCHEMA.match(answer.reason)
            if answer is None or not self.takes_schemas:
                answer = await self._request(create, request, seconds, answer_from_completion)
            return replace(answer, seed=seed)

        return await self._ask_once(fingerprint([record, stage, attempt, request]), record, stage, send)

    async def embed(self, record: str, text: str) -> Answer:
        """Return a text's embedding, stored or new; raise as :meth:`ask` does.

        It is float32[dimensions] in `Answer.parsed`.
        """
        request: dict[str, Any] = {"model": self.options.model, "input": text, "encoding_format": "float"}
        if self.options.extra_body:
            request["extra_body"] = dict(self.options.extra_body)
        create = self._api.embeddings.with_raw_response.create

        async def send() -> Answer:
            return await self._request(create, request, len(text) / CHARACTERS_PER_SECOND, answer_from_embedding)

        answer = with_embedding(await self._ask_once(fingerprint([record, "embed", request]), record, "embed", send))
        self.outcomes["embed", answer.outcome] += 1
        return answer

    async def _ask_once(self, key: str, record: str, stage: str, send: Callable[[], Awaitable[Answer]]) -> Answer:
        """Return the stored answer, or `send`'s; wait for other processes that ask."""
        self.asked[stage.partition("/")[0]] += 1
        while True:
            async with self._slots:
                if stored := self.store.find(key):
                    self.from_store += 1
                    self.usage_of[record] = self.usage_of.get(record, Usage()) + stored.usage
                    return stored
                if self.store.claim(key):
                    try:
                        answer = await send()
                        if answer.outcome in KEPT:
                            self.store.add(key, record, stage, answer)
                        else:
                            self.store.release(key)
                    except BaseException:
                        self.store.release(key)
                        raise
                    self._count_reply(answer)
                    self.usage_of[record] = self.usage_of.get(record, Usage()) + answer.usage
                    return answer
            await asyncio.sleep(POLL_SECONDS)

    async def _request(
        self, create: Callable[..., Any], request: Mapping[str, Any], seconds: float, read: Callable[[Any], Answer]
    ) -> Answer:
        """Return `read` of the server's reply; repeat if it cannot be read.

        seconds: the time that the prompt and the answer add to the time-out.
        """
        from openai import APIConnectionError, APIStatusError

        timeout = self.options.timeout + seconds
        self.requests += 1
        reason = ""
        for _ in range(BODIES_TRIED):
            try:
                reply = await create(**request, timeout=timeout)
                self.retries += reply.retries_taken
                return read(json.loads(reply.text))
            except APIStatusError as error:
                return self._answer_from_status(error.status_code, self._message(error))
            except APIConnectionError as error:
                return Answer(FAILED, reason=f"no answer after {self.options.retries} retries: {_cause(error)}")
            except ValueError as error:
                reason = self._printable(str(error)) or "the reply is not JSON"
                self.retries += 1
        return Answer(FAILED, reason=reason)

    def _answer_from_status(self, status: int, message: str) -> Answer:
        """Return an HTTP error's answer; raise if it affects all questions."""
        options, line = self.options, f"status {status}: {message}"
        if status in (400, 403, 422, 451) and _MODERATED.search(message):
            return Answer(REFUSED, reason=line)
        if status == 401:
            raise UsageError(self._key_problem(line))
        if status == 403:  # a key without the right, or a country, an address or a project that is not admitted
            needed = f"admit requests with the key in {options.key_variable}"
            raise UsageError(must(f"{options.prefix}.base_url", needed, f"{options.base_url}: {line}"))
        if status == 404:
            hint = nearest_hint(str(options.model), [name for name in self.models or () if name != options.model])
            got = f"{options.model}{hint} at {options.base_url}: {line}"
            raise UsageError(must(f"{options.prefix}.model", "be a model of the server, and base_url its /v1", got))
        if status == 413 or (status in (400, 422) and _TOO_LONG.search(message) and not _BAD_FIELD.search(message)):
            return Answer(TOO_LONG, reason=line)
        return Answer(FAILED, reason=line)

    def _count_reply(self, answer: Answer) -> None:
        """Count a reply. Raises `DataError` after `max_failures` failed requests in a row."""
        self.usage += answer.usage
        if answer.outcome in (DONE, UNPARSABLE) and answer.usage == Usage():
            self.without_usage += 1
        self._failures = self._failures + 1 if answer.outcome == FAILED else 0
        if self._failures >= self.options.max_failures:
            last = f"the last: {answer.reason}"
            raise DataError(
                f"{self._failures} requests to {self.options.base_url} failed one after the other; {last}."
                f" {len(self.store):,} answers are kept in {self.store.path}"
            )

    async def _check_server(self) -> None:
        """List the server's models, at no cost; some servers have no list."""
        from openai import APIConnectionError, APIStatusError

        options = self.options
        try:
            few = self._api.with_options(max_retries=min(options.retries, 2), timeout=options.timeout)
            reply = await few.models.with_raw_response.list()
            self.models = [str(model["id"]) for model in json.loads(reply.text)["data"]]
        except APIStatusError as error:
            if error.status_code == 401:
                raise UsageError(self._key_problem(f"status 401: {self._message(error)}")) from error
        except APIConnectionError as error:
            got = f"{options.base_url}: {_cause(error)}"
            raise DataError(must(f"{options.prefix}.base_url", "be a server that answers", got)) from error
        except (ValueError, LookupError, TypeError):
            pass

    def _key_problem(self, line: str) -> str:
        name = self.options.key_variable
        why = f"the server does not take the key in {name}" if os.environ.get(name) else f"{name} is empty"
        return f"{self.options.prefix}.key_variable must name the variable with the server's key; {why}: {line}"

    def _message(self, error: Any) -> str:
        """Return the server's message in an error."""
        body = error.body if isinstance(error.body, Mapping) else {}
        message = " ".join(str(body[name]) for name in ("code", "message", "detail") if body.get(name))
        return self._printable(message or first_line(error))

    def _printable(self, text: str) -> str:
        """Return a server's text as one line without the key."""
        key = os.environ.get(self.options.key_variable)
        text = text.replace(key, "***") if key else text
        return redacted_text(one_line(text[:500]))


async def all_of(asked: Iterable[Coroutine[Any, Any, AnswerT]]) -> list[AnswerT]:
    """Return the results of coroutines that run at once; if one raises, the others end first."""
    tasks = [asyncio.ensure_future(each) for each in asked]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _cause(error: BaseException) -> str:
    """Return a connection error's root cause, as "[Errno 111] Connect call failed"."""
    while (cause := error.__cause__ or error.__context__) is not None and "timed out" not in str(error):
        error = cause
    return first_line(error)
