"""Damaged and made-up input for every reader of untrusted files: `python -m tests.lib.fuzz_readers --seconds 600`.

Hypothesis draws the damage; a child process reads the result, so that a crash or a hang is just another answer. A
reader must either read the input, or refuse it in one line that names the file or the option.
"""

import argparse
import json
import multiprocessing
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import xxhash
from hypothesis import strategies as st

SECONDS_OF_AN_INPUT = 20
_context = multiprocessing.get_context("forkserver")  # in tests, forks from the server that has imported verl

# Changes to a file's bytes; positions are taken modulo its length.
_PLACES = st.integers(0, 1 << 20)
_NUMBERS = st.sampled_from([-1, 0, 1, 127, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, -(2**31), -(2**63)])
_BYTES = st.one_of(
    st.tuples(st.just("flip"), _PLACES, st.integers(0, 7)),
    st.tuples(st.just("cut"), _PLACES, st.just(0)),
    st.tuples(st.just("put"), _PLACES, st.binary(min_size=1, max_size=8)),
    st.tuples(st.just("take"), _PLACES, st.integers(1, 8)),
    st.tuples(st.just("write"), _PLACES, _NUMBERS.map(lambda number: struct.pack("<q", number))),
    st.tuples(st.just("write"), _PLACES, _NUMBERS.map(lambda number: struct.pack("<q", number)[:4])),
)
_NAMES = ["", ".", "..", "/etc/passwd", "../state.json", "a\0b", "data-00000-of-00001.arrow", "x" * 5000, "\ud800"]
_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 1, 2, 2**31, 2**63, 2**64, 10**30, -(2**63), 0.5, 1e308, "1", "int32", *_NAMES]),
    st.text(max_size=8),
)
_VALUES = st.recursive(
    _LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
# Further changes to a JSON file: another value somewhere, a missing key, a completely different text.
_JSON = st.one_of(
    _BYTES,
    st.tuples(st.just("value"), _PLACES, _VALUES),
    st.tuples(st.just("value"), _PLACES, _VALUES),
    st.tuples(st.just("drop"), _PLACES, st.just(0)),
    st.tuples(
        st.just("text"),
        st.just(0),
        st.sampled_from(
            ["", "null", "[]", "{}", "NaN", "[" * 100_000, '{"a":' * 5000, "9" * 5000, '{"1": "a", "1": "b"}']
        ),
    ),
)


def damaged(content: bytes, how: tuple[str, int, Any]) -> bytes:
    """Return a file's content with damage."""
    kind, place, what = how
    if kind == "text":
        return what.encode()
    if kind in ("value", "drop"):
        try:
            value = json.loads(content)
        except (ValueError, RecursionError):
            return content
        places = list(_places(value))
        if places:
            holder, key = places[place % len(places)]
            if kind == "value":
                holder[key] = what
            else:
                del holder[key]
        return json.dumps(value).encode()
    at = place % max(len(content), 1)
    if kind == "cut":
        return content[:at]
    if kind == "put":
        return content[:at] + what + content[at:]
    if kind == "take":
        return content[:at] + content[at + what :]
    changed = bytearray(content)
    if kind == "flip" and changed:
        changed[at] ^= 1 << what
    elif kind == "write":
        changed[at : at + len(what)] = what
    return bytes(changed)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in list(keys):
        yield value, key
        yield from _places(value[key])


@dataclass(frozen=True)
class Target:
    """A reader: make writes its input into a folder, read reads all of it, names are the words of valid refusals."""

    make: Callable[[Path], None]
    read: Callable[[Path], Any]
    names: tuple[str, ...] = ()
    sign: Callable[[Path], None] = lambda folder: None  # a forger's work after the damage


def _documents() -> list[dict[str, Any]]:
    from tests.lib.tokenized_data import random_documents

    return random_documents(np.random.default_rng(0), [5, 30, 9, 1, 12], 100, 2)


def _make_folder(folder: Path) -> None:
    from tests.lib.tokenized_data import write_tokenized

    write_tokenized(folder, _documents(), {1: "maths", 2: "code"}, loss_weight=True)


def _make_our_folder(folder: Path) -> None:
    from verl_ext.files import write_json
    from verl_ext.text.arrow_folder import DatasetWriter
    from verl_ext.text.tokens.documents import Document, join_documents

    writer = DatasetWriter(folder)
    for document in _documents():
        writer.add(join_documents([Document(document["input_ids"], document["loss_mask"])], 1, 0))
    writer.close()
    write_json(folder / "categories.json", {"1": "maths"})


def _make_scanned_folder(folder: Path) -> None:
    from verl_ext.data import SFTDataSet
    from verl_ext.data.tokenized.ranks import ONE_RANK

    _make_folder(folder)
    SFTDataSet(str(folder), 16, over_length="split").read_together(ONE_RANK)


def _read_folder(folder: Path) -> None:
    from verl_ext.data import SFTDataSet
    from verl_ext.data.tokenized.files_in_use import DataFiles
    from verl_ext.data.tokenized.ranks import ONE_RANK

    packs = SFTDataSet(str(folder), 16, over_length="split")
    packs.read_together(ONE_RANK)
    found = packs.categories, packs.digest, packs.omitted_documents(), packs.facts(), packs.report()
    assert found
    DataFiles(packs.data_files, "data.train_dir").digest(ONE_RANK)
    for number in range(len(packs)):
        packs[number], packs.documents_of(number)


def _read_records(folder: Path) -> None:
    from verl_ext.text.read.bad_record import BadRecord
    from verl_ext.text.read.json_records import parse_line
    from verl_ext.text.read.readers import read_chunks
    from verl_ext.text.read.sources import find_source_files

    for file in find_source_files({"a": [str(folder)]}):
        for chunk in read_chunks(file):
            for _, raw in chunk.records:
                try:
                    parse_line(raw) if isinstance(raw, bytes) else raw
                except BadRecord:
                    continue


def _make_records(folder: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"a {n}"}, {"role": "assistant", "content": "b"}]} for n in range(5)
    ]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "b.json").write_text(json.dumps(rows))


