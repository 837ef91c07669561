"""What MultiDocDataset reads once: texts, tokenized into its cache, and the range of an index's tokens."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Barrier

from transformers import AutoTokenizer

from tests.lib.document_texts import random_words, write_jsonl
from tests.lib.pretrain_files import write_index
from verl_ext.data import MultiDocDataset
from verl_ext.data.stream.megatron.index import TokenIndex

TEXTS = random_words((7, 1, 30, 12))


def test_texts_are_tokenized_once_and_again_when_they_change(tiny_model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    path = write_jsonl(tmp_path / "texts.jsonl", TEXTS)

    def folders():
        MultiDocDataset(path, tokenizer, 16, cache_dir=str(tmp_path / "cache"))
        return {folder.name for folder in (tmp_path / "cache").glob("text-*") if folder.is_dir()}

    once = folders()
    assert folders() == once
    write_jsonl(tmp_path / "texts.jsonl", TEXTS[:-1])
    assert len(folders()) == 2


class ThreadRanks:
    """A run's ranks, as threads of this process."""

    def __init__(self, rank, values, barrier):
        self.rank, self.size, self.values, self.barrier = rank, len(values), values, barrier

    def guard(self):
        return nullcontext()

    def gather(self, value):
        self.values[self.rank] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found

    def broadcast(self, value):
        return self.gather(value)[0]


def test_the_token_range_is_read_in_shares_and_kept(tmp_path, monkeypatch):
    prefix = write_index(tmp_path / "corpus", [[9, 50], [], [7], [80, 8, 8, 8]])

    def read_by_ranks():
        barrier, values = Barrier(5), [None] * 5
        datasets = [MultiDocDataset(prefix, None, 2, cache_dir=str(tmp_path / "cache")) for _ in range(5)]
        with ThreadPoolExecutor(5) as pool:
            ranks = [ThreadRanks(rank, values, barrier) for rank in range(5)]
            list(pool.map(MultiDocDataset.read_together, datasets, ranks))
        return [dataset.token_range() for dataset in datasets]

    assert read_by_ranks() == [(7, 80)] * 5
    monkeypatch.delattr(TokenIndex, "token_range")  # what is kept is not read again
    assert read_by_ranks() == [(7, 80)] * 5
