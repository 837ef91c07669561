"""Records as documents: tokens, records that are no documents, batches, and the cut after max_corpus_tokens."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers

from tests.test_tokenize_templates import tiny_tokenizer
from verl_ext.data.stream.megatron.index import TokenIndex
from verl_ext.data.stream.megatron.writer import TextIndexes, write_text_indexes
from verl_ext.data.stream.multidoc import MultiDocOptions
from verl_ext.options import DataError, UsageError
from verl_ext.text.encoder_texts import BadText, PlainDocuments, TextOptions, TextTokenizer, vocabulary_size
from verl_ext.text.read.readers import Batch, Chunk, read_batches
from verl_ext.text.read.sources import SourceFile, find_source_files
from verl_ext.text.tokens.documents import Counts

TOKENIZER = tiny_tokenizer()
EOS, BOS = TOKENIZER.eos_token_id, TOKENIZER.bos_token_id


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def batch(*records: Any) -> Batch:
    return Batch(1, [Chunk(1, "a.jsonl", list(enumerate(records, start=1)), 10)])


def documents(result: PlainDocuments) -> list[list[int]]:
    return [part.tolist() for part in np.split(result.tokens, np.cumsum(result.lengths))[:-1]]


def tokenized_from(*records: Any, add_bos: bool = False, **options: Any) -> PlainDocuments:
    return TextTokenizer(TOKENIZER, TextOptions(**options), add_bos).tokenize(batch(*records))


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("add_eos", [False, True])
def test_a_document_is_its_tokens_between_the_tokens_asked_for(add_bos: bool, add_eos: bool) -> None:
    texts = ["the cat", "sat on the mat", "a<|im_end|>"]
    options = {"add_bos": add_bos, "add_eos": add_eos, "special_tokens_in_text": "keep"}
    result = tokenized_from(*({"text": text} for text in texts), **options)
    assert documents(result) == [[BOS] * add_bos + ids(text) + [EOS] * add_eos for text in texts]
    assert (result.tokens.dtype, result.lengths.dtype) == (np.uint16, np.int64)


def test_fields_of_a_record_are_joined_by_newlines() -> None:
    record = {"question": "the cat?", "answer": "sat", "text": "other"}
    result = tokenized_from(record, b'{"answer": "b", "question": "a"}', text_key=["question", "answer"], add_eos=False)
    assert documents(result) == [ids("the cat?\nsat"), ids("a\nb")]


def test_text_key_is_of_records_and_not_of_text_files() -> None:
    given = Batch(1, [Chunk(1, "a.txt", [(1, {"text": "the cat"})], 7, whole_file=True)])
    result = TextTokenizer(TOKENIZER, TextOptions(text_key="question", add_eos=False)).tokenize(given)
    assert documents(result) == [ids("the cat")]


BAD = [
    (b'{"text": ', "malformed_json", "a.jsonl:2: malformed JSON"),
    (b'{"text": "\xff"}', "malformed_json", "a.jsonl:2: malformed JSON: no UTF-8 at byte 11"),
    ([1], "not_an_object", "a.jsonl:2: a record must be an object with fields; got list"),
    ({"txt": "x", "id": 3}, "no_text", "a.jsonl:2: text_key must name a field of the record; got text, its fields are"),
    ({"text": 3}, "non_string_text", "a.jsonl:2: text must be a string; got int"),
    ({"text": ""}, "empty", "a.jsonl:2: the text is empty"),
    ({"text": " \n\t\u3000"}, "empty", "a.jsonl:2: the text is empty"),
    ({"text": "a\ud800"}, "invalid_text", "a.jsonl:2: the text has half a surrogate pair"),
]


@pytest.mark.parametrize(("record", "reason", "line"), BAD)
def test_what_cannot_be_used_is_named_with_its_place(record: Any, reason: str, line: str) -> None:
    good = {"text": "the cat"}
    skipped = tokenized_from(good, record, good, on_bad_record="skip")
    assert (len(skipped.lengths), skipped.failure) == (2, None)
    ((after, found, told),) = [(bad.after, bad.reason, bad.line) for bad in skipped.bad]
    assert (after, found) == (1, reason)
    assert told.startswith(line)
    assert "\n" not in told
    stopped = tokenized_from(good, record, good)
    assert len(stopped.lengths) == 1
    assert stopped.failure == f"{told} ({reason}; on_bad_record=skip leaves such records out)"


def test_a_text_without_a_token_is_empty() -> None:
    tokenizer = deepcopy(TOKENIZER)
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("\u00ad", "")
    result = TextTokenizer(tokenizer, TextOptions()).tokenize(batch({"text": "a"}, {"text": "\u00ad"}, {"text": "b"}))
    assert (len(result.lengths), [bad.reason for bad in result.bad]) == (1, ["empty"])


@pytest.mark.parametrize("name", ["eos", "bos"])
def test_a_token_that_the_tokenizer_lacks_cannot_be_added(name: str) -> None:
    tokenizer = deepcopy(TOKENIZER)
    setattr(tokenizer, f"{name}_token", None)
    with pytest.raises(UsageError, match=f"^data.add_{name} must be false for a tokenizer that has no {name}_token"):
        TextTokenizer(tokenizer, MultiDocOptions(), add_bos=True)
    TextTokenizer(tokenizer, TextOptions(add_eos=name != "eos"), add_bos=name != "bos")


class Numbers:
    """A tokenizer whose texts list their tokens; it has `size` tokens, numbered up to `highest`."""

    is_fast = False
    eos_token_id = 0

    def __init__(self, size: int, highest: int) -> None:
        self.size, self.highest = size, highest

    def __len__(self) -> int:
        return self.size

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0, "b": self.highest}

    def __call__(self, texts: list[str], **_: Any) -> dict[str, Any]:
        return {"input_ids": [[int(word) for word in text.split()] for text in texts]}


@pytest.mark.parametrize(
    ("size", "highest", "dtype"),
    [(65_499, 65_498, np.uint16), (65_500, 65_499, np.int32), (60_000, 65_600, np.int32), (2, 1, np.uint16)],
)
def test_tokens_are_as_wide_as_the_vocabulary_needs(size: int, highest: int, dtype: Any) -> None:
    worker = TextTokenizer(Numbers(size, highest), TextOptions())
    assert worker.dtype == dtype
    result = worker.tokenize(batch({"text": f"{highest} 1"}))
    assert result.tokens.tolist() == [highest, 1, 0]


@pytest.mark.parametrize("token", [-1, 12, 70_000])
def test_a_token_outside_the_vocabulary_is_refused(token: int) -> None:
    worker = TextTokenizer(Numbers(10, 11), TextOptions())
    assert worker.vocabulary == vocabulary_size(worker.tokenizer) == 12
    with pytest.raises(UsageError, match=rf"tokens of its vocabulary, 0\.\.11; got {token}$"):
        worker.tokenize(batch({"text": f"1 {token}"}))


def write_index(files: list[SourceFile], prefix: Path, **options: Any) -> Counts:
    """Tokenize one source in this process, and return the counts."""
    tokenizer = TextTokenizer(TOKENIZER, MultiDocOptions(**options))
    return write_text_indexes(files, tokenizer, {"data.train_dir": prefix})["data.train_dir"]


def text_files(folder: Path, sizes: list[list[int]]) -> list[SourceFile]:
    """Write files of given sizes in bytes, by source."""
    for source, lengths in enumerate(sizes):
        (folder / str(source)).mkdir()
        for number, length in enumerate(lengths):
            (folder / str(source) / f"{number:03d}.txt").write_text("a" * length)
    return find_source_files({str(source): [str(folder / str(source))] for source in range(len(sizes))})


def test_small_files_of_one_source_share_a_batch(tmp_path: Path) -> None:
    files = text_files(tmp_path, [[30, 30, 50, 1, 200, 1], [5, 5]])
    batches = list(read_batches(files, lambda source: False, batch_bytes=100))
    assert [(p.source, [chunk.num_bytes for chunk in p.chunks]) for p in batches] == [
        (1, [30, 30, 50]),
        (1, [1, 200]),
        (1, [1]),
        (2, [5, 5]),
    ]


def test_nothing_more_of_a_full_source_is_read(tmp_path: Path) -> None:
    files = text_files(tmp_path, [[100] * 5, [100]])
    for file in files[2:5]:
        Path(file.path).unlink()  # would be reported
    taken: list[Batch] = []
    for found in read_batches(files, lambda source: source == 1 and len(taken) == 2, batch_bytes=100):
        taken.append(found)
    assert [p.source for p in taken] == [1, 1, 2]
    assert [p.failure for p in taken] == [None] * 3


def test_a_file_that_cannot_be_read_ends_its_source_after_the_documents_before_it(tmp_path: Path) -> None:
    files = text_files(tmp_path, [[10, 10, 10], [10]])
    Path(files[1].path).unlink()
    first, second = read_batches(files, lambda source: False)
    assert [chunk.path for chunk in first.chunks] == [files[0].path]
    assert first.failure is not None
    assert first.failure.startswith(f"{files[1].path}: cannot be read")
    assert (second.source, second.failure) == (2, None)


# document lengths by batch; 0 stands for a bad record
STREAMS = st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=5)


@given(stream=STREAMS, max_tokens=st.integers(1, 40), fails=st.booleans())
def test_a_stream_is_cut_after_max_tokens_and_counts_no_record_after_the_cut(
    stream: list[list[int]], max_tokens: int, fails: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    prefix = tmp_path_factory.mktemp("cut") / "out"
    index = TextIndexes({"a": prefix}, np.dtype(np.uint16), max_tokens)
    results, number = [], 0
    for records in stream:
        lengths = np.array([length for length in records if length], dtype=np.int32)
        tokens = np.arange(number, number + lengths.sum(), dtype=np.uint16)
        number += len(tokens)
        afters = [int(np.count_nonzero(records[:at])) for at, length in enumerate(records) if not length]
        results.append(
            PlainDocuments(
                1,
                9,
                tokens,
                lengths,
                [BadText(after, "empty", "x") for after in afters],
                None,
                np.zeros(len(lengths), np.int64),
            )
        )
    results[-1].failure = "broken" if fails else None
    if fails and number < max_tokens:
        with pytest.raises(DataError, match=r"^broken$"):
            [index.add(result) for result in results]
    else:
        written = [index.add(result) for result in results]
        assert sum(w.tokens for w in written) == min(number, max_tokens)
        assert sum(w.num_bytes for w in written) == 9 * len(stream)
    if not number:
        with pytest.raises(DataError, match=r"^a must hold at least one document"):
            index.close()
        index.abandon()
        return
    index.close()
    # The same rule, record by record.
    kept, bad, tokens_left = [], 0, max_tokens
    for length in (length for records in stream for length in records):
        if tokens_left == 0:
            break
        bad += not length
        kept += [min(length, tokens_left)] if length else []
        tokens_left -= min(length, tokens_left)
    found = TokenIndex(prefix)
    assert [token for place in range(found.num_documents) for token in found.tokens(place)] == [*range(sum(kept))]
    assert found.lengths.tolist() == kept
    counts = index.counts["a"]
    assert (counts.documents, counts.tokens) == (len(kept), sum(kept))
    assert (counts.bad.total(), counts.records) == (bad, bad + len(kept))
    assert sorted(counts.lengths.elements()) == sorted(kept)
    assert index.is_full(1) == (tokens_left == 0)


def test_the_same_work_runs_inside_a_process_with_a_tokenizer_at_hand(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("the cat", "", "sat")))
    (tmp_path / "b.txt").write_text("on the mat\n")
    files = find_source_files({"a": [str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")]})
    counts = write_index(files, tmp_path / "out", on_bad_record="skip")
    index = TokenIndex(tmp_path / "out")
    expected = [[*ids(text), EOS] for text in ("the cat", "sat", "on the mat\n")]
    assert [index.tokens(number).tolist() for number in range(index.num_documents)] == expected
    assert (counts.documents, counts.tokens, dict(counts.bad)) == (3, sum(map(len, expected)), {"empty": 1})
    with pytest.raises(DataError, match=r"a\.jsonl:2: the text is empty \(empty; data\.on_bad_record=skip leaves"):
        write_index(files, tmp_path / "none")
    with pytest.raises(DataError, match=r"^data\.train_dir must hold at least one document; got none \(no_text: 3\)"):
        write_index(files[:1], tmp_path / "none", text_key="body", on_bad_record="skip")
    assert not list(tmp_path.glob("none*"))


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ('{"text": "the cat"}\n{"text": 3}\n', "a.jsonl:2: text must be a string"),
        ("", "data.train_dir must hold at least one document; got none"),
    ],
)
def test_a_mistake_at_the_start_is_told_without_a_bar(
    content: str, line: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    files = find_source_files({"a": [str(tmp_path / "a.jsonl")]})
    with pytest.raises(DataError, match=line):
        write_index(files, tmp_path / "out")
    assert capfd.readouterr().err == ""
    (tmp_path / "a.jsonl").write_text('{"text": "the cat"}\n' * 9)
    write_index(files, tmp_path / "out")
    assert "9 records" in capfd.readouterr().err


def test_a_document_too_long_for_the_format_names_the_key_of_its_text(tmp_path: Path) -> None:
    tokens = np.broadcast_to(np.uint16(0), 2**31)  # one element in memory
    index = TextIndexes({"data.val_dir": tmp_path / "out"}, np.dtype(np.uint16))
    with pytest.raises(ValueError, match=r"^data\.val_dir must give documents of at most 2147483647 tokens"):
        index.add(PlainDocuments(1, 9, tokens, np.array([2**31]), [], None, np.zeros(1, np.int64)))
    index.abandon()
    assert list(tmp_path.iterdir()) == []
