"""PackDataset: the interface between the trainer and a dataset family.

A family is one module of this package, with a PackDataset and the dataclass of its options (`Options`), and
conf/data/NAME.yaml, which names the class.
"""

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import OmegaConf
from typing_extensions import override

from verl_ext.data.categories import CategoryTable
from verl_ext.data.measure import AnswerMeasure
from verl_ext.data.mixture import MixtureRow
from verl_ext.data.omitted import DroppedDocuments
from verl_ext.data.ranks import DataFile, Ranks
from verl_ext.options import REQUIRED, Options, OptionsT, check_choice, option, options_of, plain, refuse, unknown
from verl_ext.packing import CostModel

DIGEST = "the digest of the documents in data.train_dir"  # the key of `PackDataset.digest` in a checkpoint


_logger = logging.getLogger(__name__)


class RunLength(NamedTuple):
    """The length of a run, for datasets that draw samples; samples: of all steps, None if epochs decide."""

    samples: int | None
    epochs: int


class PackedDocument(NamedTuple):
    """The source of a document of a pack: `tokens` tokens from `start` on in row `row` of `folder`."""

    folder: str
    row: int
    start: int
    tokens: int


@dataclass(frozen=True)
class DataOptions(Options):
    """The keys of the data node that every dataset family has: the data's place, and how packs become steps."""

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
            yield f"data.balance_group must be at most data.train_batch_size={step}; got {group}"
        if not self.shuffle and self.balance == "sorted":
            yield "data.balance must be none with data.shuffle=false, which keeps the plan's order; got sorted"


