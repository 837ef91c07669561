"""PackedDataset: the base of the families whose packs hold whole documents."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from typing_extensions import override

from verl_ext.cache import fingerprint
from verl_ext.data.packs.dataset import PackDataset, PackedDocument, PackFacts
from verl_ext.data.packs.mixture import MixtureRow
from verl_ext.data.packs.omitted import OmittedDocuments
from verl_ext.data.packs.options import DatasetOptions, named_paths
from verl_ext.data.packs.packs import Packs
from verl_ext.data.packs.sft_options import FREE_STRATEGIES, SFTOptions
from verl_ext.data.packs.usage import DataUse
from verl_ext.data.tokenized.beginnings import NOTICED_SHARE, share_computed
from verl_ext.data.tokenized.categories import CategoryTable
from verl_ext.data.tokenized.facts import DocumentScan
from verl_ext.data.tokenized.files_in_use import DataFile
from verl_ext.data.tokenized.ranks import Ranks
from verl_ext.files import CATEGORIES
from verl_ext.metrics import LengthBins
from verl_ext.options import must, plain, whole_number
from verl_ext.packing import TOKENS, CostModel, PackPlan, Spans
from verl_ext.text.read.sources import absolute_path

IGNORED = -100  # the label that Hugging Face losses ignore


class PackedDataset(PackDataset):
    """A dataset of packs of whole documents, separated by their positions.

    A family opens its documents and groups them (`opened`). Two constructor forms give the same rows:
    `SFTDataSet(train_dir=…, max_tokens=…, padding_value=…)`, and verl's `SFTDataSet(parquet_files=…, tokenizer=…,
    config=…, processor=None, max_samples=-1)`, whose options are the keys of `config` that the family's Options have. A
    given argument wins. A folder is a path or a list of paths, read in order. The plan depends on the data and these
    options alone.

    paths_are: what the paths name. requires_max_tokens: whether a budget must be given. has_labels: whether rows have
    labels for each token.
    """

    Options: ClassVar[type[DatasetOptions]] = SFTOptions
    options: SFTOptions
    paths_are: ClassVar[str] = "a tokenized dataset folder"
    requires_max_tokens: ClassVar[bool] = True
    has_labels: ClassVar[bool] = False

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
            raise ValueError(must("data.max_tokens", "be given (tokens of a pack)", "nothing"))
        mixture = self.options.mixture_options
        if mixture is not None and max_samples > 0:
            raise ValueError(
                must("data.train_max_samples", "be -1 with data.mixture, whose budgets are in tokens", max_samples)
            )
        paths: list[str] = []
        if self.options.needs_train_dir:
            paths = named_paths(key, self.paths_are, train_dir=train_dir, parquet_files=parquet_files)
        self.key, self.max_tokens = key, self.options.packing.max_tokens
        most = max_samples if max_samples > 0 else None
        self.packs = self.opened([absolute_path(path) for path in paths], tokenizer, most)
        if tokenizer is not None and tokenizer.pad_token_id is not None:
            padding_value = tokenizer.pad_token_id
        if self.options.packing.pad_mode == "right":
            whole_number("padding_value (the tokenizer's pad_token_id)", padding_value, least=0)
        self._padding_value = padding_value or 0

    @abstractmethod
    def opened(self, paths: Sequence[str], tokenizer: Any, most: int | None) -> Packs:
        """Return the packs of the documents in absolute paths, or of the first so many documents or preferences."""

    @property
    def spans(self) -> Spans:
        """The documents by row, cut to the budget."""
        return self.packs.spans

    def plan(self, ranks: Ranks | None = None) -> PackPlan:
        """Return the pack that each document lies in."""
        return self.packs.plan(ranks)

    def scan(self, ranks: Ranks | None = None) -> DocumentScan:
        """Return what only the tokens show, and refuse data without targets."""
        return self.packs.scan(ranks)

    @override
    def read_together(self, ranks: Ranks) -> None:
        self.plan(ranks)
        self.scan(ranks)

    @property
    def mixture_report(self) -> Sequence[MixtureRow]:
        """The draw by source and length interval, empty without a mixture."""
        return self.packs.draw[1]

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, pack: int) -> dict[str, torch.Tensor]:
        """Return a pack's documents, one after the other, as 1-D tensors.

        They are input_ids, position_ids, loss_mask and category_ids int64, and loss_weight float32 if the dataset has
        it, of one length. With pad_mode=right, this is max_tokens: the rest is one last pseudo-document of the padding
        value, and attention_mask int64 is added. With share_prefixes, the first two have the documents' own tokens
        alone, and the others those of whole documents. Sets of texts have labels int64 too.
        """
        row = {name: torch.from_numpy(values) for name, values in self.packs.row(pack, self._padding_value).items()}
        labels = {"labels": torch.where(row["loss_mask"] == 1, row["input_ids"], IGNORED)} if self.has_labels else {}
        return {**row, **labels}

    def collate_fn(self, items: Sequence[Mapping[str, torch.Tensor] | int]) -> dict[str, torch.Tensor]:
        """Return packs as tensors [B, max_tokens], each padded on its right.

        items: rows, or the numbers of packs. They give input_ids, position_ids, loss_mask, category_ids and
        attention_mask int64, and loss_weight float32 if the dataset has it: what verl's TokenAwareBatchPack makes, for
        a DataLoader outside of this package's trainer.
        """
        if self.options.packing.share_prefixes:
            raise ValueError(must("data.share_prefixes", "be false outside of verl-ext's own trainer", True))
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
        return list(self.packs.documents.places(self.spans, self.packs.members(pack)))

    @override
    def facts(self, cost: CostModel = TOKENS) -> PackFacts:
        return self._facts if cost == TOKENS else replace(self._facts, costs=cost.packs(self.plan(), self.spans.length))

    @cached_property
    def _facts(self) -> PackFacts:
        plan, scan, length = self.plan(), self.scan(), self.spans.length
        tokens = plan.pack_tokens(length)
        return PackFacts(
            tokens=tokens,
            targets=plan.pack_sums(scan.targets),
            documents=np.diff(plan.pack_offsets),
            costs=tokens.astype(np.float64),
            token_range=(scan.min_token_id, scan.max_token_id),
            longest_document=int(length.max()),
            mixture=self.mixture_report,
            shared=plan.pack_sums(length) - tokens if self.options.packing.share_prefixes else None,
        )

    @property
    @override
    def folders(self) -> tuple[str, ...]:
        return self.packs.documents.source.folders

    @property
    @override
    def data_files(self) -> tuple[DataFile, ...]:
        return self.packs.documents.source.files

    @cached_property
    def categories(self) -> CategoryTable:
        """The categories that have a name or a target (needs the scan)."""
        source = f"data.category_names and {CATEGORIES}" if self.options.category_names else CATEGORIES
        return CategoryTable.of(self.packs.documents.category_names, self.scan().category_ids, source)

    def omitted_documents(self) -> list[OmittedDocuments]:
        """Return the documents that packs lack, have cut or without targets."""
        scan, policy = self.scan(), self.options.packing.over_length
        return list(self.packs.documents.omitted(self.spans, self.plan(), scan.targets, scan.over_length, policy))

    @override
    def report(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"omitted_documents": [vars(row) for row in self.omitted_documents()]}
        packing = self.options.packing
        if packing.strategy in FREE_STRATEGIES and not packing.share_prefixes:
            share = share_computed(self.packs.documents.source, self.spans, packing.share_least)
            if share is not None and share <= NOTICED_SHARE:
                facts["share_computed"] = share  # if documents shared their beginnings
        return facts

    @override
    def usage(self, bins: LengthBins) -> list[DataUse]:
        return self.packs.documents.usage(self.spans, self.plan(), bins)

    @cached_property
    def digest(self) -> str:
        """A digest of the documents' rows, cuts, lengths and targets."""
        scan, spans = self.scan(), self.spans
        # A mixture's draw follows from a rule of this version too, so that another version's run is not resumed by it.
        drawn = (self.plan().document_index,) if self.mixture_report else ()
        arrays = (spans.row, spans.start, spans.length, scan.targets, *drawn)
        facts = f"{scan.min_token_id} {scan.max_token_id} {scan.category_ids}"
        return fingerprint(facts, (values.astype(np.int64) for values in arrays), digits=16)
