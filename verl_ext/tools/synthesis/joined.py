"""GLM-Long's artificial long documents: similar documents, joined into one text.

    documents of a class  ──►  embeddings  ──►  a start, and its nearest neighbours up to a drawn length  ──►  one text

Each document is used at most once. The seed and the names of documents give the order in which they become starts. A
start goes to the interval of lengths with the fewest tokens so far, so that all intervals get about equally many (Zhipu
AI, "GLM Long: Scaling Pre-trained Model Contexts to Millions", 2024). The search for neighbours is exact: it multiplies
all embeddings of a class by the start's, which is quick enough for about 100,000 documents in a class.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from verl_ext.files import json_lines
from verl_ext.options import DataError, must, option
from verl_ext.text.read.bad_record import BadRecord, check_characters
from verl_ext.tools.endpoint.answer import DONE, Answer, Unparsable
from verl_ext.tools.endpoint.client import EndpointOptions
from verl_ext.tools.synthesis.corpus import Intervals
from verl_ext.tools.synthesis.encoder import ClassifierOptions, EncoderOptions, LocalEncoder
from verl_ext.tools.synthesis.items import SourceItem, drawn
from verl_ext.tools.synthesis.options import DocumentOptions, SynthesizeOptions, ascending_problem
from verl_ext.tools.synthesis.report import Result
from verl_ext.tools.synthesis.task import DocumentTask
from verl_ext.tools.word_count import language_of

SEPARATOR = "\n\n"


def parse_class(text: str, classes: Sequence[str]) -> str:
    """Return the class that an answer names, alone or after `Class:`; raise Unparsable for any other."""
    lines = [line.strip(" \t*_\"'.。`") for line in text.strip().splitlines()]
    named = [match[1].strip(" *_\"'.。`") for line in lines if (match := _CLASS.search(line))]
    found = [name for name in classes for each in (named or lines[-1:])[-1:] if each.casefold() == name.casefold()]
    if not found:
        raise Unparsable(f"the answer names none of the classes {', '.join(classes)}")
    return found[0]


_CLASS = re.compile(r"(?:class|类别)[\s*_]*[:：]\s*(.+)$", re.IGNORECASE)


@dataclass(frozen=True)
class ClassDocument:
    """A document of a class: tokens with separator, and its text's place.

    place, num_bytes: where the file of texts holds its text.
    """

    name: str
    tokens: int
    vector: NDArray[np.float32]
    place: int
    num_bytes: int


@dataclass(frozen=True)
class Group:
    """A text's documents, the start first, and their similarities to it."""

    interval: str
    numbers: Sequence[int]
    similarities: Sequence[float]


def groups_of(
    documents: Sequence[ClassDocument], intervals: Intervals, seed: int, filled: dict[str, int]
) -> Iterator[Group]:
    """Yield the groups of a class, each document at most once.

    Args:
        documents: the documents of the class, in the order in which they become starts.
        intervals: the intervals of the lengths of joined texts.
        seed: the seed of the target lengths.
        filled: the tokens of each interval so far, which this function updates.
    """
    # Rows of length 1, so that one product gives the cosine of a start with all documents of the class.
    tokens = np.array([document.tokens for document in documents])
    vectors = np.stack([document.vector for document in documents])
    vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    free, left = np.ones(len(documents), bool), int(tokens.sum())
    ranges = list(zip(intervals.names, intervals.edges, intervals.edges[1:], strict=False))
    for start, document in enumerate(documents):
        possible = [each for each in ranges if free[start] and document.tokens < each[2] and left > each[1]]
        if not possible:
            continue
        similarities = vectors @ vectors[start]
        nearest = np.argsort(-similarities, kind="stable")
        nearest = nearest[free[nearest] & (nearest != start)].tolist()
        place = drawn(seed, document.name, "target") / 2**64
        # The emptiest interval comes first; if this start's neighbours cannot fill it, the next may still fit.
        for name, low, high in sorted(possible, key=lambda each: (filled[each[0]], -each[1])):
            target, total, chosen = low * (high / low) ** place, document.tokens, [start]
            for number in nearest:
                if len(chosen) > 1 and total >= target:
                    break
                if total + tokens[number] <= high:
                    total += int(tokens[number])
                    chosen.append(number)
            if total > low and len(chosen) > 1:
                free[chosen] = False
                filled[name] += total
                left -= total
                yield Group(name, chosen, [float(similarities[number]) for number in chosen])
                break


