"""PackDataset: the interface between the trainer and a dataset family.

A family is one module of verl_ext/data/families, with a PackDataset and the dataclass of its options (`Options`), and
conf/data/NAME.yaml, which names the class.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import OmegaConf

from verl_ext.data.packs.mixture import MixtureRow
from verl_ext.data.packs.options import DataOptions, DatasetOptions, RunLength
from verl_ext.data.packs.usage import DataUse
from verl_ext.data.tokenized.categories import CategoryTable
from verl_ext.data.tokenized.files_in_use import DataFile
from verl_ext.data.tokenized.ranks import Ranks
from verl_ext.metrics import LengthBins
from verl_ext.options import check_choice, must
from verl_ext.packing import TOKENS, CostModel

# The keys, in a checkpoint, of `PackDataset.digest` and of `DataFiles.digest`.
DIGEST, CONTENT = "the digest of the documents in data.train_dir", "the content of the files in data.train_dir"


class PackedDocument(NamedTuple):
    """A document of a pack: `tokens` tokens of a row from `start`."""

    folder: str
    row: int
    start: int
    tokens: int


@dataclass(frozen=True)
class PackFacts:
    """The facts of P packs, for their order and the report.

    tokens int64[P]: those that a model reads, without padding; shared int64[P]: the tokens of the documents besides,
    which others have too (None: rows are whole documents); targets, documents int64[P]; costs float64[P] of the
    packs in a model. token_range: the lowest and the highest token id. longest_document: its tokens as a model reads
    it, which is the number of positions needed. last_is_label: a pack's last token is only predicted, so that the model
    reads one token less than the pack has. is_ordered: the packs are in the order of the whole run, which the trainer
    keeps; else an epoch visits each once. epochs: how often all packs together contain the data. mixture: the draw by
    source and length interval.
    """

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    documents: NDArray[np.int64]
    costs: NDArray[np.float64]
    token_range: tuple[int, int]
    longest_document: int
    last_is_label: bool = False
    is_ordered: bool = False
    epochs: float = 1.0
    mixture: Sequence[MixtureRow] = ()
    shared: NDArray[np.int64] | None = None

    @property
    def document_tokens(self) -> NDArray[np.int64]:
        """int64[P]: the tokens of the packs' documents."""
        return self.tokens if self.shared is None else self.tokens + self.shared


class PackDataset(torch.utils.data.Dataset, ABC):
    """A dataset of P packs, planned before any of them is read.

    Pack k is a dict of 1-D tensors of one length: input_ids, position_ids (from 0 in every document), loss_mask and
    category_ids int64, and loss_weight float32 if there are weights.

    key: the config key that messages name for the data; max_tokens: the most tokens of a pack that a model reads;
    needs_tokenizer: the dataset reads text. has_units: packs hold the answers of preferences (data=preference).
    """

    Options: ClassVar[type[DatasetOptions]] = DatasetOptions
    has_units: ClassVar[bool] = False
    needs_tokenizer: bool = False
    key: str
    max_tokens: int

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, pack: int) -> dict[str, torch.Tensor]: ...

    def read_together(self, ranks: Ranks) -> None:
        """Read what only the tokens show, each rank its share; collective."""

    @abstractmethod
    def facts(self, cost: CostModel = TOKENS) -> PackFacts:
        """Return the facts of the packs, which cost `cost` in a model."""

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
    def folders(self) -> tuple[str, ...]:
        """The absolute paths that are read."""

    @property
    def data_files(self) -> tuple[DataFile, ...]:
        """The files whose changes end a run; none by default."""
        return ()

    def documents_of(self, pack: int) -> list[PackedDocument]:
        """Return the documents of a pack in their order; none by default."""
        return []

    def report(self) -> dict[str, Any]:
        """Return what a report says of the data besides its packs."""
        return {"omitted_documents": []}

    def usage(self, bins: LengthBins) -> list[DataUse]:
        """Return an epoch's use of documents by source and length, if known."""
        return []

    def plan_options(self) -> dict[str, Any]:
        """Return facts besides the config that decide a pack's tokens, by name."""
        return {}

    def extends(self, saved: Mapping[str, Any], seen: int) -> bool:
        """Return whether another run's first `seen` packs are the same.

        saved: the plan options of that run, which is longer or shorter.
        """
        return False


def open_datasets(
    family: type[PackDataset],
    node: Mapping[str, Any],
    tokenizer: Any,
    length: RunLength,
    only_validation: bool = False,
) -> tuple[PackDataset, PackDataset | None]:
    """Open the training and the validation set (None without) of a run.

    node: the whole data node as a plain mapping, with a user's own keys; a class receives it as a DictConfig, as from
    verl. only_validation: nothing is trained on, and the validation set replaces the training set.

    Raises ValueError if the data or options cannot be used; the message names the key.
    """
    data, options = DataOptions.read(node), family.Options.read(node)

    def opened(which: str, paths: Any, limit: int, **more: Any) -> PackDataset:
        given = {**node, "mixture": None} if which == "val_dir" else node  # validation measures the set unmixed
        return family(  # type: ignore[call-arg]
            parquet_files=paths,
            tokenizer=tokenizer,
            config=OmegaConf.create(dict(given)),
            max_samples=limit,
            key=f"data.{which}",
            **more,
        )

    training, measuring = family.Options.run_arguments(node, length)
    train, val, most = data.train_dir, data.val_dir, data.val_max_samples
    # A measurement of data.val_dir alone opens it once.
    if only_validation and val is not None and train in (None, val):
        measured = opened("val_dir", val, most, **measuring)
        return measured, measured
    # Validation data is a part of the training data, or data of its own.
    splits = val is None and options.splits_validation
    part = {"split": "train"} if splits else {}
    train_set = opened("train_dir", train, data.train_max_samples, **part, **training)
    if splits:
        return train_set, opened("train_dir", train, most, split="val", **measuring)
    return train_set, None if val is None else opened("val_dir", val, most, **measuring)


def split_rows(samples: int, split: str | None, train_ratio: float, seed: int) -> NDArray[np.int64]:
    """Return the samples of "train", "val" or None (all), int64[rows], ascending.

    The members are those of torch.utils.data.random_split(data, [n, samples - n], generator=manual_seed(seed)) with
    n = int(train_ratio * samples).

    Raises ValueError if the part has no sample.
    """
    if split is None:
        return np.arange(samples)
    check_choice("split", split, ("train", "val"))
    shuffled = torch.randperm(samples, generator=torch.Generator().manual_seed(seed)).numpy()
    train = int(train_ratio * samples)
    rows = np.sort(shuffled[:train] if split == "train" else shuffled[train:])
    if len(rows) == 0:
        got = f"{train_ratio} of {samples}: give data.val_dir, or data.train_ratio=1"
        raise ValueError(must("data.train_ratio", "leave samples for training and for validation", got))
    return rows
