r"""BABILongDataset: long-context questions in rows of exactly max_length tokens.

    input \n\nQuestion: question\nAnswer:     target         R = answer_reserve_tokens
    <bos> c0 c1 c2 c3 c4 q0 q1 q2            a0 [eos]       fits: at most max_length - R tokens before a0
    <bos> c0 c1 c2       q0 q1 q2            a0 [eos]       truncate=context: the last tokens of the input are gone
    <bos> c0 c1 c2 c3 c4                     a0 [eos]       truncate=right: the question is gone

Only the answer's tokens are targets, and the EOS after them if it is requested. The prompt is tokenized as a whole and
then cut in tokens, so that a cut prompt has exactly max_length - R tokens, whatever is merged across the seam. A token
that holds the end of the input and the first line break (".\n\n") belongs to the question. Special tokens that the
tokenizer adds at either end are kept.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from typing_extensions import override

from verl_ext.cache import fingerprint
from verl_ext.data.families.babilong_answers import is_right_answer
from verl_ext.data.families.texts import TextSet, TextSetOptions
from verl_ext.data.packs.options import DatasetOptions
from verl_ext.data.packs.sft_options import SFTOptions
from verl_ext.options import DataError, Options, UsageError, must, option, plain
from verl_ext.packing import MOST_TOKENS
from verl_ext.text.chat.special_tokens import SpecialTokens, as_plain_text
from verl_ext.text.encoder import Encoder
from verl_ext.text.encoder_texts import without_middle
from verl_ext.text.read.bad_record import BadRecord, check_characters
from verl_ext.text.read.readers import Chunk, ChunkSize, read_record
from verl_ext.text.read.sources import SourceFile, absolute_path
from verl_ext.text.tokens.documents import Document, Documents
from verl_ext.text.tokens.tokenizer import tokenizer_facts

FIELDS = ("input", "question", "target")
LINE_BREAKS = 2  # the most tokens that the two line breaks before "Question:" take


@dataclass(frozen=True)
class SampleOptions(Options):
    """The options by which a record becomes the tokens of a sample."""

    prefix: ClassVar[str] = "data"

    max_length: int = option(32768, "tokens of a row: prompt, answer and padding", least=2, most=MOST_TOKENS)
    answer_reserve_tokens: int = option(64, "tokens of max_length that are reserved for the longest answer", least=1)
    truncate: str = option(
        "context",
        "part that is cut from a longer prompt: context: the end of input; right: the prompt's end",
        choices=("context", "right"),
    )
    append_eos: bool = option(
        False, "true: the EOS token after the answer is a target too; val/…_accuracy outside qa1 to qa20 needs it"
    )

    @override
    def problems(self) -> Iterable[str | None]:
        length, reserve = self.max_length, self.answer_reserve_tokens
        if length <= reserve:
            yield must("data.max_length", f"be above data.answer_reserve_tokens={reserve}", length)


@dataclass(frozen=True)
class BABILongOptions(TextSetOptions, SampleOptions):
    """The options by which BABILong's records become rows."""

    reads: ClassVar[str] = "BABILong's JSON files"
    no_mixture: ClassVar[str] = "for BABILong, whose rows are one sample each"
    path_test = os.path.exists, "file or folder"

    train_ratio: float = option(
        0.9, "share of train_dir for training if val_dir is null; 1: no validation", above=0, most=1
    )
    max_tokens: int | None = option(None, "must be null or max_length: a pack is a row")  # type: ignore[assignment]
    strategy: str = option("none", "fixed: a row is one sample", choices=("none",))
    over_length: str = option("error", "fixed: truncate cuts longer prompts first", choices=("error",))
    pad_mode: str = option("right", "fixed: every row has max_length tokens", choices=("right",))
    mixture: Any = option(None, "must be null: a row is one sample")

    @override
    def problems(self) -> Iterable[str | None]:
        yield from super().problems()
        if self.max_tokens not in (None, self.max_length):
            yield must("data.max_tokens", f"be data.max_length={self.max_length} for BABILong", self.max_tokens)

    @property
    @override
    def packing(self) -> SFTOptions:
        return replace(self, max_tokens=self.max_length)


def question_prompt(context: str, question: str) -> str:
    """Return the prompt of a model; `context` is the record's input."""
    return f"{context}\n\nQuestion: {question}\nAnswer:"


