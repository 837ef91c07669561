"""The command `verl-ext train`, which runs `tokenize` and torchrun on one machine.

    data.sources={gsm8k:train.jsonl} turns=last     model.path=M     parallel=cpu data.max_tokens=1024 …
           options of `tokenize`                       of both          the trainer's, word for word
                     └───────────────┬───────────────────┴───────────────────┘
    CACHE/<fingerprint>/, tokenized unless it is there   →   torchrun … data.train_dir=CACHE/<fingerprint> …

With data.val_share, CACHE/<fingerprint>/ holds train and val, which data.train_dir and data.val_dir name.

The ranks start first: while this process tokenizes, without torch, they import the trainer, check its overrides, and
then wait for the folders (verl_ext/trainer/start.py).
"""

import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from verl_ext.cache import default_root, is_complete
from verl_ext.commands.command_line import command, known_options, read_options, words_of
from verl_ext.commands.tokenize import PARTS, TokenizeOptions, summary, write_dataset
from verl_ext.config.key_table import read_words, refuse_early
from verl_ext.config.keys import is_name_of_verl
from verl_ext.config.run_file import expanded
from verl_ext.config.translation import translate
from verl_ext.custom import names_own_class
from verl_ext.launch.run import run_torchrun
from verl_ext.options import DataError, Options, UsageError, must, option
from verl_ext.overrides import Item, quoted
from verl_ext.text.encoder_chats import ChatEncoder
from verl_ext.text.read.sources import find_source_files
from verl_ext.text.tokenizing import cached_tokens, tokens_fingerprint
from verl_ext.text.tokens.tokenizer import TRUSTED, leave_out_torch

# {the trainer's key of a tokenized folder: the key of its sources}
NODES = {"data.train_dir": "data.sources", "data.val_dir": "data.val_sources"}
_SHARE = "data.val_share"


@dataclass(frozen=True)
class SourceKeys(Options):
    """The sources to tokenize, and the folder that keeps the result."""

    prefix: ClassVar[str] = "data"

    sources: dict[str, Any] = option({}, "training data, {category: files} as in `verl-ext tokenize`")
    val_sources: dict[str, Any] = option({}, "validation data in the same form; `sample` applies to data.sources alone")
    val_share: Any = option(
        None, "validation data: a share of the records of data.sources, or a number, as in `verl-ext tokenize`"
    )
    cache_dir: str | None = option(None, "folder for tokenized data; null: in the cache of `datasets`")


@dataclass(frozen=True)
class TrainOptions(Options):
    """Train a model from raw files on this machine.

    The files are tokenized, then torchrun trains. FILE.yaml holds the keys of a run, nested or dotted; keys on the line
    win, and dry_run=true only checks them. Besides the keys below, the command takes the options of `verl-ext tokenize`
    by their names (turns=last, sample=1000) and the overrides of the trainer; both use model.path. The same files,
    tokenizer and options are tokenized only once. After Ctrl-C or SIGTERM the ranks save, and the same command goes on.
    Options of verl's own SFT trainers are read too (docs/guides/verl/commands.md).
    """

    data: SourceKeys = option(SourceKeys, "data to tokenize")
    nproc: int | None = option(None, "number of ranks; null: one per GPU of this machine, or 1 without GPUs", least=1)
    dry_run: bool = option(False, "true: check everything, print the commands and the whole configuration, and end")


@dataclass(frozen=True)
class Split:
    """The words of a command line by their readers.

    Attributes:
        words: all of them, by today's names.
        options: those of this command.
        texts: the sources to tokenize, by the option of the trainer that names their folder.
        folders: the folders of tokenized documents, by option.
        overrides: those of the trainer.
    """

    words: Sequence[str]
    options: TrainOptions
    texts: Mapping[str, "Texts"]
    folders: Mapping[str, Path]
    overrides: Sequence[str]

    @property
    def trainer_words(self) -> list[str]:
        """The words of the trainer with the folders."""
        return [*(_word(key, folder) for key, folder in self.folders.items()), *self.overrides]