def _make_index(folder: Path) -> None:
    from verl_ext.data.stream.megatron.index import IndexWriter

    writer, lengths = IndexWriter(folder / "a", np.uint16), np.array([3, 0, 12, 5, 9])
    writer.add(np.arange(lengths.sum()).astype(np.uint16), lengths)
    writer.close()


def _read_index(folder: Path) -> None:
    from verl_ext.data import MultiDocDataset
    from verl_ext.data.stream.megatron.index import TokenIndex

    index = TokenIndex(folder / "a", "data.train_dir")
    assert index.token_range(), index.digest
    for document in range(index.num_documents):
        index.tokens(document).sum()
    samples = MultiDocDataset(
        [str(folder / "a.idx")], None, 8, config={"sampling": "in_order", "cache_dir": str(folder / "c")}
    )
    for number in range(len(samples)):
        samples[number], samples.documents_of(number)


_GROUPING: dict[str, Any] = {"group_size": 1, "cost": [1.0, 0.0]}
_FACTS = {"data.max_tokens": 64, "grouping": _GROUPING}
_STATES = {"SpikeHook": {"spikes": 1, "recent_losses": [2.5]}}


def _make_checkpoint(folder: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    from verl_ext.checkpoint.layout import FileFacts, Manifest
    from verl_ext.checkpoint.state import StateWriter
    from verl_ext.files import write_json

    state = {"model.a": torch.arange(12.0).view(3, 4), "model.b": torch.ones(5, dtype=torch.bfloat16)}
    dcp.save(state, storage_writer=StateWriter(folder / "state"), no_dist=True)
    write_json(folder / "extra.json", {"lr_scheduler": {"last_epoch": 3, "_step_count": 4}, "scaler": None})
    files = {
        path.relative_to(folder).as_posix(): FileFacts.from_file(path) for path in folder.rglob("*") if path.is_file()
    }
    Manifest(3, 1, ("model", "optimizer", "extra"), _FACTS, _STATES, files).write(folder)


def _sign_checkpoint(folder: Path) -> None:
    """Write checksums that match, as a forger of a checkpoint would."""
    from verl_ext.checkpoint.layout import FileFacts

    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        for name in manifest["files"]:
            if Path(name).is_relative_to(".") or (folder / name).is_file():
                manifest["files"][name] = vars(FileFacts.from_file(folder / name))
        manifest.pop("checksum", None)
        plain = json.dumps(manifest, sort_keys=True).encode()
        manifest["checksum"] = xxhash.xxh3_128_hexdigest(plain)
        (folder / "manifest.json").write_text(json.dumps(manifest))
    except Exception:
        return  # too damaged to be signed


def _read_checkpoint(folder: Path) -> None:
    from verl_ext.checkpoint.identity import Identity, resumed_grouping
    from verl_ext.checkpoint.layout import Checkpoint, Damaged
    from verl_ext.checkpoint.state import STATE, StateReader, read_extra

    try:
        checkpoint = Checkpoint.read(folder)
    except Damaged as error:
        raise Damaged(f"{folder}: {error}") from error
    if wrong := checkpoint.changed_file():
        raise Damaged(f"{folder}: {wrong}")
    facts = checkpoint.manifest.facts
    Identity({"data.max_tokens": 64}, _GROUPING, str(folder)).check(facts)
    resumed_grouping({"balance": "sorted", "cost": "flops", "shuffle": True}, _GROUPING, facts)
    read_extra(folder)
    StateReader(folder / STATE).read_whole("model.")


def _make_model(folder: Path) -> None:
    from transformers import Qwen3Config

    from verl_ext.titans.configuration import QwenTitansConfig

    base = Qwen3Config(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=128,
    )  # fmt: skip
    QwenTitansConfig.from_base(base, chunk_size=64).save_pretrained(folder)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(
            {"metadata": {"total_size": 8}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
        )
    )


def _read_model(folder: Path) -> None:
    from verl_ext.config.check import read_hf_config
    from verl_ext.config.weights import weight_problems

    (folder / "model-1.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")  # a file without tensors
    if problems := weight_problems(str(folder)):
        raise ValueError(problems[0])
    read_hf_config(str(folder))


DATA = ("data.train_dir",)
TARGETS = {
    "tokenized folder": Target(_make_folder, _read_folder, DATA),
    "our tokenized folder": Target(_make_our_folder, _read_folder, DATA),
    "scanned folder": Target(_make_scanned_folder, _read_folder, DATA),
    "arrow records": Target(_make_folder, _read_records),
    "json records": Target(_make_records, _read_records),
    "index": Target(_make_index, _read_index, DATA),
    "checkpoint": Target(_make_checkpoint, _read_checkpoint),
    "forged checkpoint": Target(_make_checkpoint, _read_checkpoint, sign=_sign_checkpoint),
    "model": Target(_make_model, _read_model, ("model.",)),
}


@contextmanager
def _time_limit() -> Iterator[None]:
    def late(number: int, frame: object) -> None:
        raise TimeoutError("an input took too long")

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS_OF_AN_INPUT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _child(name: str, number: int, examples: int, root: str, answers: Any) -> None:
    """Read a number of damaged inputs; the current one lies in `root`/input, in case this process dies of it."""
    target, whole, counts = TARGETS[name], Path(root) / "whole", Counter[str]()
    (Path(root) / "input").write_text(f"{name}, before any damage")
    whole.mkdir()
    target.make(whole)
    files = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file())
    damage = st.integers(0, len(files) - 1).flatmap(
        lambda at: st.tuples(
            st.just(at), st.lists(_JSON if files[at].suffix == ".json" else _BYTES, min_size=1, max_size=3)
        )
    )
    folder = Path(root) / "global_step_3"
    shutil.copytree(whole, folder)
    target.read(folder)

    @hypothesis.seed(number)
    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(damage)
    def once(drawn: tuple[int, list[tuple[str, int, Any]]]) -> None:
        at, steps = drawn
        (Path(root) / "input").write_text(f"{name}, seed {number}: {files[at]} {steps!r}", errors="backslashreplace")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        content = (folder / files[at]).read_bytes()
        for step in steps:
            content = damaged(content, step)
        (folder / files[at]).write_bytes(content)
        target.sign(folder)
        try:
            with _time_limit():
                target.read(folder)
        except ValueError as error:
            told = str(error)
            assert "\n" not in told, told
            assert any(word in told for word in (str(folder), *target.names)), told
            counts["refused"] += 1
        else:
            counts["read"] += 1

    failure = None
    try:
        once()
    except BaseException as error:
        words = f"{type(error).__name__}: {error}".splitlines()[0]
        failure = f"{(Path(root) / 'input').read_text()}: {words}"
        import traceback

        traceback.print_exc()
    answers.put((dict(counts), failure))


