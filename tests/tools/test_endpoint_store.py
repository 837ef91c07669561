"""The store of answers: it never pays twice, loses no finished answer, and refuses other files."""

import asyncio
import contextlib
import multiprocessing
import random
import signal
import sqlite3
import threading

import pytest

from tests.lib.chat_server import chat_server, completion, slowly
from tests.lib.errors import refused
from tests.lib.ranks import forked
from verl_ext.options import DataError, UsageError
from verl_ext.tools.endpoint.answer import Answer, Usage
from verl_ext.tools.endpoint.client import Client, EndpointOptions, SamplingOptions
from verl_ext.tools.endpoint.store import Store

pytestmark = pytest.mark.slow


KEYS = ("728f6abc0defac2f51ff6e3653e0d598", "a97a26de30ed9f32a4458478a5888467")


async def ask_all(url, path, count, told):
    with Store(path) as store:
        async with Client(EndpointOptions(base_url=url, model="tiny"), store) as client:

            async def ask(number):
                message = {"role": "user", "content": f"question {number}"}
                answer = await client.ask(str(number), "stage", [message], SamplingOptions())
                told.send(f"{number} {answer.text}")

            await asyncio.gather(*map(ask, range(count)))


def asking(*arguments):
    asyncio.run(ask_all(*arguments))


def start(url, path, count):
    """Start a process that asks; return it, and an iterator over what it tells until it ends."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = forked(asking, url, path, count, theirs)
    theirs.close()

    def told():
        with contextlib.suppress(EOFError):
            while True:
                yield ours.recv()

    return process, told()


def echo(request):
    return request["messages"][0]["content"].replace("question", "answer")


def answers_of(requests):
    return [request["messages"][0]["content"] for request in requests]


def test_a_second_run_asks_for_nothing_and_other_sampling_asks_again(tmp_path):
    path = tmp_path / "answers"
    with chat_server(lambda _: completion("yes", reasoning="because")) as server:
        first = ask(server, path)
        assert ask(server, path) == first
        assert len(server.requests) == 1
        for change in ({"model": "other"}, {"content": "question 2"}, {"record": "2"}, {"temperature": 0.1}):
            ask(server, path, **change)
        assert len(server.requests) == 5
    facts = (first.reasoning, first.usage, first.model, first.fingerprint)
    assert facts == ("because", Usage(10, 0, 5), "tiny-1", "fp")


def ask(server, path, model="tiny", content="question 1", record="1", **sampling):
    """Return the answer to one question."""
    messages = [{"role": "user", "content": content}]

    async def asked():
        with Store(path) as store:
            async with Client(EndpointOptions(base_url=server.url, model=model, retries=0), store) as client:
                return await client.ask(record, "stage", messages, SamplingOptions(**sampling))

    return asyncio.run(asked())


def test_answers_of_earlier_versions_are_found_by_their_keys(tmp_path):
    async def asked(server):
        with Store(tmp_path / "answers") as store:
            options = EndpointOptions(base_url=server.url, model="tiny", extra_body={"a": {"b": 1}})
            async with Client(options, store) as client:
                given = {"tools": [{"type": "function"}], "extra_body": {"a": {"c": 2}}, "schema": {"type": "object"}}
                messages = [{"role": "user", "content": "?"}]
                await client.ask("docs/a.jsonl:1", "write/2", messages, SamplingOptions(temperature=0.5), **given)
                await client.embed("docs/a.jsonl:1", "a text")
            return [store.find(key) is not None for key in KEYS]

    embedding = {"data": [{"embedding": [1.0, 0.0]}]}
    with chat_server(lambda body: (200, embedding) if "input" in body else "yes") as server:
        assert asyncio.run(asked(server)) == [True, True]


def test_a_failure_is_asked_for_again(tmp_path):
    with chat_server(lambda _: (500, {})) as server:
        assert ask(server, tmp_path / "answers").outcome == "failed"
    with chat_server(lambda _: "yes") as server:
        assert ask(server, tmp_path / "answers").text == "yes"


def test_two_processes_share_a_store_and_pay_once(tmp_path):
    with chat_server(slowly(echo, 0.05)) as server:
        programs = [start(server.url, tmp_path / "answers", 30) for _ in range(2)]
        outputs = [sorted(told) for _, told in programs]
    assert outputs[0] == outputs[1] == sorted(f"{i} answer {i}" for i in range(30))
    assert sorted(answers_of(server.requests)) == sorted(f"question {i}" for i in range(30))


def test_every_finished_answer_survives_kills(tmp_path):
    """A process tells an answer only after storing it, so told answers are never requested again."""
    draw, finished, count = random.Random(7), set(), 400
    with chat_server(slowly(echo, 0.02)) as server:
        for _ in range(6):
            before = len(server.requests)
            program, told = start(server.url, tmp_path / "answers", count)
            limit = draw.randrange(4, 16)
            answers = []
            for line in told:
                answers.append(line)
                if len(set(answers) - finished) >= limit:
                    program.kill()
                    break
            answers += told
            program.join()
            assert program.exitcode == -signal.SIGKILL
            asked = {name.split()[1] for name in answers_of(server.requests[before:])}
            assert asked.isdisjoint(line.split()[0] for line in finished)
            finished |= {*answers}
        assert len(finished) > 20
        before = len(server.requests)
        output = [*start(server.url, tmp_path / "answers", count)[1]]
        asked = {name.split()[1] for name in answers_of(server.requests[before:])}
    assert finished <= set(output)
    assert asked.isdisjoint(line.split()[0] for line in finished)
    assert sorted(output) == sorted(f"{i} answer {i}" for i in range(count))


def _hold_claim(path, claimed):
    with Store(path) as store:
        store.claim("key")
        claimed.send(True)
        threading.Event().wait()


def test_the_claim_of_a_process_that_died_is_void_and_of_one_that_lives_is_not(tmp_path):
    ours, theirs = multiprocessing.Pipe()
    other = forked(_hold_claim, tmp_path / "answers", theirs)
    assert ours.poll(60)
    with Store(tmp_path / "answers") as store:
        assert not store.claim("key")
        other.kill()
        other.join()
        assert store.claim("key")
        store.release("key")
    assert [path.name for path in tmp_path.iterdir()] == ["answers"]


def test_a_store_of_another_version_or_kind_is_refused(tmp_path):
    path = tmp_path / "answers"
    Store(path).close()
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 7")
    with refused("store", path, "version 1", "version 7", error=UsageError):
        Store(path)
    other = tmp_path / "other"
    with sqlite3.connect(other) as database:
        database.execute("CREATE TABLE mine (x)")
    with refused("store", other, "another database", error=UsageError):
        Store(other)
    text = tmp_path / "text"
    text.write_text("no database at all, but long enough to be read as one" * 30)
    with refused("store", text, "not a database", error=DataError):
        Store(text)
    folder = tmp_path / "folder"
    folder.mkdir()
    with refused("store", folder, error=DataError):
        Store(folder)


def test_a_full_disk_is_one_line(tmp_path, files_end_at):
    with (
        Store(tmp_path / "answers") as store,
        files_end_at(100_000),
        refused("store", tmp_path / "answers", error=DataError),
    ):
        store.add("key", "record", "stage", Answer("done", "x" * 1_000_000))
