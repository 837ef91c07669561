"""Caches: entries are made once by one of many processes, whole or not at all; also by processes that wait."""

import errno
import logging
import multiprocessing
from pathlib import Path

import filelock
import pytest

from tests.lib.errors import names, refused
from verl_ext.cache import cached_folder, default_root

_context = multiprocessing.get_context("fork")


def write_two_files(folder: Path) -> None:
    """Make an entry, and count the call in the folder above the root."""
    with open(folder.parent.parent / "calls", "a") as calls:
        calls.write(".")
    (folder / "numbers.npy").write_bytes(b"12345")
    (folder / "inner").mkdir()
    (folder / "inner" / "text").write_text("words")


def calls(tmp_path: Path) -> int:
    """Return the number of calls of `write_two_files` for the root tmp_path/root."""
    return (tmp_path / "calls").stat().st_size


def warnings(caplog):
    return [entry.getMessage() for entry in caplog.records if entry.name == "verl_ext.cache"]


def test_a_folder_is_made_at_the_first_call_and_opened_at_the_next(tmp_path, caplog):
    for _ in range(2):
        folder = cached_folder(tmp_path / "root", "abc", write_two_files)
    assert folder == tmp_path / "root" / "abc"
    assert (folder / "inner" / "text").read_text() == "words"
    assert calls(tmp_path) == 1
    assert warnings(caplog) == []


def test_files_that_others_put_beside_are_no_damage(tmp_path):
    folder = cached_folder(tmp_path / "root", "abc", write_two_files)
    (folder / "memo.npz").write_bytes(b"1")
    cached_folder(tmp_path / "root", "abc", write_two_files)
    assert (folder / "memo.npz").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [("numbers.npy", b"123"), ("inner/text", None), ("contents.json", None), ("contents.json", b'{"sizes": [3]}')],
)
def test_a_damaged_folder_is_told_in_one_line_and_made_anew(tmp_path, caplog, name, content):
    folder = cached_folder(tmp_path / "root", "abc", write_two_files)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with caplog.at_level(logging.WARNING):
        cached_folder(tmp_path / "root", "abc", write_two_files)
    (line,) = warnings(caplog)
    assert line.startswith(f"{folder} is made again")
    assert (folder / "numbers.npy").read_bytes() == b"12345"
    assert (folder / "inner" / "text").read_text() == "words"
    assert calls(tmp_path) == 2


