"""SFTDataSet: tokenized documents in packs, sliced from memory-mapped columns.

    doc A (3)      doc B (4)        with pad_mode=right, max_tokens = 9
    input_ids      a0 a1 a2 | b0 b1 b2 b3 | P P
    position_ids    0  1  2 |  0  1  2  3 | 0 1
    loss_mask       0  0  1 |  0  1  1  1 | 0 0
    category_ids    0  0  1 |  0  2  2  2 | 0 0
    attention_mask  1  1  1 |  1  1  1  1 | 0 0
    labels          . . A2  |  . B1 B2 B3 | . .      only in sets of texts; `.` is -100, not shifted

A document's first token is never a target, and a token that is not a target has category 0.

With share_prefixes, a document that begins with tokens of the one before has only its own from the last of these on:

    doc A (4)      doc B (5)        a0 a1 a2 of both
    input_ids      a0 a1 a2 a3 | a2 b3 b4
    position_ids    0  1  2  3 |  2  3  4
    loss_mask       0  0  0  1 |  0 0 0 1 1     of whole documents, as category_ids and loss_weight are
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from verl_ext.cache import fingerprint
from verl_ext.data.arrow import TokenizedData
from verl_ext.data.beginnings import NOTICED_SHARE, beginnings_of_ranks, find_beginnings, share_computed
from verl_ext.data.categories import CategoryTable
from verl_ext.data.dataset import DocumentSource, PackDataset, PackedDocument, PackFacts
from verl_ext.data.facts import DocumentScan, scan_documents
from verl_ext.data.files_in_use import DataFile
from verl_ext.data.mixture import MixtureRow, draw_spans
from verl_ext.data.omitted import OmittedDocuments, OmittedReport, OverLength
from verl_ext.data.options import DatasetOptions, named_paths
from verl_ext.data.ranks import Ranks
from verl_ext.data.sft_options import FREE_STRATEGIES, SFTOptions
from verl_ext.data.usage import DataUse, data_use
from verl_ext.files import CATEGORIES
from verl_ext.metrics import LengthBins
from verl_ext.options import plain, whole_number
from verl_ext.packing import TOKENS, CostModel, PackPlan, Spans, cut_spans, plan_packs
from verl_ext.packing.plan import index_type
from verl_ext.packing.shared import NOTHING, SharedBeginnings, plan_drawn, plan_shared
from verl_ext.text.read.sources import absolute_path

Rows = NDArray[np.int64] | slice  # ascending numbers, or a slice from 0, as numbers take 8 bytes each


def row_numbers(rows: Rows, places: NDArray[Any]) -> NDArray[Any]:
    """Return the numbers of the rows at these places among `rows`."""
    return places if isinstance(rows, slice) else rows[places]


class SFTDataSet(PackDataset):
    """A dataset of packs of whole documents, separated by their positions.

    Two constructor forms give the same rows: `SFTDataSet(train_dir=…, max_tokens=…, padding_value=…)`, and verl's
    `SFTDataSet(parquet_files=…, tokenizer=…, config=…, processor=None, max_samples=-1)`, whose options are the keys of
    `config` that SFTOptions has. A given argument wins. A folder is a path or a list of paths, read in order. The plan
    depends on the data and these options alone.

    A mixture draws from the spans, so that a span may lie in several packs or in none; the draw is the same in every
    epoch. The sources' own folders are read after train_dir, which is not opened if every source has its own.
    """

    Options: ClassVar[type[DatasetOptions]] = SFTOptions
    options: SFTOptions
    paths_are: ClassVar[str] = "a tokenized dataset folder"
    requires_max_tokens: ClassVar[bool] = True

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
        key: str = "data.train_dir",
        **options: Any,
    ) -> None:
        """Open the data that train_dir or parquet_files names, and plan its packs.

        padding_value: the padding token, unless `tokenizer` has a pad token. processor: verl's argument, not used.
        max_samples: use only so many documents from the start, all if it is not above 0. key: the config key that
        messages name for the data. options: those of `Options` by name, which win over `config`.

        Raises ValueError with a line for each option or folder that cannot be used.
        """
        if parquet_files is not None and config is not None and config.get("seed", 0) is None:
            config = {name: value for name, value in plain(config).items() if name != "seed"}  # verl's null names none
        self.options = self.Options.read(config or {}, max_tokens=max_tokens, **options)  # type: ignore[assignment]
        if self.requires_max_tokens and max_tokens is None and (config or {}).get("max_tokens") is None:
            raise ValueError("data.max_tokens must be given (tokens of a pack); got nothing")
        mixture = self.options.mixture_options
        if mixture is not None and max_samples > 0:
            raise ValueError(
                f"data.train_max_samples must be -1 with data.mixture, whose budgets are in tokens; got {max_samples}"
            )
        paths: list[str] = []
        if self.options.needs_train_dir:
            paths = named_paths(key, self.paths_are, train_dir=train_dir, parquet_files=parquet_files)
        self._train_dirs = [absolute_path(path) for path in paths]
        folders = self._train_dirs if mixture is None else mixture.all_folders(self._train_dirs)
        # A text set tokenizes here, or finds its tokens in the cache.
        self._data, rows = self._open(folders, tokenizer, key)
        if tokenizer is not None and tokenizer.pad_token_id is not None:
            padding_value = tokenizer.pad_token_id
        packing = self.options.packing
        self._pads = packing.pad_mode == "right"
        if self._pads:
            whole_number("padding_value (the tokenizer's pad_token_id)", padding_value, least=0)
        self.key, self.max_tokens, self._padding_value = key, packing.max_tokens, padding_value or 0
        self._set: Rows = slice(None) if rows is None else rows
        self._in_use = self._first_samples(max_samples) if max_samples > 0 else self._set
        self._plan_ahead()

    def _open(self, paths: Sequence[str], tokenizer: Any, key: str) -> tuple[DocumentSource, NDArray[np.int64] | None]:
        """Return the data of absolute paths, and this set's rows (None: all)."""
        return TokenizedData(paths, key), None

    def _plan_ahead(self) -> None:
        """Plan what needs no token, all of it unless documents share tokens."""
        _ = self.spans, self._draw
        if not self.options.packing.share_prefixes:
            self.plan = self._planned(NOTHING)

    def _first_samples(self, count: int) -> Rows:
        return slice(count) if isinstance(self._set, slice) else self._set[:count]

    @cached_property
    def spans(self) -> Spans:
        """The documents by row, cut to the budget: the plan knows these alone."""
        packing = self.options.packing
        spans = cut_spans(self._data.lengths[self._in_use], packing.max_tokens, packing.over_length, self.key)
        return Spans(row_numbers(self._in_use, spans.row), spans.start, spans.length)

    @property
    def _wholes(self) -> Spans:
        """What is drawn, ordered and packed as a whole: documents, or preferences."""
        return self.spans

    @cached_property
    def _draw(self) -> tuple[NDArray[np.int64] | None, Sequence[MixtureRow]]:
        """The spans that the mixture draws (None: all once), and its report."""
        if (mixture := self.options.mixture_options) is None:
            return None, ()
        of_data = self._data.folders, self._data.first_rows(), self._train_dirs
        return draw_spans(mixture, self._wholes, *of_data, self.options.packing.seed)

    @property
    def mixture_report(self) -> Sequence[MixtureRow]:
        """The draw by source and length interval, empty without a mixture."""
        return self._draw[1]

    @cached_property
    def plan(self) -> PackPlan:
        """The pack that each span lies in."""
        return self._planned(find_beginnings(self._data, self.spans, self.options.packing.share_least))

    def _planned(self, kin: SharedBeginnings) -> PackPlan:
        """Plan the packs of units, those of documents that share tokens together."""
        packing, lengths = self.options.packing, self._wholes.length
        how = packing.max_tokens, packing.strategy, packing.seed
        if (drawn := self._draw[0]) is not None:
            return plan_drawn(lengths, drawn, kin, *how)
        if not self.options.shuffle_documents:
            return plan_shared(lengths, kin, *how)
        order = self._document_order()
        return plan_packs(lengths[order], *how).renumbered(order)

    def _document_order(self) -> NDArray[np.integer]:
        """Return the spans in the order of shuffled documents, that of `datasets.Dataset.shuffle(seed)`."""
        place = np.arange(len(self._data.lengths))
        rows = place[self._in_use]
        place[rows[np.random.default_rng(self.options.packing.seed).permutation(len(rows))]] = np.arange(len(rows))
        return np.argsort(place[self.spans.row], kind="stable").astype(index_type(len(self.spans)))

    def __len__(self) -> int:
        return self.plan.num_packs

    def __getitem__(self, pack: int) -> dict[str, torch.Tensor]:
        """Return a pack's documents, one after the other, as 1-D tensors.

        They are input_ids, position_ids, loss_mask and category_ids int64, and loss_weight float32 if the dataset has
        it, of one length. With pad_mode=right, this is max_tokens: the rest is one last pseudo-document of the padding
        value, and attention_mask int64 is added. With share_prefixes, the first two have the documents' own tokens
        alone, and the others those of whole documents.
        """
        number = range(len(self))[pack]
        documents = self.plan.documents(number)
        length = self.spans.length[documents].astype(np.int64)
        tokens = int(length.sum())
        size = self.max_tokens if self._pads else tokens
        kinds = {name: np.float32 if name == "loss_weight" else np.int64 for name in self._data.columns}
        out: dict[str, NDArray[Any]] = {name: np.empty(size, kind) for name, kind in kinds.items()}
        of_pack = {name: values[:tokens] for name, values in out.items()}
        self._data.gather(self.spans.row[documents], self.spans.start[documents], length, of_pack)
        for name, values in out.items():
            values[tokens:] = self._padding_value if name == "input_ids" else 0
        out["loss_mask"][np.cumsum(length) - length] = 0
        out["category_ids"] *= out["loss_mask"]
        counts = [*length.tolist(), size - tokens]
        ramp = np.arange(max(counts))
        begins = [*self.plan.begins_of(number).tolist(), 0]
        out["position_ids"] = np.concatenate([ramp[begin:count] for begin, count in zip(begins, counts, strict=True)])
        if any(begins):
            out["input_ids"] = _own_tokens(out["input_ids"], counts, begins)
        if self._pads:
            out["attention_mask"] = np.zeros(size, np.int64)
            out["attention_mask"][:tokens] = 1
        return {name: torch.from_numpy(values) for name, values in out.items()}

    def collate_fn(self, items: Sequence[Mapping[str, torch.Tensor] | int]) -> dict[str, torch.Tensor]:
        """Return packs as tensors [B, max_tokens], each padded on its right.

        items: rows, or the numbers of packs. They give input_ids, position_ids, loss_mask, category_ids and
        attention_mask int64, and loss_weight float32 if the dataset has it: what verl's TokenAwareBatchPack makes, for
        a DataLoader outside of this package's trainer.
        """
        if self.options.packing.share_prefixes:
            raise ValueError("data.share_prefixes must be false outside of verl-ext's own trainer; got true")
        rows = [item if isinstance(item, Mapping) else self[int(item)] for item in items]
        batch: dict[str, torch.Tensor] = {}
        for name in [name for name in rows[0] if name != "labels"]:
            padding = self._padding_value if name == "input_ids" else 0
            batch[name] = torch.full((len(rows), self.max_tokens), padding, dtype=rows[0][name].dtype)
        batch["attention_mask"] = torch.zeros((len(rows), self.max_tokens), dtype=torch.int64)
        for at, row in enumerate(rows):
            tokens = len(row["input_ids"])
            for name, values in batch.items():
                values[at, :tokens] = row.get(name, torch.tensor(1))
            batch["position_ids"][at, tokens:] = torch.arange(self.max_tokens - tokens)
        return batch

    @override
    def documents_of(self, pack: int) -> list[PackedDocument]:
        documents, first_rows = self.plan.documents(range(len(self))[pack]), self._data.first_rows()
        row, start, length = (values[documents] for values in (self.spans.row, self.spans.start, self.spans.length))
        folder = np.searchsorted(first_rows, row, side="right") - 1
        numbers = zip(
            folder.tolist(), (row - first_rows[folder]).tolist(), start.tolist(), length.tolist(), strict=True
        )
        return [PackedDocument(self._data.folders[of], *place) for of, *place in numbers]

    @cached_property
    def scan(self) -> DocumentScan:
        """The scan, read at its first use; it refuses data without targets."""
        return scan_documents(self._data, self.spans, self._over_length)

    def read_together(self, ranks: Ranks) -> None:
        """Scan the tokens, each rank its share, and cache what was found."""
        self.scan = scan_documents(self._data, self.spans, self._over_length, ranks, keep=True)
        if self.options.packing.share_prefixes:
            self.plan = self._planned(
                beginnings_of_ranks(self._data, self.spans, self.options.packing.share_least, ranks)
            )

    @property
    def _over_length(self) -> OverLength:
        places = np.flatnonzero(self._data.lengths[self._in_use] > self.max_tokens)
        return OverLength(row_numbers(self._in_use, places), self.max_tokens, self.options.packing.over_length)

    @override
    def facts(self, cost: CostModel = TOKENS) -> PackFacts:
        if cost == TOKENS:
            return self._facts
        return replace(self._facts, costs=cost.packs(self.plan, self.spans.length))

    @cached_property
    def _facts(self) -> PackFacts:
        tokens, scan, shares = self.plan.pack_tokens(self.spans.length), self.scan, self.options.packing.share_prefixes
        return PackFacts(
            tokens=tokens,
            targets=self.plan.pack_sums(scan.targets),
            documents=np.diff(self.plan.pack_offsets),
            costs=tokens.astype(np.float64),
            token_range=(scan.min_token_id, scan.max_token_id),
            longest_document=int(self.spans.length.max()),
            mixture=self.mixture_report,
            shared=self.plan.pack_sums(self.spans.length) - tokens if shares else None,
        )

    @property
    @override
    def folders(self) -> tuple[str, ...]:
        return self._data.folders

    @property
    @override
    def data_files(self) -> tuple[DataFile, ...]:
        return self._data.files

    @cached_property
    def categories(self) -> CategoryTable:
        """The categories with names, and those of targets (needs the scan)."""
        source = f"data.category_names and {CATEGORIES}" if self.options.category_names else CATEGORIES
        return CategoryTable.of(self.category_names, self.scan.category_ids, source)

    @cached_property
    def category_names(self) -> dict[int, str]:
        """The names of data.category_names and categories.json by number."""
        return {**self._data.category_names, **self.options.given_names}

    @cached_property
    def _omitted(self) -> OmittedReport:
        columns, lengths = self._data.document_columns, self._data.lengths[self._set]
        categories = None if columns is None else columns.category
        return OmittedReport(categories, self.category_names, int(lengths.sum(dtype=np.int64)))

    def omitted_documents(self) -> list[OmittedDocuments]:
        """Return the documents that packs lack, have cut or without targets."""
        lengths, scan = self._data.lengths, self.scan
        used, all_of_set = lengths[self._in_use], lengths[self._set]
        beyond = row_numbers(self._set, np.arange(len(used), len(all_of_set)))
        return [
            *self._omitted.over_length(scan.over_length, self.options.packing.over_length, used),
            *self._omitted.by_category("beyond max_samples", beyond, lengths[beyond]),
            *self._omitted.of_plan(self.spans, self.plan, scan.targets),
        ]

    @override
    def report(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"omitted_documents": [vars(row) for row in self.omitted_documents()]}
        packing = self.options.packing
        if packing.strategy in FREE_STRATEGIES and not packing.share_prefixes:
            share = share_computed(self._data, self.spans, packing.share_least)
            if share is not None and share <= NOTICED_SHARE:
                facts["share_computed"] = share  # if documents shared their beginnings
        return facts

    @override
    def usage(self, bins: LengthBins) -> list[DataUse]:
        # A document's source is its category, or its folder if the record had none.
        first_rows, columns, rows = self._data.first_rows(), self._data.document_columns, self.spans.row
        folder = -np.searchsorted(first_rows, rows, side="right").astype(np.int64)
        category = np.zeros_like(folder) if columns is None else columns.category[rows].astype(np.int64)
        source = np.where(category > 0, category, folder)
        names = {n: self.category_names.get(n, str(n)) for n in np.unique(category[category > 0]).tolist()}
        names |= {-n: os.path.basename(path) or path for n, path in enumerate(self._data.folders, start=1)}
        draws = np.bincount(self.plan.document_index, minlength=len(self.spans))
        return data_use(source, names, self.spans.length.astype(np.int64), draws, bins)

    @cached_property
    def digest(self) -> str:
        """A digest of the documents' rows, cuts, lengths and targets."""
        scan, spans = self.scan, self.spans
        arrays = (spans.row, spans.start, spans.length, scan.targets)
        facts = f"{scan.min_token_id} {scan.max_token_id} {scan.category_ids}"
        return fingerprint(facts, (values.astype(np.int64) for values in arrays), digits=16)


def _own_tokens(ids: NDArray[np.int64], lengths: Sequence[int], begins: Sequence[int]) -> NDArray[np.int64]:
    """Return documents' tokens from `begins` on; those before are shared."""
    own, first, before = [], 0, ids[:0]
    for length, begin in zip(lengths, begins, strict=True):
        text = ids[first : first + length]
        assert np.array_equal(text[:begin], before[:begin]), "documents share the tokens that the plan says"
        own.append(text[begin:])
        first, before = first + length, text
    return np.concatenate(own)
