"""Records as documents: tokens, records that are no documents, batches, and the cut after max_corpus_tokens."""

import json
from copy import deepcopy
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from tests.lib.chat_templates import tiny_tokenizer
from tests.lib.errors import names, refused
from verl_ext.data.stream.megatron.index import IndexWriter, TokenIndex
from verl_ext.data.stream.megatron.writer import TextIndexes, write_text_indexes
from verl_ext.data.stream.multidoc import MultiDocOptions
from verl_ext.options import DataError, UsageError
from verl_ext.text.encoder_texts import TextOptions, TextRecordEncoder, optimal_dtype
from verl_ext.text.read.readers import Chunk, ChunkSize, read_files
from verl_ext.text.read.sources import SourceFile, find_source_files
from verl_ext.text.read.text_file import TextFile
from verl_ext.text.tokenizing import tokenize_files
from verl_ext.text.tokens.counts import Counts
from verl_ext.text.tokens.documents import Documents

TOKENIZER = tiny_tokenizer()
EOS, BOS = TOKENIZER.eos_token_id, TOKENIZER.bos_token_id


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def encoded(*records: Any, tokenizer: Any = TOKENIZER, add_bos: bool = False, **options: Any) -> Documents:
    encoder = TextRecordEncoder(TextOptions(**options), tokenizer, add_bos=add_bos)
    return encoder.encode(Chunk(1, [(f"a.jsonl:{number}", record) for number, record in enumerate(records, start=1)]))


def documents(result: Documents) -> list[list[int]]:
    return [part.tolist() for part in np.split(result.input_ids, np.cumsum(result.lengths))[:-1]]


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("add_eos", [False, True])
def test_a_document_is_its_tokens_between_the_tokens_asked_for(add_bos: bool, add_eos: bool) -> None:
    texts = ["the cat", "sat on the mat", "a<|im_end|>"]
    options = {"add_bos": add_bos, "add_eos": add_eos, "special_tokens_in_text": "keep"}
    result = encoded(*({"text": text} for text in texts), **options)
    assert documents(result) == [[BOS] * add_bos + ids(text) + [EOS] * add_eos for text in texts]
    targets = [mask.tolist() for mask in np.split(result.loss_mask, np.cumsum(result.lengths))[:-1]]
    assert targets == [[0] + [1] * (len(document) - 1) for document in documents(result)]


def test_fields_of_a_record_are_joined_by_newlines() -> None:
    record = {"question": "the cat?", "answer": "sat", "text": "other"}
    result = encoded(record, b'{"answer": "b", "question": "a"}', text_key=["question", "answer"], add_eos=False)
    assert documents(result) == [ids("the cat?\nsat"), ids("a\nb")]


def test_text_key_is_of_records_and_not_of_text_files() -> None:
    for record in (TextFile("a.txt", "the cat"), {"question": "the cat"}):
        assert documents(encoded(record, text_key="question", add_eos=False)) == [ids("the cat")]


BAD = [
    (b'{"text": ', "malformed_json", "malformed"),
    (b'{"text": "\xff"}', "malformed_json", "UTF-8 at byte 11"),
    ([1], "not_an_object", "list"),
    ({"txt": "x", "id": 3}, "no_text", "text_key"),
    ({"text": 3}, "non_string_text", "int"),
    ({"text": ""}, "empty", "empty"),
    ({"text": " \n\t\u3000"}, "empty", "empty"),
    ({"text": "a\ud800"}, "invalid_text", "surrogate"),
]


@pytest.mark.parametrize(("record", "reason", "thing"), BAD)
def test_what_cannot_be_used_is_named_with_its_place(record: Any, reason: str, thing: str) -> None:
    good = {"text": "the cat"}
    skipped = encoded(good, record, good, on_bad_record="skip")
    assert (len(skipped.lengths), skipped.failure) == (2, None)
    assert (skipped.counts.records, skipped.counts.bad) == (3, {reason: 1})
    (told,) = skipped.counts.examples[reason]
    assert names(told, "a.jsonl:2", thing)
    assert "\n" not in told
    stopped = encoded(good, record, good)
    assert len(stopped.lengths) == 1
    assert names(stopped.failure or "", told, reason, "on_bad_record=skip")


