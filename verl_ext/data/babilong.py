"""When an answer that a model generated is right. Pure Python.

qa1 to qa5    the benchmark's rule (BABILong, `compare_answers`): the target and no other label of the task
others        the answer's text is the target's (`is_same_text`): their labels are not known

BABILongOptions: how a BABILong record becomes a row, from arguments or from a config's data node, checked.

BABILong's files, {input, question, target} records in a JSON list, found, read as a stream and checked.

data/qa1/1k.json     category qa1_1k        <task>_<size>, as the published set is laid out
data/qa1/32k.json    category qa1_32k
mine/stories.json    category stories       else the file's name

A BABILong record as the tokens of one row: prompt, answer, and what is cut of a prompt that is too long.

    input \\n\\nQuestion: question\\nAnswer:     target         R = answer_reserve_tokens
    <bos> c0 c1 c2 c3 c4 q0 q1 q2            a0 [eos]       fits: at most max_length - R tokens before a0
    <bos> c0 c1 c2       q0 q1 q2            a0 [eos]       truncate=context: the last tokens of the input are gone
    <bos> c0 c1 c2 c3 c4                     a0 [eos]       truncate=right: the question is what is gone

Only the answer's tokens (and the EOS after them, where it is asked for) are targets. The prompt is tokenised whole and
then cut in tokens, so that a cut one has exactly max_length - R of them, whatever merges over the seam. A token that
holds the end of the input and the first line break (".\\n\\n") belongs to the question's side. Special tokens that the
tokenizer puts at either end stay.

What is known of every sample besides its tokens: SampleFacts, one Arrow table beside the tokenised data.

What a cache of tokenised BABILong samples is of: files, tokenizer and options, as one digest.

Tokenised BABILong files, kept: tokenised by one process, once, and opened by all others.

    CACHE/<fingerprint>/          a tokenised dataset (input_ids, loss_mask, category_ids, length; categories.json)
        samples.arrow             what is known of each sample besides
        babilong.json             what it was made of

The folder is one of `cached_folder`.

BABILongDataset: question answering over long contexts, every row one sample of exactly max_length tokens.

prompt "{input}\\n\\nQuestion: {question}\\nAnswer:" (3 tokens), answer " {target}" (2), max_length = 8

input_ids      p0   p1   p2   a0 a1   P    P    P
position_ids    0    1    2    3  4   0    1    2     the padding is a pseudo-document, as in every padded pack
loss_mask       0    0    0    1  1   0    0    0
category_ids    0    0    0    1  1   0    0    0
attention_mask  1    1    1    1  1   0    0    0
labels       -100 -100 -100   a0 a1 -100 -100 -100    not shifted, as Hugging Face models take them
"""

import json
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields

# TYPE_CHECKING merged
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from verl_ext.data.categories import FILE_NAME as CATEGORIES
from verl_ext.data.categories import CategoryNumbers
from verl_ext.data.dataset import check_train_ratio, split_rows
from verl_ext.data.left_out import OverLengthRow
from verl_ext.data.sft import SFTDataSet
from verl_ext.data.stats import DocumentScan
from verl_ext.files import cached_folder, check_cache_dir, default_root
from verl_ext.packing import MOST_TOKENS, Spans, plan_packs
from verl_ext.text.documents import Documents
from verl_ext.text.special_tokens import as_plain_text
from verl_ext.text.tokenized import digest, file_facts, tokenizer_facts
from verl_ext.values import check_choice, whole_number

PLACE_LABELS = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
TASK_LABELS: dict[str, tuple[str, ...]] = {
    "qa1": PLACE_LABELS,
    "qa2": PLACE_LABELS,
    "qa3": PLACE_LABELS,
    "qa4": PLACE_LABELS,
    "qa5": ("Bill", "Fred", "Jeff", "Mary", "apple", "football", "milk"),
}
# Where a model that goes on with an example of its own has ended its answer.
_ENDS = (".", "<context>", "<example>")


def compare_answers(output: str, target: str, question: str, labels: Iterable[str]) -> bool:
    """Whether `target` is the only label in the output's first sentence, those named in the question aside.

    Letter case does not count. Labels are looked for as substrings, as the benchmark does, so that "the kitchen" and
    "kitchens" both name the kitchen.
    """
    said = output.lower()
    for end in _ENDS:
        said = said.split(end)[0]
    asked = question.lower()
    named = {label for label in map(str.lower, labels) if label in said and label not in asked}
    return named == {target.lower()}


