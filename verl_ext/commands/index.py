"""The command `verl-ext index`: texts tokenized once into Megatron's indexed form, with a report of each source."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from verl_ext.commands.command_line import run_command
from verl_ext.commands.tokenize import InputAndOutput
from verl_ext.commands.tokenize_report import special_token_rows
from verl_ext.data.megatron.text_index import write_text_indices
from verl_ext.files import OutputFolder, output_problems, write_json
from verl_ext.progress import aligned
from verl_ext.text.documents import CHAT_COUNTS, Counts
from verl_ext.text.plain_text import PlainDocuments, TextOptions, TextTokenizer
from verl_ext.text.readers import CHUNK, Batch
from verl_ext.text.sources import SourceFile, find_source_files, local_path, total_bytes
from verl_ext.text.tokenizer import ModelOptions, leave_out_torch, load_tokenizer, tokenizer_module
from verl_ext.text.workers import available_cpus, ordered_results
from verl_ext.values import REQUIRED, option

REPORT = "report.json"
WORKER_BYTES = 8 << 20  # of text, that make another process worth its start of a few seconds
# Options that change neither tokens nor counts: left out of the report, so that equal data has equal reports.
NOT_REPORTED = ("num_workers", "overwrite")
# Counts that mean nothing for text without targets and limits.
NOT_COUNTED = ("target_tokens", "target_share", "over_length", *CHAT_COUNTS)
TEXT_COLUMNS = ("source", "encoded as text", "bad record", "first")


@dataclass(frozen=True)
class IndexOptions(TextOptions, InputAndOutput):
    """Text tokenized once into Megatron's indexed form: OUTPUT_DIR/SOURCE.bin and .idx, and report.json.

    A .txt file is one document; a long one is read and tokenized in pieces, with the tokens that it has whole."""

    maps: ClassVar[Mapping[str, str]] = {"sources": "a source to its files"}

    sources: dict[str, Any] = option(
        {},
        "source: file, folder, glob, URL or list of them (txt, jsonl, json, csv, tsv, also .gz, .bz2, .xz, .zst; "
        "parquet; Arrow folder); a folder's .txt files count where it holds no other format",
        required=True,
    )
    output_dir: str = option(REQUIRED, "folder of the indices; it appears only when complete", required=True)
    add_bos: bool = option(False, "one BOS token before each document")
    max_corpus_tokens: int | None = option(
        None, "each source is cut after so many tokens, also inside a document; null: none is", least=1
    )
    num_workers: int | None = option(
        None, "processes; null: by CPUs and size. The output is the same for any number", least=1
    )

    @property
    def patterns(self) -> dict[str, list[str]]:
        """Every source's paths and globs, in the order of `sources`."""
        return {name: _as_list(value) for name, value in self.sources.items()}

    def problems(self) -> Iterator[str | None]:
        """A line for every mistake that can be seen without opening a source."""
        for name, value in self.sources.items():
            if not name or name.startswith(".") or set(name) & set("/\\\0"):
                yield f"sources.{name} must be a file's name, that of {name}.bin and {name}.idx"
            if not _is_names(value):
                yield f"sources.{name} must be a path, a glob or a list of them; got {value!r}"
        sources = [path for value in filter(_is_names, self.sources.values()) for path in _as_list(value)]
        keep = [self.model.path, self.model.tokenizer_path, *map(local_path, sources)]
        problems = output_problems(self.output_dir, self.overwrite, REPORT, keep, kept="a source, the tokenizer")
        yield from problems
        output = Path(self.output_dir)
        # A tokenized dataset has a report.json as well.
        if not problems and output.is_dir() and any(output.iterdir()) and not any(output.glob("*.idx")):
            yield f"output_dir must be of this command to be replaced; got {output}, which holds other files"
        yield from self.model.tokenizer_problems()
        yield from super().problems()


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _is_names(value: Any) -> bool:
    """A name, or a list of at least one."""
    names = _as_list(value)
    return isinstance(names, list) and bool(names) and all(isinstance(name, str) and name for name in names)