def test_a_text_without_a_token_is_empty() -> None:
    tokenizer = deepcopy(TOKENIZER)
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("\u00ad", "")
    result = encoded({"text": "a"}, {"text": "\u00ad"}, {"text": "b"}, tokenizer=tokenizer)
    assert (len(result.lengths), list(result.counts.bad)) == (1, ["empty"])


@pytest.mark.parametrize("name", ["eos", "bos"])
def test_a_token_that_the_tokenizer_lacks_cannot_be_added(name: str) -> None:
    tokenizer = deepcopy(TOKENIZER)
    setattr(tokenizer, f"{name}_token", None)
    with refused(f"data.add_{name}", f"{name}_token", error=UsageError):
        TextRecordEncoder(MultiDocOptions(), tokenizer, add_bos=True).open()
    TextRecordEncoder(TextOptions(add_eos=name != "eos"), tokenizer, add_bos=name != "bos").open()


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
    assert optimal_dtype(TextRecordEncoder(TextOptions(), Numbers(size, highest)).vocabulary) == dtype
    assert encoded({"text": f"{highest} 1"}, tokenizer=Numbers(size, highest)).input_ids.tolist() == [highest, 1, 0]


@pytest.mark.parametrize("token", [-1, 12, 70_000])
def test_a_token_outside_the_vocabulary_is_refused(token: int) -> None:
    with refused("0..11", token, error=UsageError):
        encoded({"text": f"1 {token}"}, tokenizer=Numbers(10, 11))


def write_index(files: list[SourceFile], prefix: Path, **options: Any) -> Counts:
    """Tokenize one source in this process, and return the counts."""
    encoder = TextRecordEncoder(MultiDocOptions(**options), TOKENIZER)
    return write_text_indexes(files, encoder, {"data.train_dir": prefix})["data.train_dir"]


def text_files(folder: Path, sizes: list[list[int]]) -> list[SourceFile]:
    """Write files of given sizes in bytes, by source."""
    for source, lengths in enumerate(sizes):
        (folder / str(source)).mkdir()
        for number, length in enumerate(lengths):
            (folder / str(source) / f"{number:03d}.txt").write_text("a" * length)
    return find_source_files({str(source): [str(folder / str(source))] for source in range(len(sizes))})


def test_small_files_of_one_source_share_a_chunk(tmp_path: Path) -> None:
    files = text_files(tmp_path, [[30, 30, 50, 1, 200, 1], [5, 5]])
    chunks = list(read_files(files, ChunkSize(bytes=100)))
    sizes = [(chunk.category_id, [len(record.text) for _, record in chunk.records]) for chunk in chunks]
    assert sizes == [(1, [30, 30, 50]), (1, [1, 200]), (1, [1]), (2, [5, 5])]
    assert [chunk.num_bytes for chunk in chunks] == [110, 201, 1, 10]
    assert [place for place, _ in chunks[1].records] == [files[3].path, files[4].path]


def test_nothing_more_of_a_full_source_is_read(tmp_path: Path) -> None:
    files = text_files(tmp_path, [[100] * 5, [100]])
    for file in files[2:5]:
        Path(file.path).unlink()  # would be reported
    taken: list[Chunk] = []
    for found in read_files(files, ChunkSize(bytes=100), is_full=lambda source: source == 1 and len(taken) == 2):
        taken.append(found)
    assert [(chunk.category_id, chunk.failure) for chunk in taken] == [(1, None), (1, None), (2, None)]


def test_a_file_that_cannot_be_read_ends_its_source_after_the_documents_before_it(tmp_path: Path) -> None:
    files = text_files(tmp_path, [[10, 10, 10], [10]])
    Path(files[1].path).unlink()
    first, second = read_files(files)
    assert [place for place, _ in first.records] == [files[0].path]
    assert names(first.failure or "", files[1].path)
    assert (second.category_id, second.failure) == (2, None)


# document lengths by file; 0 stands for a bad record
STREAMS = st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=5)


