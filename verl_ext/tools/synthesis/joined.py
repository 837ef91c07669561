"""GLM-Long's artificial long documents: similar documents, joined into one text.

    documents of a class  ──►  embeddings  ──►  a start, and its nearest neighbours up to a drawn length  ──►  one text

Each document is used at most once. The seed and the names of documents give the order in which they become starts. A
start goes to the interval of lengths with the fewest tokens so far, so that all intervals get about equally many (Zhipu
AI, "GLM Long: Scaling Pre-trained Model Contexts to Millions", 2024). The search for neighbours is exact: it multiplies
all embeddings of a class by the start's, which is quick enough for about 100,000 documents in a class.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from verl_ext.files import json_lines
from verl_ext.options import DataError, must
from verl_ext.tools.endpoint.answer import DONE, Answer, Unparsable
from verl_ext.tools.endpoint.client import Client
from verl_ext.tools.endpoint.spending import QuestionProgress, read_price, spent
from verl_ext.tools.endpoint.store import Store
from verl_ext.tools.synthesis.asking import AHEAD, Work, WriteResult, count_spending, in_order
from verl_ext.tools.synthesis.corpus import Intervals
from verl_ext.tools.synthesis.encoder import EncoderOptions, LocalEncoder
from verl_ext.tools.synthesis.items import SourceItem, drawn
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


async def write_joined(work: Work) -> WriteResult:
    """Write the joined documents of all classes."""
    result, intervals, classifier = WriteResult(), Intervals(tuple(work.options.intervals)), work.options.classifier
    names, seed = intervals.names, work.settings.seed
    filled = dict.fromkeys(names, 0)
    result.lengths = {name: {"documents": 0, "tokens": 0} for name in names}
    with TemporaryFile(dir=work.path.parent) as texts, open(work.path, "w", encoding="utf-8") as file:
        classes = await _embedded(work, texts, result)
        for kind in sorted(classes):
            documents = sorted(classes[kind], key=lambda each: (drawn(seed, each.name, "start"), each.name))
            used = 0
            for group in groups_of(documents, intervals, seed, filled):
                record = _record(kind, group, documents, texts, work)
                file.writelines(json_lines([record]))
                result.records += 1
                row = result.lengths[group.interval]
                row["documents"] += 1
                row["tokens"] += record["provenance"]["tokens"]
                used += len(group.numbers)
            result.outcomes[DONE] += used
            result.outcomes["left_over"] += len(documents) - used
    if classifier.classes:
        # A class that no text has is counted as such.
        result.facts["classes"] = {name: len(classes.get(name, ())) for name in classifier.classes}
        counts = ", ".join(f"{count:,} {name}" for name, count in result.facts["classes"].items())
        result.notes.append(f"documents by class: {counts}")
    if classes and not result.outcomes[DONE]:
        longer = f"no two documents of {', '.join(sorted(classes))} make a text that long and no longer than the last"
        needed = "begin below what a class's documents have together"
        raise DataError(must("intervals", needed, f"{intervals.edges[0]:,}, and {longer}"))
    return result


async def _embedded(work: Work, texts: IO[bytes], result: WriteResult) -> dict[str, list[ClassDocument]]:
    """Return the embedded documents by class; add cost and failures to `result`."""
    count = work.settings.lengths_of
    assert count is not None
    classes: dict[str, list[ClassDocument]] = defaultdict(list)
    of_folder: EncoderOptions = work.options.encoder
    of_server = of_folder.path is None
    price = read_price(work.endpoint) if of_server else None
    with Store(work.store_path) as store:
        encoder = Client(work.endpoint, store) if of_server else LocalEncoder(of_folder, store)
        clients = [(encoder, price)] if isinstance(encoder, Client) else []
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(encoder)
            options, classifier = work.options.classifier, None
            if options.classes:
                classifier = await stack.enter_async_context(Client(options.endpoint, store))
                clients.append((classifier, read_price(options.endpoint)))

            async def prepared(item: SourceItem) -> tuple[str, Answer]:
                """Return a document's class and its embedding, or an answer that is not done."""
                kind = item.kind
                if classifier is not None:
                    start = count.shortened(item.text, min(options.max_tokens, item.tokens))
                    values = {"text": start, "classes": "\n".join(f"- {name}" for name in options.classes)}
                    message = {"role": "user", "content": work.prompts[language_of(start)].filled("classify", **values)}
                    parse, settings = partial(parse_class, classes=options.classes), work.settings
                    named = await classifier.ask(
                        item.name, "class", [message], settings.sampling, parse, settings.parse_tries
                    )
                    if not named.is_done:
                        return kind, named
                    kind = named.parsed
                start = of_folder.start + count.shortened(item.text, min(of_folder.max_tokens, item.tokens))
                return kind, await encoder.embed(item.name, start)

            begun = ((item, prepared(item)) for item in work.corpus.items())
            # Texts go to a file as they come, because those of a class together need not fit into memory.
            with QuestionProgress(clients, work.total, "embed") as bar:
                async with aclosing(in_order(begun, AHEAD * work.endpoint.concurrency)) as results:
                    async for item, (kind, answer) in results:
                        if answer.is_done:
                            tokens = count.count(item.text + SEPARATOR)
                            text = item.text.encode()
                            document = ClassDocument(item.name, tokens, answer.parsed, texts.tell(), len(text))
                            classes[kind].append(document)
                            texts.write(text)
                        else:
                            result.add(item, answer.outcome, answer.reason)
                        bar.item_done()
            result.cost = "\n".join(spent(*each) for each in clients)
            count_spending(result, clients)
    for documents in classes.values():
        sizes = {document.vector.size for document in documents}
        if len(sizes) > 1:
            raise DataError(must("the encoder", "give embeddings of one length", sorted(sizes)))
    return classes


def _record(
    kind: str, group: Group, documents: Sequence[ClassDocument], texts: IO[bytes], work: Work
) -> dict[str, Any]:
    """Return a joined text's record, with its documents' places."""
    assert work.settings.lengths_of is not None
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
        "tokens": work.settings.lengths_of.count(text),
        "documents": parts,
        "encoder": work.options.encoder.path or work.endpoint.model,
        "seed": work.settings.seed,
    }
    return {"text": text, "category": kind, "provenance": provenance}
