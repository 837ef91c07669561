"""Our datasets in verl's own trainer: this file passes with every verl version that teams run today.

    make test             with the verl that this package requires
    make verl-versions    with verl 0.7.1 and 0.8.0, in environments of their own that use only the datasets

Nothing here needs our engine, a plugin, or a model that a later transformers wrote.
"""

import contextlib
import json
import os
from importlib.metadata import version

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hydra import compose, initialize_config_module
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import AutoModelForCausalLM, Qwen3Config

from tests.lib.errors import refused
from tests.lib.stock_verl import IMPORTS, WHY

if not IMPORTS:
    pytest.skip(WHY, allow_module_level=True)

from verl.trainer.sft_trainer import SFTTrainer, create_sft_dataset
from verl.utils.dataset.dataset_utils import SFTTensorCollator
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from tests.lib.babilong_files import records, write_records
from tests.lib.document_texts import random_words, write_texts
from tests.lib.pretrain_files import texts_of, word_tokenizer, write_jsonl
from tests.lib.tokenized_data import random_documents, write_tokenized
from verl_ext.data import BABILongDataset, MultiDocDataset, PreTrainDataset, SFTDataSet
from verl_ext.options import options_of

pytestmark = pytest.mark.slow

VERL = tuple(map(int, version("verl").split(".")[:2]))
VOCABULARY = 64
MAX_TOKENS = 48


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Write the input of each dataset."""
    folder = tmp_path_factory.mktemp("files")
    documents = random_documents(np.random.default_rng(0), [20] * 20, VOCABULARY, 2)
    return {
        SFTDataSet: str(write_tokenized(folder / "tokenized", documents)),
        MultiDocDataset: write_texts(folder / "texts", random_words([40] * 8)),
        PreTrainDataset: write_jsonl(folder / "web.jsonl", texts_of([5] * 8)),
        BABILongDataset: write_records(folder / "data/qa1/0k.json", records(8, sentences=1)),
    }


# Each dataset's options, besides those of stock verl's data node.
OPTIONS = {
    SFTDataSet: {"+data.max_tokens": MAX_TOKENS},
    MultiDocDataset: {"+data.seq_len": 32, "+data.sampling": "document_stream"},
    PreTrainDataset: {"data.max_length": 16, "+data.rows": "padded"},
    BABILongDataset: {"data.max_length": 64, "+data.answer_reserve_tokens": 4},
}


def composed(dataset, path, cache, *overrides):
    """Compose the configuration of `python -m verl.trainer.sft_trainer` for one of our dataset classes."""
    options = {
        "data.custom_cls.path": "pkg://verl_ext.data",
        "data.custom_cls.name": dataset.__name__,
        "data.train_files": path,
        "data.train_batch_size": 4,
        "data.use_dynamic_bsz": "false",
        "data.num_workers": 0,
        "data.micro_batch_size_per_gpu": 1,
        "+data.cache_dir": cache,
        **OPTIONS[dataset],
    }
    given = [f"{key}={value}" for key, value in options.items()]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("sft_trainer_engine", overrides=[*given, *overrides])


def rows_of(dataset, path, cache, *overrides):
    data = composed(dataset, path, cache, *overrides).data
    return create_sft_dataset(data.train_files, data, word_tokenizer(), None, max_samples=-1)


@pytest.mark.parametrize("dataset", OPTIONS, ids=lambda dataset: dataset.__name__)
def test_verl_builds_the_dataset_and_collates_its_rows(dataset, files, tmp_path):
    rows = rows_of(dataset, files[dataset], tmp_path, "data.pad_mode=no_padding")
    assert isinstance(rows, dataset)
    sampler = DistributedSampler(rows, shuffle=True, num_replicas=2, rank=1, drop_last=True)
    batch = next(iter(StatefulDataLoader(rows, 2, sampler=sampler, collate_fn=SFTTensorCollator("no_padding"))))
    drawn = [rows[number] for number in list(sampler)[:2]]
    for name in ("input_ids", "position_ids", "loss_mask"):
        assert [row.tolist() for row in batch[name].unbind()] == [row[name].tolist() for row in drawn]
        assert batch[name].dtype == torch.int64
    assert batch["loss_mask"].values().sum() > 0


def test_fixed_length_rows_are_stacked_with_their_attention_mask(files, tmp_path):
    rows = rows_of(SFTDataSet, files[SFTDataSet], tmp_path, "data.pad_mode=right")
    batch = SFTTensorCollator("right")([rows[0], rows[1]])
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (2, MAX_TOKENS)
    assert batch["attention_mask"].sum(dim=1).tolist() == [40, 40]  # two documents of 20 tokens a pack


@pytest.mark.skipif(VERL >= (0, 9), reason="test_stock_verl.py trains with this package's engine and attention")
def test_verls_own_trainer_trains_on_packs(files, tmp_path, monkeypatch):
    """verl before 0.9 has no engine for a CPU, so its GPU engine is registered for it, with zero memory counters."""
    word_tokenizer().save_pretrained(tmp_path / "model")
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved", "empty_cache"):
        monkeypatch.setattr(torch.cpu, name, lambda: 0, raising=False)
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device="cpu")(FSDPEngineWithLMHead)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    config = composed(
        SFTDataSet,
        files[SFTDataSet],
        tmp_path,
        "data.pad_mode=no_padding",
        f"model.path={tmp_path / 'model'}",
        "+model.override_config.attn_implementation=sdpa",
        "engine.strategy=fsdp2",
        "+engine.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}",
        "optim.lr=1e-2",
        "trainer.logger=[file]",
        "trainer.device=cpu",
        f"trainer.default_local_dir={tmp_path / 'out'}",
        "trainer.total_epochs=4",
    )
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        SFTTrainer(config).fit()
    dist.destroy_process_group()
    lines = [json.loads(line)["data"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert len(losses) == 8
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("dataset", OPTIONS, ids=lambda dataset: dataset.__name__)
def test_a_key_that_resembles_an_option_is_refused_with_its_name(dataset, files, tmp_path):
    taken = set(composed(dataset, files[dataset], tmp_path).data) | {"cost", "seed"}  # too short to be told apart
    for name in set(options_of(dataset.Options)) - taken:
        swapped = f"{name[:3]}{name[4]}{name[3]}{name[5:]}" if len(name) > 5 else f"{name}{name[-1]}"
        if swapped == name or swapped in taken:
            continue
        with refused(f"data.{swapped}", f"nearest: data.{name}"):
            rows_of(dataset, files[dataset], tmp_path, f"+data.{swapped}=1")


def test_what_verl_would_cut_is_refused_and_other_keys_without_effect_are_said(files, tmp_path, caplog):
    for cut in ("left", "right"):
        with refused("data.truncation", "data.over_length", cut):
            rows_of(SFTDataSet, files[SFTDataSet], tmp_path, f"data.truncation={cut}")
    # A line is said once in a process: these values are no other test's.
    rows_of(
        SFTDataSet,
        files[SFTDataSet],
        tmp_path,
        "data.max_length=101",
        "+data.apply_chat_template_kwargs.cut=1",
        "+data.loss=sequence",
    )
    told = [line.split(" has no effect")[0] for line in caplog.messages if "no effect" in line]
    assert [line for line in told if not line.startswith("data.cache_dir")] == [  # which another family reads
        "data.loss=sequence",
        "data.max_length=101",
        "data.apply_chat_template_kwargs={'cut': 1}",
    ]