def split(words: Sequence[str], needs_torch: bool = False, trains: bool = True) -> Split:
    """Split a command line; raise UsageError and DataError with a line for each mistake that this shows.

    needs_torch: whether this process will use torch, also after a tokenizer was loaded. trains: whether a rate is
    needed.
    """
    given, words = words, expanded(words)
    read_words(words)
    words = _translated([f"data.{word}" if word.startswith("val_share=") else word for word in words])
    # Every word has one reader: this command, `tokenize`, or the trainer, which gets the rest (model.* has two).
    own, encoding = words_of(words, ["nproc", "dry_run"]), []
    keys = [*NODES.values(), _SHARE]
    given_here = {"model", "sources", "output_dir", "overwrite", "val_share"}
    of_tokenize = {*known_options(TokenizeOptions), *TokenizeOptions.gone} - given_here
    if words_of(words, keys):  # else data.cache_dir belongs to a dataset that reads text itself
        own += words_of(words, [*keys, "data.cache_dir"])
        encoding = words_of(words, of_tokenize)
    else:  # a run's file still has the options of the sources in whose place data.train_dir came
        moot = words_of([word for word in words if word not in given], of_tokenize)
        words = [word for word in words if word not in moot or words_of([word], ["model"])]
    of_both = words_of(encoding, ["model"])
    overrides = [word for word in words if word not in own and (word not in encoding or word in of_both)]
    options, texts = read_options(TrainOptions, own), {}
    refuse_early(overrides, trains)
    if needs_torch or options.dry_run:  # before a tokenizer is loaded without it
        import verl_ext.trainer.start  # noqa: F401
    _check_share(words, options.data.val_share)
    share = [word.replace(_SHARE, "val_share", 1) for word in words_of(own, [_SHARE])]
    # A folder is named before it is written, so that the ranks can start while it is tokenized.
    folders: dict[str, Path] = {}
    for key, node in NODES.items():
        if not (sources := [word.replace(node, "sources", 1) for word in words_of(own, [node])]):
            continue
        if also := words_of(overrides, [key]):
            raise UsageError(must(key, f"not be given beside {node}, which it would be made of", also[0]))
        others = [*encoding, *share] if key == "data.train_dir" else _for_validation(encoding, sources)
        texts[key] = Texts(node, [*sources, *others], default_root("verl_ext_tokenized", options.data.cache_dir))
        folders[key] = texts[key].folder
    if options.data.val_share is not None:
        folders = {key: texts["data.train_dir"].folder / part for key, part in zip(NODES, PARTS, strict=True)}
    return Split(words, options, texts, folders, overrides)


def tokenize_and_train(words: Sequence[str]) -> str:
    """Tokenize if needed, and train; raise SystemExit with a nonzero code."""
    parts = split(words)
    options, texts, folders = parts.options, parts.texts, parts.folders
    if (ranks := options.nproc) is None:
        import torch  # here, because importing it takes seconds

        ranks = torch.cuda.device_count() or 1
    line = ["torchrun", "--standalone", "--local_addr=127.0.0.1", f"--nproc_per_node={ranks}"]
    line += ["-m", "verl_ext.fsdp_sft_trainer", *parts.trainer_words]

    commands = "\n".join(f"  {shlex.join(words)}" for words in (*(each.command for each in texts.values()), line))
    categories = texts["data.train_dir"].categories if "data.train_dir" in texts else []
    if options.dry_run:
        from verl_ext.trainer.start import check_without_data

        try:
            composed = check_without_data(parts.overrides, ranks, folders, categories)
        except ValueError as error:
            raise UsageError(str(error)) from None
        return f"{composed}\nNothing was started. The commands of the run:\n{commands}"

    def tokenize() -> None:
        for each in texts.values():
            each.tokenize()
        print(f"The same in single commands:\n{commands}", flush=True)

    # The ranks wait for a folder only if it is not there yet.
    awaited = [] if all(each.are_tokenized for each in texts.values()) else [*folders]
    if code := run_torchrun(line[1:], tokenize, awaited=awaited, categories=categories, words=parts.words):
        raise SystemExit(code)
    return ""


def _for_validation(encoding: Sequence[str], sources: Sequence[str]) -> list[str]:
    """Return the options for data.val_sources.

    No part of them is taken, and `system` names their categories alone.
    """
    words = [word for word in encoding if not words_of([word], ["sample", "system"])]
    names = read_options(SourceKeys, sources).sources
    for item in map(Item.read, words_of(encoding, ["system"])):
        if isinstance(texts := item.parsed(), dict):
            texts = {name: text for name, text in texts.items() if name in names}
            words.append(f"system={{{','.join(f'{quoted(name)}:{quoted(text)}' for name, text in texts.items())}}}")
        elif item.key == "system" or item.key.removeprefix("system.") in names:
            words.append(str(item))
    return words


def _word(key: str, folder: Path) -> str:
    """Return a folder's override; a comma would make it several values."""
    return f"{key}={quoted(str(folder)) if ',' in str(folder) else folder}"


