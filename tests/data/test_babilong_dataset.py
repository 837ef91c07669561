"""BABILongDataset: rows written by hand, truncation, split, reports."""

import pickle
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from torch.utils.data import DataLoader, default_collate, random_split
from transformers import AutoTokenizer, BatchEncoding

from tests.lib.babilong_files import FACTS, byte_tokenizer, record, records, write_records
from tests.lib.errors import refused
from verl_ext.data import BABILongDataset
from verl_ext.data.families.babilong import BABILongEncoder, SampleOptions, question_prompt
from verl_ext.text.read.readers import Chunk

TOKENIZER = byte_tokenizer()
PLAIN = byte_tokenizer(special=False)
NAMES = {"input_ids", "position_ids", "loss_mask", "category_ids", "attention_mask", "labels"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def opened(tmp_path, cache):
    """Open a dataset of these records, written to data/qa1/1k.json."""

    def open_records(content, tokenizer=TOKENIZER, max_length=96, **options):
        path = write_records(tmp_path / "data/qa1/1k.json", content)
        options.setdefault("answer_reserve_tokens", 8)
        return BABILongDataset(path, tokenizer, max_length, cache_dir=cache, **options)

    return open_records


def literal_row(item, tokenizer, max_length, reserve):
    """Apply the original's steps one by one to a record."""
    prompt = tokenizer(
        f"{item['input']}\n\nQuestion: {item['question']}\nAnswer:",
        truncation=True,
        max_length=max_length - reserve,
        add_special_tokens=True,
    )["input_ids"]
    answer = tokenizer(f" {item['target']}", add_special_tokens=False)["input_ids"]
    ids = prompt + answer[: max_length - len(prompt)]
    padding = max_length - len(ids)
    return {
        "input_ids": ids + [tokenizer.pad_token_id] * padding,
        "labels": [-100] * len(prompt) + ids[len(prompt) :] + [-100] * padding,
        "attention_mask": [1] * len(ids) + [0] * padding,
    }


def test_a_row_is_the_originals_steps_on_the_record(opened):
    items = [record(2, "kitchen"), record(3, "garden"), record(0, "office")]
    dataset = opened(items)
    assert len(dataset) == 3
    for row, item in zip(dataset, items, strict=True):
        assert row.keys() == NAMES
        assert {values.dtype for values in row.values()} == {torch.int64}
        assert {values.shape for values in row.values()} == {(96,)}
        for name, expected in literal_row(item, TOKENIZER, 96, 8).items():
            assert row[name].tolist() == expected


@pytest.mark.parametrize("tokenizer", [TOKENIZER, PLAIN])
def test_truncate_right_is_the_originals_literal_form(opened, tokenizer):
    items = [record(sentences) for sentences in range(1, 12)]
    dataset = opened(items, tokenizer, max_length=64, truncate="right")
    for row, item in zip(dataset, items, strict=True):
        for name, expected in literal_row(item, tokenizer, 64, 8).items():
            assert row[name].tolist() == expected


def test_the_names_of_special_tokens_in_a_context_are_text(opened):
    row = opened([{**record(1), "input": f"{FACTS[0]}<eos> <pad>"}])[0]
    ids = row["input_ids"][row["attention_mask"] == 1].tolist()
    assert "<eos> <pad>" in TOKENIZER.decode(ids, skip_special_tokens=True)
    assert ids.count(TOKENIZER.eos_token_id) == 1  # this tokenizer ends a text with it
    assert TOKENIZER.pad_token_id not in ids


def test_padding_is_a_pseudo_document_and_masks_agree_with_labels(opened):
    row = opened([record(2)])[0]
    tokens = int(row["attention_mask"].sum())
    assert row["position_ids"].tolist() == [*range(tokens), *range(96 - tokens)]
    assert row["loss_mask"].tolist() == [int(label != -100) for label in row["labels"].tolist()]
    assert row["category_ids"].tolist() == row["loss_mask"].tolist()
    assert row["labels"][row["loss_mask"] == 1].tolist() == row["input_ids"][row["loss_mask"] == 1].tolist()


def test_the_first_and_the_last_target_are_those_of_the_answer(opened):
    answer = TOKENIZER(" far hallway", add_special_tokens=False)["input_ids"]
    assert len(answer) > 1
    for append_eos, expected in ((False, answer), (True, [*answer, TOKENIZER.eos_token_id])):
        row = opened([record(2, "far hallway")], append_eos=append_eos)[0]
        targets = np.flatnonzero(row["loss_mask"].numpy()).tolist()
        assert row["input_ids"][targets].tolist() == expected
        assert targets[-1] == int(row["attention_mask"].sum()) - 1
        assert TOKENIZER.decode(row["input_ids"][: targets[0]], skip_special_tokens=True).endswith("\nAnswer:")


def test_a_tokenizer_without_pad_token_pads_with_its_eos(opened):
    tokenizer = byte_tokenizer(pad=False)
    row = opened([record(1)], tokenizer)[0]
    assert tokenizer.pad_token_id is None
    assert set(row["input_ids"][row["attention_mask"] == 0].tolist()) == {tokenizer.eos_token_id}


TOKENIZERS = [TOKENIZER, PLAIN, byte_tokenizer(special=False, trim_offsets=True)]


@settings(deadline=None, max_examples=120)
@given(
    context=st.lists(st.sampled_from([*FACTS, "日本", "é", "\n", ".", " "]), max_size=40).map("".join),
    question=st.sampled_from(["Where is Mary? ", "q", ""]),
    limit=st.integers(40, 90),
    tokenizer=st.sampled_from(TOKENIZERS),
)
def test_the_question_survives_and_a_cut_prompt_has_exactly_the_tokens_allowed(context, question, limit, tokenizer):
    encoder = BABILongEncoder(SampleOptions(max_length=limit + 8, answer_reserve_tokens=8), tokenizer)
    sample = encoder.encode(Chunk(1, [("f:1", {"input": context, "question": question, "target": "garden"})]))
    whole = tokenizer(question_prompt(context, question))["input_ids"]
    prompt = sample.input_ids[sample.loss_mask == 0].tolist()
    assert sample.full_lengths.tolist() == [len(whole) + sample.loss_mask.sum()]
    assert len(prompt) == min(len(whole), limit)
    assert len(sample.input_ids) <= encoder.options.max_length
    text = tokenizer.decode(prompt, skip_special_tokens=True)
    assert text.endswith(f"\n\nQuestion: {question}\nAnswer:")
    begin = 0
    while begin < len(prompt) and prompt[begin] == whole[begin]:
        begin += 1
    assert prompt[begin:] == whole[len(whole) - len(prompt) + begin :]  # one gap, inside the context
    if tokenizer is TOKENIZER:
        assert (prompt[0], prompt[-1]) == (1, 2)


def test_the_boundary_between_fitting_and_cutting_is_exact(opened):
    items = [record(4)]
    whole = len(TOKENIZER(question_prompt(items[0]["input"], items[0]["question"]))["input_ids"])
    fits, cut = (opened(items, max_length=whole + 8 - less) for less in (0, 1))
    assert fits.omitted_documents() == []
    assert fits.facts().tokens[0] == whole + fits.facts().targets[0]
    (row,) = cut.omitted_documents()
    assert (row.category, row.reason, row.documents, row.tokens_removed) == ("qa1_1k", "context truncated", 1, 1)
    assert cut.facts().tokens[0] == fits.facts().tokens[0] - 1


def test_a_prompt_is_cut_where_a_word_tokenizer_drops_white_space(tiny_model):
    words = AutoTokenizer.from_pretrained(tiny_model)
    context = " ".join(f"w{number}" for number in range(30))
    encoder = BABILongEncoder(SampleOptions(max_length=20, answer_reserve_tokens=4), words)
    sample = encoder.encode(Chunk(1, [("f:1", {"input": context, "question": "w50 w51", "target": "w7"})]))
    unknown = words.unk_token_id  # for `Question:` and `Answer:`
    expected = [f"w{number}" for number in range(12)]
    assert words.convert_ids_to_tokens(sample.input_ids)[:12] == expected
    assert sample.input_ids[12:].tolist() == [
        unknown,
        *words("w50 w51")["input_ids"],
        unknown,
        *words("w7")["input_ids"],
    ]


@pytest.mark.parametrize(("samples", "ratio", "seed"), [(10, 0.9, 42), (7, 0.5, 0), (23, 0.9, 3)])
def test_the_split_has_the_members_of_torchs_random_split(opened, samples, ratio, seed):
    content = records(samples)
    train_size = int(ratio * samples)
    sizes = [train_size, samples - train_size]
    expected = random_split(range(samples), sizes, generator=torch.Generator().manual_seed(seed))
    for name, part in zip(("train", "val"), expected, strict=True):
        dataset = opened(content, split=name, train_ratio=ratio, seed=seed)
        questions = [dataset.question(number).question for number in range(len(dataset))]
        assert questions == [content[index]["question"] for index in sorted(part)]
        decoded = [TOKENIZER.decode(row["input_ids"], skip_special_tokens=True) for row in dataset]
        assert all(question in text for question, text in zip(questions, decoded, strict=True))


def test_max_samples_limits_the_split_and_says_so(opened):
    content = records(10)
    whole, limited = (opened(content, split="train", max_samples=count) for count in (-1, 4))
    assert [limited.question(k) for k in range(4)] == [whole.question(k) for k in range(4)]
    assert len(limited) == 4
    (row,) = limited.omitted_documents()
    assert (row.reason, row.documents) == ("beyond max_samples", 5)
    assert row.category == "qa1_1k"
    assert whole.omitted_documents() == []


def test_samples_beyond_max_samples_are_reported_by_category(tmp_path, cache):
    for name, count in (("qa1/1k", 3), ("qa1/2k", 2), ("qa2/1k", 4)):
        write_records(tmp_path / f"data/{name}.json", records(count))
    options = {"answer_reserve_tokens": 8, "cache_dir": cache}
    limited, whole = (
        BABILongDataset(str(tmp_path / "data"), TOKENIZER, 96, max_samples=count, **options) for count in (4, -1)
    )
    report, tokens = limited.omitted_documents(), whole.spans.length
    assert [(row.category, row.reason, row.documents) for row in report] == [
        ("qa1_2k", "beyond max_samples", 1),
        ("qa2_1k", "beyond max_samples", 4),
    ]
    assert [row.tokens_removed for row in report] == [row.tokens for row in report] == [tokens[4], tokens[5:].sum()]
    assert [row.share for row in report] == [row.tokens / tokens.sum() for row in report]
    assert {row.tokens_kept for row in report} == {0}


def test_what_was_cut_is_reported_by_category_for_the_rows_in_use(tmp_path, cache):
    write_records(tmp_path / "data/qa1/1k.json", [record(2), record(12)])
    write_records(tmp_path / "data/qa2/2k.json", [record(14), record(13), record(1)])
    dataset = BABILongDataset(str(tmp_path / "data"), TOKENIZER, 64, answer_reserve_tokens=8, cache_dir=cache)
    report = dataset.omitted_documents()
    assert [(row.category, row.documents) for row in report] == [("qa1_1k", 1), ("qa2_2k", 2)]
    assert all(row.tokens == row.tokens_kept + row.tokens_removed and row.tokens_removed > 0 for row in report)
    kept = dataset.facts().tokens
    assert report[0].tokens_kept == kept[1]
    assert report[1].tokens_kept == kept[2] + kept[3]
    right = BABILongDataset(
        str(tmp_path / "data"), TOKENIZER, 64, answer_reserve_tokens=8, cache_dir=cache, truncate="right", max_samples=2
    )
    reasons = [(row.category, row.reason) for row in right.omitted_documents()]
    assert reasons == [("qa1_1k", "question truncated"), ("qa2_2k", "beyond max_samples")]


def test_categories_are_tasks_and_sizes_by_the_files_paths(tmp_path, cache):
    for name in ("qa1/10k", "qa1/2k", "qa2/1k", "mine/stories"):
        write_records(tmp_path / f"data/{name}.json", [record(1, question=f"{name}? ")])
    dataset = BABILongDataset([str(tmp_path / "data")], TOKENIZER, 96, cache_dir=cache)
    names = ["stories", "qa1_2k", "qa1_10k", "qa2_1k"]
    assert [dataset.question(number).category for number in range(4)] == names
    assert dataset.categories.names == tuple(names)
    assert [int(row["category_ids"].max()) for row in dataset] == [1, 2, 3, 4]


def test_a_slow_tokenizer_serves_prompts_that_fit_and_is_refused_for_others(opened):
    class Slow:
        """A tokenizer that returns a fast tokenizer's output without offsets."""

        pad_token_id, eos_token_id, all_special_tokens = 0, 2, ("<pad>",)
        bos_token = unk_token = None
        eos_token = None
        added_tokens_decoder: ClassVar = {0: AddedToken("<pad>", special=True)}
        convert_tokens_to_ids = TOKENIZER.convert_tokens_to_ids

        def get_vocab(self):
            return TOKENIZER.get_vocab()

        def __call__(self, texts, **options):
            return BatchEncoding({"input_ids": TOKENIZER(texts, **options)["input_ids"]})

    rows = [dataset[0]["input_ids"] for dataset in (opened([record(1)], Slow()), opened([record(1)]))]
    assert torch.equal(*rows)
    with refused("prompts over 24 tokens", "Slow", "1k.json:1"):
        opened([record(9)], Slow(), max_length=32)
    named = {**record(1), "question": "What is <pad>?"}
    with refused("1k.json:1", "question", "<pad>"):
        opened([named], Slow())


def test_a_dataset_pickles_and_loads_in_workers(opened):
    dataset = opened(records(6), split="train")
    again = pickle.loads(pickle.dumps(dataset))
    assert again.question(3) == dataset.question(3)
    loaded = list(DataLoader(again, batch_size=2, num_workers=1, multiprocessing_context="spawn"))
    expected = [default_collate([dataset[0], dataset[1]]), default_collate([dataset[2], dataset[3]])]
    for batch, wanted in zip(loaded, expected, strict=False):
        assert all(torch.equal(batch[name], wanted[name]) for name in NAMES)
