"""A dataset class of the user's, a PackDataset that has no options of its own, in the trainer."""

import json

import pytest

from tests.ranks import run_ranks
from tests.training import metrics, train_alone
from verl_ext.config import compose
from verl_ext.config.check import check_run

OWN = """
import json

import numpy as np
import torch

from verl_ext.data import CategoryTable, PackDataset


class OwnDataset(PackDataset):
    def __init__(self, parquet_files, tokenizer=None, config=None, processor=None, max_samples=-1, key=""):
        with open(parquet_files) as file:
            self.rows = json.load(file)
        self.path, self.key, self.max_tokens = parquet_files, key, config.max_tokens
        self.shift = config.custom_cls.shift  # an attribute of verl's own node

    categories = CategoryTable((1,), ("own",))
    digest = "0" * 16
    token_range = (1, 99)
    longest_document = 6

    @property
    def folders(self):
        return (self.path,)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, pack):
        ids = torch.tensor(self.rows[pack]) + self.shift
        mask = torch.ones_like(ids)
        mask[0] = 0
        return {"input_ids": ids, "position_ids": torch.arange(len(ids)), "loss_mask": mask, "category_ids": mask}

    def pack_tokens(self):
        return np.array([len(row) for row in self.rows])

    def pack_costs(self, cost):
        return cost.documents(self.pack_tokens())

    def pack_documents(self):
        return np.ones(len(self), np.int64)

    def pack_targets(self):
        return self.pack_tokens() - 1
"""


@pytest.fixture
def overrides(tmp_path, tiny_model):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "rows.json").write_text(json.dumps([[5, 6, 7], [8, 9, 10, 11, 12, 13], [3, 4], [1, 2, 3, 4]]))
    return [
        *(f"data.train_dir={tmp_path / 'rows.json'}", f"data.val_dir={tmp_path / 'rows.json'}"),
        *(f"data.custom_cls.path={tmp_path / 'own.py'}", "data.custom_cls.name=OwnDataset"),
        *("+data.custom_cls.shift=1", f"model.path={tiny_model}", f"trainer.default_local_dir={tmp_path / 'out'}"),
    ]


def test_a_dataset_class_without_options_trains_and_validates(overrides, tmp_path):
    run_ranks(train_alone, 1, overrides)
    logged = metrics(tmp_path / "out")
    assert logged[1, "train/target_tokens"] == 11
    assert logged[1, "val/own_loss"] > 0


def test_a_dataset_class_without_options_needs_data(overrides):
    config = compose([*overrides, "data.train_dir=null", "trainer.device=cpu"])
    with pytest.raises(ValueError, match=r"^data\.train_dir is required: what the dataset class reads; got null$"):
        check_run(config, world_size=1)
