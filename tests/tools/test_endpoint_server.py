"""The client and the command against a real OpenAI-compatible server, `transformers serve`, with a tiny model."""

import asyncio
import json
import os
import socket
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.lib.errors import names
from verl_ext.tools.endpoint.client import Client, EndpointOptions, SamplingOptions
from verl_ext.tools.endpoint.store import Store
from verl_ext.tools.synthesis.command import main

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "w1 w2 w3 w4"}]


@pytest.fixture(scope="module")
def server(tiny_model):
    """The address of a server of the tiny model."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = "import sys; from transformers.cli.transformers import main; sys.exit(main())"
    command = [sys.executable, "-c", script, "serve", str(tiny_model), "--port", str(port), "--device", "cpu"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True, env=environment)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "Uvicorn running" in line:
            break
    else:
        raise AssertionError("".join(lines))
    yield f"http://localhost:{port}/v1"
    process.terminate()
    process.communicate()


def ask(url, model, folder, sampling):
    async def asked():
        with Store(folder / "answers") as store:
            async with Client(EndpointOptions(base_url=url, model=str(model)), store) as client:
                return await client.ask("record", "stage", QUESTION, sampling)

    return asyncio.run(asked())


def test_the_answer_is_that_of_plain_transformers(server, tiny_model, tmp_path):
    answer = ask(server, tiny_model, tmp_path, SamplingOptions(temperature=0.0, max_tokens=8))
    tokenizer, model = AutoTokenizer.from_pretrained(tiny_model), AutoModelForCausalLM.from_pretrained(tiny_model)
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        ids = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert (answer.outcome, answer.raw) == ("cut", tokenizer.decode(ids, skip_special_tokens=True).strip())
    assert answer.usage.as_tuple() == (prompt["input_ids"].shape[1], 0, 8)


def test_the_command_keeps_what_the_server_answered(server, tiny_model, tmp_path, capsys):
    source = tmp_path / "documents.jsonl"
    source.write_text("".join(json.dumps({"text": f"w{i} w5 w6 " * 40}) + "\n" for i in range(3)))
    words = [
        *("task=longalign", f"sources={{docs:{source}}}", f"output_dir={tmp_path}/out", f"model.path={tiny_model}"),
        *(f"endpoint.base_url={server}", f"endpoint.model={tiny_model}", "intervals=[50,200]", "sampling.max_tokens=8"),
    ]
    assert main(words) == 1  # a model of random weights numbers no questions
    assert names(capsys.readouterr().err, "3 of 3 items")
    with Store(tmp_path / "out.answers.sqlite") as store:
        assert len(store) >= 3
