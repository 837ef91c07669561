"""Datasets of packs; importing this package imports none of them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_ext.data.families.babilong import BABILongDataset
    from verl_ext.data.families.chosen import ChosenDataSet
    from verl_ext.data.families.own import DocumentDataset
    from verl_ext.data.families.preference import PreferenceDataSet
    from verl_ext.data.families.pretrain import PreTrainDataset
    from verl_ext.data.families.sft import SFTDataSet
    from verl_ext.data.packs.dataset import PackDataset, PackFacts
    from verl_ext.data.stream.multidoc import MultiDocDataset
    from verl_ext.data.tokenized.categories import CategoryTable
    from verl_ext.data.tokenized.facts import check_vocabulary
    from verl_ext.data.tokenized.files_in_use import DataFile
    from verl_ext.packing import plan_packs

_MODULES = {
    "BABILongDataset": "data.families.babilong",
    "CategoryTable": "data.tokenized.categories",
    "ChosenDataSet": "data.families.chosen",
    "DataFile": "data.tokenized.files_in_use",
    "DocumentDataset": "data.families.own",
    "MultiDocDataset": "data.stream.multidoc",
    "PackDataset": "data.packs.dataset",
    "PackFacts": "data.packs.dataset",
    "PreTrainDataset": "data.families.pretrain",
    "PreferenceDataSet": "data.families.preference",
    "SFTDataSet": "data.families.sft",
    "check_vocabulary": "data.tokenized.facts",
    "plan_packs": "packing",
}
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    """Import a name when it is first used (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"verl_ext.{_MODULES[name]}"), name)