@dataclass(frozen=True)
class DatasetOptions(Options):
    """The base class of a dataset family's options, the keys of the data node that its class reads.

    reads: a description of what data.train_dir names; data_keys: the keys that name the training data.
    """

    prefix: ClassVar[str] = "data"
    reads: ClassVar[str] = "what the dataset class reads"
    data_keys: ClassVar[tuple[str, ...]] = ("train_dir",)

    seed: int = option(42, "seed of the split, of the plan of packs and of their order", least=0, resume="same")

    @classmethod
    def read(cls: type[OptionsT], values: Mapping[str, Any], **given: Any) -> OptionsT:
        """Read options like Options.read; raise TypeError for a name in `given` that is not an option.

        In verl's own trainer nothing else checks the data node: a key that resembles an option, and a way to cut that
        has no effect, are refused, and other keys without effect are logged.
        """
        refuse(_foreign_problems(cls, plain(values)))
        if unknown := given.keys() - options_of(cls).keys():
            raise TypeError(f"{cls.__name__} has no option {', '.join(sorted(unknown))}")
        return super().read(values, **given)  # type: ignore[misc]

    @property
    def splits_validation(self) -> bool:
        """Whether a part of the training data is kept for validation if data.val_dir is null."""
        return getattr(self, "train_ratio", 1.0) < 1

    @property
    def needs_train_dir(self) -> bool:
        """Whether data.train_dir is required; False if other options name the data."""
        return True

    @classmethod
    def implied(cls, node: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of the data node whose values follow from its other keys, with these values."""
        return {}

    @classmethod
    def for_evaluation(cls, node: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys to set for an evaluation without data.train_dir, which the measured data replaces.

        Raises:
            ValueError: if there is nothing to measure.
        """
        if not node.get("val_dir"):
            raise ValueError("data.val_dir is required with trainer.eval_only=true; got null")
        return {"train_dir": node["val_dir"]}

    def path_problems(self, key: str, paths: Any) -> Iterable[str]:
        """Yield a line for each path that the family cannot read; called before a model is read."""
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
            _notice(
                f"data.{name}={node[name]} has no effect: it is no option of {family.__name__}, and none of verl's data"
            )
    if "truncation" not in known and (cut := node.get("truncation")) not in (None, "error"):
        yield f"data.truncation must be error; data.over_length=drop|truncate|split says what is cut; got {cut}"
    length = node.get("max_length")
    if "max_length" not in known and length not in (None, _VERLS_LENGTH, node.get("max_tokens")):
        _notice(
            f"data.max_length={length} has no effect: the data is tokenized, and data.max_tokens is a pack's budget"
        )
    if template := node.get("apply_chat_template_kwargs"):
        _notice(f"data.apply_chat_template_kwargs={template} has no effect: the data is tokenized, or is no chat")


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
    """Return the paths of the one argument that is given (a path or a list of paths) as strings.

    Raises:
        ValueError: if no path is given (it says `what` the config key `key` must name), or two arguments are.
    """
    values = [value for value in given.values() if value is not None]
    if len(values) > 1:
        received = " and ".join(f"{name}={value!r}" for name, value in given.items())
        raise ValueError(f"{key} must be given once; got {received}")
    named = values[0] if values else None
    several = list(named) if isinstance(named, Sequence) else []
    paths = [named] if isinstance(named, (str, os.PathLike)) else several
    if not paths or not all(isinstance(path, (str, os.PathLike)) and os.fspath(path) for path in paths):
        raise ValueError(f"{key} must name {what}; got {named!r}")
    return [os.fspath(path) for path in paths]


def missing_paths(key: str, paths: Any, exists: Callable[[str], bool], kind: str) -> Iterator[str]:
    """Yield a line for each local path of one or several that is not an existing `kind`."""
    for path in paths if isinstance(paths, (list, tuple)) else [paths]:
        if path and "://" not in str(path) and not exists(os.path.expanduser(str(path))):
            yield f"{key} must be an existing {kind}; got {path}"


def split_rows(samples: int, split: str | None, train_ratio: float, seed: int) -> NDArray[np.int64]:
    """Return the samples of `split` ("train", "val", or None: all) among 0..samples-1, int64[rows], ascending.

    The members are those of torch.utils.data.random_split(data, [n, samples - n], generator=manual_seed(seed)) with
    n = int(train_ratio * samples).

    Raises:
        ValueError: if the part has no sample.
    """
    if split is None:
        return np.arange(samples)
    check_choice("split", split, ("train", "val"))
    shuffled = torch.randperm(samples, generator=torch.Generator().manual_seed(seed)).numpy()
    train = int(train_ratio * samples)
    rows = np.sort(shuffled[:train] if split == "train" else shuffled[train:])
    if len(rows) == 0:
        raise ValueError(
            f"data.train_ratio must leave samples for training and for validation; got {train_ratio} of {samples}: "
            "give data.val_dir, or data.train_ratio=1"
        )
    return rows


class PackDataset(torch.utils.data.Dataset, ABC):
    """A dataset of P packs, which are planned before any of them is read.

    Pack k is a dict of 1-D tensors of one length: input_ids, position_ids (from 0 in every document), loss_mask and
    category_ids int64, and loss_weight float32 if there are weights.

    key: the config key that messages name for the data; max_tokens: the most tokens of a pack that a model reads.
    last_is_label: a pack's last token is only predicted, so that the model reads one token less than the pack has.
    needs_tokenizer: the dataset reads text.
    is_ordered: the packs are in the order of the whole run, which the trainer keeps; else an epoch visits each once.
    epochs: how often all packs together contain the data.
    """

    Options: ClassVar[type[DatasetOptions]] = DatasetOptions
    key: str
    max_tokens: int
    needs_tokenizer: bool = False
    last_is_label: bool = False
    is_ordered: bool = False
    epochs: float = 1.0
    mixture_report: Sequence[MixtureRow] = ()

    @classmethod
    def open_sets(
        cls, node: Mapping[str, Any], tokenizer: Any, length: RunLength, only_validation: bool = False
    ) -> tuple["PackDataset", "PackDataset | None"]:
        """Open the training and the validation set of a run, with planned packs; None if there is no validation.

        node: the whole data node as a plain mapping, with a user's own keys; a class receives it as a DictConfig, as
        from verl. only_validation: nothing is trained on, and the validation set replaces the training set.

        Raises:
            ValueError: if the data or options cannot be used; the message names the key.
        """
        data, options = DataOptions.read(node), cls.Options.read(node)

        def opened(which: str, paths: Any, limit: int, **more: Any) -> "PackDataset":
            given = {**node, "mixture": None} if which == "val_dir" else node  # validation measures the set unmixed
            return cls(  # type: ignore[call-arg]
                parquet_files=paths,
                tokenizer=tokenizer,
                config=OmegaConf.create(dict(given)),
                max_samples=limit,
                key=f"data.{which}",
                **more,
            )

        training, measuring = cls.run_arguments(node, length)
        train, val, most = data.train_dir, data.val_dir, data.val_max_samples
        if only_validation and val is not None and train in (None, val):
            measured = opened("val_dir", val, most, **measuring)
            return measured, measured
        splits = val is None and options.splits_validation
        part = {"split": "train"} if splits else {}
        train_set = opened("train_dir", train, data.train_max_samples, **part, **training)
        if splits:
            return train_set, opened("train_dir", train, most, split="val", **measuring)
        return train_set, None if val is None else opened("val_dir", val, most, **measuring)

    @classmethod
    def run_arguments(cls, node: Mapping[str, Any], length: RunLength) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return further constructor arguments that depend on the run: (for training, for validation)."""
        return {}, {}

    def read_together(self, ranks: Ranks) -> None:
        """Read facts that only the tokens show, each rank its share; this call is collective."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, pack: int) -> dict[str, torch.Tensor]: ...

    @property
    @abstractmethod
    def folders(self) -> tuple[str, ...]:
        """The absolute paths that are read."""

    @property
    def data_files(self) -> tuple[DataFile, ...]:
        """The files that hold the tokens, whose changes end a run; none unless a class names them."""
        return ()

    @property
    @abstractmethod
    def categories(self) -> CategoryTable:
        """The categories of the targets."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """A digest of the data in the packs, 16 hex digits."""

    @property
    @abstractmethod
    def token_range(self) -> tuple[int, int]:
        """The lowest and the highest token id."""

    @property
    @abstractmethod
    def longest_document(self) -> int:
        """The tokens of the longest document as a model reads it, which is the number of positions needed."""

    @abstractmethod
    def pack_tokens(self) -> NDArray[np.int64]:
        """Return the number of tokens of each pack that a model reads, int64[P], without padding."""

    @abstractmethod
    def pack_costs(self, cost: CostModel) -> NDArray[np.float64]:
        """Return the cost of running each pack, float64[P]."""

    @abstractmethod
    def pack_documents(self) -> NDArray[np.int64]:
        """Return the number of documents in each pack, int64[P]."""

    @abstractmethod
    def pack_targets(self) -> NDArray[np.int64]:
        """Return the number of target tokens in each pack, int64[P]."""

    def documents_of(self, pack: int) -> list[PackedDocument]:
        """Return the documents of a pack in their order; empty unless a class names them."""
        return []

    def plan_options(self) -> dict[str, Any]:
        """Return facts besides the config that decide which tokens a pack has, by the names that messages use."""
        return {}

    def extends(self, saved: Mapping[str, Any], seen: int) -> bool:
        """Return whether a run with the plan options `saved`, longer or shorter, has the same first `seen` packs."""
        return False

    def answer_measure(self, device: Any) -> AnswerMeasure | None:
        """Return the measure of answers, counted on `device`; None without questions."""
        return None

    def changed_documents(self) -> list[DroppedDocuments]:
        """Return the documents that are changed, left out or without a target, by category and reason."""
        return []

    def facts(self) -> dict[str, Any]:
        """Return further facts for the report."""
        return {}
