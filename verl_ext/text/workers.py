"""Jobs done by several processes, results in the order of the jobs.

Chunks of records tokenised: the part that runs in every worker process.
"""

import gc
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from verl_ext.commands.tokenize import TokenizeConfig
from verl_ext.text.chat import ChatRenderer
from verl_ext.text.chat_template import Span
from verl_ext.text.counts import Counts, Run, preview_of
from verl_ext.text.documents import Document, Documents, fit, joined
from verl_ext.text.encoders import Encoded, TextEncoder, mask_from_offsets, mask_from_prefixes
from verl_ext.text.json_records import BadRecord, parse_line
from verl_ext.text.readers import Chunk, Place, TextFile
from verl_ext.text.records import Chat, PlainText, Record, category_of, parse_record
from verl_ext.text.special_tokens import ChatText
from verl_ext.text.tokenizer import load_tokenizer
from verl_ext.values import DataError, UsageError, one_line

JOBS_PER_WORKER = 4  # in flight: enough that none waits for the slowest, few enough to bound memory

State = TypeVar("State")
Job = TypeVar("Job")
Result = TypeVar("Result")


def available_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ordered_results(
    make_state: Callable[[], State],
    work: Callable[[State, Job], Result],
    jobs: Iterable[Job],
    num_workers: int,
    *,
    name: str,
    preload: Sequence[str] = (),
) -> Iterator[Result]:
    """Yield `work(state, job)` of every job, in order, with the same values for any `num_workers` (1: in this process).

    `make_state` is called once in each process. Both functions, the jobs and the results must pickle; `preload` names
    modules that workers have from the start. At most JOBS_PER_WORKER jobs per worker are taken ahead of the result
    that is yielded. Raises what the first failing job raises, and `DataError` when a worker, called `name`, dies.
    """
    if num_workers == 1:
        state = make_state()
        gc.freeze()
        try:
            for job in jobs:
                yield work(state, job)
        finally:
            gc.unfreeze()
        return
    context = _context([*preload, work.__module__])
    pool = ProcessPoolExecutor(num_workers, context, initializer=_start_worker, initargs=(make_state, work))
    pending: deque[Future[Result]] = deque()
    try:
        for job in jobs:
            pending.append(pool.submit(_do, job))
            if len(pending) >= num_workers * JOBS_PER_WORKER:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            f"a {name} worker died, perhaps for want of memory; a lower num_workers needs less"
            f" (num_workers={num_workers} here)"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _context(preload: list[str]) -> multiprocessing.context.BaseContext:
    """A start method that never forks this process, whose libraries may hold threads and locks."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # Imported once in the server, which takes seconds; every worker is a fork of it.
    context.set_forkserver_preload(preload)
    return context


# Of a worker process.
_make_state: Callable[[], Any]
_work: Callable[[Any, Any], Any]
_states: list[Any] = []  # none or one


def _start_worker(make_state: Callable[[], Any], work: Callable[[Any, Any], Any]) -> None:
    global _make_state, _work
    _make_state, _work = make_state, work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Leave when the parent is gone, killed included: a worker would wait for its next job for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _do(job: Any) -> Any:
    # Made with the first job and not at the start: an error then arrives as this job's, not as a broken pool.
    if not _states:
        _states.append(_make_state())
        gc.freeze()  # what stays is not looked through again: a tenth of the time, where work makes many small objects
    return _work(_states[0], job)


@dataclass
class _Prepared:
    number: Place
    text: str | TextFile | ChatText
    weight: float | None
    category: str | None


@dataclass
class _Bad:
    number: Place
    category: str | None
    error: BadRecord
    is_fatal: bool = True  # under on_bad_record=error


@dataclass
class _Outcome:
    documents: list[Document] = field(default_factory=list)
    categories: list[str | None] = field(default_factory=list)  # of the documents
    bad: list[_Bad] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    by_category: dict[str, Counts] = field(default_factory=dict)
    preview: list[list[Run]] = field(default_factory=list)

    def tallies(self, category: str | None) -> list[Counts]:
        """Those that count a record: its source's, and its category's where records give it."""
        return [self.counts, *([self.by_category.setdefault(category, Counts())] if category is not None else [])]


class ChunkTokenizer:
    """Turns chunks into token arrays with one tokenizer and one configuration."""

    def __init__(self, config: TokenizeConfig) -> None:
        self.config = config
        self.tokenizer = load_tokenizer(config.model)
        self.encoder = TextEncoder(self.tokenizer, config.special_tokens_in_text)
        self._tokens: dict[str, bool] = {}  # texts that end turns: whether each is one token

    def tokenise(self, chunk: Chunk) -> Documents:
        """Tokenise a chunk; `DataError` for the first bad record under `on_bad_record=error`."""
        outcome = _Outcome(counts=Counts(records=len(chunk.records)))
        prepared = list(self._prepared(chunk, outcome))
        for item, document in self._encoded(prepared, outcome):
            self._keep(document, item, chunk.path, outcome)
        for bad in sorted(outcome.bad, key=lambda bad: bad.number):
            reason, line = bad.error.reason, f"{chunk.place(bad.number)}: {bad.error}"
            if self.config.on_bad_record == "error" and bad.is_fatal:
                raise DataError(f"{line} ({reason}; on_bad_record=skip leaves such records out)")
            for tally in outcome.tallies(bad.category):
                tally.add_bad(reason, line)
        for tally in (outcome.counts, *outcome.by_category.values()):
            ends = {end: turns for end, turns in tally.end_of_turn.items() if end and not self._is_token(end)}
            tally.text_ends.update(ends)
        return _result(chunk, outcome)

    def _prepared(self, chunk: Chunk, outcome: _Outcome) -> Iterator[_Prepared]:
        for number, raw in chunk.records:
            category = self._source_name(chunk) if self.config.category_field else None
            try:
                raw = parse_line(raw) if isinstance(raw, bytes) else raw
                category = self._category(raw, category, outcome)
                record = parse_record(raw, self.config.columns, drop_media=self.config.media == "drop")
                texts = self._texts(record.content)
                self._count_fields(record, outcome.tallies(category))
                for text in texts:
                    yield _Prepared(number, text, record.weight, category)
            except RecursionError:
                error = BadRecord("malformed_json", "the record is nested too deep")
                outcome.bad.append(_Bad(number, category, error))
            except BadRecord as error:
                is_fatal = error.reason != "unprinted" or self.config.on_unprinted == "error"
                outcome.bad.append(_Bad(number, category, error, is_fatal))
            for tally in outcome.tallies(category)[1:]:
                tally.records += 1

    def _source_name(self, chunk: Chunk) -> str:
        return list(self.config.sources)[chunk.category_id - 1]

    def _category(self, raw: Any, source: str | None, outcome: _Outcome) -> str | None:
        """The category that a record gives, or else its source's name; None without `category_field`."""
        if source is None or self.config.category_field is None:
            return None
        category = category_of(raw, self.config.category_field)
        outcome.counts.uncategorised += category is None
        return source if category is None else category

    def _count_fields(self, record: Record, tallies: list[Counts]) -> None:
        """Count the fields that nothing reads: of messages those that the template does not name."""
        if not (record.unused or record.message_fields or record.dropped):
            return
        category = self.config.category_field or ""
        unused = (name for name in record.unused if name not in (category, category.partition(".")[0]))
        counts = Counter(map(one_line, unused))
        names = self._template_words if record.message_fields else set()
        counts.update(
            {one_line(f"messages.{name}"): n for name, n in record.message_fields.items() if name not in names}
        )
        for tally in tallies:
            tally.unused_fields.update(counts)
            tally.dropped_media.update(record.dropped)

    @cached_property
    def _template_words(self) -> set[str]:
        return set(re.findall(r"\w+", self.chats.template_source))

    def _texts(self, content: Chat | PlainText) -> Sequence[str | TextFile | ChatText]:
        if isinstance(content, Chat):
            texts = self.chats.texts(content)
            for text in texts:
                _check_characters(text.text)
            return texts
        if isinstance(content.text, str):
            _check_characters(content.text)
        return [content.text]

    @cached_property
    def chats(self) -> ChatRenderer:
        """Made for the first chat: texts need no chat template."""
        return ChatRenderer(self.tokenizer, self.encoder.special, self.config)

    def _encoded(self, prepared: list[_Prepared], outcome: _Outcome) -> Iterator[tuple[_Prepared, Document]]:
        """The document of every text, in order."""
        chats = iter(self.encoder.encode_chats([item.text for item in prepared if isinstance(item.text, ChatText)]))
        plain = [item.text for item in prepared if not isinstance(item.text, ChatText)]
        texts = iter(self.encoder.encode(plain, add_special_tokens=True))
        for item in prepared:
            encoded = next(chats) if isinstance(item.text, ChatText) else next(texts)
            try:
                if not isinstance(encoded, Encoded):
                    raise encoded
                ids, mask = self._with_mask(encoded, item.text)
                if not mask.any():
                    raise BadRecord("no_target", "no token is left to learn after the first")
                weights = self._weights(encoded, item, len(ids))
            except BadRecord as error:
                outcome.bad.append(_Bad(item.number, item.category, error))
                continue
            for tally in outcome.tallies(item.category):
                tally.add_special_tokens(encoded.special_tokens)
                if isinstance(item.text, ChatText):
                    _add_chat(tally, item.text)
            yield item, Document(ids, mask, weights)

    def _with_mask(self, encoded: Encoded, text: str | TextFile | ChatText) -> tuple[np.ndarray, np.ndarray]:
        """A document's tokens and int8 mask; a plain text ends with EOS."""
        if isinstance(text, ChatText):
            ids = encoded.ids
            mask, text.border_tokens = self._span_mask(encoded, text, text.rendered.spans)
        else:
            ids = self._with_eos(encoded.ids)
            mask = np.ones(len(ids), dtype=np.int8)
        mask[:1] = 0
        return ids, mask

    def _span_mask(self, encoded: Encoded, chat: ChatText, spans: list[Span]) -> tuple[np.ndarray, int]:
        if encoded.offsets is not None:
            return mask_from_offsets(chat.text, encoded.offsets, spans)
        return mask_from_prefixes(encoded.ids.tolist(), chat.text, spans, self._chat_ids), 0

    def _weights(self, encoded: Encoded, item: _Prepared, tokens: int) -> np.ndarray | None:
        """weights[T] float32: the record's weight times that of the turn a token is in; None where neither is given."""
        targets = item.text.rendered.targets if isinstance(item.text, ChatText) else []
        turn_weights = {target.weight for target in targets} - {1.0}
        if item.weight is None and not turn_weights:
            return None
        weights = np.full(tokens, 1.0 if item.weight is None else item.weight, np.float64)
        for weight in turn_weights:
            assert isinstance(item.text, ChatText)
            spans = [target.span for target in targets if target.weight == weight]
            weights[self._span_mask(encoded, item.text, spans)[0] == 1] *= weight
        return weights.astype(np.float32)

    def _is_token(self, text: str) -> bool:
        if text not in self._tokens:
            self._tokens[text] = len(self._chat_ids(text)) == 1
        return self._tokens[text]

    def _chat_ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _with_eos(self, ids: np.ndarray) -> np.ndarray:
        eos = self.tokenizer.eos_token_id
        if eos is None:
            raise UsageError(f"the tokenizer of {self.config.model.tokenizer} must have an eos_token for text records")
        return ids if len(ids) and ids[-1] == eos else np.append(ids, np.int32(eos))

    def _keep(self, document: Document, item: _Prepared, path: str, outcome: _Outcome) -> None:
        over_length: Counter[str] = Counter()
        tallies = outcome.tallies(item.category)
        try:
            pieces = fit(document, self.config.max_tokens, self.config.over_length, over_length)
        except BadRecord as error:
            # A target lost to truncation follows from the policy asked for, not from bad data.
            outcome.bad.append(_Bad(item.number, item.category, error, is_fatal=False))
            return
        except DataError as error:
            raise DataError(f"{path}:{item.number}: {error}") from error
        for tally in tallies if over_length else ():
            tally.over_length.update(over_length)
        for piece in pieces:
            outcome.documents.append(piece)
            outcome.categories.append(item.category)
            if len(outcome.preview) < self.config.preview:
                outcome.preview.append(preview_of(piece.input_ids, piece.loss_mask, self._decode))
            for tally in tallies:
                tally.add_document(len(piece.input_ids), int(piece.loss_mask.sum()))

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _check_characters(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRecord("invalid_text", "the text has half a surrogate pair, which is no character") from error


def _result(chunk: Chunk, outcome: _Outcome) -> Documents:
    found = joined(outcome.documents, chunk.category_id, chunk.num_bytes, outcome.counts)
    if outcome.by_category:
        found.category_names = [name for name in outcome.categories if name is not None]
        found.category_counts = outcome.by_category
    found.preview = outcome.preview
    return found


def _add_chat(counts: Counts, chat: ChatText) -> None:
    """Count what ends the turns of a chat that is written, and what its template leaves out."""
    counts.end_of_turn.update(t.closed_by for t in chat.rendered.targets if t.closed_by is not None)
    counts.unprinted.update(chat.rendered.unprinted)
    counts.border_tokens += chat.border_tokens
