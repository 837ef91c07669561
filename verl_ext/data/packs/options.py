"""The options of data: those of every family, and their base class."""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from omegaconf import OmegaConf
from typing_extensions import override

from verl_ext.options import REQUIRED, Options, OptionsT, must, option, options_of, plain, refuse, unknown
from verl_ext.packing import MOST_TOKENS

_logger = logging.getLogger(__name__)


class RunLength(NamedTuple):
    """The length of a run, for datasets that draw samples."""

    samples: int | None  # of all steps; None if epochs decide
    epochs: int


@dataclass(frozen=True)
class DataOptions(Options):
    """The options of every family: the data's place, and steps of packs."""

    prefix: ClassVar[str] = "data"

    train_dir: Any = option(
        REQUIRED,
        "training data: a path or a list of paths that the dataset family can read",
        resume="may_grow",
    )
    val_dir: Any = option(None, "validation data; null: none, or the part that train_ratio leaves")
    train_max_samples: int = option(-1, "train on the first N documents only; 0 or less: on all")
    val_max_samples: int = option(-1, "validate on the first N documents only; 0 or less: on all")
    train_batch_size: int = option(8, "packs per optimizer step, over all data-parallel ranks", least=1, resume="same")
    micro_batch_size_per_gpu: int = option(1, "packs per forward", least=1)
    max_token_len_per_gpu: int | None = option(
        None,
        "tokens of a forward on each rank: as many packs as fit and divide a step evenly, at least one, in place of "
        "micro_batch_size_per_gpu; null: not used",
        least=1,
    )
    shuffle: bool = option(
        True, "true: a new order of packs in every epoch; false: the order of the plan", resume="same"
    )
    balance: str = option(
        "sorted",
        "sorted: packs of similar cost share a micro-step; none: a plain shuffle",
        choices=("sorted", "none"),
        resume="same",
    )
    balance_group: int | None = option(
        None, "packs of similar cost per group; null: one for each data-parallel rank", least=1
    )
    cost: str = option(
        "flops", "a document's cost: its flops in the model or its tokens", choices=("flops", "tokens"), resume="same"
    )
    drop_last: bool = option(False, "true: leave out the packs that do not fill the last step", resume="same")
    num_workers: int = option(2, "loader processes per rank", least=0)
    prefetch_factor: int = option(2, "steps that each loader process prepares ahead", least=1)
    pin_memory: bool | None = option(None, "true: batches in page-locked memory; null: true if there is a GPU")

    @override
    def problems(self) -> Iterable[str | None]:
        group, step = self.balance_group, self.train_batch_size
        if group is not None and group > step:
            yield must("data.balance_group", f"be at most data.train_batch_size={step}", group)
        if not self.shuffle and self.balance == "sorted":
            yield must("data.balance", "be none with data.shuffle=false, which keeps the plan's order", "sorted")


