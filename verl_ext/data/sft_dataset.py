"""SFTDataSet: a tokenised dataset as packs of at most max_tokens tokens. The contract is in pack_row.py's picture."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from verl_ext.data.categories import CategoryTable
from verl_ext.data.category_numbers import CategoryNumbers
from verl_ext.data.mixture_draw import draw_spans
from verl_ext.data.mixture_options import MixtureOptions
from verl_ext.data.mixture_report import MixtureRow
from verl_ext.data.over_length_counts import OverLengthCount, OverLengthDocuments, count_over_length
from verl_ext.data.over_length_report import OverLengthRow, left_out, over_length_report
from verl_ext.data.pack_dataset import PackDataset
from verl_ext.data.pack_options import PackOptions
from verl_ext.data.pack_row import pack_row
from verl_ext.data.scan import DocumentScan, check_has_targets, scan_documents
from verl_ext.data.tokenised_data import TokenisedData
from verl_ext.packing import CostModel, PackPlan, Spans, cut_spans, plan_packs
from verl_ext.packing.repeated import plan_repeated


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
        return CategoryTable.read(self.folders, self.scan)

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