def fuzz(name: str, number: int, examples: int) -> tuple[dict[str, int], str | None]:
    """Fuzz a target in a child process: return (counts of read and refused inputs, the first input that failed)."""
    with tempfile.TemporaryDirectory() as root:
        answers = _context.SimpleQueue()
        child = _context.Process(target=_child, args=(name, number, examples, root, answers), daemon=True)
        child.start()
        child.join(60 + examples * SECONDS_OF_AN_INPUT)
        if child.is_alive():
            child.kill()
            child.join()
        if answers.empty():
            return {}, f"{(Path(root) / 'input').read_text()}: the process ended with {child.exitcode}"
        return answers.get()


def main() -> int:
    parser = argparse.ArgumentParser(description="Damage what readers read, for so many seconds.")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--only", choices=TARGETS, action="append")
    parser.add_argument("--examples", type=int, default=200, help="inputs of a child process")
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    options = parser.parse_args()
    end, counts, failures, number = time.monotonic() + options.seconds, Counter[tuple[str, str]](), [], options.seed
    while time.monotonic() < end:
        for name in options.only or TARGETS:
            if time.monotonic() > end:
                break
            found, failure = fuzz(name, number, options.examples)
            counts.update({(name, kind): count for kind, count in found.items()})
            if failure:
                failures.append(failure)
                print(f"failed: {failure}", flush=True)
        number += 1
    for name in TARGETS:
        print(f"{name}: {counts[name, 'refused']:,} refused, {counts[name, 'read']:,} read")
    print(f"{sum(counts.values()):,} inputs, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
