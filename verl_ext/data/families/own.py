"""DocumentDataset: the base class of custom datasets, which describe their own documents.

    class Poems(DocumentDataset):
        categories = CategoryTable((1, 2), ("haiku", "sonnet"))

        @cached_property
        def lengths(self):
            return [len(ids) for ids in read(self.paths)]

        def row(self, document):
            return {"input_ids": …, "loss_mask": 1, "category_ids": 2}

Packing, over-length documents, padding, reports and data checks work as for a tokenized folder.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from typing_extensions import override

from verl_ext.data.packs.documents import DocumentRows
from verl_ext.data.packs.grouping import grouped
from verl_ext.data.packs.options import DatasetOptions
from verl_ext.data.packs.packed import PackedDataset
from verl_ext.data.packs.packs import Packs
from verl_ext.data.packs.sft_options import SFTOptions
from verl_ext.data.tokenized.arrow import DocumentColumns, fitting
from verl_ext.data.tokenized.files_in_use import DataFile
from verl_ext.data.tokenized.ranks import Ranks
from verl_ext.data.tokenized.units import UnitRows
from verl_ext.options import must, option
from verl_ext.packing.plan import index_type

_MEMBERS = ("lengths", "row", "categories")
_KINDS = {"input_ids": "iu", "loss_mask": "iub", "category_ids": "iu", "loss_weight": "iuf"}


@dataclass(frozen=True)
class CustomDocumentOptions(SFTOptions):
    """The options by which the documents of a custom dataset become packs."""

    reads: ClassVar[str] = DatasetOptions.reads
    no_mixture: ClassVar[str] = "for a dataset class of one's own"
    path_test = None  # the class itself decides what its paths name
    mixture: Any = option(None, "must be null: a mixture draws from tokenized folders")

    @override
    def problems(self) -> Iterable[str | None]:
        yield from super().problems()
        if self.category_names is not None:
            needed = "be null for a dataset class of one's own, whose `categories` has the names"
            yield must("data.category_names", needed, self.category_names)


class DocumentDataset(PackedDataset):
    """A dataset of custom documents as packs.

    A subclass defines `lengths`, `row` and `categories`.

    lengths: the tokens of each document, integer[D]. categories: the numbers that rows have, with their names. Both may
    be class attributes, properties, or set before this class's constructor is called.
    paths: the absolute paths that data.train_dir or data.val_dir names; config: the data node, with a user's own keys;
    tokenizer: the model's, if the class sets `needs_tokenizer = True`.
    """

    Options: ClassVar[type[DatasetOptions]] = CustomDocumentOptions
    paths_are = CustomDocumentOptions.reads
    requires_max_tokens = False
    lengths: ArrayLike

    def __init__(
        self,
        parquet_files: str | Sequence[str] | None = None,
        tokenizer: Any = None,
        config: Mapping[str, Any] | None = None,
        processor: Any = None,
        max_samples: int = -1,
        **given: Any,
    ) -> None:
        """Open the paths `parquet_files`.

        The arguments are verl's, and others are those of PackedDataset. Raises ValueError if an option, a path or
        `lengths` cannot be used, or the class lacks one of the three.
        """
        self.config, self.tokenizer = config, tokenizer
        super().__init__(
            parquet_files=parquet_files, tokenizer=tokenizer, config=config, max_samples=max_samples, **given
        )

    @override
    def opened(self, paths: Sequence[str], tokenizer: Any, most: int | None) -> Packs:
        cls = type(self)
        own = {name for name in _MEMBERS if getattr(cls, name, None) is not getattr(DocumentDataset, name, None)}
        if lacking := [name for name in _MEMBERS if name not in own | vars(self).keys()]:
            raise ValueError(
                f"data.custom_cls.name must be a class with {', '.join(_MEMBERS)}; {cls.__name__} lacks "
                f"{', '.join(lacking)}"
            )
        self.paths = tuple(paths)
        documents = DocumentRows(OwnDocuments(self, self.key), most=most)
        return Packs(documents, grouped(documents, self.options), self.options)

    def row(self, document: int) -> Mapping[str, ArrayLike]:
        """Return a document's columns.

        They are input_ids, loss_mask, category_ids and, in all rows or in none, loss_weight. Each has as many values as
        `lengths` says, or is one number for all tokens. The first token is never a target.
        """
        raise NotImplementedError(f"{type(self).__name__} lacks row")

    def read_together(self, ranks: Ranks) -> None:
        """Scan all documents, each rank its share; this call is collective."""
        super().read_together(ranks)
        with ranks.guard():
            if unknown := set(self.scan().category_ids) - set(self.categories.ids):
                table = ", ".join(map(str, self.categories.ids))
                raise ValueError(must(self.key, f"have category_ids of the table ({table})", min(unknown)))

    @property
    @override
    def folders(self) -> tuple[str, ...]:
        return self.paths

    @property
    def data_files(self) -> tuple[DataFile, ...]:
        """The paths that are files; a class that reads others names them."""
        return tuple(DataFile(path) for path in self.paths if os.path.isfile(path))


class OwnDocuments:
    """The documents of a DocumentDataset, read row by row."""

    files: tuple[DataFile, ...] = ()
    document_columns: DocumentColumns | None = None
    units: UnitRows | None = None
    first_blocks: NDArray[np.uint64] | None = None

    def __init__(self, dataset: DocumentDataset, key: str) -> None:
        """Check `lengths` and the first row, which names the columns."""
        self._dataset, self.key = dataset, key
        self.folders: tuple[str, ...] = (",".join(dataset.paths),)  # the path of a single document is unknown
        self.category_names = dict(zip(dataset.categories.ids, dataset.categories.names, strict=True))
        lengths = np.asarray(dataset.lengths)
        if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or not len(lengths) or lengths.min() < 0:
            least = f", the least {lengths.min()}" if lengths.size else ""
            got = f"{lengths.dtype} of shape {lengths.shape}{least}"
            raise ValueError(must(key, "have lengths, one whole number of at least 0 for each document", got))
        self.lengths = lengths.astype(index_type(int(lengths.max())), copy=False)
        self.columns: tuple[str, ...] = ()
        self.columns = tuple(self._row(0))

    def first_rows(self) -> NDArray[np.int64]:
        """Return the borders of the rows of one folder."""
        return np.array([0, len(self.lengths)])

    def blocks(self, first: int, last: int, max_tokens: int) -> Iterator[tuple[int, int]]:
        """Yield ranges like `fitting`."""
        return fitting(first, self.lengths[first:last], max_tokens)

    def block(self, first: int, last: int) -> dict[str, NDArray[Any]]:
        """Return the values of rows first..last-1 by column."""
        rows = [self._row(document) for document in range(first, last)]
        return {name: np.concatenate([row[name] for row in rows]) for name in self.columns}

    def gather(
        self, row: NDArray[np.int64], start: NDArray[np.int64], length: NDArray[np.int64], out: dict[str, NDArray[Any]]
    ) -> None:
        """Write tokens start..start+length-1 of each row to `out`, one after the other."""
        at = 0
        for document, begin, tokens in zip(row.tolist(), start.tolist(), length.tolist(), strict=True):
            columns = self._row(document)
            for name, values in out.items():
                values[at : at + tokens] = columns[name][begin : begin + tokens]
            at += tokens

    def _row(self, document: int) -> dict[str, NDArray[Any]]:
        """Return a document's columns, each of its length; refuse an invalid row."""
        columns, tokens = self._dataset.row(document), int(self.lengths[document])
        wanted = self.columns or [name for name in _KINDS if name != "loss_weight" or name in columns]
        if columns.keys() != set(wanted):
            got = f"{', '.join(columns)} in row {document}"
            raise ValueError(must(self.key, f"have rows of {', '.join(wanted)}", got))
        row = {}
        for name, values in columns.items():
            array = np.asarray(values)
            if array.dtype.kind not in _KINDS[name] or array.shape not in ((), (tokens,)):
                needed = f"have {name} of {tokens} numbers in row {document}, as lengths says, or one for all"
                raise ValueError(must(self.key, needed, f"{array.dtype} of shape {array.shape}"))
            row[name] = np.broadcast_to(array, tokens)
        return row