@dataclass(frozen=True)
class DatasetOptions(Options):
    """The base class of a dataset family's own options.

    reads: a description of what data.train_dir names; data_keys: the keys that name the training data.
    """

    prefix: ClassVar[str] = "data"
    reads: ClassVar[str] = "what the dataset class reads"
    data_keys: ClassVar[tuple[str, ...]] = ("train_dir",)

    seed: int = option(42, "seed of the split, of the plan of packs and of their order", least=0, resume="same")
    max_tokens: int = option(
        8192, "budget of a pack, over all ranks of a sequence-parallel group", least=2, most=MOST_TOKENS, resume="same"
    )

    @classmethod
    def read(cls: type[OptionsT], values: Mapping[str, Any], **given: Any) -> OptionsT:
        """Read options like Options.read; raise TypeError for an unknown argument.

        In verl's own trainer nothing else checks the data node: a key that resembles an option, and a way to cut that
        has no effect, are refused, and other keys without effect are logged.
        """
        refuse(_foreign_problems(cls, plain(values)))
        if unknown := given.keys() - options_of(cls).keys():
            raise TypeError(f"{cls.__name__} has no option {', '.join(sorted(unknown))}")
        return super().read(values, **given)  # type: ignore[misc]

    @property
    def splits_validation(self) -> bool:
        """Whether training data is kept for validation without data.val_dir."""
        return getattr(self, "train_ratio", 1.0) < 1

    @property
    def needs_train_dir(self) -> bool:
        """Whether data.train_dir is required; False if other options name the data."""
        return True

    @classmethod
    def implied(cls, node: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys whose values follow from others, with these values."""
        return {}

    @classmethod
    def run_arguments(cls, node: Mapping[str, Any], length: RunLength) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the constructor's arguments that depend on the run.

        They are those for training and those for validation.
        """
        return {}, {}

    @classmethod
    def for_evaluation(cls, node: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys to set for an evaluation without training data.

        Raises ValueError if there is nothing to measure.
        """
        if not node.get("val_dir"):
            raise ValueError("data.val_dir is required with trainer.eval_only=true; got null")
        return {"train_dir": node["val_dir"]}

    def path_problems(self, key: str, paths: Any) -> Iterable[str]:
        """Yield a line for each path that the family cannot read."""
        return ()


# Keys of verl's data node, in any version, that resemble options of a family that has no such option.
_VERLS = ("train_files", "val_files", "truncation", "max_length", "messages_key", "tools_key", "pad_mode", "use_shm")
_VERLS_LENGTH = 1024  # the default of data.max_length there
_NEAR = 0.85  # the least likeness of two names that are taken for one


def _foreign_problems(family: type[Options], node: Mapping[str, Any]) -> Iterator[str]:
    known = {**options_of(DataOptions), **options_of(family)}
    for name in node:
        if name in known or name in _VERLS:
            continue
        if get_close_matches(str(name), known, 1, _NEAR):
            yield unknown(str(name), known, node="data")
        elif name not in _keys_of_verl():
            _notice(f"data.{name}={node[name]} has no effect: neither {family.__name__} nor verl's data has it")
    if "truncation" not in known and (cut := node.get("truncation")) not in (None, "error"):
        yield must("data.truncation", "be error; data.over_length=drop|truncate|split says what is cut", cut)
    length = node.get("max_length")
    if "max_length" not in known and length not in (None, _VERLS_LENGTH, node.get("max_tokens")):
        _notice(
            f"data.max_length={length} has no effect: the data is tokenized, and data.max_tokens is a pack's budget"
        )
    if template := node.get("apply_chat_template_kwargs"):
        _notice(f"data.apply_chat_template_kwargs={template} has no effect: the data is tokenized, or is not a chat")


@cache
def _keys_of_verl() -> frozenset[str]:
    """Return the keys of the data node of verl's SFT trainers."""
    spec = find_spec("verl")
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or () for file in Path(folder, "trainer", "config").glob("sft_trainer*.yaml")]
    return frozenset(str(key) for file in files for key in OmegaConf.select(OmegaConf.load(file), "data") or ())


@cache
def _notice(line: str) -> None:
    _logger.warning("%s", line)


def named_paths(key: str, what: str, **given: Any) -> list[str]:
    """Return the paths of the one argument that is given.

    Raises ValueError if two are given, or no path is: it says `what` the config key `key` must name.
    """
    values = [value for value in given.values() if value is not None]
    if len(values) > 1:
        received = " and ".join(f"{name}={value}" for name, value in given.items())
        raise ValueError(must(key, "be given once", received))
    named = values[0] if values else None
    several = list(named) if isinstance(named, Sequence) else []
    paths = [named] if isinstance(named, (str, os.PathLike)) else several
    if not paths or not all(isinstance(path, (str, os.PathLike)) and os.fspath(path) for path in paths):
        raise ValueError(must(key, f"name {what}", named))
    return [os.fspath(path) for path in paths]
