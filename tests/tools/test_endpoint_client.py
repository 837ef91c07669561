"""The client of an endpoint against misbehaving servers: outcomes, retries, requests, and errors that end a run."""

import asyncio
import json

import pytest

from tests.lib.chat_server import HANG, chat_server, completion, slowly
from tests.lib.errors import names, refused
from verl_ext.options import DataError, UsageError
from verl_ext.tools.endpoint.answer import Unparsable
from verl_ext.tools.endpoint.client import Client, EndpointOptions, SamplingOptions
from verl_ext.tools.endpoint.store import Store

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "how many?"}]
HALF = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{"choices": [{'
CUT_JSON = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n{"choices": [{'


def ask_all(url, folder, records=("a",), messages=QUESTION, sampling=None, parse=None, tries=1, schema=None, **options):
    """Return the answers and the client after asking for every record at once."""

    async def main():
        given = {"base_url": url, "model": "tiny", "retries": 3, **options}
        with Store(folder / "answers.sqlite") as store:
            async with Client(EndpointOptions(**given), store) as client:
                asked = (
                    client.ask(record, "stage", messages, sampling or SamplingOptions(), parse, tries, schema=schema)
                    for record in records
                )
                return await asyncio.gather(*asked), client

    return asyncio.run(main())


def in_turn(*replies):
    """Return a reply function that gives these replies in turn, the last of them for ever."""
    left = list(replies)
    return lambda request: left.pop(0) if len(left) > 1 else left[0]


@pytest.mark.parametrize(
    "trouble",
    [
        (429, {"error": {"message": "slow down"}}, {"Retry-After": "0.01"}),
        (503, {"error": {"message": "loading"}}, {"Retry-After": "0.01"}),
        *((status, {}, {"Retry-After": "0.01"}) for status in (408, 409)),
        HALF,
        CUT_JSON,
        (200, b"<html>proxy</html>"),
        (200, {"error": {"message": "upstream"}}),
        (200, {"choices": []}),
        (200, {"choices": [{"message": {"content": {"no": "text"}}, "finish_reason": "stop"}]}),
    ],
)
def test_a_passing_trouble_is_tried_again(tmp_path, trouble):
    with chat_server(in_turn(trouble, "seven")) as server:
        (answer,), client = ask_all(server.url, tmp_path)
    assert (answer.text, len(server.requests), client.retries) == ("seven", 2, 1)


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        (completion("half of", "length"), "cut"),
        (completion("", "content_filter"), "refused"),
        (completion(None, refusal="I cannot"), "refused"),
        (completion(""), "unparsable"),
        (completion("\ud83d"), "unparsable"),
        (completion("gone", "abort"), "failed"),
        ((400, {"error": {"message": "This model's maximum context length is 8192 tokens"}}), "too_long"),
        ((400, {"error": {"code": "context_length_exceeded", "message": "no"}}), "too_long"),
        ((413, {}), "too_long"),
        ((400, {"error": {"code": "content_filter", "message": "triggering content management policy"}}), "refused"),
        ((400, {"error": {"message": "Unsupported parameter: 'max_tokens' is not supported"}}), "failed"),
        ((422, {"error": {"message": "temperature must be a number"}}), "failed"),
        ((500, {"error": {"message": "bug"}}, {"Retry-After": "0.01"}), "failed"),
        ((200, b"<html>proxy</html>"), "failed"),
    ],
)
def test_every_reply_has_its_outcome(tmp_path, reply, outcome):
    with chat_server(lambda _: reply) as server:
        (answer,), _ = ask_all(server.url, tmp_path)
    assert answer.outcome == outcome
    assert answer.reason
    assert len(server.requests) == {"(500": 4, "(200": 3}.get(str(reply)[:4], 1)  # a refused one is not sent again
    with pytest.raises(AssertionError):
        _ = answer.text


def test_a_server_that_hangs_is_a_failure_after_the_time_out(tmp_path):
    with chat_server(lambda _: HANG) as server:
        (answer,), _ = ask_all(server.url, tmp_path, timeout=0.3, retries=1, sampling=SamplingOptions(max_tokens=None))
    assert (answer.outcome, len(server.requests)) == ("failed", 2)
    assert "timed out" in answer.reason.lower() or "timeout" in answer.reason.lower()


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_in_a_field_of_its_own_is_kept_apart(tmp_path, field):
    with chat_server(lambda _: completion("four", **{field: "2+2"})) as server:
        (answer,), _ = ask_all(server.url, tmp_path)
    assert (answer.text, answer.reasoning) == ("four", "2+2")


def test_only_what_is_set_is_sent_and_seeds_depend_on_the_question_alone(tmp_path):
    with chat_server(lambda _: "yes") as server:
        ask_all(server.url, tmp_path / "1", ["a", "b"], sampling=SamplingOptions(temperature=0.5))
        ask_all(server.url, tmp_path / "2", ["b", "a"], sampling=SamplingOptions(temperature=0.5))
        ask_all(
            server.url,
            tmp_path / "3",
            sampling=SamplingOptions(seed=None, max_tokens=7),
            max_tokens_field="max_completion_tokens",
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )
    assert set(server.requests[0]) == {"model", "messages", "temperature", "max_tokens", "seed"}
    first, second = ({r["seed"] for r in server.requests[i : i + 2]} for i in (0, 2))
    assert first == second
    assert len(first) == 2
    last = server.requests[4]
    assert (last["max_completion_tokens"], last["chat_template_kwargs"]) == (7, {"enable_thinking": False})
    assert "seed" not in last


def test_what_cannot_be_parsed_is_asked_for_again_with_another_seed(tmp_path):
    def number(text):
        if not text.isdigit():
            raise Unparsable("no number")
        return int(text)

    with chat_server(in_turn("many", "7")) as server:
        (answer,), _ = ask_all(server.url, tmp_path, parse=number, tries=3)
        assert (answer.parsed, len({r["seed"] for r in server.requests})) == (7, 2)
        (answer,), _ = ask_all(server.url, tmp_path, parse=number, tries=3)
        assert (answer.parsed, len(server.requests)) == (7, 2)
    with chat_server(lambda _: "many") as server:
        (answer,), _ = ask_all(server.url, tmp_path / "other", parse=number, tries=3)
    assert (answer.outcome, answer.raw, len(server.requests)) == ("unparsable", "many", 3)


def test_no_more_than_the_given_number_of_requests_is_open(tmp_path):
    with chat_server(slowly(lambda _: "yes", 0.05)) as server:
        ask_all(server.url, tmp_path, list("abcdefgh"), concurrency=3)
    assert server.busy == 3


def test_the_key_comes_from_the_named_variable_and_is_never_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", "topsecretvalue")
    with chat_server(lambda _: (401, {"error": {"message": "wrong key topsecretvalue"}})) as server:
        with refused("endpoint.key_variable", "MY_KEY", error=UsageError) as raised:
            ask_all(server.url, tmp_path, key_variable="MY_KEY")
        assert server.headers[0]["Authorization"] == "Bearer topsecretvalue"
    assert "topsecretvalue" not in str(raised.value)


def test_an_unknown_model_is_named_with_the_nearest_and_a_server_that_does_not_answer_too(tmp_path, free_port):
    unknown = (404, {"error": {"message": "no such model"}})
    with (
        chat_server(lambda _: unknown, models=["tinny"]) as server,
        refused("endpoint.model", "nearest: tinny", error=UsageError),
    ):
        ask_all(server.url, tmp_path)
    with refused("endpoint.base_url", f"http://127.0.0.1:{free_port}/v1", error=DataError):
        ask_all(f"http://127.0.0.1:{free_port}/v1", tmp_path, retries=0)


def test_failures_one_after_the_other_end_the_run_and_refusals_do_not(tmp_path):
    nine = {"records": [str(i) for i in range(9)], "max_failures": 3, "concurrency": 1}
    with (
        chat_server(lambda _: (400, {"error": {"message": "broken"}})) as server,
        refused("3 requests", "broken", error=DataError),
    ):
        ask_all(server.url, tmp_path, **nine)
    assert len(server.requests) < 9
    with chat_server(lambda _: (400, {"error": {"code": "content_filter"}})) as server:
        answers, _ = ask_all(server.url, tmp_path, **nine)
    assert [answer.outcome for answer in answers] == ["refused"] * 9


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"base_url": None}, "endpoint.base_url"),
        ({"base_url": "localhost:8000"}, "endpoint.base_url"),
        ({"model": None}, "endpoint.model"),
        ({"key_variable": "sk-abcdefgh"}, "endpoint.key_variable"),
    ],
)
def test_options_that_name_no_endpoint_are_refused(given, key):
    options = EndpointOptions(**{"base_url": "http://host/v1", "model": "m", **given})
    (line,) = options.endpoint_problems()
    assert names(line, key)
    assert "sk-" not in line