def _check_share(words: Sequence[str], share: Any) -> None:
    """Raise `UsageError` for a data.val_share without data.sources, or beside other validation data."""
    if share is None:
        return
    if not words_of(words, ["data.sources"]):
        hint = "`verl-ext tokenize val_share=` divides what data.train_dir and data.val_dir then name"
        raise UsageError(must(_SHARE, "be null without data.sources, whose records it divides", f"{share}: {hint}"))
    for key in ("data.val_dir", "data.val_sources"):
        if given := words_of(words, [key]):
            raise UsageError(must(key, f"be left out beside {_SHARE}, which makes the validation data", given[0]))


def _translated(words: Sequence[str]) -> Sequence[str]:
    """Return words of verl's by today's names; print notes of changes."""
    flags = [word for word in words if word.startswith("-")]
    items = [Item.read(word) for word in words if word not in flags]
    if not any(is_name_of_verl(item.key) for item in items):
        return words
    values = {item.key: item.value for item in items}
    own_class = names_own_class(values.get("data.custom_cls.path"), values.get("data.custom_cls.name"))
    found = translate(items, own_class, packed=values.get("data", "packed") == "packed")
    if found.problems:
        raise UsageError("\n".join(found.problems))
    for notice in found.notices:
        print(f"note: {notice}", file=sys.stderr, flush=True)
    return [*flags, *map(str, (*found.sources, *found.items))]


class Texts:
    """The sources of one key, and the folder of their tokenized documents."""

    def __init__(self, node: str, words: Sequence[str], root: Path) -> None:
        """Parse `words` of `verl-ext tokenize` for the sources of `node`.

        root: the parent of the documents' folder. Raises UsageError and DataError with one line.
        """
        self._node, self._words = node, list(words)
        with self._errors_name_the_key():
            self._options = options = read_options(TokenizeOptions, [*words, _word("output_dir", root / "new")]).dated()
            for name, needed in (("backend", "local"), ("format", "arrow")):
                if (given := getattr(options, name)) != needed:
                    raise UsageError(must(name, f"be {needed} here", f"{given}: use `verl-ext tokenize`"))
            leave_out_torch(options.model)
            if options.model.trust_remote_code:
                print(f"note: {TRUSTED}", file=sys.stderr, flush=True)  # before the tokenizer runs it
            self._encoder = ChatEncoder(options, list(options.sources))
            if self._encoder.prints_date and not words_of(words, ["chat_date"]):
                self._words.append(f"chat_date={options.chat_date}")  # the same command on another day
                print(
                    f"{node}: the chat template prints the date; {self._words[-1]} keeps it on another day", flush=True
                )
            self.folder = root / self._fingerprint()
        self.are_tokenized = is_complete(self.folder)

    @property
    def categories(self) -> list[str]:
        """The categories' names; none if only unread records name them."""
        return [] if self._options.category_field else list(self._options.sources)

    @property
    def command(self) -> list[str]:
        """The command that writes the folder."""
        return ["verl-ext", "tokenize", *self._words, _word("output_dir", self.folder), "overwrite=true"]

    def tokenize(self) -> None:
        """Tokenize the sources unless done; print tables or the existing folder.

        Raises DataError if the sources change meanwhile, so that the folder has the name that it was given before.
        """
        if self.are_tokenized:
            print(f"{self._node}: tokenized before, into {self.folder}", flush=True)
            return

        def write(folder: Path) -> None:
            report = write_dataset(folder, find_source_files(self._options.patterns), self._options)
            print(f"{summary(report)}\n", flush=True)

        with self._errors_name_the_key():
            self.folder = cached_tokens(self.folder.parent, self._fingerprint, write, "sources")

    def _fingerprint(self) -> str:
        options, files = self._options, find_source_files(self._options.patterns)
        chosen = [options.sample, options.seed, options.val_share, options.deduplicate]
        return tokens_fingerprint(files, self._encoder, list(options.sources), *chosen)

    @contextmanager
    def _errors_name_the_key(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            message = re.sub(r"(?<![\w.])sources\b", self._node, str(error)).replace("output_dir", "data.cache_dir")
            message = re.sub(r"(?<![\w.])val_share\b", _SHARE, message)
            raise (UsageError if isinstance(error, UsageError) else DataError)(message) from error


main = command(
    "train",
    TrainOptions,
    tokenize_and_train,
    example="[FILE.yaml] 'data.sources={gsm8k:train.jsonl,code:code.json}' model.path=MODEL [nproc=N] [key=value …]",
    read=list,
)
