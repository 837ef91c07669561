"""BABILongDataset: question answering over long contexts, every row one sample of exactly max_length tokens.

prompt "{input}\\n\\nQuestion: {question}\\nAnswer:" (3 tokens), answer " {target}" (2), max_length = 8

input_ids      p0   p1   p2   a0 a1   P    P    P
position_ids    0    1    2    3  4   0    1    2     the padding is a pseudo-document, as in every padded pack
loss_mask       0    0    0    1  1   0    0    0
category_ids    0    0    0    1  1   0    0    0
attention_mask  1    1    1    1  1   0    0    0
labels       -100 -100 -100   a0 a1 -100 -100 -100    not shifted, as Hugging Face models take them
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from verl_ext.data.babilong_cache import tokenised_folder
from verl_ext.data.babilong_files import find_files
from verl_ext.data.babilong_options import BABILongOptions
from verl_ext.data.babilong_samples import BABILongSample, SampleFacts
from verl_ext.data.category_numbers import CategoryNumbers
from verl_ext.data.document_split import split_rows
from verl_ext.data.over_length_report import OverLengthRow
from verl_ext.data.scan import DocumentScan
from verl_ext.data.sft_dataset import SFTDataSet
from verl_ext.packing import Spans, plan_packs

IGNORED = -100  # the label that Hugging Face losses leave out


class BABILongDataset(SFTDataSet):
    """BABILong's JSON lists of {input, question, target} as rows of one length; see the picture above.

    Two constructor forms give the same rows: `BABILongDataset(path, tokenizer, max_length)`, and verl's
    `BABILongDataset(parquet_files=…, tokenizer=…, config=…, processor=None, max_samples=-1)`, whose options are the
    keys of `config` (max_length, answer_reserve_tokens, truncate, append_eos, train_ratio, seed, cache_dir); an
    argument that is given wins. A path is a JSON file, a folder with *.json or */*.json, or a list of these.

    `split` "train" or "val" is one part of the seeded random split of all samples, None all of them; rows keep the
    files' order. Files are tokenised when they, the tokenizer or an option are new, whole, whatever the split and
    max_samples; after that rows are read from the cache. An SFTDataSet otherwise: plan, scan, categories (`qa1_32k`)
    and reports are those of packs that hold one document each.
    """

    needs_tokenizer = True

    def __init__(
        self,
        path: str | Sequence[str] | None = None,
        tokenizer: Any = None,
        max_length: int | None = None,
        *,
        parquet_files: str | Sequence[str] | None = None,
        config: Mapping[str, Any] | None = None,
        processor: Any = None,
        max_samples: int = -1,
        split: str | None = None,
        answer_reserve_tokens: int | None = None,
        truncate: str | None = None,
        append_eos: bool | None = None,
        train_ratio: float | None = None,
        seed: int | None = None,
        cache_dir: str | None = None,
        key: str = "data.train_dir",
    ) -> None:
        """`max_samples`: the first so many of the split, all when it is not above 0. `key`: the config key that
        messages name for the path. `processor` is verl's argument for images and not used.

        Raises:
            ValueError: an option, a file or a tokenizer that cannot be used; one line with the key and the value.
        """
        if path is not None and parquet_files is not None:
            raise ValueError(f"{key} must be given once; got path={path!r} and parquet_files={parquet_files!r}")
        given = {
            "max_length": max_length,
            "answer_reserve_tokens": answer_reserve_tokens,
            "truncate": truncate,
            "append_eos": append_eos,
            "train_ratio": train_ratio,
            "seed": seed,
            "cache_dir": cache_dir,
        }
        self.babilong = BABILongOptions.from_config(config or {}, given)
        self.split = split
        padding = _padding_value(tokenizer)
        files = find_files(parquet_files if path is None else path, key)
        self.files = tuple(file.path for file in files)
        folder = tokenised_folder(files, tokenizer, self.babilong, key)
        super().__init__(
            str(folder),
            self.babilong.max_length,
            padding,
            strategy="none",
            seed=self.babilong.seed,
            pad_mode="right",
            key=key,
        )
        self._facts = SampleFacts(folder)
        self._restrict(max_samples)

    def _restrict(self, max_samples: int) -> None:
        """Keep the samples of the split, the first `max_samples` of them."""
        options = self.babilong
        self._rows = split_rows(len(self._facts), self.split, options.train_ratio, options.seed)
        self._documents = min(len(self._rows), max_samples) if max_samples > 0 else len(self._rows)
        rows = self._rows[: self._documents]
        assert len(self.spans) == len(self._facts), "every sample has tokens"
        self.spans = Spans(rows, np.zeros(len(rows), np.int64), self.spans.length[rows])
        self.plan = plan_packs(self.spans.length, options.max_length, "none", options.seed)

    def __getitem__(self, pack: int) -> dict[str, torch.Tensor]:
        """Row `pack`: int64[max_length] each of input_ids, position_ids, loss_mask, category_ids, attention_mask and
        labels."""
        row = super().__getitem__(pack)
        row["labels"] = torch.where(row["loss_mask"] == 1, row["input_ids"], IGNORED)
        return row

    def sample(self, pack: int) -> BABILongSample:
        """What row `pack` asks, the right answer and its category."""
        row = int(self.spans.row[pack])
        name = self._category_names[int(self._facts.category_id[row])]
        return BABILongSample(name, *self._facts.text(row))

    def scan_part(self, first: int, last: int, progress: bool = True) -> DocumentScan:
        """The scan of rows first..last-1 (at least one), from what tokenising them told: no token is read."""
        rows, facts = self.spans.row[first:last], self._facts
        categories = tuple(np.unique(facts.category_id[rows]).tolist())
        return DocumentScan(
            facts.targets[rows], int(facts.lowest[rows].min()), int(facts.highest[rows].max()), categories
        )

    @cached_property
    def over_length_report(self) -> list[OverLengthRow]:
        """The samples whose prompt was cut, by category: `context truncated`, or under truncate=right `question
        truncated`. tokens are those before the cut."""
        reason = "context truncated" if self.babilong.truncate == "context" else "question truncated"
        return self._facts.cut_report(self.spans, self._category_names, reason)

    def not_as_they_stand(self) -> list[OverLengthRow]:
        """over_length_report, and the samples of the split beyond max_samples, by category."""
        names, lengths = self._category_names, self._data.lengths()
        return [*self.over_length_report, *self._facts.beyond_report(self._rows, self._documents, lengths, names)]

    @cached_property
    def _category_names(self) -> dict[int, str]:
        return CategoryNumbers.read(self.folders).names


def _padding_value(tokenizer: Any) -> int:
    """The tokenizer's pad token, its EOS where it has none."""
    if tokenizer is None:
        raise ValueError("BABILongDataset must be given a tokenizer (model.path's); got nothing")
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise ValueError("the tokenizer must have a pad_token or an eos_token to pad with; it has neither")
