"""PreTrainDataset: rows of BOS, a text's first max_length - 2 tokens, EOS.

max_length = 5, texts of 4, 1 and 2 tokens; B and E are BOS and EOS, P is the padding

rows=packed, max_tokens = 9                      rows=padded
input_ids     B  a  a  a  E  B  b  E             B  a  a  a  E     B  b  E  P  P     B  c  c  E  P
position_ids  0  1  2  3  4  0  1  2             0  1  2  3  4     0  1  2  0  1     0  1  2  3  0
loss_mask     0  1  1  1  1  0  1  1             0  1  1  1  1     0  1  1  0  0     0  1  1  1  0
labels       -1  a  a  a  E -1  b  E             -1 a  a  a  E    -1  b  E -1 -1    -1  c  c  E -1

-1 stands for -100. Every token but the first is a target. If the tokenizer has no BOS, documents begin with their text.
Padding is recognized by its position and not by its token. A pad token that equals EOS therefore costs no document its
last target.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from verl_ext.data.families.texts import TextSet, TextSetOptions
from verl_ext.data.packs.options import DatasetOptions
from verl_ext.data.packs.sft_options import SFTOptions
from verl_ext.options import must, option
from verl_ext.packing import MOST_TOKENS
from verl_ext.text.encoder_texts import RecordTextOptions, TextRecordEncoder
from verl_ext.text.read.sources import (
    SourceFile,
    absolute_path,
    file_name,
    find_source_files,
    is_there,
    without_compression,
)

ROWS = ("packed", "padded")
ADDED = 2  # tokens of max_length that are not text: BOS and EOS


@dataclass(frozen=True)
class TextDocumentOptions(RecordTextOptions):
    """The options by which text becomes documents."""

    prefix: ClassVar[str] = "data"

    max_length: int = option(
        512,
        "tokens of a document, BOS and EOS included; a longer text loses its end",
        least=ADDED + 1,
        most=MOST_TOKENS,
    )


@dataclass(frozen=True)
class PreTrainOptions(TextSetOptions, TextDocumentOptions):
    """The options of texts' rows; rows=padded sets max_tokens, strategy and pad_mode."""

    reads: ClassVar[str] = "files of text records"
    no_mixture: ClassVar[str] = "for data=pretrain, which reads text"
    path_test = is_there, "file, folder or glob of files"

    rows: str = option(
        "packed",
        "packed: whole documents up to max_tokens; padded: one document, filled up to max_length",
        choices=ROWS,
    )
    max_tokens: int | None = option(  # type: ignore[assignment]
        None,
        "budget of a pack, over all ranks of a sequence-parallel group; null: max_length",
        least=2,
        most=MOST_TOKENS,
    )
    mixture: Any = option(None, "must be null: give train_dir a list")

    @classmethod
    @override
    def implied(cls, node: Mapping[str, Any]) -> dict[str, Any]:
        one_a_row = {"max_tokens": node.get("max_length"), "strategy": "none", "pad_mode": "right"}
        return one_a_row if node.get("rows") == "padded" else {}

    @property
    @override
    def packing(self) -> SFTOptions:
        budget = self.max_length if self.max_tokens is None else self.max_tokens
        return replace(self, **{"max_tokens": budget, **self.implied(vars(self))})


class PreTrainEncoder(TextRecordEncoder):
    """An encoder of text records: BOS, the beginning of the text, EOS."""

    Options = TextDocumentOptions
    options: TextDocumentOptions

    def __init__(self, options: TextDocumentOptions, tokenizer: Any, key: str = "") -> None:
        """Take options, a tokenizer with an EOS, and the files' config key."""
        if tokenizer.eos_token_id is None:
            needed = "hold a tokenizer with an eos_token, which every document of data=pretrain ends with"
            raise ValueError(must("model.path", needed, "one without"))
        super().__init__(options, tokenizer, key, add_bos=tokenizer.bos_token_id is not None)
        self.most_tokens = options.max_length - ADDED + 1 + self.add_bos

    def notices(self, total: Mapping[str, Any]) -> Iterator[str]:
        """Yield lines on how documents differ from records; total: the report's counts."""
        if not self.add_bos:
            yield f"the tokenizer has no bos_token: documents of {self.key} begin with the first token of their text"
        if cut := total["over_length"]:
            yield (
                f"{cut['documents']:,} of {total['documents']:,} documents of {self.key} are longer than "
                f"data.max_length={self.options.max_length}: {cut['tokens']:,} tokens in all are cut off their ends"
            )
        special = total["special_tokens_in_text"]
        if special["records"]:
            yield (
                f"{special['records']:,} records of {self.key} hold names of special tokens, "
                f"{special['occurrences']:,} in all, which are encoded as text (data.special_tokens_in_text=encode)"
            )
        if bad := total["bad_records"]:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in bad.items())
            example = next(iter(total["examples"].values()))[0]
            yield (
                f"{sum(bad.values()):,} of {total['records']:,} records of {self.key} are left out "
                f"(data.on_bad_record=skip): {reasons}; one of them is {example}"
            )


def find_text_files(paths: Sequence[str], key: str) -> list[tuple[SourceFile, str]]:
    """Return (file, category) of files, folders, globs and URLs, in their order.

    The files of a folder or a glob are sorted by name. A file's category is its name without suffixes; that of an Arrow
    folder or a Hub dataset is its full name.

    Raises ValueError if there is no file, or one has no known format or cannot be read; it names `key`.
    """

    def category_of(file: SourceFile) -> str:
        name = file_name(file.path)
        return name if file.kind in ("arrow", "hub") else Path(without_compression(name)).stem

    files = find_source_files({"text": [absolute_path(path) for path in paths]}, key)
    return [(file, category_of(file)) for file in files]


class PreTrainDataset(TextSet):
    """A dataset of text records in rows, drawn above.

    Its own constructor form is `PreTrainDataset(tokenizer, datapath, max_length=512)`. A path is a file (jsonl, json,
    parquet, csv, .txt), a folder (also of Arrow files), a glob or a URL.
    """

    Options: ClassVar[type[DatasetOptions]] = PreTrainOptions
    options: PreTrainOptions
    encoder, paths_are, find_files = PreTrainEncoder, "files of records with a text", staticmethod(find_text_files)
    cut_reason = "truncated to max_length"

    def __init__(
        self,
        tokenizer: Any = None,
        datapath: str | Sequence[str] | None = None,
        max_length: int | None = None,
        **given: Any,
    ) -> None:
        """Open the files; `given` are arguments of TextSet."""
        super().__init__(datapath, tokenizer, max_length, **given)
        self.has_bos = tokenizer.bos_token_id is not None

    @override
    def report(self) -> dict[str, Any]:
        options = self.options
        return {**super().report(), "rows": options.rows, "max_length": options.max_length, "bos": self.has_bos}