def is_same_text(output: str, target: str) -> bool:
    """Whether the output's first line is the target; case, white space at the ends and a last full stop aside.

    Of a target of several lines, as many lines are compared. Anything said after it on the line makes it wrong.
    """
    wanted = target.strip().lower()
    said = "\n".join(output.strip().lower().split("\n")[: wanted.count("\n") + 1]).strip()
    return wanted in (said, said.removesuffix(".").rstrip())


def is_right_answer(output: str, target: str, question: str, category: str) -> bool:
    """Whether `output` answers a sample of `category`, whose task is what stands before its first "_"."""
    labels = TASK_LABELS.get(category.partition("_")[0])
    return is_same_text(output, target) if labels is None else compare_answers(output, target, question, labels)


TRUNCATE = ("context", "right")


@dataclass(frozen=True)
class BABILongOptions:
    """max_length: tokens of every row; answer_reserve_tokens: of these, kept free of the prompt; truncate: what a
    prompt that is too long loses, the end of its `input` (context) or its own end, question and all (right);
    append_eos: the EOS token after the answer is a target too; train_ratio and seed: of the split into train and val;
    cache_dir: where the tokenised data is kept (None: the cache of `datasets`)."""

    max_length: int
    answer_reserve_tokens: int = 64
    truncate: str = "context"
    append_eos: bool = False
    train_ratio: float = 0.9
    seed: int = 42
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        if self.max_length is None:
            raise ValueError("data.max_length must be given (tokens of a row); got nothing")
        whole_number("data.max_length", self.max_length, least=2, most=MOST_TOKENS)
        whole_number("data.answer_reserve_tokens", self.answer_reserve_tokens, least=1)
        if self.max_length <= self.answer_reserve_tokens:
            raise ValueError(
                f"data.max_length must be above data.answer_reserve_tokens={self.answer_reserve_tokens}; "
                f"got {self.max_length}"
            )
        check_choice("data.truncate", self.truncate, TRUNCATE)
        if not isinstance(self.append_eos, bool):
            raise ValueError(f"data.append_eos must be true or false; got {self.append_eos!r}")
        check_train_ratio(self.train_ratio)
        whole_number("data.seed", self.seed, least=0)
        check_cache_dir(self.cache_dir)

    @property
    def prompt_tokens(self) -> int:
        """The most tokens that a prompt may have."""
        return self.max_length - self.answer_reserve_tokens

    @classmethod
    def from_config(cls, config: Mapping[str, Any], given: Mapping[str, Any]) -> "BABILongOptions":
        """What is `given` and not None, else the key of `config` (verl's data node or a mapping), else the default."""
        _refuse_packing(config)
        options: dict[str, Any] = {"max_length": None}
        for name in (entry.name for entry in fields(cls)):
            value = config.get(name) if given.get(name) is None else given[name]
            if value is not None:
                options[name] = value
        made = cls(**options)
        budget = config.get("max_tokens")
        if given.get("max_length") is None and budget is not None and budget != made.max_length:
            raise ValueError(f"data.max_tokens must be data.max_length={made.max_length} for BABILong; got {budget}")
        return made


def _refuse_packing(config: Mapping[str, Any]) -> None:
    """A row is one sample: what would put several into one, or draw them, has no meaning here."""
    if config.get("mixture") is not None:
        raise ValueError("data.mixture must be null for BABILong, whose rows are one sample each; got a mixture")
    if config.get("strategy") not in (None, "none"):
        raise ValueError(f"data.strategy must be none for BABILong; got {config.get('strategy')!r}")


FIELDS = ("input", "question", "target")


@dataclass(frozen=True)
class BABILongFile:
    """One JSON file and the category of its samples."""

    path: str
    category: str


class Record(NamedTuple):
    """One record; `number` counts from 0 in the list of the file at `path`."""

    path: str
    number: int
    input: str
    question: str
    target: str

    def __str__(self) -> str:
        return f"record {self.number} of {self.path}"


def find_files(given: Any, key: str) -> list[BABILongFile]:
    """The files of a path or of a list of paths, each a JSON file or a folder with *.json or */*.json in it.

    In the order given; those of a folder by name, numbers by their value. ValueError, which names `key`, where there
    are none.
    """
    paths = [given] if isinstance(given, (str, os.PathLike)) else list(given or [])
    if not paths or not all(isinstance(path, (str, os.PathLike)) and os.fspath(path) for path in paths):
        raise ValueError(f"{key} must name a BABILong JSON file, or a folder of them; got {given!r}")
    return [
        BABILongFile(str(path), category_of(path))
        for path in (found for one in paths for found in _expand(Path(os.path.abspath(os.path.expanduser(one))), key))
    ]