class BABILongEncoder(Encoder):
    """An encoder of records: prompt and answer, cut to max_length tokens."""

    Options, texts = SampleOptions, ("question", "target")
    reads = f"JSON lists of records of {', '.join(FIELDS)}"
    options: SampleOptions

    @property
    def prompt_tokens(self) -> int:
        """The most tokens that a prompt may have."""
        return self.options.max_length - self.options.answer_reserve_tokens

    @cached_property
    def _special(self) -> SpecialTokens:
        return SpecialTokens(self.tokenizer, self.key)

    def open(self) -> None:
        """Check that the tokenizer has the tokens that are added."""
        if self.options.append_eos and self.tokenizer.eos_token_id is None:
            raise UsageError("data.append_eos=true needs a tokenizer with an eos_token; it has none")

    def fingerprint(self) -> str:
        """Return a digest of the tokenizer and the options."""
        return fingerprint([tokenizer_facts(self.tokenizer), self.tokenizer.eos_token_id, vars(self.options)])

    @override
    def read(self, file: SourceFile, size: ChunkSize) -> Iterator[Chunk]:
        is_empty = True
        for chunk in super().read(file, size):
            is_empty = is_empty and not chunk.records
            yield chunk
        if is_empty:
            raise DataError(f"{file.path}: must hold at least one record; it has none")

    @override
    def failure(self, bad: BadRecord, place: str) -> str:
        return f"{place}: {bad}"

    def encode(self, chunk: Chunk) -> Documents:
        """Return the documents of a chunk, one for each record."""
        records = [self._record(raw) for _, raw in chunk.records]
        usable = iter(self._tokens([record for record in records if isinstance(record, dict)]))
        places = (place for place, _ in chunk.records)
        makers = (
            partial(self._document, record, next(usable) if isinstance(record, dict) else None, place)
            for record, place in zip(records, places, strict=True)
        )
        return self.one_each(chunk, makers)

    def notices(self, total: Mapping[str, Any]) -> Iterator[str]:
        """Yield lines on how documents differ from records; total: the report's counts."""
        if cut := total["over_length"]:
            yield (
                f"{cut['documents']} of {total['documents']} samples have prompts over {self.prompt_tokens} "
                f"tokens: cut by {cut['tokens']} tokens in all (data.truncate={self.options.truncate})"
            )

    def _record(self, raw: Any) -> dict[str, Any] | BadRecord:
        try:
            if isinstance(raw, bytes):
                raise BadRecord("no_list", "the file is not a list: it has an object on each line")
            record = read_record(raw)
            for name in FIELDS:
                if name not in record:
                    raise BadRecord("no_text", f"the record has no {name}")
                if not isinstance(record[name], str):
                    raise BadRecord("non_string_text", must(name, "be a text", json.dumps(record[name])[:80]))
                check_characters(record[name])
                # A slow tokenizer would take the names of special tokens for the tokens themselves.
                if not getattr(self.tokenizer, "is_fast", False) and (named := self._special.found(record[name])):
                    needed = "which only a fast tokenizer can encode as text"
                    raise BadRecord("special_token", f"{name} holds the special token {named[0][0]}, {needed}")
            return record
        except BadRecord as bad:
            return bad

    def _tokens(self, records: Sequence[dict[str, Any]]) -> list[tuple[list[int], Any, list[int]]]:
        """Return (prompt, its encoding by a fast tokenizer, answer) of each record."""
        if not records:
            return []
        how = {"padding": False, "truncation": False, "return_attention_mask": False, "return_token_type_ids": False}
        how |= {"verbose": False, **as_plain_text(self.tokenizer)}  # avoids a warning above model_max_length
        prompts = self.tokenizer([question_prompt(record["input"], record["question"]) for record in records], **how)
        answers = self.tokenizer([f" {record['target']}" for record in records], add_special_tokens=False, **how)
        encodings = prompts.encodings or [None] * len(records)
        return list(zip(prompts["input_ids"], encodings, answers["input_ids"], strict=True))

    def _document(self, record: dict[str, Any] | BadRecord, tokens: Any, place: str) -> Document:
        """Return a record's document.

        Raises `BadRecord`, and `UsageError` for an answer longer than answer_reserve_tokens, or if max_length has no
        room for the question.
        """
        if isinstance(record, BadRecord):
            raise record
        prompt, encoding, answer = tokens
        answer = self._checked_answer(answer, record["target"], place)
        ids = np.asarray(prompt, np.int32)
        if len(prompt) > self.prompt_tokens:
            ids = without_middle(ids, self.prompt_tokens, self._last_tokens(len(prompt), encoding, record, place))
        mask = np.repeat([0, 1], [len(ids), len(answer)]).astype(np.int8)
        ids = np.append(ids, np.asarray(answer, np.int32))
        return Document(ids, mask, full_length=len(prompt) + len(answer), texts=[record[name] for name in self.texts])

    def _checked_answer(self, tokens: list[int], target: str, place: str) -> list[int]:
        if not tokens or not target.strip():
            raise BadRecord("empty", must("target", "be an answer", repr(target)))
        end = [self.tokenizer.eos_token_id] * self.options.append_eos
        answer, reserve = [*tokens, *end], self.options.answer_reserve_tokens
        if len(answer) > reserve:
            got = f"{reserve}, but {place} has an answer of {len(answer)} tokens{', EOS included' * len(end)}"
            raise UsageError(must("data.answer_reserve_tokens", "hold every answer", got))
        return answer

    def _last_tokens(self, size: int, encoding: Any, record: dict[str, Any], place: str) -> int:
        """Return how many of `size` tokens `truncate` keeps at the end."""
        if encoding is None:
            needed = f"hold a fast tokenizer, by which prompts over {self.prompt_tokens} tokens are cut"
            raise UsageError(must("model.path", needed, f"{type(self.tokenizer).__name__}, and {place} has {size}"))
        special = encoding.special_tokens_mask
        leading, keep_from = special.index(0), size - special[::-1].index(0)
        if self.options.truncate == "context":
            keep_from = self._question_begins(encoding, record, leading, keep_from)
        if self.prompt_tokens - (size - keep_from) < leading:
            reserve = self.options.answer_reserve_tokens
            got = f"{self.options.max_length}, but {place} needs at least {leading + size - keep_from + reserve}"
            raise UsageError(
                must("data.max_length", f"hold the question and data.answer_reserve_tokens={reserve}", got)
            )
        return size - keep_from

    def _question_begins(self, encoding: Any, record: dict[str, Any], first: int, end: int) -> int:
        """Return the question's first token; tokens first..end-1 are not special."""
        context = len(record["input"])
        characters = range(context, len(question_prompt(record["input"], record["question"])))
        found = ((at, token) for at in characters if (token := encoding.char_to_token(at)) is not None)
        character, token = next(found, (context, end))
        if character > context:  # offsets omit white space, for which a tokenizer may still have tokens
            for _ in range(LINE_BREAKS):
                if token > first and self.tokenizer.decode([encoding.ids[token - 1]]).endswith("\n"):
                    token -= 1
        return token


