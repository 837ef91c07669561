"""PackOptions: how documents become packs, from keyword arguments or from a config's data node, checked.

One pack as tensors, sliced from the memory-mapped columns: no Python per token.

    doc A (3)      doc B (4)        with pad_mode=right, max_tokens = 9
    input_ids      a0 a1 a2 | b0 b1 b2 b3 | P P
    position_ids    0  1  2 |  0  1  2  3 | 0 1
    loss_mask       0  0  1 |  0  1  1  1 | 0 0
    category_ids    0  0  1 |  0  2  2  2 | 0 0
    attention_mask  1  1  1 |  1  1  1  1 | 0 0

A document's first token is never a target, and a token that is no target has category 0.

SFTDataSet: a tokenised dataset as packs of at most max_tokens tokens. The contract is in pack_row.py's picture.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from verl_ext.data.arrow import TokenisedData
from verl_ext.data.categories import CategoryNumbers, CategoryTable
from verl_ext.data.dataset import PackDataset
from verl_ext.data.left_out import OverLengthRow, left_out, over_length_report
from verl_ext.data.mixture import MixtureOptions, MixtureRow, draw_spans
from verl_ext.data.stats import (
    DocumentScan,
    OverLengthCount,
    OverLengthDocuments,
    check_has_targets,
    count_over_length,
    scan_documents,
)
from verl_ext.packing import (
    MOST_TOKENS,
    OVER_LENGTH_POLICIES,
    STRATEGIES,
    CostModel,
    PackPlan,
    Spans,
    cut_spans,
    plan_packs,
)
from verl_ext.packing.strategies import plan_repeated
from verl_ext.values import check_choice, whole_number

PAD_MODES = ("no_padding", "right")


@dataclass(frozen=True)
class PackOptions:
    """max_tokens: budget of a pack; padding_value: the token that fills a pack under pad_mode=right (None: unknown);
    mixture: None for every document once."""

    max_tokens: int
    padding_value: int | None = 0
    strategy: str = "best_fit"
    seed: int = 42
    over_length: str = "error"
    pad_mode: str = "no_padding"
    mixture: MixtureOptions | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is None:
            raise ValueError("data.max_tokens must be given (tokens of a pack); got nothing")
        whole_number("data.max_tokens", self.max_tokens, least=2, most=MOST_TOKENS)
        whole_number("data.seed", self.seed, least=0)
        check_choice("data.strategy", self.strategy, STRATEGIES)
        check_choice("data.over_length", self.over_length, OVER_LENGTH_POLICIES)
        check_choice("data.pad_mode", self.pad_mode, PAD_MODES)
        if self.pad_mode == "right":
            whole_number("padding_value (the tokenizer's pad_token_id)", self.padding_value, least=0)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], tokenizer: Any, given: Mapping[str, Any]) -> "PackOptions":
        """The keys of `config` (verl's data node or a mapping), `given` where it has none or null; the padding is the
        tokenizer's. A max_tokens that is given wins over the config's."""
        options = dict(given)
        for name in ("max_tokens", "strategy", "seed", "over_length", "pad_mode", "mixture"):
            value = config.get(name)
            if value is not None and not (name == "max_tokens" and given["max_tokens"] is not None):
                options[name] = value
        if tokenizer is not None and tokenizer.pad_token_id is not None:
            options["padding_value"] = tokenizer.pad_token_id
        if options.get("mixture") is not None:
            options["mixture"] = MixtureOptions.read(options["mixture"])
        return cls(**options)


def pack_row(
    data: TokenisedData,
    row: NDArray[np.int64],
    start: NDArray[np.int64],
    length: NDArray[np.int64],
    pad_to: int | None = None,
    padding_value: int = 0,
) -> dict[str, torch.Tensor]:
    """The documents (tokens start..start+length of each dataset row) one after the other: 1-D tensors of T tokens.

    input_ids, position_ids, loss_mask, category_ids int64, loss_weight float32 when the dataset has it. With `pad_to`,
    T is that many tokens, the rest one last pseudo-document of `padding_value`, and attention_mask int64 is added.
    """
    tokens = int(length.sum())
    size = tokens if pad_to is None else pad_to
    out = {name: np.empty(size, np.int64) for name in ("input_ids", "loss_mask", "category_ids")}
    if data.has_loss_weight:
        out["loss_weight"] = np.empty(size, np.float32)
    pieces = data.pieces(row, start, length)
    for name, values in out.items():
        data.columns[name].gather(pieces, values[:tokens])
        values[tokens:] = padding_value if name == "input_ids" else 0
    out["loss_mask"][np.cumsum(length) - length] = 0
    out["category_ids"] *= out["loss_mask"]
    out["position_ids"] = _positions(length, size)
    if pad_to is not None:
        out["attention_mask"] = np.zeros(size, np.int64)
        out["attention_mask"][:tokens] = 1
    return {name: torch.from_numpy(values) for name, values in out.items()}


def _positions(length: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """int64[size]: 0, 1, … from every document's first token, and from the first token of the padding."""
    counts = [*length.tolist(), size - int(length.sum())]
    ramp = np.arange(max(counts))
    return np.concatenate([ramp[:count] for count in counts])


class SFTDataSet(PackDataset):
    """Packs of whole documents, documents apart by their positions; item k is the dict of tensors of `pack_row`.

    Two constructor forms give the same rows: `SFTDataSet(train_dir=…, max_tokens=…, padding_value=…)`, and verl's
    `SFTDataSet(parquet_files=…, tokenizer=…, config=…, processor=None, max_samples=-1)`, whose options are the keys of
    `config` (max_tokens, strategy, seed, over_length, pad_mode, mixture). A folder is a path or a list of paths, read
    one after the other. The plan depends on the data and these options alone.

    spans: the documents after over-length handling; plan: which of them lie in which pack. A mixture (the form of
    `mixture_options.py`) draws from spans, so that one may lie in several packs or in none, the same in every epoch;
    mixture_report: what it drew by source and length interval, empty without one. Its sources' own folders are read
    after train_dir, which is not opened where every source has its own.
    """

    def __init__(
        self,
        train_dir: str | Sequence[str] | None = None,
        max_tokens: int | None = None,
        padding_value: int | None = 0,
        *,
        parquet_files: str | Sequence[str] | None = None,
        tokenizer: Any = None,
        config: Mapping[str, Any] | None = None,
        processor: Any = None,
        max_samples: int = -1,
        strategy: str = "best_fit",
        seed: int = 42,
        over_length: str = "error",
        pad_mode: str = "no_padding",
        mixture: Mapping[str, Any] | None = None,
        key: str = "data.train_dir",
    ) -> None:
        """`max_samples`: the first so many documents, all when it is not above 0. `key`: the config key that messages
        name for the folder. `processor` is verl's argument for images and not used.

        Raises:
            ValueError: an option or a folder that cannot be used; a line with the key and the value received for each.
        """
        given = {
            "max_tokens": max_tokens,
            "padding_value": padding_value,
            "strategy": strategy,
            "seed": seed,
            "over_length": over_length,
            "pad_mode": pad_mode,
            "mixture": mixture,
        }
        self.options = PackOptions.from_config(config or {}, tokenizer, given)
        self.key = key
        drawn_by = self.options.mixture
        if drawn_by is not None and max_samples > 0:
            raise ValueError(
                f"data.train_max_samples must be -1 with data.mixture, whose budgets are in tokens; got {max_samples}"
            )
        needed = drawn_by is None or drawn_by.needs_train_dir
        folders = _folders(train_dir, parquet_files, key) if needed else []
        self._data = TokenisedData(folders if drawn_by is None else drawn_by.all_folders(folders), key)
        lengths = self._data.lengths()
        self._documents = min(len(lengths), max_samples) if max_samples > 0 else len(lengths)
        self.spans: Spans = cut_spans(
            lengths[: self._documents], self.options.max_tokens, self.options.over_length, key
        )
        self.mixture_report: list[MixtureRow] = []
        self.max_tokens = self.options.max_tokens
        self.plan: PackPlan
        if drawn_by is None:
            self.plan = plan_packs(self.spans.length, self.options.max_tokens, self.options.strategy, self.options.seed)
        else:
            self.plan = self._plan_mixture(drawn_by, folders)
        self._scan: DocumentScan | None = None

    def __len__(self) -> int:
        return self.plan.num_packs

    def __getitem__(self, pack: int) -> dict[str, torch.Tensor]:
        """Pack `pack`: 1-D tensors of one length T ≤ max_tokens, see `pack_row`."""
        number = int(pack)
        if not -len(self) <= number < len(self):
            raise IndexError(f"pack {number} of {len(self)}")
        documents = self.plan.documents(number % len(self))
        return pack_row(
            self._data,
            self.spans.row[documents],
            self.spans.start[documents],
            self.spans.length[documents].astype(np.int64),
            pad_to=self.options.max_tokens if self.options.pad_mode == "right" else None,
            padding_value=self.options.padding_value or 0,
        )

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders read, absolute."""
        return self._data.folders

    @property
    def scan(self) -> DocumentScan:
        """Targets of every document, token ids, categories and what over-length handling did; one pass over the tokens
        at the first use, and one over the documents longer than a pack. Settable, so that ranks may compute it
        together. ValueError when there is no target, or for values out of range."""
        if self._scan is None:
            over_length = self.over_length_part(0, len(self.over_length))
            self.scan = replace(self.scan_part(0, len(self.spans)), over_length=over_length)
        assert self._scan is not None
        return self._scan

    @scan.setter
    def scan(self, scan: DocumentScan) -> None:
        assert len(scan.targets) == len(self.spans), "a scan of other documents"
        check_has_targets(scan, self.key)
        self._scan = scan
        for derived in ("categories", "over_length_report", "digest"):
            self.__dict__.pop(derived, None)

    def scan_part(self, first: int, last: int, progress: bool = True) -> DocumentScan:
        """The scan of documents first..last-1 of `spans` alone (at least one); `progress`: with a bar."""
        part = Spans(self.spans.row[first:last], self.spans.start[first:last], self.spans.length[first:last])
        return scan_documents(self._data, part, progress=progress)

    @cached_property
    def over_length(self) -> OverLengthDocuments:
        """The documents longer than a pack."""
        lengths = self._data.lengths()[: self._documents]
        return OverLengthDocuments.of(lengths, self.options.max_tokens, self.options.over_length)

    def over_length_part(self, first: int, last: int, progress: bool = True) -> tuple[OverLengthCount, ...]:
        """What was done to documents first..last-1 of `over_length` alone; `progress`: with a bar."""
        return count_over_length(self._data, self.over_length.part(first, last), progress=progress)

    @property
    def token_range(self) -> tuple[int, int]:
        """The lowest and the highest token id (needs the scan)."""
        return self.scan.min_token_id, self.scan.max_token_id

    @property
    def longest_document(self) -> int:
        """Tokens of the longest of spans."""
        return int(self.spans.length.max())

    @cached_property
    def categories(self) -> CategoryTable:
        """The ids of categories.json and those that occur on targets (needs the scan)."""
        return CategoryTable.read(self.folders, self.scan.category_ids)

    @cached_property
    def over_length_report(self) -> list[OverLengthRow]:
        """What was done to over-length and empty documents, by category (needs the scan); [] for none."""
        names = CategoryNumbers.read(self.folders).names
        lengths = self._data.lengths()
        return over_length_report(
            self.scan.over_length, self.options.over_length, names, lengths[: self._documents], int(lengths.sum())
        )

    def not_as_they_stand(self) -> list[OverLengthRow]:
        """over_length_report, and the documents that no pack holds or that have no target (needs the scan)."""
        return [
            *self.over_length_report,
            *left_out(self._data.lengths(), self._documents, self.spans, self.plan, self.scan.targets),
        ]

    @cached_property
    def digest(self) -> str:
        """16 hex digits of which documents there are: their rows, cuts, lengths and targets (needs the scan)."""
        scan, spans = self.scan, self.spans
        parts = [np.ascontiguousarray(values) for values in (spans.row, spans.start, spans.length, scan.targets)]
        digest = hashlib.sha256(f"{scan.min_token_id} {scan.max_token_id} {scan.category_ids}".encode())
        for part in parts:
            digest.update(part.astype(np.int64, copy=False).tobytes())
        return digest.hexdigest()[:16]

    def pack_tokens(self) -> NDArray[np.int64]:
        """int64[P]: tokens of each pack, without padding."""
        return self.plan.pack_sums(self.spans.length)

    def pack_costs(self, cost: CostModel) -> NDArray[np.float64]:
        """float64[P]: what each pack costs to run."""
        return cost.packs(self.plan, self.spans.length)

    def pack_documents(self) -> NDArray[np.int64]:
        """int64[P]: documents of each pack."""
        return np.diff(self.plan.pack_offsets)

    def pack_targets(self) -> NDArray[np.int64]:
        """int64[P]: target tokens of each pack (needs the scan)."""
        return self.plan.pack_sums(self.scan.targets)

    def _plan_mixture(self, mixture: MixtureOptions, train_folders: Sequence[str]) -> PackPlan:
        """The plan of the spans that the mixture draws, one as often as it is drawn; sets mixture_report."""
        drawn, self.mixture_report = draw_spans(
            mixture, self.spans, self.folders, self._data.first_rows(), train_folders, self.options.seed
        )
        options = self.options
        return plan_repeated(self.spans.length, drawn, options.max_tokens, options.strategy, options.seed)


def _folders(train_dir: Any, parquet_files: Any, key: str) -> list[str]:
    if train_dir is not None and parquet_files is not None:
        raise ValueError(f"{key} must be given once; got train_dir={train_dir!r} and parquet_files={parquet_files!r}")
    given = parquet_files if train_dir is None else train_dir
    paths = [given] if isinstance(given, (str, os.PathLike)) else list(given or [])
    if not paths or not all(isinstance(path, (str, os.PathLike)) and os.fspath(path) for path in paths):
        raise ValueError(f"{key} must name a tokenised dataset folder; got {given!r}")
    return [os.path.abspath(os.path.expanduser(path)) for path in paths]
