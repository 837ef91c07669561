"""PreTrainDataset: text as rows of whole documents, each BOS, its first max_length - 2 tokens, EOS.

max_length = 5, texts of 4, 1 and 2 tokens; B and E are BOS and EOS, P is the padding

rows=packed, max_tokens = 9                      rows=padded
input_ids     B  a  a  a  E  B  b  E             B  a  a  a  E     B  b  E  P  P     B  c  c  E  P
position_ids  0  1  2  3  4  0  1  2             0  1  2  3  4     0  1  2  0  1     0  1  2  3  0
loss_mask     0  1  1  1  1  0  1  1             0  1  1  1  1     0  1  1  0  0     0  1  1  1  0
labels       -1  a  a  a  E -1  b  E             -1 a  a  a  E    -1  b  E -1 -1    -1  c  c  E -1

-1 stands for -100. Labels are not shifted, as Hugging Face models take them. Padding is known by its place, never by
its token: a pad token that is the EOS too costs no document its last target.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl_ext.data.category_numbers import CategoryNumbers
from verl_ext.data.document_split import split_rows
from verl_ext.data.over_length_counts import OverLengthDocuments
from verl_ext.data.over_length_report import OverLengthRow, over_length_report
from verl_ext.data.pretrain_cache import tokenised_folder
from verl_ext.data.pretrain_documents import DocumentFacts
from verl_ext.data.pretrain_files import find_files
from verl_ext.data.pretrain_options import PreTrainOptions
from verl_ext.data.pretrain_summary import Summary
from verl_ext.data.scan import DocumentScan
from verl_ext.data.sft_dataset import SFTDataSet
from verl_ext.packing import Spans, cut_spans, plan_packs

IGNORED = -100  # the label that Hugging Face losses leave out


class PreTrainDataset(SFTDataSet):
    """Records with a text (jsonl, json, parquet, csv, Arrow folders, .txt files) as rows; see the picture above.

    Two constructor forms give the same rows: `PreTrainDataset(tokenizer, datapath, max_length=512)`, and verl's
    `PreTrainDataset(parquet_files=…, tokenizer=…, config=…, processor=None, max_samples=-1)`, whose options are the
    keys of `config` (those of PreTrainOptions); an argument that is given wins. A path is a file, a folder, a glob or a
    list of these; the category of a document is its file's name.

    `split` "train" or "val" is one part of the seeded random split of all documents, None all of them; documents keep
    the files' order. Files are tokenised when they, the tokenizer or an option are new, whole, whatever the split,
    max_samples and the rows; after that rows are read from the cache. An SFTDataSet otherwise.
    """

    needs_tokenizer = True

    def __init__(
        self,
        tokenizer: Any = None,
        datapath: str | Sequence[str] | None = None,
        max_length: int | None = None,
        *,
        parquet_files: str | Sequence[str] | None = None,
        config: Mapping[str, Any] | None = None,
        processor: Any = None,
        max_samples: int = -1,
        split: str | None = None,
        text_key: str | None = None,
        rows: str | None = None,
        special_tokens_in_text: str | None = None,
        on_bad_record: str | None = None,
        train_ratio: float | None = None,
        seed: int | None = None,
        cache_dir: str | None = None,
        max_tokens: int | None = None,
        strategy: str | None = None,
        over_length: str | None = None,
        pad_mode: str | None = None,
        key: str = "data.train_dir",
    ) -> None:
        """`max_samples`: the first so many documents of the split, all when it is not above 0. `key`: the config key
        that messages name for the path. `processor` is verl's argument for images and not used.

        Raises:
            ValueError: an option, a file or a tokenizer that cannot be used; one line with the key and the value.
        """
        if datapath is not None and parquet_files is not None:
            raise ValueError(f"{key} must be given once; got datapath={datapath!r} and parquet_files={parquet_files!r}")
        if tokenizer is None:
            raise ValueError("PreTrainDataset must be given a tokenizer (model.path's); got nothing")
        given = {
            "max_length": max_length,
            "text_key": text_key,
            "rows": rows,
            "special_tokens_in_text": special_tokens_in_text,
            "on_bad_record": on_bad_record,
            "train_ratio": train_ratio,
            "seed": seed,
            "cache_dir": cache_dir,
            "max_tokens": max_tokens,
            "strategy": strategy,
            "over_length": over_length,
            "pad_mode": pad_mode,
        }
        self.text = PreTrainOptions.from_config(config or {}, given)
        self.split = split
        self.has_bos = tokenizer.bos_token_id is not None
        files, names = find_files(parquet_files if datapath is None else datapath, key)
        self.files = tuple(file.path for file in files)
        folder = tokenised_folder(files, names, tokenizer, self.text, key)
        packs = self.text.packs
        super().__init__(
            str(folder),
            packs["max_tokens"],
            tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
            strategy="none",  # planned below, with the documents in use
            seed=self.text.seed,
            over_length=self.text.over_length,
            pad_mode=packs["pad_mode"],
            key=key,
        )
        self.options = replace(self.options, strategy=packs["strategy"])
        self._facts = DocumentFacts(folder, CategoryNumbers.read(self.folders).names)
        self._restrict(max_samples)

    def _restrict(self, max_samples: int) -> None:
        """Pack the documents of the split, the first `max_samples` of them."""
        options, lengths = self.options, self._data.lengths()
        self._split_rows = split_rows(len(self._facts), self.split, self.text.train_ratio, options.seed)
        self._documents = min(len(self._split_rows), max_samples) if max_samples > 0 else len(self._split_rows)
        self._rows = self._split_rows[: self._documents]
        spans = cut_spans(lengths[self._rows], options.max_tokens, options.over_length, self.key)
        self.spans = Spans(self._rows[spans.row], spans.start, spans.length)
        self.plan = plan_packs(spans.length, options.max_tokens, options.strategy, options.seed)

    def __getitem__(self, pack: int) -> dict[str, torch.Tensor]:
        """Row `pack`: 1-D tensors of one length, those of `pack_row` and labels int64."""
        row = super().__getitem__(pack)
        row["labels"] = torch.where(row["loss_mask"] == 1, row["input_ids"], IGNORED)
        return row

    def scan_part(self, first: int, last: int, progress: bool = True) -> DocumentScan:
        """The scan of spans first..last-1 (at least one), from what tokenising them told: no token is read. Of a
        document that was cut into spans, token ids are those of the whole."""
        rows, facts = self.spans.row[first:last], self._facts
        targets = self.spans.length[first:last] - 1
        categories = tuple(np.unique(facts.category_id[rows[targets > 0]]).tolist())
        return DocumentScan(targets, int(facts.lowest[rows].min()), int(facts.highest[rows].max()), categories)

    @cached_property
    def over_length(self) -> OverLengthDocuments:
        """The documents longer than a pack."""
        over = OverLengthDocuments.of(
            self._data.lengths()[self._rows], self.options.max_tokens, self.options.over_length
        )
        return replace(over, rows=self._rows[over.rows])

    @cached_property
    def over_length_report(self) -> list[OverLengthRow]:
        """The documents cut at max_length, by category, `truncated to max_length` with the tokens from before the cut;
        then those longer than a pack (needs the scan)."""
        lengths, names = self._data.lengths()[self._rows], self._facts.names
        cut = self._facts.cut_report(self._rows, lengths, "truncated to max_length")
        for row in cut:
            row.targets_removed = row.tokens_removed
        counts, policy = self.scan.over_length, self.options.over_length
        return [*cut, *over_length_report(counts, policy, names, lengths, int(lengths.sum()))]

    def not_as_they_stand(self) -> list[OverLengthRow]:
        """over_length_report, the documents of the split beyond max_samples, and the records left out under
        on_bad_record=skip (told with the part to train on), by category (needs the scan)."""
        lengths = self._data.lengths()
        beyond, total = self._split_rows[self._documents :], int(lengths[self._split_rows].sum())
        bad = [] if self.split == "val" else Summary.read(Path(self.folders[0])).bad_record_rows()
        return [
            *self.over_length_report,
            *self._facts.left_report(beyond, lengths[beyond], total, "beyond max_samples"),
            *bad,
        ]

    def facts(self) -> dict[str, Any]:
        """What its report says besides: how documents became rows, and whether they begin with a BOS."""
        return {"rows": self.text.rows, "max_length": self.text.max_length, "bos": self.has_bos}
