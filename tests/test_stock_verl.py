"""Our datasets and engine inside verl's own trainer, for a team that keeps its verl deployment."""

import numpy as np
import pytest

from tests.babilong_files import records, write_records
from tests.document_texts import random_words, write_texts
from tests.pretrain_files import texts_of, write_jsonl
from tests.ranks import run_ranks
from tests.stock_verl import train_with_stock_verl
from tests.tiny_model import VOCABULARY
from tests.tokenized_data import random_documents, write_tokenized

pytestmark = pytest.mark.slow


@pytest.fixture
def output(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    return str(folder)


def test_verls_own_trainer_trains_on_our_packs(tiny_model, tmp_path, output):
    rng = np.random.default_rng(0)
    folder = write_tokenized(tmp_path / "data", random_documents(rng, [20] * 30, VOCABULARY, 2))
    overrides = [f"data.train_files={folder}", "+data.max_tokens=64", "data.micro_batch_size_per_gpu=1"]
    overrides.append("trainer.total_epochs=3")
    losses, _ = run_ranks(train_with_stock_verl, 2, "SFTDataSet", str(tiny_model), output, overrides)
    assert len(losses) >= 6
    assert losses[-1] < losses[0]


def test_verls_own_trainer_takes_samples_of_a_stream(tiny_model, tmp_path, output):
    texts = write_texts(tmp_path / "texts", random_words([40] * 8))
    overrides = [f"data.train_files={texts}", "+data.seq_len=32", f"+data.cache_dir={output}/cache"]
    overrides += ["+data.sampling=document_stream", "data.micro_batch_size_per_gpu=2", "trainer.total_epochs=2"]
    (losses,) = run_ranks(train_with_stock_verl, 1, "MultiDocDataset", str(tiny_model), output, overrides)
    assert len(losses) == 4
    assert losses[-1] < losses[0]


def test_verls_own_trainer_takes_babilong_rows(tiny_model, tmp_path, output):
    path = write_records(tmp_path / "data/qa1/0k.json", records(8, sentences=1))
    overrides = [f"data.train_files={path}", f"data.val_files={path}", "data.max_length=32"]
    overrides += ["+data.answer_reserve_tokens=4", f"+data.cache_dir={output}/cache"]
    overrides += ["data.micro_batch_size_per_gpu=2", "trainer.total_epochs=2"]
    (losses,) = run_ranks(train_with_stock_verl, 1, "BABILongDataset", str(tiny_model), output, overrides)
    assert len(losses) == 4
    assert losses[-1] < losses[0]


def test_verls_own_trainer_takes_rows_of_text(tiny_model, tmp_path, output):
    path = write_jsonl(tmp_path / "web.jsonl", texts_of([5] * 8))
    overrides = [f"data.train_files={path}", f"data.val_files={path}", "data.max_length=16", "+data.rows=padded"]
    overrides += [f"+data.cache_dir={output}/cache", "data.custom_cls.path=pkg://verl_ext.data.pretrain"]
    overrides += ["data.micro_batch_size_per_gpu=2", "trainer.total_epochs=2"]
    (losses,) = run_ranks(train_with_stock_verl, 1, "PreTrainDataset", str(tiny_model), output, overrides)
    assert len(losses) == 4
    assert losses[-1] < losses[0]