@settings(deadline=None)
@given(stream=STREAMS, most=st.integers(1, 40), fails=st.booleans(), records=st.integers(1, 9))
def test_a_stream_is_cut_after_max_corpus_tokens_and_no_error_after_the_cut_ends_it(
    stream: list[list[int]], most: int, fails: bool, records: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    numbers, files = count(1), []
    for at, lengths in enumerate(stream):
        texts = [" ".join(str(next(numbers)) for _ in range(length)) for length in lengths]
        (folder / f"{at}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        files.append(SourceFile(1, str(folder / f"{at}.jsonl"), "jsonl", 9))
    files += [SourceFile(1, str(folder / "none.jsonl"), "jsonl", 9)] if fails else []
    encoder = TextRecordEncoder(TextOptions(on_bad_record="skip", add_eos=False), Numbers(1000, 999))
    total = sum(map(sum, stream))

    indexes = TextIndexes({"a": folder / "out"}, np.dtype(np.uint16), most)

    def write() -> Counts:
        size = ChunkSize(records)
        tokenize_files(files, encoder, indexes.add, indexes, size=size, is_full=indexes.is_full)
        return indexes.counts["a"]

    if total < most and fails:
        with refused(folder / "none.jsonl", error=DataError):
            write()
        return
    if not total:
        with refused("a", "none", error=DataError):
            write()
        return
    counts = write()
    # The same rule, record by record.
    kept, bad, room = [], 0, most
    for length in (length for lengths in stream for length in lengths):
        if not room:
            break
        bad += not length
        kept += [min(length, room)] if length else []
        room -= min(length, room)
    index = TokenIndex(folder / "out")
    found = [token for place in range(index.num_documents) for token in index.tokens(place).tolist()]
    assert found == [*range(1, sum(kept) + 1)]
    assert index.lengths.tolist() == kept
    assert (counts.documents, counts.tokens) == (len(kept), sum(kept))
    assert counts.records == counts.bad.total() + len(kept)
    assert bad <= counts.bad.total() <= sum(length == 0 for lengths in stream for length in lengths)
    assert sorted(counts.lengths.elements()) == sorted(kept)


def test_the_same_work_runs_inside_a_process_with_a_tokenizer_at_hand(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("the cat", "", "sat")))
    (tmp_path / "b.txt").write_text("on the mat\n")
    files = find_source_files({"a": [str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")]})
    counts = write_index(files, tmp_path / "out", on_bad_record="skip")
    index = TokenIndex(tmp_path / "out")
    expected = [[*ids(text), EOS] for text in ("the cat", "sat", "on the mat\n")]
    assert [index.tokens(number).tolist() for number in range(index.num_documents)] == expected
    assert (counts.documents, counts.tokens, dict(counts.bad)) == (3, sum(map(len, expected)), {"empty": 1})
    with refused(f"{tmp_path}/a.jsonl:2", "empty", "data.on_bad_record=skip", error=DataError):
        write_index(files, tmp_path / "none")
    with refused("data.train_dir", "no_text: 3", error=DataError):
        write_index(files[:1], tmp_path / "none", text_key="body", on_bad_record="skip")
    assert not list(tmp_path.glob("none*"))


@pytest.mark.parametrize(
    ("content", "things"),
    [('{"text": "the cat"}\n{"text": 3}\n', ("a.jsonl:2", "text", "int")), ("", ("data.train_dir", "none"))],
)
def test_a_mistake_at_the_start_is_told_without_a_bar(
    content: str, things: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    files = find_source_files({"a": [str(tmp_path / "a.jsonl")]})
    with refused(*things, error=DataError):
        write_index(files, tmp_path / "out")
    assert capfd.readouterr().err == ""
    (tmp_path / "a.jsonl").write_text('{"text": "the cat"}\n' * 9)
    write_index(files, tmp_path / "out")
    assert "9 records" in capfd.readouterr().err


def test_a_document_too_long_for_the_format_names_the_key_of_its_text(tmp_path: Path) -> None:
    tokens = np.broadcast_to(np.uint16(0), 2**31)  # one element in memory
    writer = IndexWriter(tmp_path / "out", np.uint16, "data.val_dir")
    with refused("data.val_dir", 2147483647):
        writer.add(tokens, np.array([2**31]))
    writer.abandon()
    assert list(tmp_path.iterdir()) == []