def category_of(path: Path) -> str:
    """`<task>_<size>` of …/qa1/32k.json, else the file's name without its ending."""
    return f"{path.parent.name}_{path.stem}" if re.fullmatch(r"qa\d+", path.parent.name) else path.stem


def read_records(file: BABILongFile, key: str) -> Iterator[tuple[Record, int]]:
    """(record, about how many bytes of the file it stands for), in order; memory is that of a few records.

    Raises:
        ValueError: no JSON list, not UTF-8, no record; a record without a field, or with one that is no text.
    """
    # Here, because the tokenise command's modules import config and transformers' template tools.
    from verl_ext.text.readers import read_chunks
    from verl_ext.text.sources import SourceFile
    from verl_ext.values import DataError

    index = 0
    try:
        for chunk in read_chunks(SourceFile(0, file.path, "json", os.path.getsize(file.path))):
            for _, raw in chunk.records:
                if isinstance(raw, bytes):  # what read_chunks makes of lines that begin with an object
                    raise ValueError(f"{key} must hold JSON lists of records; {file.path} is no list")
                yield _checked(raw, file.path, index, key), chunk.num_bytes // len(chunk.records)
                index += 1
    except DataError as error:
        raise ValueError(f"{key} must hold JSON lists of records; {error}") from error
    if index == 0:
        raise ValueError(f"{key} must hold at least one record in every file; {file.path} has none")


def _expand(path: Path, key: str) -> Sequence[Path]:
    if path.is_file():
        return [path]
    if not path.exists():
        raise ValueError(f"{key} must name a BABILong JSON file, or a folder of them; {path} does not exist")
    found = [
        file
        for pattern in ("*.json", "*/*.json")
        for file in path.glob(pattern)
        if file.is_file() and not file.name.startswith(".")
    ]
    if not found:
        raise ValueError(f"{key} must name a BABILong JSON file, or a folder of them; {path} has no *.json or */*.json")
    return sorted(found, key=_natural)


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sorts 2k before 10k."""
    parts = re.split(r"(\d+)", str(path))
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _kind(value: Any) -> str:
    """What a value that is no text is in JSON."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return "a list" if isinstance(value, list) else "an object" if isinstance(value, dict) else "a number"


def _checked(raw: Any, path: str, index: int, key: str) -> Record:
    where = f"record {index} of {path}"
    if isinstance(raw, Exception):  # a BadRecord
        raise ValueError(f"{key} must hold records of {', '.join(FIELDS)}; {where}: {raw}")
    if not isinstance(raw, dict):
        raise ValueError(f"{key} must hold records of {', '.join(FIELDS)}; {where} is no object")
    for name in FIELDS:
        if name not in raw:
            raise ValueError(f"{key} must hold records of {', '.join(FIELDS)}; {where} has no {name}")
        if not isinstance(raw[name], str):
            raise ValueError(f"{key} must hold records of text; {name} of {where} is {_kind(raw[name])}")
        try:
            raw[name].encode()
        except UnicodeEncodeError as error:
            problem = "has half of a surrogate pair"
            raise ValueError(f"{key} must hold records of text; {name} of {where} {problem}") from error
    return Record(path, index, *(raw[name] for name in FIELDS))


LINE_BREAKS = 2  # tokens that the two line breaks before "Question:" may be


class SampleTokens(NamedTuple):
    """input_ids int32[T], T ≤ max_length; the last `targets` of them are the answer; full_tokens: T before cutting."""

    input_ids: NDArray[np.int32]
    targets: int
    full_tokens: int

    @property
    def loss_mask(self) -> NDArray[np.int8]:
        """int8[T]: 1 on the answer."""
        mask = np.zeros(len(self.input_ids), np.int8)
        mask[len(mask) - self.targets :] = 1
        return mask


def prompt_text(context: str, question: str) -> str:
    """What the model is given; `context` is the record's input."""
    return f"{context}\n\nQuestion: {question}\nAnswer:"


def answer_text(target: str) -> str:
    """What the model is to say."""
    return f" {target}"


