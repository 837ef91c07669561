"""Datasets of packs; importing this package imports none of them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_ext.data.babilong import BABILongDataset
    from verl_ext.data.categories import CategoryTable
    from verl_ext.data.chosen import ChosenDataSet
    from verl_ext.data.dataset import PackDataset, PackFacts
    from verl_ext.data.facts import check_vocabulary
    from verl_ext.data.files_in_use import DataFile
    from verl_ext.data.own import DocumentDataset
    from verl_ext.data.pretrain import PreTrainDataset
    from verl_ext.data.sft import SFTDataSet
    from verl_ext.data.stream.multidoc import MultiDocDataset
    from verl_ext.packing import plan_packs

_MODULES = {
    "BABILongDataset": "data.babilong",
    "CategoryTable": "data.categories",
    "ChosenDataSet": "data.chosen",
    "DataFile": "data.files_in_use",
    "DocumentDataset": "data.own",
    "MultiDocDataset": "data.stream.multidoc",
    "PackDataset": "data.dataset",
    "PackFacts": "data.dataset",
    "PreTrainDataset": "data.pretrain",
    "SFTDataSet": "data.sft",
    "check_vocabulary": "data.facts",
    "plan_packs": "packing",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"verl_ext.{_MODULES[name]}"), name)
