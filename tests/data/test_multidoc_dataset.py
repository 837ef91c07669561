"""MultiDocDataset: samples of a stream of documents equal those of streams built by hand."""

import gzip
import json
import pickle
import re
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.lib.document_texts import EOS, random_words, stream_of, tokens_of, write_jsonl, write_texts
from tests.lib.errors import refused
from tests.lib.megatron_peer import megatron_file
from tests.lib.pretrain_files import write_index
from verl_ext.data import MultiDocDataset
from verl_ext.trainer.report import data_facts, step_facts
from verl_ext.trainer.report_lines import report_lines
from verl_ext.trainer.step_plan import StepPlan

LENGTHS = (7, 1, 30, 12, 15, 16, 2, 40, 9, 25)  # with EOS, some have 16 tokens and some 2
TEXTS = random_words(LENGTHS)
STREAM = stream_of(TEXTS)


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts") / "scenes", TEXTS)


@pytest.fixture(scope="module")
def opened(tokenizer, texts, tmp_path_factory):
    cache = str(tmp_path_factory.mktemp("cache"))

    def of(paths=texts, **options):
        return MultiDocDataset(paths, tokenizer, options.pop("seq_len", 16), cache_dir=cache, **options)

    return of


def ids(row):
    return row["input_ids"].tolist()


def test_random_starts_are_distinct_places_anywhere_in_the_stream(opened):
    dataset = opened()
    assert dataset.sampling == "random_starts"
    assert len(dataset) == len(STREAM) // 16
    places = {tuple(STREAM[start : start + 16]): start for start in range(len(STREAM) - 15)}
    starts = [places[tuple(ids(dataset[k]))] for k in range(len(dataset))]
    assert len(set(starts)) == len(starts)
    assert any(start % 16 for start in starts)
    assert dataset.facts().tokens.tolist() == [16] * len(dataset)
    assert dataset.facts().targets.tolist() == [15] * len(dataset)


def test_a_seed_gives_the_same_samples_and_another_gives_others(opened):
    first, again, other = (opened(seed=seed) for seed in (1, 1, 2))
    rows = [[ids(dataset[k]) for k in range(len(dataset))] for dataset in (first, again, other)]
    assert rows[0] == rows[1] != rows[2]
    assert first.digest == again.digest != other.digest


@pytest.mark.parametrize("seq_len", [2, 16, 31, len(STREAM) - 1, len(STREAM)])
def test_in_order_every_token_but_the_first_is_predicted_once(opened, seq_len):
    dataset = opened(seq_len=seq_len, sampling="in_order")
    predicted = [token for k in range(len(dataset)) for token in ids(dataset[k])[1:]]
    assert predicted == STREAM[1:]
    assert dataset.facts().targets.sum() == dataset.facts().tokens.sum() == len(STREAM) - 1
    assert dataset.facts().tokens.max() <= seq_len


def test_a_sample_is_one_document_to_attention_or_as_many_as_it_holds(opened):
    across, apart = (opened(sampling="in_order", attend_across_documents=choice) for choice in (True, False))
    assert len(across) == len(apart)
    for k in range(len(across)):
        row, other = across[k], apart[k]
        size = len(row["input_ids"])
        assert ids(row) == ids(other)
        assert row["position_ids"].tolist() == list(range(size))
        assert row["loss_mask"].tolist() == [0] + [1] * (size - 1)
        position, positions = 0, []
        for before, _ in pairwise([EOS, *ids(row)]):
            position = 0 if before == EOS else position + 1
            positions.append(position)
        assert other["position_ids"].tolist() == positions
        assert other["loss_mask"].tolist() == [int(position > 0) for position in positions]
        assert torch.equal(other["category_ids"], other["loss_mask"])
        assert apart.facts().targets[k] == sum(position > 0 for position in positions)
        assert apart.facts().documents[k] == positions.count(0)