class SampleTokenizer:
    """Tokenises records; a batch at a time, since fast tokenizers work on its texts in parallel."""

    def __init__(self, tokenizer: Any, options: BABILongOptions, key: str = "data.train_dir") -> None:
        """ValueError: `append_eos` with a tokenizer that has no EOS."""
        self.tokenizer, self.options, self.key = tokenizer, options, key
        if options.append_eos and tokenizer.eos_token_id is None:
            raise ValueError("data.append_eos=true needs a tokenizer with an eos_token; it has none")
        self._end = [tokenizer.eos_token_id] if options.append_eos else []

    def tokenise(self, records: Sequence[Record]) -> list[SampleTokens]:
        """One sample a record.

        Raises:
            ValueError: an answer without a token or longer than answer_reserve_tokens, a question that max_length has
                no room for; the record is named.
        """
        prompts = self._encoded([prompt_text(record.input, record.question) for record in records], special=True)
        answers = self._encoded([answer_text(record.target) for record in records], special=False)
        samples = []
        for number, record in enumerate(records):
            answer = self._checked_answer(answers["input_ids"][number], record)
            prompt = np.asarray(prompts["input_ids"][number], np.int32)
            cut = prompt
            if len(prompt) > self.options.prompt_tokens:
                encoding = prompts.encodings[number] if prompts.encodings is not None else None
                cut = self._cut(prompt, encoding, record)
            ids = np.concatenate([cut, np.asarray(answer, np.int32)])
            samples.append(SampleTokens(ids, len(answer), len(prompt) + len(answer)))
        return samples

    def _encoded(self, texts: list[str], special: bool) -> Any:
        return self.tokenizer(
            texts,
            add_special_tokens=special,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # no warning that a text is longer than model_max_length
            **as_plain_text(self.tokenizer),
        )

    def _checked_answer(self, tokens: list[int], record: Record) -> list[int]:
        if not tokens or not record.target.strip():
            raise ValueError(f"{self.key} must hold an answer in every record; target of {record} is {record.target!r}")
        answer, reserve = [*tokens, *self._end], self.options.answer_reserve_tokens
        if len(answer) > reserve:
            eos = ", EOS included" if self._end else ""
            raise ValueError(
                f"data.answer_reserve_tokens must hold every answer; got {reserve}, but {record} has an answer of "
                f"{len(answer)} tokens{eos}"
            )
        return answer

    def _cut(self, prompt: NDArray[np.int32], encoding: Any, record: Record) -> NDArray[np.int32]:
        """`prompt` as exactly prompt_tokens tokens: its beginning, and what `truncate` keeps of its end."""
        if encoding is None:
            limit, kind = self.options.prompt_tokens, type(self.tokenizer).__name__
            raise ValueError(
                f"prompts over {limit} tokens need a fast tokenizer (tokenizer.is_fast) to be cut; got {kind}, and "
                f"{record} has {len(prompt)}"
            )
        special = encoding.special_tokens_mask
        size, leading, trailing = len(prompt), special.index(0), special[::-1].index(0)
        keep_from = size - trailing
        if self.options.truncate == "context":
            keep_from = self._question_begins(encoding, record, leading, keep_from)
        begin = self.options.prompt_tokens - (size - keep_from)
        if begin < leading:
            raise ValueError(
                f"data.max_length must hold the question and data.answer_reserve_tokens="
                f"{self.options.answer_reserve_tokens}; got {self.options.max_length}, but {record} needs at least "
                f"{leading + size - keep_from + self.options.answer_reserve_tokens}"
            )
        return np.concatenate([prompt[:begin], prompt[keep_from:]])

    def _question_begins(self, encoding: Any, record: Record, first: int, end: int) -> int:
        """The first token of what follows the input; first..end-1 are the tokens that are not special."""
        context = len(record.input)
        text = len(prompt_text(record.input, record.question))
        for character in range(context, text):
            token = encoding.char_to_token(character)
            if token is not None:
                break
        else:
            return end
        if character > context:  # offsets leave white space out; a tokenizer may still have tokens for it
            for _ in range(LINE_BREAKS):
                if token > first and self.tokenizer.decode([encoding.ids[token - 1]]).endswith("\n"):
                    token -= 1
        return token


FILE_NAME = "samples.arrow"
_SCHEMA = pa.schema(
    {
        "category_id": pa.int32(),
        "full_tokens": pa.int64(),  # of prompt and answer, before the prompt was cut
        "targets": pa.int32(),
        "lowest": pa.int32(),  # token ids
        "highest": pa.int32(),
        "question": pa.large_string(),
        "target": pa.large_string(),
    }
)


