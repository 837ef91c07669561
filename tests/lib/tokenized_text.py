"""Text files, tokenized in this process."""

import json
from pathlib import Path
from typing import Any

from datasets import load_from_disk

from verl_ext.commands.command_line import read_options
from verl_ext.commands.report import Report
from verl_ext.commands.tokenize import TokenizeOptions, tokenize
from verl_ext.text.arrow_folder import DOCUMENT_COLUMNS, FIRST_BLOCK
from verl_ext.text.read.readers import ChunkSize

QA = [{"question": f"the cat {i}", "answer": "sat on the mat " * (i % 5 + 1)} for i in range(20)]


def tokenize_files(sources: dict[str, Any], output: Path, model: Path, *overrides: str, **sizes: Any) -> Report:
    items = ",".join(f"{name}:'{path}'" for name, path in sources.items())
    base = [f"sources={{{items}}}", f"output_dir={output}", f"model.path={model}", "num_workers=1"]
    return tokenize(read_options(TokenizeOptions, [*base, *overrides]), **sizes)


def rows(output: Path) -> list[dict[str, Any]]:
    """Return the columns of tokens; those of documents follow from them."""
    return load_from_disk(str(output)).remove_columns([*DOCUMENT_COLUMNS, FIRST_BLOCK]).to_list()


def made(
    folder: Path, model: Path, sources: dict[str, list[Any]], *options: str, size: ChunkSize | None = None
) -> Report:
    """Tokenize records by source into folder/out."""
    folder.mkdir(exist_ok=True)
    for name, records in sources.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    listed = ",".join(f"{name}:'{folder}/{name}.jsonl'" for name in sources)
    given = [f"sources={{{listed}}}", f"output_dir={folder}/out", f"model.path={model}", "num_workers=1", *options]
    return tokenize(read_options(TokenizeOptions, given), size)
