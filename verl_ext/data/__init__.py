"""Tokenised datasets as packs. Importing this imports neither verl nor `datasets`."""

from verl_ext.data.babilong import BABILongDataset
from verl_ext.data.categories import CategoryTable
from verl_ext.data.dataset import PackDataset
from verl_ext.data.left_out import OverLengthRow
from verl_ext.data.mixture import MixtureRow
from verl_ext.data.multidoc import MultiDocDataset
from verl_ext.data.pretrain import PreTrainDataset
from verl_ext.data.sft import SFTDataSet
from verl_ext.data.stats import DocumentScan, check_vocabulary
from verl_ext.packing import PackPlan, epoch_order, plan_packs

__all__ = [
    "BABILongDataset",
    "CategoryTable",
    "DocumentScan",
    "MixtureRow",
    "MultiDocDataset",
    "OverLengthRow",
    "PackDataset",
    "PackPlan",
    "PreTrainDataset",
    "SFTDataSet",
    "check_vocabulary",
    "epoch_order",
    "plan_packs",
]
