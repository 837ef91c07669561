"""Inputs that MultiDocDataset refuses: one line names the key and the value received; nothing is overwritten."""

import logging
import struct

import numpy as np
import pytest
from omegaconf import OmegaConf
from transformers import AutoTokenizer

from tests.lib.babilong_files import byte_tokenizer
from tests.lib.checked import checked
from tests.lib.document_texts import random_words, write_jsonl, write_texts
from tests.lib.pretrain_files import write_index
from verl_ext.config.compose import compose
from verl_ext.data import MultiDocDataset


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture
def prefix(tmp_path):
    """Write a uint16 corpus of 4 documents and 90 tokens."""
    return write_index(tmp_path / "corpus", np.split(np.arange(90), [30, 50, 50]))


@pytest.fixture
def refused(tokenizer, tmp_path):
    """Assert that the samples of some paths are refused in one matching line."""

    def check(paths, match, **options):
        options = {"config": {"cache_dir": str(tmp_path / "cache")}, **options}
        with pytest.raises(ValueError, match=match) as error:
            MultiDocDataset(paths, tokenizer, options.pop("seq_len", 8), **options)
        assert "\n" not in str(error.value)

    return check


@pytest.mark.parametrize(
    ("blend", "match"),
    [
        ([[0, "{p}"], [0.0, "b"]], r"data\.blend must have a weight above 0; got \[0\.0, 0\.0\]"),
        ([[float("nan"), "{p}"]], r"data\.blend must have weights that are finite and at least 0; got \[nan\]"),
        ([["{p}", 0.7]], r"data\.blend must be pairs of a weight and a path"),
        ([0.7, "{p}"], r"data\.blend must be pairs of a weight and a path"),
        ([], r"data\.blend must be pairs of a weight and a path"),
        ([[True, "{p}"]], r"data\.blend must be pairs of a weight and a path"),
        ([[1, "{p}"], [2, "{p}"]], r"data\.blend must name each path once; got .*corpus twice"),
        (
            [[1, "{p}"], [2, "{p}.bin"]],
            r"data\.blend must have sources of different names; got .*_corpus twice: rename /",
        ),
    ],
)
def test_a_blend_that_cannot_be_drawn(blend, match, prefix, refused):
    named = [
        [part.format(p=prefix) if isinstance(part, str) else part for part in pair] if isinstance(pair, list) else pair
        for pair in blend
    ]
    refused(None, match, blend=named)


def test_a_blend_beside_train_dir_and_other_samplings_of_it(prefix, refused):
    refused(prefix, r"data\.train_dir must be null with data\.blend", blend=[[1, prefix]])
    refused(None, r"data\.sampling must be document_stream with data\.blend", blend=[[1, prefix]], sampling="in_order")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"seq_len": 1}, r"data\.seq_len must be at least 2; got 1"),
        ({"seed": 2**32}, r"data\.seed must be"),
        ({"config": {"strategy": "best_fit"}}, r"data\.strategy must be none; got best_fit"),
        ({"config": {"mixture": {"a": 1}}}, r"data\.mixture must be null for samples of a stream; got \{'a': 1\}"),
        ({"config": {"cache_dir": ""}}, r"data\.cache_dir must be a folder or null; got ''"),
    ],
)
def test_an_option_that_cannot_be(options, match, prefix, refused):
    refused(prefix, match, **options)


def test_a_seq_len_that_is_not_the_packs_budget(prefix, tokenizer):
    with pytest.raises(ValueError, match=r"data\.max_tokens must be data\.seq_len=16 .*; got 8"):
        MultiDocDataset(prefix, tokenizer, config={"seq_len": 16, "max_tokens": 8})
    with pytest.raises(TypeError, match="no option sample"):
        MultiDocDataset(prefix, tokenizer, 16, sample="in_order")


@pytest.mark.parametrize("sampling", ["random_starts", "document_stream"])
def test_a_corpus_shorter_than_one_sample(sampling, prefix, refused):
    refused(
        prefix,
        r"data\.train_dir: corpus must have the .* tokens that a sample of data\.seq_len needs; got 90 tokens",
        seq_len=91,
        sampling=sampling,
    )