def main(arguments: Sequence[str]) -> int:
    """Run the command; its exit code."""
    example = "'sources={books:books/,web:web.jsonl}' output_dir=DIR model.path=MODEL_OR_TOKENIZER"
    return run_command(arguments, "index", IndexOptions, _run_alone, example)


def _run_alone(options: IndexOptions) -> str:
    leave_out_torch(options.model)  # of this process
    return run(options)


def run(options: IndexOptions) -> str:
    """Write an index for each source and report.json into output_dir; the closing table.

    Raises `UsageError` and `DataError`, each one line, and leaves output_dir as it was then.
    """
    files = find_source_files(options.patterns)
    # Also made here: a tokenizer that lacks a token is told before any process is started.
    tokenizer = load_text_tokenizer(options.model, options, options.add_bos)
    with OutputFolder(options.output_dir, options.overwrite) as folder:
        counts = write_text_indices(
            files,
            tokenizer,
            {f"sources.{name}": folder.path / name for name in options.sources},
            max_tokens=options.max_corpus_tokens,
            tokenized=partial(_tokenized, options, files, tokenizer),
            parcel_bytes=CHUNK.bytes,
        )
        by_source = dict(zip(options.sources, counts.values(), strict=True))
        write_json(folder.path / REPORT, _report(options, tokenizer, by_source))
        folder.publish()
    return f"{_table(by_source)}\n\nwritten to {options.output_dir}"


def load_text_tokenizer(model: ModelOptions, options: TextOptions, add_bos: bool = False) -> TextTokenizer:
    """The state of a worker."""
    return TextTokenizer(load_tokenizer(model), options, add_bos)


def _tokenized(
    options: IndexOptions, files: Sequence[SourceFile], tokenizer: TextTokenizer, batches: Iterable[Batch]
) -> Iterator[PlainDocuments]:
    """The documents of every batch, in order, from worker processes where there is work for them."""
    num_bytes = total_bytes(files)
    useful = available_cpus() if num_bytes is None else min(available_cpus(), 1 + num_bytes // WORKER_BYTES)
    num_workers = options.num_workers or useful
    if num_workers == 1:
        return map(tokenizer.tokenize, batches)
    make, preload = partial(load_text_tokenizer, options.model, options, options.add_bos), [tokenizer_module()]
    return ordered_results(make, TextTokenizer.tokenize, batches, num_workers, name="tokenize", preload=preload)


def _report(options: IndexOptions, tokenizer: TextTokenizer, counts: Mapping[str, Counts]) -> dict[str, Any]:
    """The content of report.json; it names no time, so that equal runs give equal files."""
    total = Counts()
    for of_source in counts.values():
        total.add(of_source)
    in_all = _counted(total)
    del in_all["examples"]
    return {
        "tokenizer": options.model.tokenizer,
        "vocabulary": tokenizer.vocabulary,
        "dtype": tokenizer.dtype.name,
        "eos_token_id": tokenizer.last[0] if tokenizer.last else None,
        "bos_token_id": tokenizer.first[0] if tokenizer.first else None,
        "options": {key: value for key, value in asdict(options).items() if key not in NOT_REPORTED},
        "sources": {name: _counted(of_source) for name, of_source in counts.items()},
        "total": in_all,
    }


def _counted(counts: Counts) -> dict[str, Any]:
    return {key: value for key, value in counts.as_dict().items() if key not in NOT_COUNTED}


def _table(counts: Mapping[str, Counts]) -> str:
    """A row for each source, and tables of special tokens in texts and bad records, where there are any."""
    rows, bad = [], []
    for name, of_source in counts.items():
        numbers = {
            "records": of_source.records,
            "bad": of_source.bad.total(),
            "documents": of_source.documents,
            "tokens": of_source.tokens,
            "median": of_source.length_quantile(0.5),
            "longest": max(of_source.lengths, default=0),
        }
        rows.append({"source": name, **{key: f"{value:,}" for key, value in numbers.items()}})
        for reason, count in sorted(of_source.bad.items()):
            first = of_source.examples[reason][0]
            bad.append({"source": name, "bad record": reason, "records": f"{count:,}", "first": first})
    special = special_token_rows("source", counts)
    return "\n\n".join(aligned(part, TEXT_COLUMNS) for part in (rows, special, bad) if part)
