"""The index command's configuration: composed by Hydra from `conf/index.yaml`, typed and checked here.

The closing table and report.json: what each source's index holds, and the records that are not in it.

The index run: find the files, tokenise their records, write one index a source, publish.

The command `verl-ext index`.
"""

import json
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Optional

from omegaconf import MISSING

from verl_ext.commands.command_line import least_problems, load_options, run_command
from verl_ext.commands.tokenize_run import special_token_rows
from verl_ext.data.megatron.text_index import TextIndex, Written, no_document_error, show_progress
from verl_ext.files import OutputFolder, output_problems
from verl_ext.progress import aligned
from verl_ext.text.counts import CHAT_COUNTS, Counts
from verl_ext.text.json_records import ON_BAD_RECORD, SPECIAL_TOKENS_IN_TEXT
from verl_ext.text.plain_text import Documents, TextOptions, TextTokenizer
from verl_ext.text.readers import read_parcels
from verl_ext.text.remote import local_path
from verl_ext.text.sources import SourceFile, find_source_files, total_bytes
from verl_ext.text.tokenizer import ModelConfig, load_tokenizer, tokenizer_module
from verl_ext.text.workers import available_cpus, ordered_results
from verl_ext.values import choice_problem

CONFIG_NAME = "index"
REPORT = "report.json"
# Nodes whose keys are the user's own.
OPEN_NODES = {"sources": "a source to its files"}


# Optional[...] and not `| None`: OmegaConf's structured configs read the annotations.
@dataclass
class IndexConfig:
    """Everything that `verl-ext index` takes; the fields are described in `conf/index.yaml`."""

    sources: dict[str, Any] = field(default_factory=dict)
    output_dir: str = MISSING
    overwrite: bool = False
    model: ModelConfig = field(default_factory=ModelConfig)
    text_key: Any = "text"
    add_eos: bool = True
    add_bos: bool = False
    special_tokens_in_text: str = "encode"
    max_corpus_tokens: Optional[int] = None  # noqa: UP045
    on_bad_record: str = "error"
    num_workers: Optional[int] = None  # noqa: UP045

    def source_patterns(self) -> dict[str, list[str]]:
        """Every source's paths and globs, in the order of `sources`."""
        return {name: _as_list(value) for name, value in self.sources.items()}

    def problems(self) -> list[str]:
        """One line for every mistake that can be seen without opening a source."""
        source_problems = self._source_problems()
        return [*source_problems, *self._output_problems(), *self.model.tokenizer_problems(), *self._option_problems()]

    def _source_problems(self) -> list[str]:
        if not self.sources:
            return ["sources must name at least one source, e.g. 'sources={books:books/}'; got {}"]
        problems = []
        for name, value in self.sources.items():
            if not name or name.startswith(".") or set(name) & set("/\\\0"):
                problems.append(f"sources.{name} must be a file's name, that of {name}.bin and {name}.idx")
            if not _is_names(value):
                problems.append(f"sources.{name} must be a path, a glob or a list of them; got {value!r}")
        return problems

    def _output_problems(self) -> list[str]:
        sources = [path for value in self.sources.values() if _is_names(value) for path in _as_list(value)]
        keep = [self.model.path, self.model.tokenizer_path, *map(local_path, sources)]
        problems = output_problems(self.output_dir, self.overwrite, REPORT, keep, kept="a source, the tokenizer")
        output = Path(self.output_dir)
        # A tokenised dataset has a report.json as well.
        if not problems and output.is_dir() and any(output.iterdir()) and not any(output.glob("*.idx")):
            return [f"output_dir must be of this command to be replaced; got {output}, which holds other files"]
        return problems

    def _option_problems(self) -> list[str]:
        least = {"max_corpus_tokens": (self.max_corpus_tokens, 1), "num_workers": (self.num_workers, 1)}
        problems = least_problems(least)
        choices = (("special_tokens_in_text", SPECIAL_TOKENS_IN_TEXT), ("on_bad_record", ON_BAD_RECORD))
        problems += filter(None, (choice_problem(key, getattr(self, key), options) for key, options in choices))
        if not _is_names(self.text_key):
            problems.append(f"text_key must be a field or a list of fields; got {self.text_key!r}")
        return problems


def _is_names(value: Any) -> bool:
    """A name, or a list of at least one."""
    values = [value] if isinstance(value, str) else value
    return isinstance(values, list) and bool(values) and all(isinstance(name, str) and name for name in values)


def _as_list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def load_config(overrides: Sequence[str]) -> IndexConfig:
    """Compose `conf/index.yaml` with command-line overrides, check it, and return it typed.

    Raises `UsageError` with one line for every mistake.
    """
    return load_options(CONFIG_NAME, IndexConfig, overrides, OPEN_NODES)


# Options that change neither tokens nor counts: left out, so that equal data has equal reports.
NOT_REPORTED = ("num_workers", "overwrite")
TEXT_COLUMNS = ("source", "encoded as text", "bad record", "first")
# Counts of `Counts` that mean nothing for text without targets and limits.
NOT_COUNTED = ("target_tokens", "target_share", "over_length", *CHAT_COUNTS)


