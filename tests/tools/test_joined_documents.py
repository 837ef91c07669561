"""`task=glm_long_documents` joins similar documents into long ones, with an encoder in a folder or behind a server."""

import json
import random
from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from tests.lib.chat_server import chat_server
from tests.lib.document_texts import write_lines
from tests.lib.encoders import write_encoder
from tests.lib.errors import names
from tests.lib.synthesized import records_of as synthesized_records
from tests.lib.synthesized import report_of
from verl_ext.commands.tokenize import TokenizeOptions, tokenize
from verl_ext.data import SFTDataSet

pytestmark = pytest.mark.slow

TOPICS = 4


def topic_of(text):
    """Return the subject of a document: its number, with which all but a few words end."""
    return int(text.split()[0].removeprefix("w")) % TOPICS


@pytest.fixture
def documents(tmp_path):
    """Write 120 documents of 20 to 60 words in two classes, each on one of four subjects."""
    draw = random.Random(0)
    records = []
    for number in range(120):
        topic, count = number % TOPICS, draw.randint(20, 60)
        text = " ".join(f"w{4 * draw.randrange(25) + topic}" for _ in range(count))
        records.append({"text": text, "subject": "law" if number % 3 else "trade"})
    return write_lines(tmp_path / "documents.jsonl", records)


def embedding_reply(request):
    vector = [0.1] * TOPICS
    vector[topic_of(request["input"])] = 1.0
    body = {"model": "e", "data": [{"index": 0, "embedding": vector}], "usage": {"prompt_tokens": 7}}
    return 200, body


@pytest.fixture
def join(synthesize):
    """Return a function that joins documents, by a server or None."""

    def joined(server, source, *given, out="out"):
        words = ("intervals=[100,200,400]", "endpoint.model=e", *given)
        return synthesize(server, source, *words, task="glm_long_documents", out=out)

    return joined


records_of = partial(synthesized_records, task="glm_long_documents")


def test_neighbours_of_a_class_are_joined_with_their_places_into_intervals_of_equal_tokens(
    join, tmp_path, documents, capsys
):
    with chat_server(embedding_reply, ("e",)) as server:
        assert join(server, documents, "class_field=subject") == 0
    assert "840 prompt tokens" in capsys.readouterr().out
    by_text = {record["text"]: record for record in map(json.loads, documents.read_text().splitlines())}
    used, alike, tokens = [], 0, {"100–200": 0, "200–400": 0}
    for record in records_of(tmp_path):
        facts = record["provenance"]
        parts = [record["text"][begin:end] for begin, end in (each["span"] for each in facts["documents"])]
        assert record["text"] == "\n\n".join(parts)
        assert {by_text[part]["subject"] for part in parts} == {record["category"]} == {facts["class"]}
        assert facts["tokens"] == len(record["text"].split())
        low, high = map(int, facts["interval"].split("–"))
        assert low < facts["tokens"] <= high
        used += parts
        alike += len({topic_of(part) for part in parts}) == 1
        tokens[facts["interval"]] += facts["tokens"]
    assert len(used) == len(set(used)) > 100  # each document is used once, and few are left over
    assert alike >= 0.75 * len(records_of(tmp_path))  # the last ones of a class take the rest
    assert abs(tokens["100–200"] - tokens["200–400"]) <= 400
    report = report_of(tmp_path)
    assert {name: row["tokens"] for name, row in report["lengths"].items()} == tokens
    assert report["outcomes"] == {"done": len(used), "left_over": 120 - len(used)}


def test_a_model_names_the_classes_within_which_documents_are_joined(join, tmp_path, documents, capsys):
    """Two subjects are law, one is trade, the model has no class for the fourth, and none is war."""

    def reply(request):
        text = request["messages"][0]["content"].split("\n")[0]
        forms = ["Class: law", "**Class:** Law.", "trade", "It may be of several."]
        return forms[topic_of(text)]

    given = ("classifier.classes=[law,trade,war]", "max_failed_share=0.3", "classifier.endpoint.model=c")
    with chat_server(embedding_reply, ("e",)) as server, chat_server(reply, ("c",)) as namer:
        given = (*given, f"classifier.endpoint.base_url={namer.url}")
        assert join(server, documents, *given) == 0
        asked = len(namer.requests), len(server.requests)
        assert join(server, documents, *given, "overwrite=true") == 0
        assert (len(namer.requests), len(server.requests)) == asked == (90 + 3 * 30, 90)
    report = report_of(tmp_path)
    assert report["classes"] == {"law": 60, "trade": 30, "war": 0}
    assert report["outcomes"]["unparsable"] == 30
    classes = {"requests": 90 + 3 * 30, "done": 90, "unparsable": 30}
    assert report["stages"] == {"class": classes, "embed": {"requests": 90, "done": 90, "unparsable": 0}}
    assert report["spent_without_record"]["unparsable"]["items"] == 30
    assert "0 war" in capsys.readouterr().out
    texts = {record["text"]: topic_of(record["text"]) for record in map(json.loads, documents.read_text().splitlines())}
    for record in records_of(tmp_path):
        spans = [each["span"] for each in record["provenance"]["documents"]]
        topics = {texts[record["text"][begin:end]] for begin, end in spans}
        assert topics <= ({0, 1} if record["category"] == "law" else {2})
    for wrong in (
        ["classifier.classes=[law,Law]"],
        ["classifier.classes=[]"],
        ["class_field=subject"],
        ["classifier.endpoint.model=null"],
    ):
        assert join(server, documents, *given, *wrong, out="wrong") == 2
        assert "classifier" in capsys.readouterr().err