def test_counts_of_all_samples_are_those_of_the_rows(opened):
    for sampling in ("random_starts", "document_stream", "in_order"):
        for across in (True, False):
            dataset = opened(sampling=sampling, attend_across_documents=across, num_samples=40)
            rows = [dataset[k] for k in range(len(dataset))]
            read = [len(row["input_ids"]) - dataset.last_is_label for row in rows]
            facts = dataset.facts()
            assert facts.tokens.tolist() == facts.costs.tolist() == read
            assert facts.targets.tolist() == [int(row["loss_mask"].sum()) for row in rows]
            assert facts.documents.tolist() == [int((row["position_ids"] == 0).sum()) for row in rows]
            assert facts.longest_document >= max(int(row["position_ids"][: read[0]].max()) + 1 for row in rows)


@pytest.mark.parametrize(("sampling", "label"), [("random_starts", 0), ("document_stream", 1), ("in_order", 1)])
def test_a_label_is_no_token_that_a_model_reads(opened, sampling, label):
    dataset = opened(sampling=sampling)
    assert dataset.last_is_label == bool(label)
    assert len(dataset[0]["input_ids"]) == 16 + label
    assert dataset.facts().tokens[0] == 16


def test_the_report_names_the_sources_and_the_epochs_of_the_steps(opened, tmp_path):
    dataset = opened({"web": write_index(tmp_path / "corpus", [[5] * 81])}, epochs=3)
    plan = StepPlan(len(dataset), 1, seed=0, shuffle=False)
    steps = step_facts(dataset.facts(), plan, ranks=1, micro_batch_size=1)
    lines = "\n".join(report_lines({"train": data_facts(dataset), "steps": steps}))
    assert "train: its sources:" in lines
    assert re.search(r"^ *web +1 +81 +15 +2\.963$", lines, re.MULTILINE)
    assert "steps: 15 in 2.96 epochs of 1 packs" in lines


def test_eos_stands_between_documents_on_request_alone(opened):
    without = opened(add_eos=False, sampling="in_order", seq_len=1000)
    assert ids(without[0]) == stream_of(TEXTS, eos=False)


@pytest.mark.parametrize("cut", [1, 20, 33, len(STREAM), 10_000])
def test_a_corpus_is_cut_after_max_tokens(opened, cut):
    dataset = opened(max_tokens=max(cut, 3), sampling="in_order", seq_len=1000)
    assert ids(dataset[0]) == STREAM[: max(cut, 3)]


def test_documents_come_from_files_folders_globs_and_records_alike(opened, texts, tmp_path):
    by_name = sorted(f"{texts}/{number:03d}.txt" for number in range(len(TEXTS)))
    forms = (texts, by_name, f"{texts}/*.txt", write_jsonl(tmp_path / "texts.jsonl", TEXTS))
    assert all(ids(opened(form, sampling="in_order", seq_len=1000)[0]) == STREAM for form in forms)


@pytest.mark.parametrize("sampling", ["random_starts", "document_stream", "in_order"])
def test_a_single_document_is_cut_in_two_whose_samples_never_overlap(opened, tmp_path, sampling):
    path = write_index(tmp_path / "one" / "book", [range(1, 1001)])  # a token is its place, from 1
    parts = {
        part: opened(path, split=part, train_ratio=0.8, sampling=sampling, validates=part == "val")
        for part in ("train", "val")
    }
    cut = int(0.8 * (1000 - 16))
    for part, (first, last) in {"train": (1, cut), "val": (cut + 17, 1000)}.items():
        rows = [ids(parts[part][k]) for k in range(len(parts[part]))]
        if part == "val" or sampling != "document_stream":  # whose epochs go on at the beginning
            assert all(row == list(range(row[0], row[0] + len(row))) for row in rows)
        seen = {token for row in rows for token in row}
        assert first <= min(seen)
        assert max(seen) <= last
        assert parts[part].token_range() == (first, last)
        (place,) = parts[part].documents_of(0)[:1]
        assert (place.row, place.start) == (0, rows[0][0] - 1)
        copy = pickle.loads(pickle.dumps(parts[part]))
        assert ids(copy[len(copy) - 1]) == rows[-1]
        (row,) = parts[part].omitted_documents()
        assert (row.reason, row.tokens_kept, row.tokens_removed) == (
            "cut into training and validation",
            last - first + 1,
            16,
        )
    assert {token for k in range(len(parts["val"])) for token in ids(parts["val"][k])} == set(range(cut + 17, 1001))
    assert parts["train"].digest != parts["val"].digest