class Report:
    """One tally per source, in the order of `sources`, and the tokenizer's facts."""

    def __init__(self, config: IndexConfig, tokenizer: TextTokenizer) -> None:
        self.config = config
        self.tallies = {name: Counts() for name in config.sources}
        self.tokens = {
            "vocabulary": tokenizer.vocabulary,
            "dtype": tokenizer.dtype.name,
            "eos_token_id": tokenizer.last[0] if tokenizer.last else None,
            "bos_token_id": tokenizer.first[0] if tokenizer.first else None,
        }

    def as_dict(self) -> dict[str, Any]:
        """The content of report.json; it names no time, so that equal runs give equal files."""
        options = {key: value for key, value in asdict(self.config).items() if key not in NOT_REPORTED}
        total = Counts()
        for tally in self.tallies.values():
            total.add(tally)
        sources = {name: _counts(tally) for name, tally in self.tallies.items()}
        in_all = {key: value for key, value in _counts(total).items() if key != "examples"}
        tokenizer = {"tokenizer": self.config.model.tokenizer, **self.tokens}
        return {**tokenizer, "options": options, "sources": sources, "total": in_all}

    def write(self, folder: Path) -> None:
        """Write report.json beside the indices."""
        text = json.dumps(self.as_dict(), indent=2, ensure_ascii=False) + "\n"
        (folder / REPORT).write_text(text, encoding="utf-8")

    def table(self) -> str:
        """The closing table, and one each of special tokens in text and bad records, where there are any."""
        rows = [_row(name, tally) for name, tally in self.tallies.items()]
        special = special_token_rows("source", self.tallies)
        bad = [
            {"source": name, "bad record": reason, "records": f"{count:,}", "first": tally.examples[reason][0]}
            for name, tally in self.tallies.items()
            for reason, count in sorted(tally.bad.items())
        ]
        return "\n\n".join(aligned(part, TEXT_COLUMNS) for part in (rows, special, bad) if part)


def _counts(tally: Counts) -> dict[str, Any]:
    return {key: value for key, value in tally.as_dict().items() if key not in NOT_COUNTED}


def _row(name: str, tally: Counts) -> dict[str, str]:
    counts = {
        "records": tally.records,
        "bad": tally.bad.total(),
        "documents": tally.documents,
        "tokens": tally.tokens,
        "median": tally.length_quantile(0.5),
        "longest": max(tally.lengths, default=0),
    }
    return {"source": name, **{key: f"{value:,}" for key, value in counts.items()}}


WORKER_BYTES = 8 << 20  # of text, that make another process worth its start of a few seconds


def build_index(config: IndexConfig) -> Report:
    """Write an index for each of `config.sources` into `config.output_dir`; return what was counted.

    Raises `UsageError` and `DataError`, each one line, and leaves `output_dir` as it was then.
    """
    files = find_source_files(config.source_patterns())
    # Also made here: a tokenizer that lacks a token is told before any process is started.
    tokenizer = load_text_tokenizer(config.model, _options(config))
    report = Report(config, tokenizer)
    with OutputFolder(config.output_dir, config.overwrite) as folder:
        _write_indices(config, files, tokenizer, folder.path, report)
        report.write(folder.path)
        folder.publish()
    return report


def load_text_tokenizer(model: ModelConfig, options: TextOptions) -> TextTokenizer:
    """The state of a worker."""
    return TextTokenizer(load_tokenizer(model), options)


def _options(config: IndexConfig) -> TextOptions:
    return TextOptions(
        config.text_key, config.add_eos, config.add_bos, config.on_bad_record, config.special_tokens_in_text
    )


def _write_indices(
    config: IndexConfig, files: list[SourceFile], tokenizer: TextTokenizer, folder: Path, report: Report
) -> None:
    with closing(_written(config, files, tokenizer, folder, report)) as work:
        show_progress(work, total_bytes(files))


def _written(
    config: IndexConfig, files: list[SourceFile], tokenizer: TextTokenizer, folder: Path, report: Report
) -> Generator[Written, None, None]:
    """What is written of each parcel, and a source's bytes that are left unread, as it is done."""
    names = list(config.sources)
    full: set[int] = set()
    for source, results in groupby(_documents(config, files, tokenizer, full), key=lambda result: result.source):
        name = names[source - 1]
        with TextIndex(folder / name, tokenizer.dtype, config.max_corpus_tokens, f"sources.{name}") as index:
            unread = sum(file.num_bytes or 0 for file in files if file.category_id == source)
            report.tallies[name] = index.tally
            for result in results:
                written = index.add(result)
                if index.is_full:
                    full.add(source)
                unread -= written.num_bytes
                yield written
            yield Written(max(unread, 0), 0, 0)
            _refuse_nothing(config, name, index.tally)
            index.close()
    for name in names:
        _refuse_nothing(config, name, report.tallies[name])


def _documents(
    config: IndexConfig, files: list[SourceFile], tokenizer: TextTokenizer, full: set[int]
) -> Iterator[Documents]:
    """Every parcel's documents, in order, until its source is in `full`."""
    parcels = read_parcels(files, full.__contains__)
    num_workers = config.num_workers or _useful_workers(files)
    if num_workers == 1:
        return map(tokenizer.tokenise, parcels)
    make = partial(load_text_tokenizer, config.model, tokenizer.options)
    preload = [tokenizer_module()]
    return ordered_results(make, TextTokenizer.tokenise, parcels, num_workers, name="tokenise", preload=preload)


def _useful_workers(files: list[SourceFile]) -> int:
    num_bytes = total_bytes(files)
    return available_cpus() if num_bytes is None else min(available_cpus(), 1 + num_bytes // WORKER_BYTES)


def _refuse_nothing(config: IndexConfig, name: str, tally: Counts) -> None:
    if not tally.documents:
        raise no_document_error(f"sources.{name}", tally)


USAGE = "usage: verl-ext index 'sources={books:books/,web:web.jsonl}' output_dir=DIR model.path=MODEL_OR_TOKENIZER"


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code: 0, 1 for unusable data, 2 for a mistake in the command."""
    return run_command(arguments, USAGE, CONFIG_NAME, _index)


def _index(arguments: Sequence[str]) -> str:
    config = load_config(arguments)

    return f"{build_index(config).table()}\n\nwritten to {config.output_dir}"
