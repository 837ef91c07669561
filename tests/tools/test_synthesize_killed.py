"""`verl-ext synthesize` killed in the middle: the same command asks for what is missing and writes the same records."""

import json
import random
import signal
import sqlite3

import pytest

from tests.lib.chat_server import chat_server
from tests.lib.ranks import forked
from verl_ext.__main__ import main
from verl_ext.cache import fingerprint
from verl_ext.tools.endpoint.store import Store

pytestmark = pytest.mark.slow

PLAN = "\n".join(f"Paragraph {number} - Main Point: point {number} - Word Count: 100" for number in (1, 2, 3))
CHATS = [
    {"conversation": [{"role": "user", "content": f"Write 300 words on {subject}.", "language": "English"}]}
    for subject in ("tides", "bombs", "ships", "mills", "clocks", "bread", "rivers", "prompts")
]
DOCUMENTS = [
    {"text": " ".join(f"w{random.Random(number).randrange(120)} w{(number * place) % 120}" for place in range(200))}
    for number in range(8)
]
CASES = {  # task, records, options, and the fingerprint of the keys of the answers, by which paid ones are found
    "parallel paragraphs": ("agentwrite", CHATS, ["paragraphs=parallel"], "4301fbb6"),
    "logs that a model selects": ("agentwrite", CHATS, ["select=200", "languages=[en]", "paragraphs=both"], "319fea6b"),
    "ways, grounded": (
        "glm_long",
        DOCUMENTS,
        ["ways={chunk:1,chunks:2,summary:1}", "grounded=true", "questions=2", "window=128"],
        "0122ba69",
    ),
    "published, a number of records": (
        "longalign",
        DOCUMENTS,
        ["prompts=published", "records=6", "questions=2"],
        "0ed1b18b",
    ),
}


def reply_to(request):
    """Answer by the request alone, so that every run hears the same."""
    content = request["messages"][0]["content"]
    if "do not carry it out" in content.lower():
        return f"Harmful: {'yes' if 'bombs' in content else 'no'}\nScraping: no\nLong: yes"
    if "Divide the work" in content:
        return PLAN
    if "Judge strictly" in content:
        return "Supported: yes"
    if "difficult question" in content:
        return "Question: which one?\nAnswer: the other one"
    if "please propose 5" in content:
        return "1. First?\n2. Second?\n3. Third?"
    return f"{content[-30:]} " + "word " * 95


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_was_killed_asks_for_what_is_missing_and_writes_the_same_records(case, tmp_path, tiny_model):
    task, records, given, keys = CASES[case]
    source = tmp_path / "source.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    running, kill_at = [], 6

    def reply(request):
        if len(server.requests) >= kill_at:
            for program in running:
                program.kill()
        return reply_to(request)

    def options(out):
        words = {
            **{"task": task, "output_dir": tmp_path / out, "sources": f"{{docs:{source}}}", "endpoint.model": "tiny"},
            **{"endpoint.base_url": server.url, "endpoint.retries": 0, "endpoint.concurrency": 2},
            "near_duplicates": "null",
            **({"model.path": tiny_model, "intervals": "[100,900]"} if "long" in task else {}),
            **({"min_length_score": 0} if task == "agentwrite" else {}),
        }
        return ["synthesize", *(f"{key}={value}" for key, value in words.items()), *given]

    with chat_server(reply) as server:
        program = forked(main, options("killed"))
        running.append(program)
        program.join()
        assert program.exitcode == -signal.SIGKILL
        running.clear()
        assert not (tmp_path / "killed").exists()
        with Store(f"{tmp_path}/killed.answers.sqlite") as store:
            paid = len(store)
        assert 0 < paid <= kill_at
        before = len(server.requests)
        assert main(options("killed")) == 0
        again = len(server.requests) - before
        assert main(options("whole")) == 0
        whole = len(server.requests) - before - again
    assert again == whole - paid
    with sqlite3.connect(f"{tmp_path}/whole.answers.sqlite") as database:
        assert fingerprint(database.execute("SELECT key FROM answers ORDER BY key").fetchall(), digits=8) == keys
    texts = [(tmp_path / out / f"{task}.jsonl").read_text() for out in ("killed", "whole")]
    assert texts[0] == texts[1]
    assert len(texts[0].splitlines()) >= 6
