"""TextSet: the base of datasets that tokenize into a cache when opened.

CACHE/<fingerprint>/       of the files, the tokenizer and the encoder's options
    data-00000-of-00001.arrow, state.json, dataset_info.json    what `datasets.load_from_disk` opens
    categories.json        {"1": "gsm8k", "2": "code"}
    report.json            the counts of records, by category
"""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from verl_ext.cache import default_root
from verl_ext.data.arrow import TokenizedData
from verl_ext.data.dataset import split_rows
from verl_ext.data.omitted import OmittedDocuments
from verl_ext.data.sft import SFTDataSet, row_numbers
from verl_ext.data.sft_options import SFTOptions
from verl_ext.files import CATEGORIES, REPORT, write_json
from verl_ext.options import option
from verl_ext.redaction import redacted
from verl_ext.text.arrow_folder import DatasetWriter
from verl_ext.text.read.sources import SourceFile
from verl_ext.text.tokenizing import cached_tokens, code_digest, tokenize_files, tokens_fingerprint
from verl_ext.text.tokens.counts import Counts
from verl_ext.text.tokens.documents import Documents

IGNORED = -100  # the label that Hugging Face losses ignore

_logger = logging.getLogger(__name__)
_reported: set[tuple[Path, str]] = set()


@dataclass(frozen=True)
class TextSetOptions(SFTOptions):
    """The options of a set of texts, tokenized when it is opened."""

    may_share: ClassVar[bool] = False

    train_ratio: float = option(
        1.0,
        "share of train_dir for training if val_dir is null; 1: no validation",
        above=0,
        most=1,
        resume="same",
    )
    share_prefixes: bool = option(False, "must be false: a row has a label for each of its tokens", resume="same")
    cache_dir: str | None = option(None, "folder for tokenized files; null: the cache of Hugging Face datasets")


class TextSet(SFTDataSet):
    """The base class of sets of texts, whose rows have labels too.

    Whole files are tokenized once for each tokenizer and set of encoder options, whatever the split, max_samples and
    the packs are; after that, rows are read from the cache. The constructor forms are those of SFTDataSet; in the
    family's own form, they take a path (or a list of paths), a tokenizer and max_length.

    encoder: the class that turns files into documents; its `Options` are part of the family's. find_files: a function
    of paths and their key, which returns (file, category) of each and raises ValueError without any. cut_reason: the
    report's name for a document that lost tokens in tokenizing; cuts_targets: whether these tokens were targets. split:
    "train" or "val" of the seeded random split of all documents; None: all. Other arguments are those of SFTDataSet.
    """

    needs_tokenizer = True
    requires_max_tokens = False
    encoder: ClassVar[type[Any]]
    find_files: Callable[[Sequence[str], str], list[tuple[SourceFile, str]]]
    _data: TokenizedData
    cut_reason: str
    cuts_targets = False
    split: str | None
    files: tuple[str, ...]

    def __init__(
        self,
        path: str | Sequence[str] | None = None,
        tokenizer: Any = None,
        max_length: int | None = None,
        *,
        split: str | None = None,
        **given: Any,
    ) -> None:
        self.split = split
        padding = getattr(tokenizer, "eos_token_id", None)
        super().__init__(path, padding_value=padding, tokenizer=tokenizer, max_length=max_length, **given)

    def _open(self, paths: Sequence[str], tokenizer: Any, key: str) -> tuple[TokenizedData, NDArray[np.int64] | None]:
        options: Any = self.options
        found = self.find_files(paths, key)
        if tokenizer is None:
            raise ValueError(f"{type(self).__name__} must be given a tokenizer (model.path's); got nothing")
        self.files = tuple(file.path for file, _ in found)
        # Categories are numbered from 1, in the order of their first files.
        names = list(dict.fromkeys(name for _, name in found))
        files = [replace(file, category_id=names.index(name) + 1) for file, name in found]
        encoder = self.encoder(self.encoder.Options.read(vars(options)), tokenizer, key)
        folder = cached_tokens(
            default_root("verl_ext_tokenized", options.cache_dir),
            lambda: tokens_fingerprint(files, encoder, names, code_digest(__name__)),
            lambda to: _write(to, files, names, encoder),
            key,
        )
        if (folder, key) not in _reported:  # once in a process
            _reported.add((folder, key))
            for line in encoder.notices(_report(folder)["total"]):
                _logger.warning("%s", line)
        data = TokenizedData([str(folder)], key)
        return data, split_rows(len(data), self.split, options.train_ratio, options.seed)

    def __getitem__(self, pack: int) -> dict[str, torch.Tensor]:
        """Return row `pack`: an SFTDataSet's 1-D tensors, and labels int64 as long."""
        row = super().__getitem__(pack)
        row["labels"] = torch.where(row["loss_mask"] == 1, row["input_ids"], IGNORED)
        return row

    @override
    def omitted_documents(self) -> list[OmittedDocuments]:
        """Return also documents cut in tokenizing and the training part's bad records.

        Tokens are counted before the cut.
        """
        columns = self._data.document_columns
        assert columns is not None, "a set of texts has them"
        full, lengths = columns.full_length[self._in_use], self._data.lengths[self._in_use]
        cut = np.flatnonzero(full > lengths)
        report = replace(self._omitted, total=int(full.sum(dtype=np.int64))).by_category(
            self.cut_reason, row_numbers(self._in_use, cut), full[cut], lengths[cut]
        )
        for row in report:
            row.targets_removed = row.tokens_removed if self.cuts_targets else 0
        bad = [
            OmittedDocuments(category, f"bad record: {reason}", documents)
            for category, counts in _report(Path(self.folders[0]))["categories"].items()
            for reason, documents in counts["bad_records"].items()
        ]
        return [*report, *super().omitted_documents(), *([] if self.split == "val" else bad)]


def _write(folder: Path, files: Sequence[SourceFile], names: Sequence[str], encoder: Any) -> None:
    """Write the dataset, its categories and its report into an empty folder."""
    counts = {name: Counts() for name in names}
    writer = DatasetWriter(folder, texts=encoder.texts)

    def add(documents: Documents) -> Documents:
        counts[names[documents.category_id - 1]].add(documents.counts, documents.counted())
        writer.add(documents)
        return documents

    tokenize_files(files, encoder, add, writer)
    total = Counts().add(*counts.values())
    if not total.documents:
        example = next(chain.from_iterable(total.examples.values()), "")
        raise ValueError(
            f"{encoder.key} must hold at least one record with a text; got none in {files[0].path} and "
            f"{len(files) - 1} files more, of {total.records} records{example and f', such as {example}'}"
        )
    write_json(folder / CATEGORIES, {str(number): name for number, name in enumerate(names, start=1)})
    report = {
        "files": redacted([file.path for file in files]),
        "options": vars(encoder.options),
        "categories": {name: of_category.as_dict() for name, of_category in counts.items()},
        "total": total.as_dict(),
    }
    write_json(folder / REPORT, report)


def _report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / REPORT).read_text(encoding="utf-8"))