def test_paths_that_hold_nothing(tmp_path, refused):
    refused(str(tmp_path / "absent"), r"data\.train_dir must name files that exist; .*absent does not exist")
    refused(None, r"data\.train_dir must name texts or an index .*; got null")
    refused([], r"data\.train_dir must name texts or an index .*; got \[\]")
    refused(str(tmp_path / "*.txt"), r"data\.train_dir must name files that exist; .* matches no file")
    refused(str(tmp_path / "absent.idx"), r"data\.train_dir must name a corpus in Megatron's indexed form")


def test_an_index_without_its_tokens_and_one_that_is_cut(prefix, tmp_path, refused):
    whole = (tmp_path / "corpus.bin").read_bytes()
    (tmp_path / "corpus.bin").write_bytes(whole[:-2])
    refused(prefix, r"data\.train_dir must have a \.bin of 180 bytes.*got 178")
    (tmp_path / "corpus.bin").unlink()
    refused(prefix, r"data\.train_dir must name a corpus .*corpus\.bin: No such file")


@pytest.mark.parametrize(
    ("at", "value", "match"),
    [
        (0, b"MMIDIDY", "must begin with"),
        (9, struct.pack("<Q", 2), "must have version 1"),
        (17, b"\x09", "must have a dtype code"),
        (18, struct.pack("<Q", 5), "bytes, for the 5 sequences"),
        (34, struct.pack("<i", 31), "pointer"),
    ],
)
def test_an_idx_that_is_none(at, value, match, prefix, tmp_path, refused):
    data = bytearray((tmp_path / "corpus.idx").read_bytes())
    data[at : at + len(value)] = value
    (tmp_path / "corpus.idx").write_bytes(data)
    refused(prefix, match)


def test_a_text_that_is_no_utf8_names_the_file_and_the_byte(tmp_path, refused, tokenizer):
    folder = write_texts(tmp_path / "texts", random_words((9, 12)))
    (tmp_path / "texts" / "000.txt").write_bytes(b"w1 w2 \xff w3")
    refused(folder, r"000\.txt.*UTF-8.*byte 7.*data\.on_bad_record=skip")
    config = {"seq_len": 8, "cache_dir": str(tmp_path / "cache"), "on_bad_record": "skip"}
    dataset = MultiDocDataset(folder, tokenizer, config=config)
    assert [(row.category, row.documents) for row in dataset.omitted_documents()] == [("texts", 1)]
    assert dataset.report()["sources"][0]["tokens"] == 13


def test_texts_behind_a_url_give_the_same_samples(tmp_path, tokenizer):
    import fsspec

    (tmp_path / "scenes.txt").write_text("the cat sat on the mat " * 50)
    fsspec.filesystem("memory").pipe("/multidoc/scenes.txt", (tmp_path / "scenes.txt").read_bytes())
    local, remote = (
        MultiDocDataset([path], tokenizer, 8, cache_dir=str(tmp_path / "cache"))
        for path in (str(tmp_path / "scenes.txt"), "memory://multidoc/scenes.txt")
    )
    assert len(local) == len(remote)
    assert all(local[row]["input_ids"].equal(remote[row]["input_ids"]) for row in range(len(local)))
    assert local.categories.names == remote.categories.names == ("scenes",)


def test_an_empty_document_is_a_bad_record(tmp_path, refused, tokenizer):
    path = write_jsonl(tmp_path / "texts.jsonl", ["w1 w2 w3", " ", *random_words((20,))])
    refused(path, r"texts\.jsonl:2: .*empty")
    config = {"seq_len": 8, "cache_dir": str(tmp_path / "cache"), "on_bad_record": "skip"}
    row = MultiDocDataset(path, tokenizer, config=config).omitted_documents()[0]
    assert (row.reason, row.documents) == ("bad record: empty", 1)


def test_records_whose_special_tokens_are_text_are_counted(tmp_path):
    path = write_jsonl(tmp_path / "texts.jsonl", ["Mary <eos> went <eos> home", "to the garden", "<pad>"])
    config = {"seq_len": 8, "cache_dir": str(tmp_path / "cache"), "add_eos": False}
    for _ in range(2):  # written, then opened again
        dataset = MultiDocDataset(path, byte_tokenizer(), config=config)
        (row,) = dataset.omitted_documents()
        assert (row.category, row.reason, row.documents) == ("texts", "special tokens encoded as text", 2)
        assert dataset.token_range()[0] > 2  # the ids of <pad>, <bos> and <eos>


