"""SFTOptions: how the documents of a tokenized dataset become packs."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from typing_extensions import override

from verl_ext.data.packs.mixture import MixtureOptions
from verl_ext.data.packs.options import DatasetOptions
from verl_ext.data.tokenized.beginnings import SHARE_LEAST
from verl_ext.data.tokenized.categories import read_names
from verl_ext.options import must, option
from verl_ext.packing import OVER_LENGTH_POLICIES, STRATEGIES
from verl_ext.text.read.sources import local_path

PAD_MODES = ("no_padding", "right")
_ORDERED = ("next_fit", "none")  # the strategies that keep the order of the documents
FREE_STRATEGIES = tuple(name for name in STRATEGIES if name not in _ORDERED)


@dataclass(frozen=True)
class SFTOptions(DatasetOptions):
    """The options by which the documents of a tokenized dataset become packs.

    no_mixture: why a family refuses data.mixture, if it does. path_test: a test of a local path, and what it asks for.
    """

    reads: ClassVar[str] = "the folder that `verl-ext tokenize` wrote"
    may_share: ClassVar[bool] = True
    no_mixture: ClassVar[str] = ""
    path_test: ClassVar[tuple[Callable[[str], bool], str] | None] = (os.path.isdir, "folder")
    sharing_strategies: ClassVar[Iterable[str]] = FREE_STRATEGIES

    strategy: str = option("best_fit", "how documents become packs", choices=STRATEGIES, resume="same")
    over_length: str = option(
        "error", "treatment of documents longer than max_tokens", choices=OVER_LENGTH_POLICIES, resume="same"
    )
    pad_mode: str = option("no_padding", "right: every pack is padded to max_tokens", choices=PAD_MODES)
    shuffle_documents: bool = option(
        False, "true: strategy=next_fit or none takes the documents in an order drawn by the seed", resume="same"
    )
    category_names: Any = option(
        None, "{NUMBER: NAME}, before the names of categories.json; null: these names alone", resume="same"
    )
    share_prefixes: bool = option(
        False, "true: tokens with which several documents of a pack begin are computed once", resume="same"
    )
    share_least: int = option(SHARE_LEAST, "least number of tokens that documents share", least=1, resume="same")
    mixture: Any = option(
        None, "{sources: {NAME: {tokens: 4e9, intervals: [8192, 32768], …}}}; null: every document once", resume="same"
    )

    @cached_property
    def mixture_options(self) -> MixtureOptions | None:
        """The mixture with its sources. Raises ValueError if it is wrong."""
        return None if self.mixture is None else MixtureOptions.read(self.mixture)

    @property
    def given_names(self) -> dict[int, str]:
        """The names of data.category_names by number. Raises ValueError if they are wrong."""
        return {} if self.category_names is None else read_names(self.category_names, "data.category_names")

    @override
    def problems(self) -> Iterable[str | None]:
        if self.mixture is not None and self.no_mixture:
            yield must("data.mixture", f"be null {self.no_mixture}", self.mixture)
        else:
            try:
                _ = self.mixture_options
            except ValueError as error:
                yield from str(error).splitlines()
        yield from super().problems()
        # How documents are ordered and shared, and the names of their categories.
        implied = {**vars(self), **self.implied(vars(self))}
        strategy = implied["strategy"]
        if self.share_prefixes and not self.may_share:
            yield must("data.share_prefixes", f"be false for {self.reads}", True)
        elif self.share_prefixes:
            for name, allowed in (("strategy", self.sharing_strategies), ("pad_mode", ("no_padding",))):
                if implied[name] not in allowed:
                    needed = f"be {' or '.join(allowed)} with data.share_prefixes=true"
                    yield must(f"data.{name}", needed, implied[name])
        if self.shuffle_documents and strategy not in _ORDERED:
            needed = f"be {' or '.join(_ORDERED)} with data.shuffle_documents=true"
            yield must("data.strategy", needed, f"{strategy}, which orders them itself")
        if self.shuffle_documents and self.mixture is not None:
            yield must("data.shuffle_documents", "be false with data.mixture, which draws the documents", True)
        try:
            _ = self.given_names
        except ValueError as error:
            yield str(error)

    @override
    def path_problems(self, key: str, paths: Any) -> Iterable[str]:
        exists, kind = self.path_test or (bool, "")
        for path in paths if isinstance(paths, (list, tuple)) else [paths]:
            if path and not exists(os.path.expanduser(local_path(str(path)))):
                yield must(key, f"be an existing {kind}", path)

    @property
    @override
    def needs_train_dir(self) -> bool:
        return self.mixture_options is None or None in self.mixture_options.folders

    def all_folders(self, train_dir: Sequence[str]) -> Sequence[str]:
        """Return train_dir with the folders of the mixture; raise ValueError if one of these is missing."""
        return train_dir if self.mixture_options is None else self.mixture_options.all_folders(train_dir)

    @property
    def packing(self) -> "SFTOptions":
        """The options of packing, with max_tokens."""
        return self
