"""CollatedDataset: a user's class of packs, like verl's TokenAwareBatchPack.

    own[k]                    [7, 0, 3]           what stands for pack k, such as its documents
    own.collate_fn([own[k]])  five tensors [1, T] input_ids, position_ids, loss_mask, category_ids, attention_mask

The packs are the class's own. Padding (attention_mask 0) at a pack's end is left out, and as everywhere a document's
first token, whose position is 0, is never a target.
"""

import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from typing_extensions import override

from verl_ext.cache import fingerprint
from verl_ext.custom import custom_object
from verl_ext.data.packs.dataset import PackDataset, PackFacts
from verl_ext.data.packs.options import DatasetOptions, named_paths
from verl_ext.data.tokenized.categories import CategoryTable, FolderCategories
from verl_ext.data.tokenized.files_in_use import DataFile
from verl_ext.data.tokenized.ranks import ONE_RANK, Ranks, together
from verl_ext.options import first_line, must, option, options_of, spell
from verl_ext.packing import TOKENS, CostModel, PackPlan
from verl_ext.packing.plan import offsets_of
from verl_ext.text.read.sources import absolute_path

COLUMNS = ("input_ids", "position_ids", "loss_mask")
_KEY = "data.custom_cls.name"


@dataclass(frozen=True)
class CollatedOptions(DatasetOptions):
    """The options for a class with a `collate_fn`, which packs by itself."""

    strategy: Any = option("best_fit", "not used: the class packs")
    over_length: Any = option("error", "not used: the class packs")
    pad_mode: Any = option("no_padding", "not used: padding is left out")
    mixture: Any = option(None, "must be null")

    @override
    def problems(self) -> Iterable[str | None]:
        for name in ("strategy", "over_length", "pad_mode", "mixture"):
            default = options_of(CollatedOptions)[name].default
            if (value := getattr(self, name)) != default:
                why = "for a class with a collate_fn, which makes the packs itself"
                yield must(f"data.{name}", f"be {spell(default)} {why}", value)


def is_collated(named: Any) -> bool:
    """Return whether an object is a class of items with a `collate_fn`."""
    members = ("__len__", "__getitem__", "collate_fn")
    return isinstance(named, type) and all(callable(getattr(named, member, None)) for member in members)


class _Pack(NamedTuple):
    """The facts of one pack."""

    lengths: NDArray[np.int64]  # of its documents
    targets: int
    lowest: int
    highest: int
    categories: tuple[int, ...]
    digest: str  # of its values