def test_a_split_that_leaves_a_part_without_documents_names_the_source(prefix, refused):
    match = r"data\.train_dir: corpus: data\.train_ratio must leave .*; got 0.1 of 4"
    refused(prefix, match, split="train", train_ratio=0.1)


def test_a_number_of_samples_is_of_a_document_stream(prefix, refused):
    match = r"data\.num_samples must be null with data\.sampling=in_order; got 3"
    refused(prefix, match, sampling="in_order", config={"num_samples": 3})


def test_a_folder_of_an_index_and_of_texts(tmp_path, prefix, refused):
    (tmp_path / "report.json").write_text("{}")  # like the index command's
    refused(str(tmp_path), r"data\.train_dir: corpus must have", seq_len=1000)
    (tmp_path / "more.txt").write_text("w1")
    refused(str(tmp_path), r"data\.train_dir must name a folder of indices or of texts; .* holds more\.txt as well")


def test_a_folder_of_chats_with_masks_is_refused(tmp_path, prefix, refused):
    write_index(tmp_path / "corpus_mask", [[1] * length for length in (30, 20, 0, 40)])
    match = r"data\.train_dir must name indices of texts, because loss masks are not read; .* holds corpus_mask of"
    refused(str(tmp_path), match)


def test_a_damaged_cache_is_told_and_made_anew(tmp_path, tokenizer, caplog):
    path = write_jsonl(tmp_path / "texts.jsonl", random_words((20, 30)))

    def rows():
        dataset = MultiDocDataset(path, tokenizer, 8, cache_dir=str(tmp_path / "cache"), sampling="document_stream")
        return [dataset[k]["input_ids"].tolist() for k in range(len(dataset))]

    first = rows()
    for file in ("text.bin", "sample_index.npy"):
        for damaged in (tmp_path / "cache").glob(f"*/{file}"):
            damaged.write_bytes(damaged.read_bytes()[:-3])
        with caplog.at_level(logging.WARNING):
            assert rows() == first
        assert "made again" in caplog.text
        caplog.clear()


def test_a_cached_token_range_that_was_changed_is_read_anew(tmp_path, prefix, tokenizer):
    first = MultiDocDataset(prefix, tokenizer, 8, cache_dir=str(tmp_path / "cache")).token_range()
    assert first == (0, 89)
    [cached] = (tmp_path / "cache").glob("range-*/token_range.npy")
    cached.write_bytes(cached.read_bytes()[:-1] + b"1")
    assert MultiDocDataset(prefix, tokenizer, 8, cache_dir=str(tmp_path / "cache")).token_range() == first


def test_its_options_are_refused_where_nothing_reads_them(tiny_model, tmp_path):
    for override in (
        "data.add_eos=false",
        "data.blend=[[1,a]]",
        "data.seq_len=8",
        "data.sampling=in_order",
        "data.add_eos=true",
    ):
        config = compose([f"model.path={tiny_model}", f"data.train_dir={tmp_path}", override])
        key = override.partition("=")[0]
        with pytest.raises(ValueError, match=rf"{key} is an option of data=multidoc; got .* without it"):
            checked(config, 1)


def test_a_blend_stands_in_for_train_dir(tiny_model, tmp_path):
    text = write_jsonl(tmp_path / "texts.jsonl", ["Mary went home"])
    own = [f"model.path={tiny_model}", "data=multidoc", "trainer.device=cpu", "optim.lr=1e-3"]
    checked(compose([*own, f"data.blend=[[1,{text}]]"]), 1)
    named = compose([f"model.path={tiny_model}", "data=multidoc", "data.train_dir={a: x, b: [y, z]}"])
    assert OmegaConf.to_container(named.data.train_dir) == {"a": "x", "b": ["y", "z"]}
    with pytest.raises(ValueError, match=r"data\.train_dir must have each name once.*got a more than once"):
        compose(["data=multidoc", "data.train_dir={a: x, a: y}"])
    with pytest.raises(
        ValueError, match=r"data\.train_dir is required: texts or an index, or data\.blend in its place"
    ):
        checked(compose(own), 1)
