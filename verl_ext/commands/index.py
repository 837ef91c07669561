"""The command `verl-ext index`, which tokenizes texts into Megatron's indexed format."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_ext.commands.command_line import SourceOptions, command
from verl_ext.commands.report import aligned_rows, most_frequent, reported_options, tables, total_entry
from verl_ext.data.stream.megatron.writer import write_text_indexes
from verl_ext.files import CATEGORIES, REPORT, OutputFolder, write_json
from verl_ext.options import must, option
from verl_ext.text.encoder_texts import TextOptions, TextRecordEncoder, optimal_dtype
from verl_ext.text.read.sources import files_left_out, find_source_files
from verl_ext.text.tokens.counts import CHAT_COUNTS, Counts
from verl_ext.text.tokens.tokenizer import ModelOptions

# Counts that have no meaning for text without targets and length limits.
NOT_COUNTED = ("target_tokens", "target_share", "over_length", *CHAT_COUNTS)


@dataclass(frozen=True)
class IndexOptions(TextOptions, SourceOptions):
    """Tokenize text once into Megatron's indexed format: OUTPUT_DIR/SOURCE.bin and .idx, and report.json.

    A .txt file is one document. A folder's .txt files count only if the folder holds no other format.
    """

    model: ModelOptions = option(ModelOptions, "the tokenizer")
    add_bos: bool = option(False, "one BOS token before each document")
    max_corpus_tokens: int | None = option(
        None, "number of tokens after which a source is cut, even inside a document; null: never", least=1
    )

    def problems(self) -> Iterator[str | None]:
        """Yield a line for every mistake visible before opening a source."""
        yield from self.file_name_problems()
        problems = self.source_problems(self.model)
        yield from problems
        output = Path(self.output_dir)
        # A tokenized dataset has a report.json too, and one in Megatron's format indexes.
        is_other = (output / CATEGORIES).is_file() or not any(output.glob("*.idx"))
        if not problems and output.is_dir() and any(output.iterdir()) and is_other:
            needed = "be a folder that this command wrote, to be replaced"
            yield must("output_dir", needed, f"{output}, which holds other files")
        yield from self.model.tokenizer_problems()
        yield from super().problems()


def index_texts(options: IndexOptions) -> str:
    """Write an index of each source and report.json; return the closing tables.

    Raises `UsageError` and `DataError` with one line.
    """
    files = find_source_files(options.patterns)
    encoder = TextRecordEncoder(options, add_bos=options.add_bos)
    encoder.open()  # before the folder is made
    with OutputFolder(options.output_dir, options.overwrite) as folder:
        counts = write_text_indexes(
            files,
            encoder,
            {f"sources.{name}": folder.path / name for name in options.sources},
            max_corpus_tokens=options.max_corpus_tokens,
            num_workers=options.num_workers,
        )
        by_source = dict(zip(options.sources, counts.values(), strict=True))
        left_out = files_left_out(files)
        write_json(folder.path / REPORT, _report(options, encoder, by_source, left_out))
        folder.publish()
    table = aligned_rows(*tables("source", by_source, targets=False))
    notes = f"files left out, of other formats: {most_frequent(left_out)}\n\n" if left_out else ""
    return f"{table}\n\n{notes}written to {options.output_dir}"


def _report(
    options: IndexOptions, encoder: TextRecordEncoder, counts: Mapping[str, Counts], left_out: Mapping[str, int]
) -> dict[str, Any]:
    """Return report.json's content, without times: equal runs write equal files."""
    return {
        "tokenizer": options.model.tokenizer,
        "vocabulary": encoder.vocabulary,
        "dtype": optimal_dtype(encoder.vocabulary).name,
        "eos_token_id": encoder.last[0] if encoder.last else None,
        "bos_token_id": encoder.first[0] if encoder.first else None,
        "options": reported_options(options),
        "working_folder": os.getcwd(),
        "sources": {name: _counted(of_source.as_dict()) for name, of_source in counts.items()},
        "total": _counted(total_entry(counts.values(), left_out)),
    }


def _counted(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key not in NOT_COUNTED}


main = command(
    "index",
    IndexOptions,
    index_texts,
    example="'sources={books:books/,web:web.jsonl}' output_dir=DIR model.path=MODEL_OR_TOKENIZER",
)
