"""PreTrainDataset's rows equal a plain construction, document by document; splits and reports."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, default_collate, random_split
from transformers import AutoModelForCausalLM, Qwen3Config

import verl_ext.attention.packed  # noqa: F401  makes the attention known to transformers
from tests.lib.babilong_files import byte_tokenizer
from tests.lib.errors import refused
from tests.lib.pretrain_files import plain_document, plain_row, texts_of, word_tokenizer, write_jsonl
from tests.lib.tiny_model import SHAPE
from verl_ext.attention import PACKED_ATTENTION
from verl_ext.data.families.pretrain import PreTrainDataset
from verl_ext.parallel.shards import document_layout

TOKENIZER = word_tokenizer()
WITHOUT_BOS = word_tokenizer(bos=False)
PADS_WITH_EOS = word_tokenizer(pad="<eos>")
WITHOUT_PAD = word_tokenizer(pad=None)
TOKENIZERS = [TOKENIZER, WITHOUT_BOS, PADS_WITH_EOS, WITHOUT_PAD]
NAMES = {"input_ids", "position_ids", "loss_mask", "category_ids", "labels"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def opened(tmp_path, cache):
    """Open a dataset of these texts, written to data/web.jsonl."""

    def open_texts(texts, tokenizer=TOKENIZER, max_length=8, **options):
        path = write_jsonl(tmp_path / "data/web.jsonl", texts)
        return PreTrainDataset(tokenizer, path, max_length, cache_dir=cache, **options)

    return open_texts


def documents_of(row):
    """Return (input_ids, labels) of each document of a row, without padding."""
    tokens = int(row["attention_mask"].sum()) if "attention_mask" in row else len(row["input_ids"])
    begins = [at for at, position in enumerate(row["position_ids"][:tokens].tolist()) if position == 0]
    ids, labels = row["input_ids"].tolist(), row["labels"].tolist()
    return [(ids[a:b], labels[a:b]) for a, b in zip(begins, [*begins[1:], tokens], strict=True)]


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    max_length=st.integers(3, 10),
    spare=st.integers(0, 20),
    tokenizer=st.sampled_from(TOKENIZERS),
    pad_mode=st.sampled_from(["no_padding", "right"]),
)
def test_rows_are_a_plain_construction_of_every_document(
    tmp_path_factory, lengths, max_length, spare, tokenizer, pad_mode
):
    folder, texts = tmp_path_factory.mktemp("rows"), texts_of(lengths)
    path = write_jsonl(folder / "web.jsonl", texts)
    options = {"cache_dir": str(folder / "cache")}
    padded = PreTrainDataset(tokenizer, path, max_length, rows="padded", **options)
    assert len(padded) == len(texts)
    for row, text in zip(padded, texts, strict=True):
        ids, labels = plain_row(tokenizer, text, max_length)
        assert row["input_ids"].tolist() == ids
        assert row["labels"].tolist() == labels
        assert row["attention_mask"].tolist() == [1] * len(documents_of(row)[0][0]) + [0] * labels[1:].count(-100)

    packed = PreTrainDataset(tokenizer, path, max_length, max_tokens=max_length + spare, pad_mode=pad_mode, **options)
    found = [document for row in packed for document in documents_of(row)]
    wanted = [plain_document(tokenizer, text, max_length) for text in texts]
    assert sorted(found) == sorted((ids, [-100, *ids[1:]]) for ids in wanted)
    order = packed.plan().document_index.tolist()
    assert [ids for ids, _ in found] == [wanted[document] for document in order]
    for row in packed:
        tokens = sum(len(ids) for ids, _ in documents_of(row))
        assert len(row["input_ids"]) == (max_length + spare if pad_mode == "right" else tokens) <= max_length + spare
        assert row["labels"][tokens:].tolist() == [-100] * (len(row["labels"]) - tokens)
        assert row["loss_mask"].tolist() == [int(label != -100) for label in row["labels"].tolist()]
        assert row["category_ids"].tolist() == row["loss_mask"].tolist()


def test_padded_and_packed_rows_hold_the_same_targets_of_a_byte_tokenizer(opened):
    tokenizer = byte_tokenizer()  # adds its own <bos> and <eos> to a text, unless told not to
    texts = ["Mary went to the kitchen.\n\nJohn", "日本 <eos> é", "x"]
    rows = opened(texts, tokenizer, max_length=12, rows="padded")
    padded = [document for row in rows for document in documents_of(row)]
    packed = [
        document for row in opened(texts, tokenizer, max_length=12, max_tokens=40) for document in documents_of(row)
    ]
    assert [ids for ids, _ in padded] == [plain_document(tokenizer, text, 12) for text in texts]
    assert sorted(packed) == sorted(padded)


def test_the_longest_text_that_fits_is_whole_and_one_token_more_is_cut(opened):
    rows = opened(texts_of([5, 6, 7, 1]), max_length=8, rows="padded")
    assert [int(row["attention_mask"].sum()) for row in rows] == [7, 8, 8, 3]
    assert [row["input_ids"][int(row["attention_mask"].sum()) - 1].item() for row in rows] == [2] * 4
    (cut,) = rows.omitted_documents()
    assert (cut.category, cut.reason, cut.documents) == ("web", "truncated to max_length", 1)
    assert (cut.tokens, cut.tokens_kept, cut.tokens_removed) == (9, 8, 1)
    assert cut.share == 9 / (7 + 8 + 9 + 3)


def test_a_pad_token_that_is_the_eos_costs_no_document_its_last_target(opened):
    for tokenizer in (PADS_WITH_EOS, WITHOUT_PAD):
        (row,) = opened(texts_of([3]), tokenizer, rows="padded")
        assert row["input_ids"].tolist() == [1, 4, 5, 6, 2, 2, 2, 2]
        assert row["labels"].tolist() == [-100, 4, 5, 6, 2, -100, -100, -100]
        assert row["attention_mask"].tolist() == [1, 1, 1, 1, 1, 0, 0, 0]


def test_without_a_bos_documents_begin_with_their_text_and_it_is_told_once(opened, caplog):
    dataset = opened(texts_of([9, 1]), WITHOUT_BOS)
    again = PreTrainDataset(
        WITHOUT_BOS, dataset.files, 8, cache_dir=str(Path(dataset.folders[0]).parent), rows="padded"
    )
    assert again.folders == dataset.folders
    for opening, rows in ((dataset, "packed"), (again, "padded")):
        report = opening.report()
        assert [report[name] for name in ("rows", "max_length", "bos")] == [rows, 8, False]
    assert [len(ids) for ids, _ in documents_of(dataset[0])] == [7]
    assert documents_of(dataset[1]) == [([11, 2], [-100, 2])]
    told = [entry.getMessage() for entry in caplog.records if "bos_token" in entry.getMessage()]
    assert told == [
        "the tokenizer has no bos_token: documents of data.train_dir begin with the first token of their text"
    ]


def test_packs_are_of_max_length_where_no_budget_is_given(opened):
    dataset = opened(texts_of([2, 2, 6, 1]))
    assert (dataset.max_tokens, dataset.options.strategy, len(dataset)) == (8, "best_fit", 2 + 1)
    assert max(len(row["input_ids"]) for row in dataset) == 8


def test_padded_rows_are_those_of_max_length_whatever_the_options_of_packs(opened):
    plain = opened(texts_of([2, 3]), rows="padded")
    config = {"rows": "padded", "max_tokens": 8192, "strategy": "best_fit", "pad_mode": "no_padding"}
    for row, wanted in zip(opened(texts_of([2, 3]), config=config), plain, strict=True):
        assert all(torch.equal(row[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(("ratio", "seed"), [(0.9, 42), (0.5, 0)])
def test_the_split_is_by_document_and_has_the_members_of_torchs_random_split(opened, ratio, seed):
    texts, size = texts_of([3] * 8 + [5] * 3), int(ratio * 11)
    expected = random_split(range(11), [size, 11 - size], generator=torch.Generator().manual_seed(seed))
    for name, part in zip(("train", "val"), expected, strict=True):
        dataset = opened(texts, split=name, train_ratio=ratio, seed=seed, max_tokens=16)
        found = [ids for row in dataset for ids, _ in documents_of(row)]
        assert sorted(found) == sorted(plain_document(TOKENIZER, texts[index], 8) for index in part)


def test_max_samples_limits_the_documents_of_the_split_and_says_so_by_category(tmp_path, cache):
    paths = [write_jsonl(tmp_path / f"{name}.jsonl", texts_of([4] * count)) for name, count in (("a", 3), ("b", 5))]
    dataset = PreTrainDataset(TOKENIZER, paths, 8, cache_dir=cache, max_samples=4)
    assert int(dataset.facts().documents.sum()) == 4
    (beyond,) = dataset.omitted_documents()
    assert (beyond.category, beyond.reason, beyond.documents) == ("b", "beyond max_samples", 4)
    assert (beyond.tokens, beyond.tokens_removed, beyond.share) == (24, 24, 24 / 48)
    assert dataset.categories.names == ("a", "b")
    assert sorted(int(row["category_ids"].max()) for row in dataset) == [1, 1, 1, 2]


def test_what_was_cut_is_reported_by_category_for_the_documents_in_use(tmp_path, cache):
    paths = [
        write_jsonl(tmp_path / f"{name}.jsonl", texts_of(size)) for name, size in (("a", [9, 2, 8]), ("b", [9, 9]))
    ]
    dataset = PreTrainDataset(TOKENIZER, paths, 8, cache_dir=cache, max_samples=4)
    report = dataset.omitted_documents()
    assert [(row.category, row.documents, row.tokens, row.tokens_removed) for row in report] == [
        ("a", 2, 21, 5),
        ("b", 1, 11, 3),
        ("b", 1, 8, 8),  # beyond max_samples
    ]
    assert [row.share for row in report[:2]] == [21 / 36, 11 / 36]


@pytest.mark.parametrize(("policy", "sizes"), [("truncate", [4, 6, 6]), ("drop", [4]), ("split", [4, 6, 2, 6, 1])])
def test_documents_over_the_budget_of_a_pack_follow_over_length(opened, policy, sizes):
    dataset = opened(texts_of([2, 6, 5]), max_tokens=6, over_length=policy, strategy="none")
    assert dataset.facts().tokens.tolist() == sizes
    assert dataset.facts().targets.tolist() == [int(row["loss_mask"].sum()) for row in dataset]
    assert dataset.scan().targets.tolist() == [size - 1 for size in sizes]


def test_documents_over_the_budget_are_counted_among_those_in_use(opened):
    dataset = opened(texts_of([9, 2, 6, 6]), max_tokens=6, over_length="truncate", strategy="none", max_samples=3)
    assert [(count.documents, count.tokens, count.tokens_kept) for count in dataset.scan().over_length] == [(2, 16, 12)]
    assert [(row.reason, row.documents, row.tokens_removed) for row in dataset.omitted_documents()] == [
        ("truncated to max_length", 1, 3),
        ("truncate", 2, 4),
        ("beyond max_samples", 1, 8),
    ]
    with refused("data.max_tokens", "data.train_dir", 6):
        opened(texts_of([9, 2, 6, 6]), max_tokens=6)


def test_a_dataset_pickles_and_loads_in_workers(opened):
    dataset = opened(texts_of([3, 9, 1, 5, 2, 4]), split="train", train_ratio=0.9, rows="padded")
    again = pickle.loads(pickle.dumps(dataset))
    assert again.omitted_documents() == dataset.omitted_documents()
    loaded = list(DataLoader(again, batch_size=2, num_workers=1, multiprocessing_context="fork"))
    for number, batch in enumerate(loaded[:2]):
        wanted = default_collate([dataset[2 * number], dataset[2 * number + 1]])
        assert all(torch.equal(batch[name], wanted[name]) for name in NAMES)


def test_the_loss_of_packed_rows_is_that_of_padded_rows_document_by_document(opened):
    texts, models = texts_of([3, 6, 1, 9, 5, 2]), []
    for attention in (PACKED_ATTENTION, "eager"):
        torch.manual_seed(0)
        models.append(AutoModelForCausalLM.from_config(Qwen3Config(**SHAPE), attn_implementation=attention).eval())
    packed, plain = models
    padded = opened(texts, rows="padded", tokenizer=PADS_WITH_EOS)
    wanted = []
    for row in padded:
        batch = {name: row[name][None] for name in ("input_ids", "attention_mask", "labels")}
        wanted.append(plain(**batch, use_cache=False).loss.item())

    dataset = opened(texts, tokenizer=PADS_WITH_EOS, max_tokens=17)
    assert max(dataset.facts().documents) > 1
    found = np.zeros(len(texts))
    for number, row in enumerate(dataset):
        layout = document_layout(row["position_ids"])
        logits = packed(
            input_ids=row["input_ids"][None],
            position_ids=row["position_ids"][None],
            use_cache=False,
            document_layout=layout,
        ).logits[0]
        nll = torch.nn.functional.cross_entropy(
            logits[:-1].double(), row["labels"][1:], reduction="none", ignore_index=-100
        )
        ends = np.cumsum(dataset.spans.length[dataset.plan().documents(number)])
        for document, end in zip(dataset.plan().documents(number).tolist(), ends.tolist(), strict=True):
            size = int(dataset.spans.length[document])
            found[document] = nll[end - size : end - 1].mean().item()
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