class BABILongSample(NamedTuple):
    """What a sample asks and what is right, as the file has them; category: its file's."""

    category: str
    question: str
    target: str


@dataclass
class SampleFactsWriter:
    """Collects facts in the order of the samples; cut: how many have a prompt that was cut, by cut_tokens in all."""

    columns: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in _SCHEMA.names})
    cut: int = 0
    cut_tokens: int = 0

    def add(self, category_id: int, record: Record, sample: SampleTokens) -> None:
        """One sample more."""
        ids = sample.input_ids
        self.cut += sample.full_tokens > len(ids)
        self.cut_tokens += sample.full_tokens - len(ids)
        values = (category_id, sample.full_tokens, sample.targets, int(ids.min()), int(ids.max()))
        for name, value in zip(_SCHEMA.names, (*values, record.question, record.target), strict=True):
            self.columns[name].append(value)

    def write(self, folder: Path) -> None:
        """The table, in `folder`."""
        table = pa.table(self.columns, schema=_SCHEMA)
        with pa.OSFile(str(folder / FILE_NAME), "wb") as sink, pa.ipc.new_file(sink, table.schema) as stream:
            stream.write_table(table)


class SampleFacts:
    """Columns of N samples: category_id, targets, lowest, highest int32[N] and full_tokens int64[N]; texts by row."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with pa.memory_map(str(folder / FILE_NAME)) as source:
            self._table = pa.ipc.open_file(source).read_all()
        numbers = {name: self._table[name].to_numpy() for name in _SCHEMA.names[:5]}
        self.category_id: NDArray[np.int32] = numbers["category_id"]
        self.full_tokens: NDArray[np.int64] = numbers["full_tokens"]
        self.targets: NDArray[np.int32] = numbers["targets"]
        self.lowest: NDArray[np.int32] = numbers["lowest"]
        self.highest: NDArray[np.int32] = numbers["highest"]

    def __len__(self) -> int:
        return len(self.targets)

    def __reduce__(self) -> tuple[type, tuple[Path]]:
        return type(self), (self.folder,)

    def text(self, row: int) -> tuple[str, str]:
        """(question, target) of a sample."""
        return self._table["question"][row].as_py(), self._table["target"][row].as_py()

    def cut_report(self, spans: Spans, names: dict[int, str], reason: str) -> list[OverLengthRow]:
        """A row for each category with samples of `spans` whose prompt was cut; tokens are those before the cut."""
        rows, kept = spans.row, spans.length.astype(np.int64)
        full, category = self.full_tokens[rows], self.category_id[rows]
        report = []
        for number in np.unique(category[full > kept]).tolist():
            cut = (category == number) & (full > kept)
            tokens, left = int(full[cut].sum()), int(kept[cut].sum())
            share = tokens / int(full.sum())
            report.append(OverLengthRow(names[number], reason, int(cut.sum()), tokens, share, left, tokens - left))
        return report

    def beyond_report(
        self, rows: NDArray[np.int64], in_use: int, lengths: NDArray[np.int64], names: dict[int, str]
    ) -> list[OverLengthRow]:
        """A row for each category with samples beyond the first `in_use` of `rows`; `lengths` int64[N] of all rows."""
        left = rows[in_use:]
        category, total = self.category_id[left], int(lengths[rows].sum())
        report = []
        for number in np.unique(category).tolist():
            beyond = lengths[left[category == number]]
            tokens = int(beyond.sum())
            reason, share = "beyond max_samples", tokens / total
            report.append(OverLengthRow(names[number], reason, len(beyond), tokens, share, tokens_removed=tokens))
        return report


def category_numbers(categories: Iterable[str]) -> dict[str, int]:
    """Category -> number from 1, in the order in which they first occur."""
    return {name: number for number, name in enumerate(dict.fromkeys(categories), start=1)}


FORMAT = 3  # to be raised when the same input is written as something else


def fingerprint(files: Sequence[BABILongFile], tokenizer: Any, options: BABILongOptions) -> str:
    """32 hex digits of everything that the tokens, categories and counts follow from.

    A file counts by its real path, size and time of change.
    """
    return digest(
        [
            FORMAT,
            file_facts(file.path for file in files),
            [file.category for file in files],
            tokenizer_facts(tokenizer),
            [options.max_length, options.answer_reserve_tokens, options.truncate],
            tokenizer.eos_token_id if options.append_eos else None,
        ]
    )


FACTS = "babilong.json"
BATCH_CHARACTERS = 1 << 22  # tokenised together: about 1M tokens, enough work for the tokenizer's threads

_logger = logging.getLogger(__name__)


def tokenised_folder(
    files: Sequence[BABILongFile], tokenizer: Any, options: BABILongOptions, key: str = "data.train_dir"
) -> Path:
    """The folder of these files' tokens, tokenised now unless it is there. Processes may call it at the same time.

    Raises:
        ValueError: files that cannot be used (`key` is named), a cache that cannot be written.
    """
    made_of = fingerprint(files, tokenizer, options)

    def make(folder: Path) -> None:
        _tokenise(folder, files, SampleTokenizer(tokenizer, options, key))

    folder = cached_folder(default_root("verl_ext_babilong", options.cache_dir), made_of, make)
    if fingerprint(files, tokenizer, options) != made_of:
        raise ValueError(f"{key} must not change while it is tokenised; one of its {len(files)} files did")
    return folder


def _tokenise(folder: Path, files: Sequence[BABILongFile], tokenizer: SampleTokenizer) -> None:
    """Write the dataset into `folder`, and say what was cut."""
    # Here, because the tokenise command's modules import config and transformers' template tools.
    from verl_ext.text.tokenized import DatasetWriter

    numbers = category_numbers(file.category for file in files)
    facts = SampleFactsWriter()
    writer = DatasetWriter(folder)
    try:
        _write_samples(files, numbers, tokenizer, writer, facts)
        writer.close()
    finally:
        writer.abandon()
    facts.write(folder)
    names = {str(number): name for name, number in numbers.items()}
    (folder / CATEGORIES).write_text(json.dumps(names, ensure_ascii=False), encoding="utf-8")
    made_of = {"files": [file.path for file in files], "options": vars(tokenizer.options)}
    (folder / FACTS).write_text(json.dumps(made_of, indent=2, default=str), encoding="utf-8")
    if facts.cut:
        _logger.warning(
            "%d of %d samples have prompts over %d tokens: cut by %d tokens in all (data.truncate=%s)",
            facts.cut,
            len(facts.columns["targets"]),
            tokenizer.options.prompt_tokens,
            facts.cut_tokens,
            tokenizer.options.truncate,
        )


def _write_samples(
    files: Sequence[BABILongFile],
    numbers: dict[str, int],
    tokenizer: SampleTokenizer,
    writer: Any,
    facts: SampleFactsWriter,
) -> None:
    from verl_ext.progress import Progress

    begun = time.monotonic()
    results = _results(files, numbers, tokenizer, facts)
    first = next(results)  # before the bar: files with a mistake at their start show none
    with Progress(sum(os.path.getsize(file.path) for file in files)) as progress:
        progress.started = begun
        for result in chain([first], results):
            writer.add(result)
            progress.add(result)


def _results(
    files: Sequence[BABILongFile], numbers: dict[str, int], tokenizer: SampleTokenizer, facts: SampleFactsWriter
) -> Iterator["Documents"]:
    """A result for every batch of records, whose facts are added; at least one."""
    from verl_ext.text.counts import Counts
    from verl_ext.text.documents import Documents

    for file in files:
        number = numbers[file.category]
        for records, num_bytes in _batches(file, tokenizer.key):
            samples = tokenizer.tokenise(records)
            for record, sample in zip(records, samples, strict=True):
                facts.add(number, record, sample)
            lengths = np.array([len(sample.input_ids) for sample in samples], np.int32)
            yield Documents(
                category_id=number,
                num_bytes=num_bytes,
                input_ids=np.concatenate([sample.input_ids for sample in samples]),
                loss_mask=np.concatenate([sample.loss_mask for sample in samples]),
                lengths=lengths,
                weights=None,
                counts=Counts(records=len(records), tokens=int(lengths.sum())),
            )


def _batches(file: BABILongFile, key: str) -> Iterator[tuple[list[Record], int]]:
    """(records of about BATCH_CHARACTERS together, at least one; bytes of the file that they stand for)."""
    records: list[Record] = []
    characters = size = 0
    for record, num_bytes in read_records(file, key):
        records.append(record)
        characters += len(record.input)
        size += num_bytes
        if characters >= BATCH_CHARACTERS:
            yield records, size
            records, characters, size = [], 0, 0
    if records:
        yield records, size


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