class CollatedDataset(PackDataset):
    """The packs of the class that data.custom_cls names; see the module's drawing.

    The class is made with those of verl's arguments that its constructor has: `train_dir` (or `parquet_files`),
    `max_tokens`, `padding_value`, `tokenizer`, `config`, `processor` and `max_samples`.
    """

    Options: ClassVar[type[DatasetOptions]] = CollatedOptions
    needs_tokenizer = True

    def __init__(
        self,
        parquet_files: str | Sequence[str] | None = None,
        tokenizer: Any = None,
        config: Mapping[str, Any] | None = None,
        processor: Any = None,
        max_samples: int = -1,
        key: str = "data.train_dir",
    ) -> None:
        """Make the user's object.

        Raises ValueError if its constructor needs other arguments, or it has no packs.
        """
        node = config or {}
        options: Any = self.Options.read(node)
        paths = named_paths(key, "what the dataset class reads", parquet_files=parquet_files)
        # The user's constructor names what it wants, in verl's words or ours; it gets that alone.
        custom = node["custom_cls"]
        own = custom_object("data.custom_cls", custom["path"], custom["name"])
        path: Any = paths[0] if len(paths) == 1 else paths
        given = {
            "train_dir": path,
            "parquet_files": path,
            "max_tokens": options.max_tokens,
            "padding_value": getattr(tokenizer, "pad_token_id", None) or 0,
            "tokenizer": tokenizer,
            "config": config,
            "processor": processor,
            "max_samples": max_samples,
        }
        signature = inspect.signature(own)
        try:
            bound = signature.bind(**{name: given[name] for name in signature.parameters if name in given})
        except TypeError as error:
            needs = f"a class whose constructor takes some of {', '.join(given)}"
            got = f"{custom['name']}{signature}: {first_line(error)}"
            raise ValueError(must(_KEY, f"name {needs}", got)) from error
        # A class that does not know verl's max_samples is cut here.
        self._own = own(*bound.args, **bound.kwargs)
        self.key, self.max_tokens = key, options.max_tokens
        self._paths = tuple(map(absolute_path, paths))
        self._num = len(self._own)
        if max_samples > 0 and "max_samples" not in bound.arguments:
            self._num = min(self._num, max_samples)
        if not self._num:
            raise ValueError(f"{key} must hold a pack of data.max_tokens={self.max_tokens}; {custom['name']} has none")

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, pack: int) -> dict[str, torch.Tensor]:
        """Return a pack's 1-D tensors of one length, without padding."""
        given = self._own.collate_fn([self._own[range(len(self))[pack]]])
        row = {name: torch.as_tensor(given[name]).reshape(-1) for name in given} if isinstance(given, Mapping) else {}
        sizes = {len(values) for values in row.values()}
        if not row.keys() >= set(COLUMNS) or len(sizes) != 1:
            shapes = ", ".join(f"{name} of {len(values)}" for name, values in row.items()) or type(given).__name__
            needed = f"a collate_fn that gives {', '.join(COLUMNS)} of one shape [1, T]"
            raise ValueError(must(_KEY, f"name a class with {needed}", f"{shapes} for pack {pack}"))
        tokens = sizes.pop()
        if (attended := row.pop("attention_mask", None)) is not None and attended.any():
            tokens = int(attended.nonzero()[-1]) + 1
        row = {name: values[:tokens] for name, values in row.items()}
        first = row["position_ids"] == 0
        if not first[0] or tokens > self.max_tokens:
            needed = f"packs of at most data.max_tokens={self.max_tokens} tokens, whose positions begin at 0"
            got = f"{tokens} from {int(row['position_ids'][0])} in pack {pack}"
            raise ValueError(must(self.key, f"have {needed}", got))
        mask = row["loss_mask"].long() * ~first
        category = row.get("category_ids", torch.zeros_like(mask)).long() * mask
        kept = {"input_ids": row["input_ids"].long(), "position_ids": row["position_ids"].long()}
        weight = {"loss_weight": row["loss_weight"].float()} if "loss_weight" in row else {}
        return {**kept, "loss_mask": mask, "category_ids": category, **weight}

    @override
    def read_together(self, ranks: Ranks) -> None:
        self._packs(ranks)

    @together
    def _packs(self, ranks: Ranks | None) -> list[_Pack]:
        """Read every pack once, each rank its share."""
        ranks = ranks or ONE_RANK
        with ranks.guard():
            own = [self._facts(pack) for pack in range(ranks.rank, len(self), ranks.size)]
        packs: list[Any] = [None] * len(self)
        for rank, facts in enumerate(ranks.gather(own)):
            packs[rank :: ranks.size] = facts
        with ranks.guard():
            if not any(pack.targets for pack in packs):
                raise ValueError(f"{self.key} must have target tokens; loss_mask is 0 everywhere")
        return packs

    def _facts(self, pack: int) -> _Pack:
        row = {name: values.numpy() for name, values in self[pack].items()}
        ids, starts = row["input_ids"], np.flatnonzero(row["position_ids"] == 0)
        if ((mask := row["loss_mask"]) < 0).any() or (mask > 1).any():
            raise ValueError(must(self.key, "have loss_mask 0 or 1", f"{mask.min()}..{mask.max()} in pack {pack}"))
        digest = xxhash.xxh3_128()
        for name in sorted(row):
            digest.update(name.encode() + np.ascontiguousarray(row[name]).tobytes())
        lengths = np.diff(starts, append=len(ids))
        categories = tuple(int(number) for number in np.unique(row["category_ids"]) if number)
        return _Pack(lengths, int(mask.sum()), int(ids.min()), int(ids.max()), categories, digest.hexdigest())

    @property
    @override
    def folders(self) -> tuple[str, ...]:
        return self._paths

    @property
    @override
    def data_files(self) -> tuple[DataFile, ...]:
        below = [
            [os.path.join(path, name) for name in sorted(os.listdir(path))] if os.path.isdir(path) else [path]
            for path in self._paths
        ]
        return tuple(DataFile(path) for paths in below for path in paths if os.path.isfile(path))

    @cached_property
    @override
    def categories(self) -> CategoryTable:
        names = FolderCategories.read(self._paths).names
        return CategoryTable.of(names, {number for pack in self._packs() for number in pack.categories})

    @cached_property
    @override
    def digest(self) -> str:
        return fingerprint([pack.digest for pack in self._packs()], digits=16)

    @override
    def facts(self, cost: CostModel = TOKENS) -> PackFacts:
        packs, lengths = self._packs(), np.concatenate([pack.lengths for pack in self._packs()])
        documents = np.array([len(pack.lengths) for pack in packs], np.int64)
        plan = PackPlan(np.arange(len(lengths)), offsets_of(documents))
        return PackFacts(
            tokens=plan.pack_sums(lengths),
            targets=np.array([pack.targets for pack in packs], np.int64),
            documents=documents,
            costs=cost.packs(plan, lengths),
            token_range=(min(pack.lowest for pack in packs), max(pack.highest for pack in packs)),
            longest_document=int(lengths.max()),
        )
