"""Tokenized datasets as packs. Importing this imports neither torch nor verl nor `datasets`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_ext.data.babilong import BABILongDataset
    from verl_ext.data.categories import CategoryTable
    from verl_ext.data.dataset import PackDataset
    from verl_ext.data.left_out import OverLengthRow
    from verl_ext.data.mixture import MixtureRow
    from verl_ext.data.multidoc import MultiDocDataset
    from verl_ext.data.pretrain import PreTrainDataset
    from verl_ext.data.scan import DocumentScan, check_vocabulary
    from verl_ext.data.sft import SFTDataSet
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

_MODULES = {
    **{"BABILongDataset": "babilong", "MultiDocDataset": "multidoc", "PreTrainDataset": "pretrain"},
    **{"SFTDataSet": "sft", "PackDataset": "dataset", "CategoryTable": "categories", "OverLengthRow": "left_out"},
    **{"MixtureRow": "mixture", "DocumentScan": "scan", "check_vocabulary": "scan"},
}


def __getattr__(name: str) -> Any:
    """Loads a class when it is asked for (PEP 562): `verl-ext index` writes Megatron's files without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = f"{__name__}.{_MODULES[name]}" if name in _MODULES else "verl_ext.packing"
    return getattr(import_module(module), name)
