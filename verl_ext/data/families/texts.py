"""TextSet: the base of datasets that tokenize into a cache when opened.

CACHE/<fingerprint>/       of the files, the tokenizer and the encoder's options
    data-00000-of-00001.arrow, state.json, dataset_info.json    what `datasets.load_from_disk` opens
    categories.json        {"1": "gsm8k", "2": "code"}
    report.json            the counts of records, by category
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from verl_ext.cache import default_root
from verl_ext.data.packs.dataset import split_rows
from verl_ext.data.packs.documents import DocumentRows
from verl_ext.data.packs.grouping import Grouping
from verl_ext.data.packs.omitted import NO_CATEGORY, OmittedDocuments
from verl_ext.data.packs.packed import PackedDataset
from verl_ext.data.packs.packs import Packs
from verl_ext.data.packs.sft_options import SFTOptions
from verl_ext.data.tokenized.arrow import TokenizedData
from verl_ext.data.tokenized.reports import read_report
from verl_ext.files import CATEGORIES, REPORT, write_json
from verl_ext.options import must, option
from verl_ext.redaction import redacted
from verl_ext.text.arrow_folder import DatasetWriter
from verl_ext.text.read.sources import SourceFile, files_left_out
from verl_ext.text.tokenizing import cached_tokens, code_digest, tokenize_files, tokens_fingerprint
from verl_ext.text.tokens.counts import Counts
from verl_ext.text.tokens.documents import Documents

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


class TextSet(PackedDataset):
    """The base of families that read texts, whose rows have labels too.

    Whole files are tokenized once for each tokenizer and set of encoder options, whatever the split, max_samples and
    the packs are; after that, rows are read from the cache. The constructor forms are those of PackedDataset; in the
    family's own form, they take a path (or a list of paths), a tokenizer and max_length.

    encoder: the class that turns files into documents; its `Options` are part of the family's. find_files: a function
    of paths and their key, which returns (file, category) of each and raises ValueError without any. cut_reason: the
    report's name for a document that lost tokens in tokenizing. split: "train" or "val" of the seeded random split of
    all documents; None: all. Other arguments are those of PackedDataset.
    """

    needs_tokenizer = True
    requires_max_tokens = False
    has_labels = True
    encoder: ClassVar[type[Any]]
    find_files: Callable[[Sequence[str], str], list[tuple[SourceFile, str]]]
    cut_reason: str
    options: TextSetOptions
    split: str | None
    files: tuple[str, ...]
    data: TokenizedData

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

    @override
    def opened(self, paths: Sequence[str], tokenizer: Any, most: int | None) -> Packs:
        options, key = self.options, self.key
        found = self.find_files(paths, key)
        if tokenizer is None:
            raise ValueError(must(type(self).__name__, "be given a tokenizer (model.path's)", "nothing"))
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
        report = read_report(folder)
        if (folder, key) not in _reported:  # once in a process
            _reported.add((folder, key))
            for line in encoder.notices(report["total"]):
                _logger.warning("%s", line)
        # Bad records and files that are not read belong to the training part.
        never = [
            OmittedDocuments(category, f"bad record: {reason}", count)
            for category, counts in report["categories"].items()
            for reason, count in counts["bad_records"].items()
        ]
        left_out = files_left_out(file for file, _ in found)
        never += [OmittedDocuments(NO_CATEGORY, f"file left out: {name}", n) for name, n in left_out.items()]
        self.data, packing = TokenizedData([str(folder)], key), options.packing
        documents = DocumentRows(
            self.data,
            split_rows(len(self.data), self.split, options.train_ratio, options.seed),
            most,
            options.given_names,
            self.cut_reason,
            [] if self.split == "val" else never,
        )
        return Packs(documents, Grouping(documents, packing), packing)


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
        of = f"{len(files) - 1} files more, of {total.records} records{example and f', such as {example}'}"
        got = f"none in {files[0].path} and {of}"
        raise ValueError(must(encoder.key, "hold at least one record with a text", got))
    write_json(folder / CATEGORIES, {str(number): name for number, name in enumerate(names, start=1)})
    report = {
        "files": redacted([file.path for file in files]),
        "options": vars(encoder.options),
        "categories": {name: of_category.as_dict() for name, of_category in counts.items()},
        "total": total.as_dict(),
    }
    write_json(folder / REPORT, report)
