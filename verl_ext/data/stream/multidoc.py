"""MultiDocDataset: a stream of documents' tokens, cut into samples of seq_len.

documents            a a a E b b E c c c c c E        E: the EOS token after each document
sample, seq_len 5    b b E c c c                      the last token is only predicted (not with random_starts)

attend_across_documents   true                 false
position_ids              0 1 2 3 4 5          0 1 2 0 1 2
loss_mask                 0 1 1 1 1 1          0 1 1 0 1 1
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from verl_ext.cache import Arrays, default_root, fingerprint
from verl_ext.data.packs.dataset import DIGEST, PackDataset, PackedDocument, PackFacts
from verl_ext.data.packs.omitted import OmittedDocuments
from verl_ext.data.packs.options import DatasetOptions, RunLength
from verl_ext.data.stream.megatron.blend import BLEND_RULES
from verl_ext.data.stream.plans import LABEL_TOKENS, StreamPlan, WindowPlan
from verl_ext.data.stream.sources import SourceFinder, is_path, read_blend
from verl_ext.data.tokenized.categories import CategoryTable
from verl_ext.data.tokenized.files_in_use import DataFile
from verl_ext.data.tokenized.ranks import ONE_RANK, Ranks, arrays_of_ranks, together
from verl_ext.files import file_state
from verl_ext.options import must, option, plain
from verl_ext.packing import TOKENS, CostModel
from verl_ext.packing.strategies import MOST_TOKENS
from verl_ext.text.encoder_texts import TextOptions
from verl_ext.text.read.sources import is_there

CACHE = "verl_ext_multidoc"
# The name of a document stream's length in a checkpoint.
NUM_SAMPLES = "the number of samples of the run (data.num_samples, trainer.total_training_steps, trainer.total_epochs)"


@dataclass(frozen=True)
class MultiDocOptions(DatasetOptions, TextOptions):
    """The options by which documents become samples."""

    reads: ClassVar[str] = "texts or an index, or data.blend in its place"
    data_keys: ClassVar[tuple[str, ...]] = ("train_dir", "blend")

    blend: Any = option(None, "sources and their shares, [[0.7,PATH],[0.3,PATH]], in place of train_dir")
    blend_rule: str = option(
        "tijdeman",
        "tijdeman: every source within one sample of its share; megatron: the order of megatron-core's builder",
        choices=BLEND_RULES,
    )
    train_ratio: float = option(
        1.0,
        "share of each source's documents (of the tokens, if it is one document) for training if val_dir is null; "
        "1: no validation",
        above=0,
        most=1,
        resume="same",
    )
    seq_len: int = option(1024, "tokens of a sample", least=2, most=MOST_TOKENS)
    sampling: str | None = option(
        None,
        "random_starts: samples begin anywhere; document_stream: Megatron's sample order; in_order: end to end; "
        "null: random_starts for text, document_stream for an index or a blend",
        choices=LABEL_TOKENS,
    )
    val_sampling: str = option("in_order", "sampling of the validation data", choices=("in_order", "random_starts"))
    attend_across_documents: bool = option(True, "false: attention and prediction stay inside a document")
    num_samples: int | None = option(
        None, "number of samples of document_stream; null: as many as the run needs", least=1, resume="may_grow"
    )
    max_corpus_tokens: int | None = option(None, "tokens after which a text source is cut; null: never", least=1)
    cache_dir: str | os.PathLike[str] | None = option(
        None, "folder for tokenized texts and indices; null: the cache of datasets"
    )
    max_tokens: int | None = option(None, "must be null or seq_len: a pack is a sample")  # type: ignore[assignment]
    strategy: str = option("none", "fixed: a pack is a sample", choices=("none",), resume="same")
    over_length: str = option(
        "error", "fixed: a document continues in the next sample", choices=("error",), resume="same"
    )
    pad_mode: str = option("no_padding", "fixed: samples are not padded", choices=("no_padding",))
    mixture: Any = option(None, "must be null; data.blend draws from several sources", resume="same")
    balance: str = option("none", "fixed: every sample costs the same", choices=("none",))
    seed: int = option(42, "seed of the samples, of their order and of the split", least=0, most=2**32 - 1)
    val_seed: int | None = option(None, "seed of val_sampling=random_starts; null: seed + 1", least=0)

    @property
    @override
    def needs_train_dir(self) -> bool:
        return self.blend is None

    @classmethod
    @override
    def for_evaluation(cls, node: Mapping[str, Any]) -> dict[str, Any]:
        splits_blend = node.get("blend") is not None and not node.get("val_dir") and node.get("train_ratio", 1.0) < 1
        return {} if splits_blend else {**super().for_evaluation(node), "blend": None}

    @classmethod
    @override
    def run_arguments(cls, node: Mapping[str, Any], length: RunLength) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"num_samples": node.get("num_samples") or length.samples, "epochs": length.epochs}, {"validates": True}

    @override
    def problems(self) -> Iterable[str | None]:
        if self.max_tokens not in (None, self.seq_len):
            yield must("data.max_tokens", f"be data.seq_len={self.seq_len} for samples of it", self.max_tokens)
        if self.mixture is not None:
            yield must("data.mixture", "be null for samples of a stream", self.mixture)
        yield from super().problems()
        if self.cache_dir is not None and not is_path(self.cache_dir):
            yield must("data.cache_dir", "be a folder or null", self.cache_dir)
        if self.blend is not None:
            try:
                read_blend(self.blend)
            except ValueError as error:
                yield str(error)

    @override
    def path_problems(self, key: str, paths: Any) -> Iterable[str]:
        if key == "data.train_dir" and self.blend is not None:
            key, paths = "data.blend", [path for _, path in read_blend(self.blend)]
        for path in _flat(plain(paths)):
            if path and not (is_there(str(path)) or is_there(f"{path}.idx")):
                yield f"{key} must name texts or an index; {path} does not exist"


def _flat(paths: Any) -> Iterable[Any]:
    """Yield each path of a path, a list, or paths by name."""
    if not isinstance(paths, (list, tuple, Mapping)):
        yield paths
        return
    for each in paths.values() if isinstance(paths, Mapping) else paths:
        yield from _flat(each)


class MultiDocDataset(PackDataset):
    """A dataset of samples of seq_len tokens, from texts or Megatron's indices.

    Two constructor forms give the same samples: `MultiDocDataset(file_paths, tokenizer, seq_len, add_eos=True,
    max_tokens=None, seed=None)`, whose max_tokens cuts the corpus, and verl's `MultiDocDataset(parquet_files=…,
    tokenizer=…, config=…, processor=None, max_samples=-1)`, whose options are MultiDocOptions' keys of `config`. A
    given argument wins. Texts are tokenized once, into an index in the cache. Sources are the categories.

    Args:
        epochs: the epochs of a document stream whose num_samples is null.
        split: "train" or "val": one part of the seeded random split of each source's documents; None: all of them.
        validates: sample by val_sampling and val_seed.
        max_samples: use only so many samples from the start; all if it is not above 0.
        key: the config key that messages name.
        given: MultiDocOptions by name, which win over those of `config`.
        processor: verl's argument for images, not used.

    Raises ValueError if an option, a file or an index cannot be used; one line names the key and the value.
    """

    Options = MultiDocOptions
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
        epochs: int = 1,
        split: str | None = None,
        validates: bool = False,
        key: str = "data.train_dir",
        **given: Any,
    ) -> None:
        if file_paths is not None and parquet_files is not None:
            raise ValueError(must(key, "be given once", f"{file_paths} and {parquet_files}"))
        paths = parquet_files if file_paths is None else file_paths
        node = dict(plain(config or {}))
        if seq_len is not None:
            node["max_tokens"] = None
        named = {"seq_len": seq_len, "add_eos": add_eos, "max_corpus_tokens": max_tokens, "seed": seed}
        self.options = options = MultiDocOptions.read(node, **{**named, **given})
        # A blend names the data itself; validation data of its own takes its place.
        uses_blend = options.blend is not None and (split is not None or not validates)
        if uses_blend and paths is not None:
            raise ValueError(must(key, "be null with data.blend, which names the data", paths))
        self.key = "data.blend" if uses_blend else key
        self._root = default_root(CACHE, options.cache_dir)
        finder = SourceFinder(tokenizer, options, options.max_corpus_tokens, self._root, self.key)
        sources = finder.blended(options.blend) if uses_blend else finder.listed(paths)
        if split is not None:
            sources = [source.part(split, options.train_ratio, options.seed, options.seq_len) for source in sources]
        self.sources = sources
        self.max_tokens = options.seq_len
        self.sampling = options.val_sampling if validates else self._train_sampling(node.get("num_samples"))
        self.last_is_label = LABEL_TOKENS[self.sampling] == 1
        self.is_ordered = self.sampling == "document_stream"
        # Validation has another seed than training, unless the user names one.
        val_seed = options.seed + 1 if options.val_seed is None else options.val_seed
        self._seed = val_seed if validates else options.seed
        self._plan: StreamPlan | WindowPlan
        if self.is_ordered:
            self._plan = self._stream(options.num_samples, epochs)
        else:
            self._plan = WindowPlan(self.sampling, self.sources, options.seq_len, self._seed, max_samples)
        self._num = min(len(self._plan), max_samples) if max_samples > 0 else len(self._plan)
        self.epochs = self._plan.epochs * self._num / len(self._plan) if self.is_ordered else 1.0

    def _stream(self, num_samples: int | None, epochs: int) -> StreamPlan:
        options = self.options
        return StreamPlan(
            self.sources, options.seq_len, self._seed, num_samples, epochs, self._root, options.blend_rule
        )

    def extends(self, saved: Mapping[str, Any], seen: int) -> bool:
        """Return whether only the number of samples differs, after `seen` equal ones.

        They are the same as long as both numbers use the documents equally often. Several sources without weights are
        mixed in proportion to their samples in an unknown number of epochs, which may give another order.
        """
        num = saved.get(NUM_SAMPLES)
        weighs = len(self.sources) == 1 or all(source.weight is not None for source in self.sources)
        if not (isinstance(self._plan, StreamPlan) and weighs and isinstance(num, int)):
            return False
        if num == self._num or seen > min(num, self._num):
            return False
        is_same_data = saved.get(DIGEST) == self._digest_of(num, num)
        return is_same_data and self._plan.begins_as(self._stream(num, 1), seen)

    def _train_sampling(self, asked_samples: int | None) -> str:
        """Return the sampling of training data; asked_samples: data.num_samples in the config."""
        blends = any(source.weight is not None for source in self.sources)
        is_text = all(source.is_text for source in self.sources) and not blends
        chosen = self.options.sampling or ("random_starts" if is_text else "document_stream")
        if chosen != "document_stream" and blends:
            raise ValueError(must("data.sampling", "be document_stream with data.blend", chosen))
        if chosen != "document_stream" and asked_samples is not None:
            raise ValueError(must("data.num_samples", f"be null with data.sampling={chosen}", asked_samples))
        return chosen

    @override
    def read_together(self, ranks: Ranks) -> None:
        self.token_range(ranks)

    @together
    def token_range(self, ranks: Ranks | None) -> tuple[int, int]:
        """Return the lowest and the highest token id; each rank reads its share, and the cache keeps it."""
        ranks = ranks or ONE_RANK

        def read() -> Arrays:
            with ranks.guard():
                part = [source.token_range(ranks.rank, ranks.size) for source in self.sources]
            ranges = [own for parts in ranks.gather(part) for own in parts if own[0] <= own[1]]
            return {"token_range": np.array([min(low for low, _ in ranges), max(high for _, high in ranges)])}

        with ranks.guard():
            files = [[*map(file_state, source.index.files), source.index.digest] for source in self.sources]
        arrays = arrays_of_ranks(ranks, f"range-{fingerprint(files)}", read, self._root)
        lowest, highest = arrays["token_range"].tolist()
        return lowest, highest

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, pack: int) -> dict[str, torch.Tensor]:
        """Return sample `pack`: input_ids, position_ids, loss_mask and category_ids, int64[T] each.

        T is max_tokens, plus one if last_is_label. With in_order, a source's last sample may have fewer tokens.
        """
        source, (document, start, stop) = self._plan.pieces(range(len(self))[pack])
        ids = self.sources[source].index.gather(document, start, stop).astype(np.int64)
        begins = np.zeros(1, np.int64)
        if not self.options.attend_across_documents:
            begins = np.cumsum(stop - start) - (stop - start)
        mask = np.ones(len(ids), np.int64)
        mask[begins] = 0
        positions = np.arange(len(ids)) - np.repeat(begins, np.diff(begins, append=len(ids)))
        row = {
            "input_ids": ids,
            "position_ids": positions,
            "loss_mask": mask,
            "category_ids": mask * (source + 1),
        }
        return {name: torch.from_numpy(values) for name, values in row.items()}

    @override
    def documents_of(self, pack: int) -> list[PackedDocument]:
        source, (document, start, stop) = self._plan.pieces(range(len(self))[pack])
        index = self.sources[source].index
        pieces = zip(document.tolist(), (start + index.first_token).tolist(), (stop - start).tolist(), strict=True)
        return [PackedDocument(index.prefix, *piece) for piece in pieces]

    @property
    @override
    def folders(self) -> tuple[str, ...]:
        return tuple(source.index.prefix for source in self.sources)

    @property
    @override
    def data_files(self) -> tuple[DataFile, ...]:
        return tuple(DataFile(path) for source in self.sources for path in source.index.files)

    @cached_property
    def categories(self) -> CategoryTable:
        """The categories: one for each source, numbered from 1."""
        return CategoryTable(tuple(range(1, len(self.sources) + 1)), tuple(source.name for source in self.sources))

    @cached_property
    def digest(self) -> str:
        """A digest of document lengths, the id range and what decides samples."""
        return self._digest_of(self._num, len(self._plan))

    def _digest_of(self, num_samples: int, planned: int) -> str:
        parts = [
            [s.index.digest, s.weight, None if s.documents is None else fingerprint(s.documents, digits=64)]
            for s in self.sources
        ]
        options = self.plan_options()
        if NUM_SAMPLES in options:
            options[NUM_SAMPLES] = planned
        facts = [parts, self.token_range(), self.options.seq_len, self._seed, num_samples, options]
        return fingerprint(facts, digits=16)

    @override
    def plan_options(self) -> dict[str, Any]:
        options = self.options
        facts: dict[str, Any] = {
            "data.sampling": self.sampling,
            "data.attend_across_documents": options.attend_across_documents,
        }
        if not self.is_ordered:
            return facts
        if len(self.sources) > 1:
            facts["the weights of data.blend"] = [source.weight for source in self.sources]
            facts["data.blend_rule"] = options.blend_rule
        return {**facts, NUM_SAMPLES: len(self._plan)}

    @override
    def facts(self, cost: CostModel = TOKENS) -> PackFacts:
        tokens = self._plan.token_counts()[: self._num]
        longest = int(tokens.max())
        documents: NDArray[np.int64] = np.broadcast_to(np.int64(1), self._num)  # if attention spans all
        if not self.options.attend_across_documents:
            documents = self._piece_counts
            longest = min(longest, max(int(source.index.lengths.max()) for source in self.sources))
        # Targets are all tokens but the first of each span of attention, and a last token that is only a label. A
        # stream's samples have one length, of which one value is stored.
        is_like_tokens = self.last_is_label and self.options.attend_across_documents
        targets = tokens if is_like_tokens else tokens + self.last_is_label - documents
        lengths = tokens[:1] if self.is_ordered else tokens  # a sample costs as much as one document
        return PackFacts(
            tokens=tokens,
            targets=targets,
            documents=documents,
            costs=np.broadcast_to(cost.documents(lengths), len(tokens)),
            token_range=self.token_range(),
            longest_document=longest,
            last_is_label=self.last_is_label,
            is_ordered=self.is_ordered,
            epochs=self.epochs,
        )

    @cached_property
    def _piece_counts(self) -> NDArray[np.int64]:
        return self._plan.piece_counts()[: self._num]

    def omitted_documents(self) -> list[OmittedDocuments]:
        """Return sources' records without a document, and with special tokens as text.

        A document of which this set has a part is named with the tokens between the two parts.
        """
        return [omitted for source in self.sources for omitted in source.omitted_documents()]

    @override
    def report(self) -> dict[str, Any]:
        rows = []
        for source, samples in zip(self.sources, self._plan.source_counts(self._num).tolist(), strict=True):
            row = {
                "source": source.name,
                "documents": source.index.num_documents if source.documents is None else len(source.documents),
                "tokens": source.num_tokens,
                "samples": samples,
                "epochs": round(samples * self.options.seq_len / max(source.num_tokens, 1), 3),
            }
            rows.append(row if source.weight is None else {**row, "weight": source.weight})
        documents = sum(row["documents"] for row in rows)
        facts = {"sampling": self.sampling, "sources": rows, "samples": self._num, "documents": documents}
        return {"omitted_documents": [vars(row) for row in self.omitted_documents()], **facts}