def test_tokens_are_added_up(tmp_path):
    body = completion("yes", prompt_tokens=100, completion_tokens=7)
    body["usage"]["prompt_tokens_details"] = {"cached_tokens": 60}
    with chat_server(lambda _: json.loads(json.dumps(body))) as server:
        _, client = ask_all(server.url, tmp_path, ["a", "b"])
    assert client.usage.as_tuple() == (200, 120, 14)


def test_json_is_asked_for_by_a_schema_until_the_server_refuses_one(tmp_path):
    schema, own = {"type": "object", "properties": {"n": {"type": "integer"}}}, {"type": "text"}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}
    refusal = (400, {"error": {"message": "response_format of type json_schema is not supported"}})
    for name, reply, forms, options in (
        ("takes", in_turn('{"n": 7}'), [form, form], {}),
        ("refuses", in_turn(refusal, '{"n": 7}'), [form, None, None], {}),
        ("refuses", in_turn(refusal), [], {}),  # the answer without the schema is one to the same question
        ("own", in_turn('{"n": 7}'), [own, own], {"extra_body": {"response_format": own}}),
    ):
        (tmp_path / name).mkdir(exist_ok=True)
        with chat_server(reply) as server:
            given = {"parse": json.loads, "schema": schema, "concurrency": 1, **options}
            answers, _ = ask_all(server.url, tmp_path / name, ("a", "b"), **given)
        assert [answer.parsed for answer in answers] == [{"n": 7}] * 2
        assert [request.get("response_format") for request in server.requests] == forms