def test_a_single_document_too_short_for_two_parts_is_refused(opened, tmp_path):
    path = write_index(tmp_path / "one" / "book", [range(1, 17)])
    with refused("book", "data.train_ratio", "data.seq_len=16", "0.8 of 16"):
        opened(path, split="train", train_ratio=0.8)


def test_a_stream_counts_samples_and_documents_by_their_names(opened):
    dataset = opened(seq_len=8)
    (line, *_) = report_lines({"train": data_facts(dataset)})
    assert line.startswith(f"train: {len(dataset)} samples of {len(TEXTS)} documents, {8 * len(dataset)} tokens")


def test_a_split_by_document_shares_none(opened):
    parts = {
        part: opened(split=part, train_ratio=0.7, sampling="in_order", seq_len=1000, validates=part == "val")
        for part in ("train", "val")
    }
    found = {part: Counter(_documents(ids(dataset[0]))) for part, dataset in parts.items()}
    assert sum(found["train"].values()) == 7
    assert sum(found["val"].values()) == 3
    assert found["train"] + found["val"] == Counter(_documents(STREAM))


def test_validation_has_a_seed_of_its_own(opened):
    def rows(**options):
        dataset = opened(validates=True, config={"val_sampling": "random_starts", **options}, seed=5)
        return [ids(dataset[k]) for k in range(len(dataset))]

    train = opened(seed=5)
    assert rows() == rows(val_seed=6) != rows(val_seed=7)
    assert rows(val_seed=5) == [ids(train[k]) for k in range(len(train))]


def test_the_two_constructor_forms_give_the_same_samples(opened, texts, tokenizer, tmp_path):
    config = {"seq_len": 16, "max_tokens": 16, "seed": 3, "cache_dir": str(tmp_path), "max_corpus_tokens": 100}
    other = MultiDocDataset(parquet_files=texts, tokenizer=tokenizer, config=config)
    first = opened(seed=3, max_tokens=100)
    assert len(first) == len(other) == 6
    assert all(ids(first[k]) == ids(other[k]) for k in range(6))
    assert len(MultiDocDataset(parquet_files=texts, tokenizer=tokenizer, config=config, max_samples=4)) == 4


def test_a_blend_keeps_its_shares_at_every_prefix_and_names_its_sources(opened, tmp_path):
    paths = [write_index(tmp_path / name, [[number + 3] * 50] * 20) for number, name in enumerate("abc")]
    weights = (0.5, 0.3, 0.2)
    dataset = opened(None, blend=list(zip(weights, paths, strict=True)), num_samples=100)
    assert dataset.categories.names == ("a", "b", "c")
    drawn = [int(dataset[k]["category_ids"][1]) for k in range(100)]
    assert [int(dataset[k]["input_ids"][0]) for k in range(100)] == [category + 2 for category in drawn]
    for number, weight in enumerate(weights, start=1):
        counts = np.cumsum([category == number for category in drawn])
        assert np.abs(counts - weight * np.arange(1, 101)).max() < 1
    assert [row["samples"] for row in dataset.report()["sources"]] == [50, 30, 20]


def test_a_source_of_weight_0_is_never_drawn_and_may_be_too_short(opened, tmp_path):
    long, short = write_index(tmp_path / "long", [[5] * 100]), write_index(tmp_path / "short", [[6]])
    dataset = opened(None, blend=[[1, long], [0, short]], num_samples=9)
    assert {int(token) for k in range(9) for token in dataset[k]["input_ids"]} == {5}