@dataclass(frozen=True)
class JoinOptions(DocumentOptions):
    """Long documents, each joined of similar ones."""

    class_field: str | None = option(
        None, "field with a record's class; only documents of one class are joined; null: its source"
    )
    classifier: ClassifierOptions = option(ClassifierOptions, "model that names the classes")
    encoder: EncoderOptions = option(EncoderOptions, "encoder that embeds documents")

    def task_problems(self) -> Iterator[str | None]:
        """Yield a line for each mistake in the encoder, the classes and their servers."""
        if self.encoder.path is None:
            yield from self.endpoint.endpoint_problems()
        yield from self.model.tokenizer_problems()
        if self.prompts is not None and not self.classifier.classes:
            yield must("prompts", "be null without classifier.classes", self.prompts)
        yield from self.classifier.class_problems()
        if self.classifier.classes and self.class_field is not None:
            yield must("class_field", "be null with classifier.classes", self.class_field)
        yield ascending_problem("intervals", self.intervals, 2)

    @property
    def servers(self) -> list[EndpointOptions]:
        """The servers that embed documents and name their classes."""
        encoders = [] if self.loads_model else [self.endpoint]
        return encoders + ([self.classifier.endpoint] if self.classifier.classes else [])

    @property
    def loads_model(self) -> bool:
        """Whether an encoder on this machine embeds documents."""
        return self.encoder.path is not None


