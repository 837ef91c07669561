"""Finished answers in a SQLite file: no run pays twice.

    answers   key → outcome, text, reasoning, usage; a row is committed to the disk before the answer is used
    claims    key → the process that asks for it now

A process that is killed leaves its claims behind. Therefore each process holds a kernel lock on a file of its own
beside the store; a claim is void if the lock of its process is free.
"""

import contextlib
import fcntl
import json
import os
import sqlite3
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from verl_ext.files import writable_problem
from verl_ext.options import DataError, UsageError, first_line, must
from verl_ext.tools.endpoint.answer import KEPT, Answer, Usage

VERSION = 1
_APPLICATION = 0x7665726C  # marks a SQLite file as our store
_BUSY_SECONDS = 60
_TABLES = (
    "CREATE TABLE answers (key TEXT PRIMARY KEY, record TEXT, stage TEXT, answer TEXT, written TEXT) WITHOUT ROWID",
    "CREATE TABLE claims (key TEXT PRIMARY KEY, owner TEXT NOT NULL) WITHOUT ROWID",
    f"PRAGMA application_id = {_APPLICATION}",
    f"PRAGMA user_version = {VERSION}",
)


class Store:
    """The answers in a file, which processes of a machine can share.

    Use one store per process, as a context, from one thread. Raises `UsageError` if the file is not a store of this
    version, and `DataError` if it cannot be read or written.
    """

    def __init__(self, path: str | os.PathLike[str], key: str = "store") -> None:
        """Open or create the file; `key` is its option in messages."""
        self.path, self._key = Path(path), key
        if problem := writable_problem(key, str(self.path.parent)):
            raise UsageError(problem)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._errors():
            self._database = sqlite3.connect(self.path, timeout=_BUSY_SECONDS, isolation_level=None)
            self._database.execute("PRAGMA synchronous = FULL")
        try:
            with self._transaction():
                self._check_version()
        except BaseException:
            self._database.close()
            raise
        self._owner = uuid.uuid4().hex
        self._lock = open(self._lock_file(self._owner), "w")  # noqa: SIM115 - held until the store is closed
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        with self._errors():
            return self._database.execute("SELECT COUNT(*) FROM answers").fetchone()[0]

    def find(self, key: str) -> Answer | None:
        """Return the answer to a question; None if there is none yet."""
        with self._errors():
            row = self._database.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        fields = json.loads(row[0])
        return Answer(**{**fields, "usage": Usage(**fields["usage"])})

    def claim(self, key: str) -> bool:
        """Claim a question; False: it has an answer, or a live claim."""
        with self._transaction():
            if self._database.execute("SELECT 1 FROM answers WHERE key = ?", (key,)).fetchone():
                return False
            row = self._database.execute("SELECT owner FROM claims WHERE key = ?", (key,)).fetchone()
            if row and self._is_alive(row[0]):
                return False
            self._database.execute("INSERT OR REPLACE INTO claims VALUES (?, ?)", (key, self._owner))
            return True

    def release(self, key: str) -> None:
        """Give up a claim without an answer."""
        with self._transaction():
            self._database.execute("DELETE FROM claims WHERE key = ? AND owner = ?", (key, self._owner))

    def add(self, key: str, record: str, stage: str, answer: Answer) -> None:
        """Write an answer to the disk, and give up its claim."""
        assert answer.outcome in KEPT, f"an answer that is {answer.outcome} is asked for again"
        text = json.dumps(asdict(answer))
        with self._transaction():
            self._database.execute(
                "INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?, CURRENT_TIMESTAMP)", (key, record, stage, text)
            )
            self._database.execute("DELETE FROM claims WHERE key = ?", (key,))

    def close(self) -> None:
        """Give up all claims and close the file."""
        with contextlib.suppress(DataError), self._transaction():
            self._database.execute("DELETE FROM claims WHERE owner = ?", (self._owner,))
        self._database.close()
        self._lock_file(self._owner).unlink(missing_ok=True)
        self._lock.close()

    def _check_version(self) -> None:
        """Create an empty file's tables; refuse another kind or version."""
        application, version, tables = (
            self._database.execute(query).fetchone()[0]
            for query in ("PRAGMA application_id", "PRAGMA user_version", "SELECT COUNT(*) FROM sqlite_master")
        )
        if not tables:
            for statement in _TABLES:
                self._database.execute(statement)
        elif application != _APPLICATION:
            raise UsageError(must(self._key, "be a file of answers, or a new one", f"{self.path}: another database"))
        elif version != VERSION:
            needed = f"be a file of answers of version {VERSION}, or a new one"
            raise UsageError(must(self._key, needed, f"{self.path} of version {version}"))

    def _lock_file(self, owner: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{owner}.lock")

    def _is_alive(self, owner: str) -> bool:
        if owner == self._owner:
            return True
        try:
            with open(self._lock_file(owner)) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        self._lock_file(owner).unlink(missing_ok=True)
        return False

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._errors():
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                if self._database.in_transaction:  # SQLite itself rolls back on a full disk
                    self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            needed = "be a file of answers that can be read and written"
            raise DataError(must(self._key, needed, f"{self.path}: {first_line(error)}")) from error