def test_the_texts_follow_from_the_seed_and_the_documents_and_embeddings_are_paid_once(join, tmp_path, documents):
    lines = documents.read_text().splitlines(keepends=True)
    with chat_server(embedding_reply, ("e",)) as server:
        given = (f"store={tmp_path}/store", "near_duplicates=null")
        assert join(server, documents, *given, "endpoint.concurrency=1") == 0
        assert join(server, documents, *given, "endpoint.concurrency=8", out="again") == 0
        assert len(server.requests) == len(lines)
        assert join(server, documents, *given, "seed=7", out="other") == 0
    assert records_of(tmp_path) == records_of(tmp_path, out="again") != records_of(tmp_path, out="other")


def test_a_mixture_draws_the_joined_documents_by_their_lengths(join, tmp_path, documents, tiny_model):
    with chat_server(embedding_reply, ("e",)) as server:
        assert join(server, documents) == 0
    given = {"sources": {"joined": str(tmp_path / "out")}, "output_dir": str(tmp_path / "tokenized"), "num_workers": 1}
    tokenize(TokenizeOptions.read({**given, "model": {"path": str(tiny_model)}}))
    config = {"max_tokens": 512, "mixture": {"sources": {"joined": {"tokens": 6000, "intervals": [100, 200, 512]}}}}
    dataset = SFTDataSet(str(tmp_path / "tokenized"), config=config)
    rows = {(row.low, row.high): row for row in dataset.mixture_report}
    lengths = [record["provenance"]["tokens"] + 1 for record in records_of(tmp_path)]  # and the end of the text
    assert rows[100, 200].distinct == sum(100 < length <= 200 for length in lengths)
    assert rows[200, 512].distinct == sum(length > 200 for length in lengths)


@pytest.fixture
def encoder(tmp_path, tiny_model):
    return write_encoder(tmp_path / "encoder", tiny_model)


@pytest.mark.parametrize(
    ("files", "given", "pooled"),
    [
        ({}, (), lambda states: states.mean(0)),
        ({"1_Pooling/config.json": {"pooling_mode_cls_token": True}}, (), lambda states: states[0]),
        ({"1_Pooling/config.json": {"pooling_mode_cls_token": True}}, ("encoder.pooling=last",), lambda s: s[-1]),
    ],
)
def test_an_encoder_in_a_folder_pools_as_its_files_or_the_option_say(
    join, tmp_path, documents, encoder, files, given, pooled
):
    for name, content in files.items():
        (encoder / name).parent.mkdir()
        (encoder / name).write_text(json.dumps(content))
    assert join(None, documents, f"encoder.path={encoder}", *given, "encoder.max_tokens=8") == 0
    tokenizer, model = AutoTokenizer.from_pretrained(encoder), AutoModel.from_pretrained(encoder)

    def vector(text):
        with torch.inference_mode():
            ids = tokenizer(" ".join(text.split()[:8]), return_tensors="pt")
            found = pooled(model(**ids).last_hidden_state[0]).numpy()
        return found / np.linalg.norm(found)

    record = records_of(tmp_path)[0]
    parts = [record["text"][begin:end] for begin, end in (each["span"] for each in record["provenance"]["documents"])]
    start = vector(parts[0])
    expected = [vector(part) @ start for part in parts]
    found = [each["similarity"] for each in record["provenance"]["documents"]]
    np.testing.assert_allclose(found, expected, atol=1e-3)
    assert found == sorted(found, reverse=True)


def test_no_more_is_embedded_than_an_encoder_has_positions(join, tmp_path, documents, encoder):
    assert join(None, documents, f"encoder.path={encoder}", "records=30") == 0  # of up to 60 words


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (["endpoint.base_url=null"], "endpoint.base_url"),
        (["encoder.path=nowhere"], "encoder.path"),
        (["prompts=prompts.yaml"], "prompts"),
        (["class_field=body"], "class_field=body"),
        (["intervals=[100000,200000]"], "intervals"),
    ],
)
def test_mistakes_are_one_line(join, tmp_path, documents, capsys, monkeypatch, given, error):
    monkeypatch.chdir(tmp_path)
    with chat_server(embedding_reply, ("e",)) as server:
        assert join(server, documents, *given) in (1, 2)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert names(line, error)
    assert not (tmp_path / "out").exists()


def test_documents_without_an_embedding_are_counted_and_no_reply_becomes_one(join, tmp_path, documents):
    def reply(request):
        if topic_of(request["input"]) == 3:
            return 400, {"error": {"message": "the input is flagged by moderation"}}
        return embedding_reply(request)

    with chat_server(reply, ("e",)) as server:
        assert join(server, documents) == 1
        assert join(server, documents, "max_failed_share=0.3") == 0
    report = report_of(tmp_path)
    assert report["outcomes"]["refused"] == len(report["without_record"]) == 30
    assert report["stages"] == {"embed": {"requests": 120, "done": 90, "refused": 30}}
    assert 3 not in {topic_of(record["text"]) for record in records_of(tmp_path)}