def find_task_files(paths: Sequence[str], key: str) -> list[tuple[SourceFile, str]]:
    """Return (file, category) of JSON files, or of folders' *.json, */*.json.

    The paths keep their order; a folder's files are sorted by name, numbers by value. The category of …/qa1/32k.json is
    `<task>_<size>`, or else the file's stem. Raises ValueError, which names `key`, if there are none.
    """
    found = []
    for file in (file for path in paths for file in _json_files(Path(absolute_path(path)), key)):
        category = f"{file.parent.name}_{file.stem}" if re.fullmatch(r"qa\d+", file.parent.name) else file.stem
        found.append((SourceFile(0, str(file), "json", file.stat().st_size), category))
    return found


def _json_files(path: Path, key: str) -> list[Path]:
    if path.is_file():
        return [path]
    wanted = f"{key} must name a BABILong JSON file, or a folder of them; {path}"
    if not path.exists():
        raise ValueError(f"{wanted} does not exist")
    files = (*path.glob("*.json"), *path.glob("*/*.json"))
    found = [file for file in files if file.is_file() and not file.name.startswith(".")]
    if not found:
        raise ValueError(f"{wanted} has no *.json or */*.json")
    return sorted(found, key=_numbers_by_value)  # 2k before 10k


def _numbers_by_value(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", str(path))]


class BABILongQuestion(NamedTuple):
    """A sample's question, its right answer, and its file's category."""

    category: str
    question: str
    target: str


class BABILongDataset(TextSet):
    """A dataset of BABILong's JSON of {input, question, target}, drawn above.

    Its own constructor form is `BABILongDataset(path, tokenizer, max_length)`; `find_files` describes the path.
    """

    Options: ClassVar[type[DatasetOptions]] = BABILongOptions
    options: BABILongOptions
    encoder, find_files = BABILongEncoder, staticmethod(find_task_files)
    paths_are = "a BABILong JSON file, or a folder of them"

    def __init__(
        self,
        path: str | Sequence[str] | None = None,
        tokenizer: Any = None,
        max_length: int | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        **given: Any,
    ) -> None:
        """Open the files; `given` are arguments of TextSet."""
        node = {**(plain(config) or {}), "pad_mode": "right"}  # verl's own node says no_padding
        if max_length is not None:
            node["max_tokens"] = None
        elif node.get("max_length") is None:
            raise ValueError(must("data.max_length", "be given (tokens of a row)", "nothing"))
        if tokenizer is not None and tokenizer.pad_token_id is None and tokenizer.eos_token_id is None:
            needed = "hold a tokenizer with a pad_token or an eos_token to pad with"
            raise ValueError(must("model.path", needed, "one with neither"))
        super().__init__(path, tokenizer, max_length, config=node, **given)

    @property
    def cut_reason(self) -> str:  # type: ignore[override]
        """The report's name for a cut prompt."""
        return "context truncated" if self.options.truncate == "context" else "question truncated"

    def question(self, pack: int) -> BABILongQuestion:
        """Return the question of row `pack`, the right answer and its category."""
        row, columns = int(self.spans.row[pack]), self.data.document_columns
        assert columns is not None, "a set of texts has them"
        name = self.packs.documents.category_names[int(columns.category[row])]
        return BABILongQuestion(name, *(self.data.text(column, row) for column in BABILongEncoder.texts))

    def is_right_answer(self, pack: int, answer: str) -> bool:
        """Return whether a text answers a row's question by its task's rule."""
        category, question, target = self.question(pack)
        return is_right_answer(answer, target, question, category)