def test_several_sources_without_weights_give_all_their_samples(opened, tmp_path):
    a, b = write_index(tmp_path / "a", [[5] * 81]), write_index(tmp_path / "b", [[6] * 33])
    dataset = opened([a, b])
    assert Counter(int(dataset[k]["input_ids"][0]) for k in range(len(dataset))) == {5: 5, 6: 2}
    assert opened(str(tmp_path)).categories.names == ("a", "b")


def test_a_limit_of_samples_is_shared_by_the_sources(opened, tmp_path):
    a, b = write_index(tmp_path / "a", [[5] * 320]), write_index(tmp_path / "b", [[6] * 160])
    for options in ({"sampling": "random_starts"}, {"validates": True}, {"blend": [[2, a], [1, b]]}):
        dataset = opened(None if "blend" in options else [a, b], max_samples=6, **options)
        assert Counter(int(dataset[k]["input_ids"][0]) for k in range(len(dataset))) == {5: 4, 6: 2}


def test_a_digest_is_of_everything_that_decides_the_samples(opened, tmp_path):
    paths = [write_index(tmp_path / name, [[number + 5] * 40] * 6) for number, name in enumerate("abc")]
    shuffled = write_index(tmp_path / "other" / "a", [[9] * 40] * 6)
    blend = [[0.7, paths[0]], [0.2, paths[1]], [0.1, paths[2]]]
    others = [
        opened(None, blend=blend),
        opened(None, blend=blend, config={"blend_rule": "megatron"}),
        opened(None, blend=[[0.6, paths[0]], [0.3, paths[1]], [0.1, paths[2]]]),
        opened(None, blend=[[0.7, shuffled], *blend[1:]]),
        opened(None, blend=blend, max_samples=10),
        opened(None, blend=blend, max_samples=10, epochs=3),
        opened(None, blend=blend, seed=7),
        opened(None, blend=blend, attend_across_documents=False),
        opened(None, blend=blend, seq_len=8),
        opened(None, blend=blend, split="train", train_ratio=0.5),
    ]
    assert len({dataset.digest for dataset in others}) == len(others)
    assert opened(None, blend=[[7, paths[0]], [2, paths[1]], [1, paths[2]]]).plan_options() != others[0].plan_options()


def test_sources_are_named_by_their_paths(opened, texts, tmp_path):
    for folder in ("web.v1", "web.v2"):
        write_index(tmp_path / folder / "train", [[5] * 40])
    indices = [f"{tmp_path}/web.v1/train.bin", f"{tmp_path}/web.v2/train"]
    assert opened(indices).categories.names == ("web.v1_train", "web.v2_train")
    assert opened({"x": indices[0], "y": indices[1]}).categories.names == ("x", "y")
    assert opened(None, blend=[[1, path] for path in indices]).categories.names == ("web.v1_train", "web.v2_train")
    assert opened(f"{texts}/*.txt").categories.names == ("scenes",)
    path = write_jsonl(tmp_path / "web.v1.jsonl", TEXTS)
    assert opened(path).categories.names == ("web.v1",)
    packed = tmp_path / "web.v1.JSONL.gz"
    packed.write_bytes(gzip.compress((tmp_path / "web.v1.jsonl").read_bytes()))
    assert opened(str(packed)).categories.names == ("web.v1",)
    assert ids(opened(str(packed))[1]) == ids(opened(path)[1])


def test_epochs_say_how_often_the_tokens_are_seen(opened, tmp_path):
    prefix = write_index(tmp_path / "corpus", [[5] * 81])
    assert opened(prefix).epochs == pytest.approx(80 / 81)
    assert opened(prefix, epochs=3).epochs == pytest.approx(240 / 81)
    assert len(opened(prefix, epochs=3)) == 15  # ⌊(3·81 − 1) / 16⌋
    assert len(opened(prefix, num_samples=7)) == 7


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    """Write 10 documents of 4 sentences of 2 to 6 tokens; document d holds only the token d + 1."""
    documents = [[[number + 1] * ((number + part) % 5 + 2) for part in range(4)] for number in range(10)]
    return str(megatron_file(tmp_path_factory.mktemp("sentences") / "corpus", documents, np.uint16))


