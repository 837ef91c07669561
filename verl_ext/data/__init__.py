"""Tokenised datasets as packs. Importing this imports neither verl nor `datasets`."""

from verl_ext.data.babilong_dataset import BABILongDataset
from verl_ext.data.categories import CategoryTable
from verl_ext.data.mixture_report import MixtureRow
from verl_ext.data.multidoc_dataset import MultiDocDataset
from verl_ext.data.over_length_report import OverLengthRow
from verl_ext.data.pack_dataset import PackDataset
from verl_ext.data.pretrain_dataset import PreTrainDataset
from verl_ext.data.scan import DocumentScan, check_vocabulary
from verl_ext.data.sft_dataset import SFTDataSet
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