def test_a_maker_that_fails_or_is_interrupted_leaves_no_folder_and_is_called_again(tmp_path):
    def fails(folder):
        (folder / "half").write_text("half")
        raise error

    for error in (ValueError("the line that says why"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            cached_folder(tmp_path / "root", "abc", fails)
        assert [entry.name for entry in (tmp_path / "root").iterdir() if entry.is_dir()] == []
    cached_folder(tmp_path / "root", "abc", write_two_files)
    assert not (tmp_path / "root" / "abc.failed").exists()


def _open_after(root: Path, asked, make, answers) -> None:
    """Open the folder in a process of its own, which sets `asked` when it asks for the lock."""

    class Announced(filelock.FileLock):
        def acquire(self, *arguments, **options):
            asked.set()
            return super().acquire(*arguments, **options)

    filelock.FileLock = Announced
    try:
        answers.put(str(cached_folder(root, "abc", make)))
    except ValueError as error:
        answers.put(f"{type(error).__name__}: {error}")


def _with_one_that_waits(root: Path, make, waiting_make):
    """Return (this process's result, the result of a process that asked while `make` was at work here)."""
    asked, answers = _context.Event(), _context.Queue()
    other = _context.Process(target=_open_after, args=(root, asked, waiting_make, answers), daemon=True)

    def make_beside(folder):
        other.start()
        assert asked.wait(30)
        make(folder)

    try:
        here = str(cached_folder(root, "abc", make_beside))
    except (ValueError, KeyboardInterrupt) as error:
        here = f"{type(error).__name__}: {error}"
    there = answers.get(timeout=30)
    other.join()
    return here, there


def _never(folder):
    raise AssertionError("it was made twice")


def test_of_two_processes_one_makes_the_folder_and_the_other_opens_it(tmp_path):
    here, there = _with_one_that_waits(tmp_path / "root", write_two_files, _never)
    assert here == there == str(tmp_path / "root" / "abc")
    assert calls(tmp_path) == 1


def test_a_process_that_waited_for_one_that_failed_raises_the_same(tmp_path):
    def fails(folder):
        raise ValueError("data.train_dir must hold records; got none")

    here, there = _with_one_that_waits(tmp_path / "root", fails, _never)
    assert here == there == "ValueError: data.train_dir must hold records; got none"


def test_a_process_that_waited_for_one_that_was_interrupted_makes_the_folder(tmp_path):
    def interrupted(folder):
        raise KeyboardInterrupt

    here, there = _with_one_that_waits(tmp_path / "root", interrupted, write_two_files)
    assert here == "KeyboardInterrupt: "
    assert there == str(tmp_path / "root" / "abc")


def test_what_cannot_be_written_is_one_line_with_the_key(tmp_path):
    (tmp_path / "file").write_text("")
    with refused("data.cache_dir", tmp_path / "file" / "cache"):
        cached_folder(tmp_path / "file" / "cache", "abc", write_two_files)


def test_a_file_that_make_cannot_read_is_named_and_the_cache_is_not(tmp_path):
    def reads(folder):
        (folder / "half").write_text("half")
        (tmp_path / "none.jsonl").read_text()

    for _ in range(2):
        with refused(tmp_path / "none.jsonl", "No such file or directory"):
            cached_folder(tmp_path / "root", "abc", reads)
    here, there = _with_one_that_waits(tmp_path / "root", reads, _never)
    assert here == there
    assert names(here, "ValueError", tmp_path / "none.jsonl", "No such file or directory")


@pytest.mark.parametrize(
    ("error", "things"),
    [
        (OSError(errno.EIO, "Input/output error"), ("{root}/abc", "Input/output error")),
        (OSError("broken\nmore of it"), ("{root}/abc", "broken")),
        (PermissionError(errno.EACCES, "Permission denied", "/b.txt"), ("/b.txt: Permission denied",)),
        (OSError(errno.ENOSPC, "Full", "/full/b"), ("/full/b: Full",)),
        (OSError(errno.ENOSPC, "Full"), ("data.cache_dir", "{root}: Full")),
        (OSError(errno.EFBIG, "Too large"), ("data.cache_dir", "{root}: Too large")),
    ],
)
def test_an_os_error_of_make_is_told_as_what_it_is(tmp_path, error, things):
    def fails(folder):
        raise error

    with refused(*(thing.format(root=tmp_path / "root") for thing in things)):
        cached_folder(tmp_path / "root", "abc", fails)


def test_a_process_that_waited_for_one_that_filled_the_disk_raises_the_same(tmp_path):
    def fills(folder):
        raise OSError(errno.ENOSPC, "Full")

    for line in _with_one_that_waits(tmp_path / "root", fills, _never):
        assert names(line, "data.cache_dir", f"{tmp_path / 'root'}: Full")


def test_a_process_that_waited_for_one_that_could_not_leave_a_note_makes_the_folder(tmp_path, monkeypatch):
    def fills(folder):
        write_text = Path.write_text

        def full(path, text, **options):
            write_text(path, "", **options)
            raise OSError(errno.ENOSPC, "Full")

        monkeypatch.setattr(Path, "write_text", full)  # the other process has started
        raise OSError(errno.ENOSPC, "Full")

    here, there = _with_one_that_waits(tmp_path / "root", fills, write_two_files)
    assert here.endswith(": Full")
    assert there == str(tmp_path / "root" / "abc")


def test_an_error_of_make_in_its_own_folder_is_the_caches(tmp_path):
    def writes(folder):
        (folder / "none" / "file").write_text("")

    with refused("data.cache_dir", tmp_path / "root", "No such file or directory"):
        cached_folder(tmp_path / "root", "abc", writes)


def test_the_root_is_the_folder_given_or_one_in_the_cache_of_datasets(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hf"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_root("verl_ext_index", None) == tmp_path / "hf" / "verl_ext_index"
    assert default_root("verl_ext_index", "~/mine") == tmp_path / "mine"