@pytest.mark.parametrize("sampling", ["random_starts", "document_stream", "in_order"])
def test_attention_is_kept_inside_documents_and_not_inside_their_sentences(opened, sentences, sampling):
    dataset = opened(sentences, sampling=sampling, attend_across_documents=False)
    for k in range(len(dataset)):
        tokens = ids(dataset[k])
        begins = [True, *(left != right for left, right in pairwise(tokens))]
        assert (dataset[k]["position_ids"] == 0).tolist() == begins
        assert (dataset[k]["loss_mask"] == 0).tolist() == begins
        assert dataset.facts().documents[k] == sum(begins)
    assert dataset.facts().longest_document == 16


def test_no_sentences_of_one_document_are_trained_on_and_validated_on(opened, sentences):
    parts = {
        part: opened(sentences, split=part, train_ratio=0.7, sampling="in_order", validates=part == "val")
        for part in ("train", "val")
    }
    found = {part: {token for k in range(len(data)) for token in ids(data[k])} for part, data in parts.items()}
    assert found["train"].isdisjoint(found["val"])
    assert (len(found["train"]), len(found["val"])) == (7, 3)
    assert [parts[part].report()["sources"][0]["documents"] for part in ("train", "val")] == [7, 3]


def test_a_stream_of_documents_of_several_sequences_is_said_not_to_be_megatrons(opened, sentences, tmp_path, caplog):
    opened(sentences, sampling="in_order")
    assert not caplog.records
    opened(sentences)
    [said] = [entry.getMessage() for entry in caplog.records]
    assert said.startswith("corpus has 10 documents of 40 sequences: it is shuffled by document, where megatron-core's")
    other = write_index(tmp_path / "other", [[5] * 80])
    with refused("data.blend_rule", "tijdeman", "megatron", "corpus has 10 documents"):
        opened(None, blend=[[1, other], [1, sentences]], config={"blend_rule": "megatron"})


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12), seq_len=st.integers(2, 30))
def test_any_documents_give_every_token_once_in_order(tmp_path_factory, lengths, seq_len):
    rng = np.random.default_rng(len(lengths))
    documents = [rng.integers(3, 100, length).tolist() for length in lengths]
    stream = [token for document in documents for token in document]
    folder = tmp_path_factory.mktemp("any")
    prefix = write_index(folder / "corpus", documents)
    if len(stream) < 2:
        with refused("data.train_dir", "corpus", f"{len(stream)} tokens"):
            MultiDocDataset(prefix, None, seq_len, sampling="in_order", cache_dir=str(folder))
        return
    dataset = MultiDocDataset(prefix, None, seq_len, sampling="in_order", cache_dir=str(folder))
    assert [token for k in range(len(dataset)) for token in ids(dataset[k])[1:]] == stream[1:]


def test_it_pickles_with_what_it_maps(opened):
    for sampling in ("random_starts", "document_stream", "in_order"):
        dataset = opened(sampling=sampling)
        copy = pickle.loads(pickle.dumps(dataset))
        assert [ids(copy[k]) for k in range(len(copy))] == [ids(dataset[k]) for k in range(len(dataset))]


def _documents(stream):
    """Return the documents of a stream of texts, as JSON for counting."""
    found, document = [], []
    for token in stream:
        document.append(token)
        if token == EOS:
            found.append(json.dumps(document))
            document = []
    return found


def test_tokens_of_a_text_are_the_tokenizers(tokenizer):
    assert tokens_of(TEXTS[2], eos=False) == tokenizer(TEXTS[2], add_special_tokens=False)["input_ids"]
