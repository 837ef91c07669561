"""MultiDocOptions: how documents become samples, from arguments or from a config's data node, checked.

MultiDocDataset: documents one after the other as a stream of tokens, cut into samples of seq_len.

documents            a a a E b b E c c c c c E        E: the EOS token after each
sample, seq_len 5    b b E c c c                      its last token is only predicted (but of random_starts)

attend_across_documents   true                 false
position_ids              0 1 2 3 4 5          0 1 2 0 1 2
loss_mask                 0 1 1 1 1 1          0 1 1 0 1 1
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from verl_ext.data.categories import CategoryTable
from verl_ext.data.dataset import PackDataset, split_rows
from verl_ext.data.left_out import OverLengthRow
from verl_ext.data.multidoc_plan import LABEL_TOKENS, SamplePlan, StreamPlan, WindowPlan, source_table
from verl_ext.data.multidoc_sources import MultiDocOptions, Source, SourceFinder, cached_range, keep_range, range_part
from verl_ext.files import default_root
from verl_ext.packing import CostModel
from verl_ext.text.tokenized import digest

CACHE = "verl_ext_multidoc"
Number = TypeVar("Number", np.int64, np.float64)


class MultiDocDataset(PackDataset):
    """Samples of seq_len tokens of documents, texts or Megatron's indexed form; see the picture above.

    Two constructor forms give the same samples: `MultiDocDataset(file_paths, tokenizer, seq_len, add_eos=True,
    max_tokens=None, seed=None)`, whose max_tokens cuts the corpus, and verl's `MultiDocDataset(parquet_files=…,
    tokenizer=…, config=…, processor=None, max_samples=-1)`, whose options are the keys of `config`
    (conf/data/multidoc.yaml); an argument that is given wins. Texts are tokenised once, into an index in the cache.

    A sample's category is its source. `split` "train" or "val" is one part of the seeded random split of each source's
    documents, None all of them; no document is in both.
    """

    needs_tokenizer = True

    def __init__(
        self,
        file_paths: str | Sequence[str] | Mapping[str, Any] | None = None,
        tokenizer: Any = None,
        seq_len: int | None = None,
        add_eos: bool | None = None,
        max_tokens: int | None = None,
        seed: int | None = None,
        *,
        parquet_files: str | Sequence[str] | Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        processor: Any = None,
        max_samples: int = -1,
        blend: Sequence[Sequence[Any]] | None = None,
        sampling: str | None = None,
        attend_across_documents: bool | None = None,
        num_samples: int | None = None,
        epochs: int = 1,
        split: str | None = None,
        validates: bool = False,
        train_ratio: float | None = None,
        cache_dir: str | None = None,
        key: str = "data.train_dir",
    ) -> None:
        """`num_samples`: of a document stream; None: those of `epochs`. `validates`: sample by val_sampling and
        val_seed. `max_samples`: the first so many samples, all when it is not above 0. `key`: the config key that
        messages name. `processor` is verl's argument for images and not used.

        Raises:
            ValueError: an option, a file or an index that cannot be used; one line with the key and the value.
        """
        given = {
            "seq_len": seq_len,
            "add_eos": add_eos,
            "max_corpus_tokens": max_tokens,
            "seed": seed,
            "sampling": sampling,
            "attend_across_documents": attend_across_documents,
            "num_samples": num_samples,
            "train_ratio": train_ratio,
            "cache_dir": cache_dir,
        }
        config = config or {}
        if file_paths is not None and parquet_files is not None:
            raise ValueError(f"{key} must be given once; got {file_paths!r} and {parquet_files!r}")
        self.options = options = MultiDocOptions.from_config(config, given)
        self._root = default_root(CACHE, options.cache_dir)
        paths = parquet_files if file_paths is None else file_paths
        blend = config.get("blend") if blend is None else blend
        uses_blend = blend is not None and (split is not None or not validates)
        if uses_blend and paths is not None:
            raise ValueError(f"{key} must be null with data.blend, which names the data; got {paths!r}")
        self.key = "data.blend" if uses_blend else key
        finder = SourceFinder(tokenizer, options, self._root, self.key)
        self.sources: list[Source] = finder.blended(blend) if uses_blend else finder.listed(paths)
        self._documents = [self._part(source, split) for source in self.sources]
        self.max_tokens = options.seq_len
        self.sampling = self._sampling(validates, config.get("num_samples"))
        self.last_is_label = LABEL_TOKENS[self.sampling] == 1
        self.is_ordered = self.sampling == "document_stream"
        self._seed = options.seed
        if validates:
            self._seed = options.seed + 1 if options.val_seed is None else options.val_seed
        self._plan = self._planned(epochs, max_samples)
        self._num = min(len(self._plan), max_samples) if max_samples > 0 else len(self._plan)
        self.epochs = self._plan.epochs * self._num / len(self._plan) if self.is_ordered else 1.0
        self._token_range: tuple[int, int] | None = None

    def _sampling(self, validates: bool, num_samples: int | None) -> str:
        if validates:
            return self.options.val_sampling
        blends = any(source.weight is not None for source in self.sources)
        is_text = all(source.is_text for source in self.sources) and not blends
        chosen = self.options.sampling or ("random_starts" if is_text else "document_stream")
        if chosen != "document_stream" and blends:
            raise ValueError(f"data.sampling must be document_stream with data.blend; got {chosen}")
        if chosen != "document_stream" and num_samples is not None:
            raise ValueError(f"data.num_samples must be null with data.sampling={chosen}; got {num_samples}")
        return chosen

    def _part(self, source: Source, split: str | None) -> NDArray[np.int64] | None:
        """The documents of a part of the split; None for all."""
        options = self.options
        if split is None:
            return None
        try:
            return split_rows(source.index.num_documents, split, options.train_ratio, options.seed)
        except ValueError as error:
            raise ValueError(f"{self.key}: {source.name}: {error}") from error

    def _planned(self, epochs: int, max_samples: int) -> SamplePlan:
        options, parts = self.options, (self.sources, self._documents)
        if self.is_ordered:
            return StreamPlan(
                *parts, options.seq_len, self._seed, options.num_samples, epochs, self._root, options.blend_rule
            )
        return WindowPlan(self.sampling, *parts, options.seq_len, self._seed, max_samples)

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, pack: int) -> dict[str, torch.Tensor]:
        """Sample `pack`: int64[T] each of input_ids, position_ids, loss_mask and category_ids; T is max_tokens, and one
        more where last_is_label; a source's last sample in order may have fewer."""
        number = int(pack)
        if not -len(self) <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        source, (document, start, stop) = self._plan.pieces(number % len(self))
        ids = self.sources[source].index.gather(document, start, stop).astype(np.int64)
        begins = np.zeros(1, np.int64)
        if not self.options.attend_across_documents:
            begins = np.cumsum(stop - start) - (stop - start)
        mask = np.ones(len(ids), np.int64)
        mask[begins] = 0
        row = {
            "input_ids": ids,
            "position_ids": _positions(begins, len(ids)),
            "loss_mask": mask,
            "category_ids": mask * (source + 1),
        }
        return {name: torch.from_numpy(values) for name, values in row.items()}

    @property
    def folders(self) -> tuple[str, ...]:
        """The prefixes of the indices that are read."""
        return tuple(source.index.prefix for source in self.sources)

    @cached_property
    def categories(self) -> CategoryTable:
        """One for each source, numbered from 1."""
        return CategoryTable(tuple(range(1, len(self.sources) + 1)), tuple(source.name for source in self.sources))

    @cached_property
    def digest(self) -> str:
        """16 hex digits of the documents' lengths, their token ids' range, and all that decides which sample has which
        tokens."""
        parts = [
            [
                source.index.digest,
                source.weight,
                None if documents is None else hashlib.sha256(documents.tobytes()).hexdigest(),
            ]
            for source, documents in zip(self.sources, self._documents, strict=True)
        ]
        facts = [parts, self.token_range, self.options.seq_len, self._seed, self._num, self.plan_options()]
        return digest(facts)[:16]

    def plan_options(self) -> dict[str, Any]:
        """How documents become samples."""
        options = self.options
        facts: dict[str, Any] = {
            "data.sampling": self.sampling,
            "data.attend_across_documents": options.attend_across_documents,
        }
        if len(self.sources) > 1 and self.is_ordered:
            facts |= {"the weights of data.blend": [source.weight for source in self.sources]}
            facts |= {"data.blend_rule": options.blend_rule}
        if self.is_ordered:
            decided_by = "data.num_samples, trainer.total_training_steps, trainer.total_epochs"
            facts[f"the number of samples of the run ({decided_by})"] = len(self._plan)
        return facts

    @property
    def token_range(self) -> tuple[int, int]:
        """The lowest and the highest token id of the indices; one pass over the tokens at the first use, unless the
        cache knows. Settable, so that ranks may compute it together."""
        if self._token_range is None:
            self._token_range = self.cached_token_range() or self.token_range_part(0, 1)
        assert self._token_range is not None, "an index of no token has no sample"
        return self._token_range

    @token_range.setter
    def token_range(self, token_range: tuple[int, int]) -> None:
        self._token_range = token_range

    def token_range_part(self, part: int, parts: int) -> tuple[int, int] | None:
        """token_range of about one of `parts` equal shares of the tokens; None where there is none in it."""
        return range_part([source.index for source in self.sources], part, parts)

    def cached_token_range(self) -> tuple[int, int] | None:
        """token_range where the cache has it."""
        return cached_range(self._root, [source.index for source in self.sources])

    def cache_token_range(self) -> None:
        """Keep token_range for the next start."""
        keep_range(self._root, [source.index for source in self.sources], self.token_range)

    @property
    def longest_document(self) -> int:
        """Tokens of the longest document of a sample, as a model reads it."""
        longest = int(self.pack_tokens().max())
        if self.options.attend_across_documents:
            return longest
        return min(longest, max(int(source.index.lengths.max()) for source in self.sources))

    def pack_tokens(self) -> NDArray[np.int64]:
        """int64[P]: tokens that a model reads of each sample."""
        return _each(lambda tokens: tokens - self.last_is_label, self._plan.token_counts()[: self._num])

    def pack_costs(self, cost: CostModel) -> NDArray[np.float64]:
        """float64[P]: what each sample costs as one document."""
        return _each(cost.documents, self.pack_tokens())

    def pack_documents(self) -> NDArray[np.int64]:
        """int64[P]: documents, or pieces of them, of each sample; 1 where attention spans all."""
        if self.options.attend_across_documents:
            return np.broadcast_to(np.int64(1), self._num)
        return self._piece_counts

    @cached_property
    def _piece_counts(self) -> NDArray[np.int64]:
        return self._plan.piece_counts()[: self._num]

    def pack_targets(self) -> NDArray[np.int64]:
        """int64[P]: every token but the first of each document."""
        tokens = self._plan.token_counts()[: self._num]
        if self.options.attend_across_documents:
            return _each(lambda count: count - 1, tokens)
        return tokens - self.pack_documents()

    def changed_documents(self) -> list[OverLengthRow]:
        """The records of texts that gave no document, by source and reason, and those whose special tokens are text."""
        rows = [
            OverLengthRow(source.name, f"bad record: {reason}", count)
            for source in self.sources
            for reason, count in sorted(source.bad_records.items())
        ]
        return rows + [
            OverLengthRow(source.name, "special tokens encoded as text", source.special_tokens)
            for source in self.sources
            if source.special_tokens
        ]

    def facts(self) -> dict[str, Any]:
        """How it is sampled, and its sources: documents, tokens, samples and epochs of each."""
        counts = self._plan.source_counts(self._num)
        return {
            "sampling": self.sampling,
            "sources": source_table(self.sources, self._documents, counts, self.options.seq_len),
        }


def _each(function: Callable[[NDArray[np.int64]], NDArray[Number]], values: NDArray[np.int64]) -> NDArray[Number]:
    """`function` of every value; of values that are all one and in its memory, in the memory of one as well."""
    if values.strides == (0,):
        return np.broadcast_to(function(values[:1])[0], len(values))
    return function(values)


def _positions(begins: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """int64[size]: 0, 1, … from each of `begins` on."""
    steps = np.ones(size, np.int64)
    steps[0] = 0
    steps[begins[1:]] = 1 - np.diff(begins)
    return np.cumsum(steps)
