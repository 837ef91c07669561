"""The models of joined documents: a sentence encoder in a folder, such as E5, and what names classes."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from verl_ext.cache import fingerprint
from verl_ext.options import Options, UsageError, first_line, must, option
from verl_ext.text.tokenizing import file_facts
from verl_ext.tools.endpoint.answer import Answer, answer_from_embedding, with_embedding
from verl_ext.tools.endpoint.client import EndpointOptions
from verl_ext.tools.endpoint.local_model import load_model
from verl_ext.tools.endpoint.store import Store

# The keys of 1_Pooling/config.json of sentence-transformers, and the pooling that each names.
_POOLINGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_lasttoken": "last"}
_MODULES = ("Transformer", "Pooling", "Normalize")  # others in modules.json, e.g. Dense, would be ignored silently


@dataclass(frozen=True)
class EncoderOptions(Options):
    """The options for the embeddings of documents."""

    prefix: ClassVar[str] = "encoder"

    path: str | None = option(
        None, "glm_long_documents: folder of a sentence encoder for transformers; null: `endpoint` embeds"
    )
    pooling: str | None = option(
        None,
        "pooling of encoder.path's token states: mean, cls (the first) or last; null: as 1_Pooling/config.json"
        " says, mean without that file",
        choices=("mean", "cls", "last"),
    )
    start: str = option("", "glm_long_documents: text before each document, e.g. `passage: ` of E5")
    max_tokens: int = option(
        512,
        "glm_long_documents: tokens at a document's start that are embedded, counted by model.path's tokenizer",
        least=1,
    )


@dataclass(frozen=True)
class ClassifierEndpoint(EndpointOptions):
    """The server and the model that name classes."""

    prefix: ClassVar[str] = "classifier.endpoint"


@dataclass(frozen=True)
class ClassifierOptions(Options):
    """How documents get their classes, the first of GLM-Long's two stages."""

    prefix: ClassVar[str] = "classifier"

    classes: list[str] = option(
        [], "glm_long_documents: classes of which a model names each document's; []: by class_field or source"
    )
    endpoint: ClassifierEndpoint = option(ClassifierEndpoint, "server that names the classes")
    max_tokens: int = option(1024, "tokens at a document's start that the model reads", least=1)

    def class_problems(self) -> Iterator[str]:
        """Yield a line for each mistake in the classes and their server."""
        if not self.classes:
            if self.endpoint.base_url or self.endpoint.model:
                yield must("classifier.classes", "be given with classifier.endpoint", "none")
            return
        names = [name.strip().casefold() for name in self.classes]
        if len(names) < 2 or len(set(names)) < len(names) or not all(names):
            yield must("classifier.classes", "be two or more different names", self.classes)
        yield from self.endpoint.endpoint_problems()


class LocalEncoder:
    """A sentence encoder of one text at a time, with stored embeddings.

    It runs on the GPU if there is one.
    """

    def __init__(self, options: EncoderOptions, store: Store) -> None:
        """Read the pooling; raise UsageError if the folder is not an encoder."""
        self.options, self.store, self.path = options, store, Path(str(options.path))
        if not (self.path / "config.json").is_file():
            raise UsageError(must("encoder.path", "be a folder with a config.json", self.path))
        self.pooling = options.pooling or self._pooling()
        self._facts = [file_facts([str(self.path)]), self.pooling]
        self._loaded: tuple[Any, Any] | None = None  # tokenizer and model

    def _pooling(self) -> str:
        """Return the pooling of sentence-transformers' files, "mean" without them."""
        modules, pooling = self.path / "modules.json", self.path / "1_Pooling" / "config.json"
        try:
            kinds = [str(each["type"]).rpartition(".")[2] for each in _json(modules)] if modules.is_file() else []
            named = (
                [way for key, way in _POOLINGS.items() if _json(pooling).get(key)] if pooling.is_file() else ["mean"]
            )
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            got = f"{self.path}: {first_line(error)}"
            raise UsageError(must("encoder.path", "hold readable files", got)) from error
        if others := [kind for kind in kinds if kind not in _MODULES]:
            got = f"{self.path} with a module {others[0]} after it"
            raise UsageError(must("encoder.path", "end with its pooling", got))
        if len(named) != 1:
            raise UsageError(must("encoder.pooling", f"be given: {pooling} names none of mean, cls, last alone", None))
        return named[0]

    async def embed(self, record: str, text: str) -> Answer:
        """Return a text's stored or new embedding, float32[dimensions] in `Answer.parsed`."""
        key = fingerprint([*self._facts, record, text])
        answer = self.store.find(key)
        if answer is None:
            answer = answer_from_embedding({"data": [{"embedding": self._vector(text)}], "model": str(self.path)})
            self.store.add(key, record, "embed", answer)
        return with_embedding(answer)

    def _vector(self, text: str) -> list[float]:
        import torch

        if self._loaded is None:
            self._loaded = load_model("AutoModel", self.path, "encoder.path", "a model", self.path)
        tokenizer, model = self._loaded
        positions = getattr(model.config, "max_position_embeddings", 1 << 20) - 2  # RoBERTa's positions begin at 2
        most = min(tokenizer.model_max_length, positions)
        inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=most).to(model.device)
        with torch.inference_mode():
            states = model(**inputs).last_hidden_state[0].float()
        pooled = {"mean": states.mean(0), "cls": states[0], "last": states[-1]}[self.pooling]
        return pooled.tolist()


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
