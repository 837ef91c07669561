"""SFTDataSet: the documents of tokenized folders, each whole in one pack."""

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from verl_ext.data.packs.documents import DocumentRows
from verl_ext.data.packs.grouping import grouped
from verl_ext.data.packs.packed import PackedDataset
from verl_ext.data.packs.packs import Packs
from verl_ext.data.tokenized.arrow import TokenizedData


class SFTDataSet(PackedDataset):
    """A dataset of the documents of tokenized folders, or of a mixture of them.

    The sources' own folders are read after train_dir, which is not opened if every source has its own.
    """

    @override
    def opened(self, paths: Sequence[str], tokenizer: Any, most: int | None) -> Packs:
        options = self.options
        data = TokenizedData(options.all_folders(paths), self.key)
        documents = DocumentRows(data, most=most, names=options.given_names)
        return Packs(documents, grouped(documents, options), options, paths)
