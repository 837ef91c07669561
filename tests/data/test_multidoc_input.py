"""Inputs that MultiDocDataset refuses: one line names the key and the value received; nothing is overwritten."""

import logging

import fsspec
import numpy as np
import pytest
from omegaconf import OmegaConf
from transformers import AutoTokenizer

from tests.lib.babilong_files import byte_tokenizer
from tests.lib.checked import checked
from tests.lib.document_texts import random_words, write_jsonl, write_texts
from tests.lib.errors import refused
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
def assert_refused(tokenizer, tmp_path):
    """Assert that the samples of some paths are refused in a line that names some things."""

    def check(paths, *things, **options):
        options = {"config": {"cache_dir": str(tmp_path / "cache")}, **options}
        with refused(*things):
            MultiDocDataset(paths, tokenizer, options.pop("seq_len", 8), **options)

    return check


@pytest.mark.parametrize(
    ("blend", "things"),
    [
        ([[0, "{p}"], [0.0, "b"]], ("a weight", "[0.0, 0.0]")),
        ([[float("nan"), "{p}"]], ("finite", "[nan]")),
        *((pairs, ("pairs",)) for pairs in ([["{p}", 0.7]], [0.7, "{p}"], [], [[True, "{p}"]])),
        ([[1, "{p}"], [2, "{p}"]], ("each path", "corpus twice")),
        ([[1, "{p}"], [2, "{p}.bin"]], ("names", "rename", "corpus")),
    ],
)
def test_a_blend_that_cannot_be_drawn(blend, things, prefix, assert_refused):
    named = [
        [part.format(p=prefix) if isinstance(part, str) else part for part in pair] if isinstance(pair, list) else pair
        for pair in blend
    ]
    assert_refused(None, "data.blend", *things, blend=named)


def test_a_blend_beside_train_dir_and_other_samplings_of_it(prefix, assert_refused):
    blend = [[1, prefix]]
    assert_refused(prefix, "data.train_dir", "data.blend", prefix, blend=blend)
    assert_refused(None, "data.sampling", "data.blend", "in_order", blend=blend, sampling="in_order")


@pytest.mark.parametrize(
    ("options", "things"),
    [
        ({"seq_len": 1}, ("data.seq_len", 2, 1)),
        ({"seed": 2**32}, ("data.seed", 2**32)),
        ({"config": {"strategy": "best_fit"}}, ("data.strategy", "none", "best_fit")),
        ({"config": {"mixture": {"a": 1}}}, ("data.mixture", "{'a': 1}")),
        ({"config": {"cache_dir": ""}}, ("data.cache_dir", "")),
    ],
)
def test_an_option_that_cannot_be(options, things, prefix, assert_refused):
    assert_refused(prefix, *things, **options)


def test_a_seq_len_that_is_not_the_packs_budget(prefix, tokenizer):
    with refused("data.max_tokens", "data.seq_len=16", 8):
        MultiDocDataset(prefix, tokenizer, config={"seq_len": 16, "max_tokens": 8})
    with refused("sample", error=TypeError):
        MultiDocDataset(prefix, tokenizer, 16, sample="in_order")


@pytest.mark.parametrize("sampling", ["random_starts", "document_stream"])
def test_a_corpus_shorter_than_one_sample(sampling, prefix, assert_refused):
    things = ("data.train_dir", "corpus", "data.seq_len", "90 tokens")
    assert_refused(prefix, *things, seq_len=91, sampling=sampling)


def test_paths_that_hold_nothing(tmp_path, assert_refused):
    for path, reason in (("absent", "exist"), ("*.txt", "no file"), ("absent.bin", "No such file")):
        assert_refused(str(tmp_path / path), "data.train_dir", tmp_path / path, reason)
    for nothing in (None, []):
        assert_refused(nothing, "data.train_dir", nothing)


def test_an_index_without_its_tokens_and_one_that_is_cut(prefix, tmp_path, assert_refused):
    whole = (tmp_path / "corpus.bin").read_bytes()
    (tmp_path / "corpus.bin").write_bytes(whole[:-2])
    assert_refused(prefix, "data.train_dir", "180 bytes", "178 bytes")
    (tmp_path / "corpus.bin").unlink()
    assert_refused(prefix, "data.train_dir", "corpus.bin: No such file")


