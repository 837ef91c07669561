"""Raw files tokenized as for training."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain, count
from pathlib import Path
from typing import Any

from verl_ext.commands.command_line import read_options
from verl_ext.options import DataError, UsageError, choice_problem, must, options_of
from verl_ext.text.read.bad_record import BadRecord
from verl_ext.text.read.readers import read_chunks, read_record
from verl_ext.text.read.sources import find_source_files, is_url, kind_of
from verl_ext.text.tokens.tokenizer import ModelOptions, load_tokenizer

_BABILONG = {"input", "question", "target"}


def is_raw_file(path: str) -> bool:
    """Tell whether a path is a raw file: chats, texts, BABILong."""
    return not os.path.isdir(path) and kind_of(path) is not None


def tokenized_raw(
    paths: Sequence[str], key: str, model: ModelOptions, given: Mapping[str, Any], max_length: int | None, folder: Path
) -> str:
    """Tokenize raw files, each as a category; return the tokenized folder.

    Args:
        paths: the files.
        key: the option that names them.
        model: the tokenizer.
        given: the options of `verl-ext tokenize` that differ from its defaults.
        max_length: the tokens of a row of BABILong samples.
        folder: the parent of the tokenized folder.

    Raises:
        UsageError: If there is no tokenizer or an unknown option.
        DataError: If a file has no usable record.
    """
    if not model.tokenizer:
        raise UsageError(must("model.path", f"name a tokenizer: {key} names raw files, {', '.join(paths)}", None))
    # BABILong's samples go through the trainer's own dataset, so their rows are those of training.
    if _is_babilong(paths[0]):
        from verl_ext.data import BABILongDataset  # imports torch, like the trainer's dataset

        if max_length is None:
            raise UsageError(must("max_tokens", "be the tokens of a row for BABILong's samples", None))
        try:
            dataset = BABILongDataset(list(paths), load_tokenizer(model), max_length, cache_dir=str(folder))
            return str(dataset.folders[0])
        except ValueError as error:
            raise DataError(str(error)) from error
    from verl_ext.commands.tokenize import TokenizeOptions, write_dataset  # imports the modules of its workers

    # `tokenize` cannot name what is set below: every file is a category of its own, in one folder of ours.
    ours = ("sources", "output_dir", "overwrite", "model", "val_share")
    known = [name for name in options_of(TokenizeOptions) if name not in ours]
    for problem in filter(None, (choice_problem("a name in tokenize", name, known) for name in given)):
        raise UsageError(problem)
    names = _names(paths)
    made = folder / "+".join(names)
    own = {"on_bad_record": "skip", **given, "model": asdict(model), "preview": 0}
    sources = {name: str(path) for name, path in zip(names, paths, strict=True)}
    options = read_options(TokenizeOptions, [], **own, sources=sources, output_dir=str(made))
    made.mkdir(parents=True)
    write_dataset(made, find_source_files(options.patterns), options)
    return str(made)


def _names(paths: Sequence[str]) -> list[str]:
    """Return the file names without suffixes, numbered if they are equal."""
    names: list[str] = []
    for path in paths:
        name = Path(path).name.partition(".")[0] or "data"
        numbered = (f"{name}-{number}" for number in count(len(names)))
        names.append(next(each for each in chain([name], numbered) if each not in names))
    return names


def _is_babilong(path: str) -> bool:
    if is_url(path) or kind_of(path) == "text":
        return False
    for file in find_source_files({"": [path]}, "paths"):
        for chunk in read_chunks(file):
            for _, raw in chunk.records[:1]:
                try:
                    return read_record(raw).keys() >= _BABILONG
                except BadRecord:
                    return False
    return False
