"""What became of the records of a tokenised folder: kept beside it, told by every run that opens it."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from verl_ext.data.over_length_report import OverLengthRow

FILE_NAME = "pretrain.json"


@dataclass
class Summary:
    """files and options: what it was made of. documents of records; of them cut, by cut_tokens in all, to max_length.
    special_tokens: records whose text holds names of special tokens, and occurrences of these. bad_records: category ->
    reason -> how many gave no document; example: one of these, with its file and line."""

    files: list[str]
    options: dict[str, Any]
    bos: bool
    records: int = 0
    documents: int = 0
    cut: int = 0
    cut_tokens: int = 0
    special_tokens: dict[str, int] = field(default_factory=dict)
    bad_records: dict[str, dict[str, int]] = field(default_factory=dict)
    example: str = ""

    def write(self, folder: Path) -> None:
        """pretrain.json in `folder`."""
        text = json.dumps(asdict(self), indent=2, default=str, ensure_ascii=False)
        (folder / FILE_NAME).write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Summary":
        """What `write` wrote."""
        return cls(**json.loads((folder / FILE_NAME).read_text(encoding="utf-8")))

    def notices(self, key: str) -> Iterator[str]:
        """A line for each thing that is not as the records have it; `key`: the config key of the path."""
        if not self.bos:
            yield f"the tokenizer has no bos_token: documents of {key} begin with the first token of their text"
        if self.cut:
            yield (
                f"{self.cut:,} of {self.documents:,} documents of {key} are longer than data.max_length="
                f"{self.options['max_length']}: {self.cut_tokens:,} tokens in all are cut off their ends"
            )
        if self.special_tokens:
            yield (
                f"{self.special_tokens['records']:,} records of {key} hold names of special tokens, "
                f"{self.special_tokens['occurrences']:,} in all, which are encoded as text "
                "(data.special_tokens_in_text=encode)"
            )
        bad: Counter[str] = sum(map(Counter, self.bad_records.values()), start=Counter())
        if bad:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(bad.items()))
            yield (
                f"{bad.total():,} of {self.records:,} records of {key} are left out (data.on_bad_record=skip): "
                f"{reasons}; one of them is {self.example}"
            )

    def bad_record_rows(self) -> list[OverLengthRow]:
        """A row for each category and reason of records that gave no document."""
        return [
            OverLengthRow(category, f"bad record: {reason}", count)
            for category, bad in self.bad_records.items()
            for reason, count in sorted(bad.items())
        ]