class JoinedDocuments(DocumentTask):
    """Documents of a class, embedded, and joined with their nearest neighbours."""

    name: ClassVar[str] = "glm_long_documents"
    options_class: ClassVar[type[SynthesizeOptions]] = JoinOptions
    options: JoinOptions

    def __init__(self, options: JoinOptions) -> None:
        super().__init__(options)
        # An interval limits a joined text, not its parts: any document up to the longest may be a part.
        self.lengths = replace(self.lengths, intervals=Intervals((1, options.intervals[-1])))

    @property
    def has_prompts(self) -> bool:
        """Whether a model is asked for the classes."""
        return bool(self.options.classifier.classes)

    def read(self, record: Mapping[str, Any], name: str, source: str) -> SourceItem | None:
        """Return a record's document with its class."""
        item, field = super().read(record, name, source), self.options.class_field
        if item is None or field is None:
            return item
        kind = record.get(field)
        if not isinstance(kind, str) or not kind:
            raise BadRecord("no_class", f"class_field={field} must name a field with a text")
        check_characters(kind)
        return replace(item, kind=kind)

    async def write(self, path: Path) -> None:
        """Write the joined documents of all classes."""
        options, outcomes = self.options, self.outcomes
        intervals, classifier = Intervals(tuple(options.intervals)), options.classifier
        filled = dict.fromkeys(intervals.names, 0)
        outcomes.lengths = {name: {"documents": 0, "tokens": 0} for name in intervals.names}
        with TemporaryFile(dir=path.parent) as texts, open(path, "w", encoding="utf-8") as file:
            async with self.opened():
                classes = await self._embedded(texts)
            # Once all documents are known, each class is joined by itself, from starts in an order that the seed draws.
            for kind in sorted(classes):
                documents = sorted(classes[kind], key=lambda each: (drawn(options.seed, each.name, "start"), each.name))
                used = 0
                for group in groups_of(documents, intervals, options.seed, filled):
                    record = self._joined(kind, group, documents, texts)
                    file.writelines(json_lines([record]))
                    outcomes.records += 1
                    row = outcomes.lengths[group.interval]
                    row["documents"] += 1
                    row["tokens"] += record["provenance"]["tokens"]
                    used += len(group.numbers)
                outcomes.items[DONE] += used
                outcomes.items["left_over"] += len(documents) - used
        if classifier.classes:
            # A class that no text has is counted as such.
            outcomes.facts["classes"] = {name: len(classes.get(name, ())) for name in classifier.classes}
            counts = ", ".join(f"{count:,} {name}" for name, count in outcomes.facts["classes"].items())
            outcomes.notes.append(f"documents by class: {counts}")
        if classes and not outcomes.items[DONE]:
            longer = (
                f"no two documents of {', '.join(sorted(classes))} make a text that long and no longer than the last"
            )
            needed = "begin below what a class's documents have together"
            raise DataError(must("intervals", needed, f"{intervals.edges[0]:,}, and {longer}"))

    async def _embedded(self, texts: IO[bytes]) -> dict[str, list[ClassDocument]]:
        """Return the embedded documents by class, whose texts it writes to a file; count the others."""
        options, classes = self.options.encoder, defaultdict[str, list[ClassDocument]](list)
        is_local = self.options.loads_model
        encoder: Any = LocalEncoder(options, self.store) if is_local else self.clients[self.options.endpoint.prefix]

        async def prepared(item: SourceItem) -> tuple[str, Answer]:
            """Return a document's class and its embedding, or an answer that is not done."""
            kind = item.kind
            if self.options.classifier.classes:
                named = await self._class_of(item)
                if not named.is_done:
                    return kind, named
                kind = named.parsed
            start = options.start + self.tokens.shortened(item.text, min(options.max_tokens, item.tokens))
            return kind, await encoder.embed(item.name, start)

        # Each text goes to a file at once, because all texts of a class may not fit into memory.
        async with aclosing(self.each(prepared, "embed")) as results:
            async for item, (kind, answer) in results:
                if answer.is_done:
                    tokens, text = self.tokens.count(item.text + SEPARATOR), item.text.encode()
                    document = ClassDocument(item.name, tokens, answer.parsed, texts.tell(), len(text))
                    classes[kind].append(document)
                    texts.write(text)
                else:
                    self.outcomes.add(item, Result(answer.outcome, reason=answer.reason))
        for documents in classes.values():
            sizes = {document.vector.size for document in documents}
            if len(sizes) > 1:
                raise DataError(must("the encoder", "give embeddings of one length", sorted(sizes)))
        return classes

    async def _class_of(self, item: SourceItem) -> Answer:
        """Ask for the class of a document's start."""
        classifier = self.options.classifier
        start = self.tokens.shortened(item.text, min(classifier.max_tokens, item.tokens))
        values = {"text": start, "classes": "\n".join(f"- {name}" for name in classifier.classes)}
        content = self.prompts[language_of(start)].filled("classify", **values)
        parse = partial(parse_class, classes=classifier.classes)
        return await self.answer(item, "class", content, parse, classifier.endpoint)

    def _joined(self, kind: str, group: Group, documents: Sequence[ClassDocument], texts: IO[bytes]) -> dict[str, Any]:
        """Return a joined text's record, with its documents' places."""
        text, parts = "", []
        for number, similarity in zip(group.numbers, group.similarities, strict=True):
            document = documents[number]
            texts.seek(document.place)
            own = texts.read(document.num_bytes).decode()
            text += SEPARATOR if text else ""
            span = [len(text), len(text) + len(own)]
            text += own
            parts.append({"item": document.name, "span": span, "similarity": round(similarity, 4)})
        provenance = {
            "class": kind,
            "interval": group.interval,
            "tokens": self.tokens.count(text),
            "documents": parts,
            "encoder": self.options.encoder.path or self.options.endpoint.model,
            "seed": self.options.seed,
        }
        return {"text": text, "category": kind, "provenance": provenance}
