"""Our datasets and engine inside verl's own trainer, for a team that keeps its verl deployment."""

import pytest

from tests.lib.babilong_files import records, write_records
from tests.lib.document_texts import random_words, write_texts
from tests.lib.pretrain_files import texts_of, write_jsonl
from tests.lib.ranks import in_turn, run_ranks
from tests.lib.stock_verl import needs_stock_verl, train_with_stock_verl
from tests.lib.training import small_run

pytestmark = [pytest.mark.slow, needs_stock_verl]


def test_verls_own_trainer_trains_on_our_packs(tiny_model, tmp_path):
    overrides = small_run(tmp_path, tiny_model, [20] * 30, "+data.max_tokens=64", categories=2)
    overrides[0] = overrides[0].replace("train_dir", "train_files")
    more = ["data.micro_batch_size_per_gpu=1", "trainer.total_epochs=3"]
    losses, _ = run_ranks(train_with_stock_verl, 2, "SFTDataSet", str(tiny_model), str(tmp_path), [*overrides, *more])
    assert len(losses) >= 6
    assert losses[-1] < losses[0]


def test_verls_own_trainer_takes_samples_of_a_stream_babilong_rows_and_rows_of_text(tiny_model, tmp_path):
    stream = write_texts(tmp_path / "texts", random_words([40] * 8))
    rows = write_records(tmp_path / "data/qa1/0k.json", records(8, sentences=1))
    texts = write_jsonl(tmp_path / "web.jsonl", texts_of([5] * 8))
    datasets = {
        "MultiDocDataset": [f"data.train_files={stream}", "+data.seq_len=32", "+data.sampling=document_stream"],
        "BABILongDataset": [f"data.train_files={rows}", "data.max_length=32", "+data.answer_reserve_tokens=4"],
        "PreTrainDataset": [f"data.train_files={texts}", "data.max_length=16", "+data.rows=padded"],
    }
    calls = []
    for name, words in datasets.items():
        folder = tmp_path / name
        folder.mkdir()
        words += [words[0].replace("train_files", "val_files")] * (name != "MultiDocDataset")
        words += [f"+data.cache_dir={folder}/cache", "data.micro_batch_size_per_gpu=2", "trainer.total_epochs=2"]
        calls.append((train_with_stock_verl, name, str(tiny_model), str(folder), words))
    for losses in run_ranks(in_turn, 1, calls)[0]:
        assert len(losses) == 4
        assert losses[-1] < losses[0]