def test_a_text_that_is_no_utf8_names_the_file_and_the_byte(tmp_path, assert_refused, tokenizer):
    folder = write_texts(tmp_path / "texts", random_words((9, 12)))
    (tmp_path / "texts" / "000.txt").write_bytes(b"w1 w2 \xff w3")
    assert_refused(folder, "000.txt", "UTF-8", "byte 7", "data.on_bad_record=skip")
    config = {"seq_len": 8, "cache_dir": str(tmp_path / "cache"), "on_bad_record": "skip"}
    dataset = MultiDocDataset(folder, tokenizer, config=config)
    assert [(row.category, row.documents) for row in dataset.omitted_documents()] == [("texts", 1)]
    assert dataset.report()["sources"][0]["tokens"] == 13


def test_texts_behind_a_url_give_the_same_samples(tmp_path, tokenizer):
    (tmp_path / "scenes.txt").write_text("the cat sat on the mat " * 50)
    fsspec.filesystem("memory").pipe("/multidoc/scenes.txt", (tmp_path / "scenes.txt").read_bytes())
    local, remote = (
        MultiDocDataset([path], tokenizer, 8, cache_dir=str(tmp_path / "cache"))
        for path in (str(tmp_path / "scenes.txt"), "memory://multidoc/scenes.txt")
    )
    assert len(local) == len(remote)
    assert all(local[row]["input_ids"].equal(remote[row]["input_ids"]) for row in range(len(local)))
    assert local.categories.names == remote.categories.names == ("scenes",)


def test_an_empty_document_is_a_bad_record(tmp_path, assert_refused, tokenizer):
    path = write_jsonl(tmp_path / "texts.jsonl", ["w1 w2 w3", " ", *random_words((20,))])
    assert_refused(path, "texts.jsonl:2", "empty")
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


def test_a_split_that_leaves_a_part_without_documents_names_the_source(prefix, assert_refused):
    things = ("data.train_dir", "corpus", "data.train_ratio", "0.1 of 4")
    assert_refused(prefix, *things, split="train", train_ratio=0.1)


def test_a_number_of_samples_is_of_a_document_stream(prefix, assert_refused):
    things = ("data.num_samples", "data.sampling=in_order", 3)
    assert_refused(prefix, *things, sampling="in_order", config={"num_samples": 3})


def test_a_folder_of_an_index_and_of_texts(tmp_path, prefix, assert_refused):
    (tmp_path / "report.json").write_text("{}")  # like the index command's
    assert_refused(str(tmp_path), "data.train_dir", "corpus", "data.seq_len", seq_len=1000)
    (tmp_path / "more.txt").write_text("w1")
    assert_refused(str(tmp_path), "data.train_dir", tmp_path, "more.txt")


def test_a_folder_of_chats_with_masks_is_refused(tmp_path, prefix, assert_refused):
    write_index(tmp_path / "corpus_mask", [[1] * length for length in (30, 20, 0, 40)])
    assert_refused(str(tmp_path), "data.train_dir", "loss masks", tmp_path, "corpus_mask")


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
        "data.blend=[[1, 2]]",
        "data.seq_len=8",
        "data.sampling=in_order",
        "data.add_eos=true",
    ):
        config = compose([f"model.path={tiny_model}", f"data.train_dir={tmp_path}", "optim.lr=1", override])
        key = override.partition("=")[0]
        with refused(key, "data=multidoc", override.partition("=")[2]):
            checked(config, 1)


def test_a_blend_stands_in_for_train_dir(tiny_model, tmp_path):
    text = write_jsonl(tmp_path / "texts.jsonl", ["Mary went home"])
    own = [f"model.path={tiny_model}", "data=multidoc", "trainer.device=cpu", "optim.lr=1e-3"]
    checked(compose([*own, f"data.blend=[[1,{text}]]"]), 1)
    named = compose([f"model.path={tiny_model}", "data=multidoc", "data.train_dir={a: x, b: [y, z]}"])
    assert OmegaConf.to_container(named.data.train_dir) == {"a": "x", "b": ["y", "z"]}
    with refused("data.train_dir", "a", "once"):
        compose(["data=multidoc", "data.train_dir={a: x, a: y}"])
    with refused("data.train_dir", "data.blend"):
        checked(compose(own), 1)
