"""`judge` and `synthesize` with models on this machine, in processes of their own, as they hide torch from others."""

import asyncio
import json
import subprocess
import sys

import pytest

from tests.lib.chat_server import chat_server
from tests.lib.document_texts import write_lines
from tests.lib.encoders import write_encoder
from tests.lib.synthesized import records_of, synthesized, words
from tests.lib.tiny_model import write_scripted_model
from verl_ext.__main__ import main
from verl_ext.tools.endpoint.client import Client, EndpointOptions, SamplingOptions
from verl_ext.tools.endpoint.store import Store
from verl_ext.tools.judging.under_test import LocalModel

SAID = "<think> kitchen or office </think> the garden is it <|im_end|> no more"


@pytest.fixture(scope="module")
def speaker(tmp_path_factory):
    return write_scripted_model(tmp_path_factory.mktemp("speaker"), SAID)


def _answers(folder):
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_folder_a_server_and_a_file_with_the_same_text_get_the_same_scores(tmp_path, speaker):
    (tmp_path / "hay.txt").write_text("A sentence of the hay. " * 60)
    said = SAID.partition(" <|im_end|>")[0]
    given = [
        *("judge", "task=needle", f"cases={tmp_path}/hay.txt", f"model.path={speaker}", "needle.lengths=[60]"),
        *("needle.depths=[0,100]", "needle.text=It is in the garden.", "needle.question=Where?"),
        *("needle.expected=[garden,kitchen]", "max_tokens=16"),
    ]
    with chat_server(lambda request: said) as server:
        endpoint = (f"endpoint.base_url={server.url}", "endpoint.model=served")
        folder = (f"models.folder={speaker}", f"output_dir={tmp_path}/out")
        program = [sys.executable, "-m", "verl_ext", *map(str, (*given, *endpoint, *folder))]
        subprocess.run(program, check=True, cwd=tmp_path)
    rows = [{"case": f"60-{depth}", "answer": said} for depth in (0, 100)]
    write_lines(tmp_path / "pred.jsonl", rows)
    file = (f"predictions.file={tmp_path}/pred.jsonl", f"output_dir={tmp_path}/read")
    assert main([*map(str, (*given, *file))]) == 0
    for folder in ("out/folder", "out/served", "read/file"):
        for row in _answers(tmp_path / folder):
            assert (row["answer"], row["outcome"]) == ("the garden is it", "done"), folder
            assert row["reasoning"] == "kitchen or office"
            assert row["scores"] == {"found": 0.5}


def test_other_requests_go_on_while_a_model_writes_and_its_answer_ends_when_nobody_waits(tmp_path):
    speaker = write_scripted_model(tmp_path / "speaker", "the garden")  # and goes on

    async def asked(store, server):
        model, endpoint = LocalModel(str(speaker), store, "models.a"), EndpointOptions(server.url, "judge")
        async with model, Client(endpoint, store) as judge:
            sampling = SamplingOptions(max_tokens=20_000)  # takes minutes
            writing = asyncio.create_task(model.ask("1", "answer", [{"role": "user", "content": "p"}], sampling))
            answer = await judge.ask("2", "judge", [{"role": "user", "content": "q"}], sampling)
            assert answer.text == "verdict"
            assert not writing.done()
            writing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await writing

    with chat_server(lambda request: "verdict") as server, Store(tmp_path / "store") as store:
        asyncio.run(asked(store, server))  # waits for the thread of the model
        assert len(store) == 1


@pytest.mark.slow
def test_documents_are_joined_by_an_encoder_in_a_folder(tmp_path, tiny_model):
    documents = write_lines(tmp_path / "documents.jsonl", [{"text": words(60, i)} for i in range(8)])
    encoder = write_encoder(tmp_path / "encoder", tiny_model)
    task, given = "glm_long_documents", ("intervals=[100,200]", f"encoder.path={encoder}")
    assert synthesized(tmp_path, tiny_model, None, documents, *given, task=task) == 0
    assert records_of(tmp_path, task)
