"""ScanMemo: the scan of a dataset kept beside its data, so that the next start reads no token.

    FOLDER/.verl_ext_scan.npz    key           what was scanned, as a digest: data files and documents
                                 targets       int32[S]
                                 token_ids     int64[2], lowest and highest
                                 category_ids  int64[C]
                                 over_length   int64[K,7], a row for each OverLengthCount

A memo is never needed: one that is missing, broken or of other data is ignored, and one that cannot be written is not.
"""

import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl_ext.data.category_numbers import FILE_NAME as CATEGORIES
from verl_ext.data.over_length_counts import OverLengthCount, OverLengthDocuments
from verl_ext.data.scan import DocumentScan
from verl_ext.packing import Spans

FILE_NAME = ".verl_ext_scan.npz"
FORMAT = 2  # to be raised when a scan means something else


class ScanMemo:
    """The memo of the scan of `spans` and `over_length` documents of `folders`; it lies in the first of them."""

    def __init__(self, folders: Sequence[str], spans: Spans, over_length: OverLengthDocuments) -> None:
        self.path = Path(folders[0]) / FILE_NAME
        self._documents = len(spans)
        self._key = _digest(folders, spans, over_length)

    def read(self) -> DocumentScan | None:
        """The scan, or None when there is none of exactly this data."""
        try:
            with np.load(self.path, allow_pickle=False) as arrays:
                if arrays["key"].item() != self._key:
                    return None
                targets, (lowest, highest) = arrays["targets"], arrays["token_ids"].tolist()
                categories = tuple(arrays["category_ids"].tolist())
                over_length = tuple(OverLengthCount(*numbers) for numbers in arrays["over_length"].tolist())
        except Exception:  # whatever is wrong with the file, the data can be read instead
            return None
        if targets.dtype != np.int32 or targets.shape != (self._documents,):
            return None
        return DocumentScan(targets, lowest, highest, categories, over_length)

    def write(self, scan: DocumentScan) -> None:
        """Keep `scan`, unless the folder cannot be written to. Readers see the old memo or the new one, whole."""
        unfinished = self.path.with_name(f"{FILE_NAME}.{uuid.uuid4().hex}")
        try:
            with open(unfinished, "xb") as file:
                np.savez(
                    file,
                    key=np.array(self._key),
                    targets=scan.targets,
                    token_ids=np.array([scan.min_token_id, scan.max_token_id], np.int64),
                    category_ids=np.array(scan.category_ids, np.int64),
                    over_length=np.array(scan.over_length, np.int64).reshape(-1, len(OverLengthCount._fields)),
                )
            os.replace(unfinished, self.path)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink()


def _digest(folders: Sequence[str], spans: Spans, over_length: OverLengthDocuments) -> str:
    """Of the data files (name, size, time of change), the datasets' fingerprints and categories, the spans and the
    over-length documents."""
    files = [_folder_facts(Path(folder)) for folder in folders]
    handling = [over_length.max_tokens, over_length.policy] if len(over_length) else None
    digest = hashlib.sha256(json.dumps([FORMAT, files, len(spans), len(over_length), handling]).encode())
    for array in (spans.row, spans.start, spans.length, over_length.rows, over_length.lengths):
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _folder_facts(folder: Path) -> list[Any]:
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    names = folder / CATEGORIES
    facts: list[Any] = [state.get("_fingerprint"), names.read_text(encoding="utf-8") if names.exists() else None]
    for file in state["_data_files"]:
        status = (folder / file["filename"]).stat()
        facts.append([file["filename"], status.st_size, status.st_mtime_ns])
    return facts
