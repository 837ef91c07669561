"""The expected results of a step, computed slowly: plain Hugging Face, one forward per document, the literal formula.

    L = Σ_t a_t·ℓ_t / Z        a_t = loss_mask_t · loss_weight_t · c[category_t] · g

This module shares no code with the package: coefficients come from Python loops over tokens, attention from
transformers' own eager implementation, and sums are in float64.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)


@dataclass(frozen=True)
class Document:
    """One document's columns, all of the same length; the first token is no target."""

    input_ids: list[int]
    loss_mask: list[int]
    category_ids: list[int]
    loss_weight: list[float]

    @property
    def targets(self) -> int:
        """N_doc."""
        return sum(self.loss_mask)


Pack = Sequence[Document]


@dataclass(frozen=True)
class ExpectedStep:
    """A step's loss, and each parameter's gradient."""

    loss: float
    gradients: dict[str, torch.Tensor]

    def gradient_errors(self, found: Mapping[str, torch.Tensor], floor: float = 1e-4) -> dict[str, float]:
        """Return the norm of each gradient's difference, relative to its own norm or to `floor` of the largest norm."""
        least = max(1e-12, floor * max(float(gradient.norm()) for gradient in self.gradients.values()))
        return {
            name: float((found[name].double() - gradient).norm()) / max(float(gradient.norm()), least)
            for name, gradient in self.gradients.items()
        }

    def assert_taken(self, step: Any, loss: float = 1e-5, gradients: float = 1e-5, floor: float = 1e-4) -> None:
        """Require this loss and these gradients of an engine's step, within relative bounds."""
        assert step.report["train/loss"] == pytest.approx(self.loss, rel=loss)
        assert step.gradients.keys() == self.gradients.keys()
        errors = self.gradient_errors(step.gradients, floor)
        assert max(errors.values()) < gradients, errors

    @property
    def grad_norm(self) -> float:
        """Return the 2-norm over all parameters."""
        return sqrt(sum(float(gradient.square().sum()) for gradient in self.gradients.values()))


@dataclass(frozen=True)
class Expected(ExpectedStep):
    """Also each category's means and token count; accuracy and entropy are by category, None is for all targets."""

    category_loss: dict[int, float]
    category_tokens: dict[int, int]
    accuracy: dict[int | None, float]
    entropy: dict[int | None, float]


def documents_of_answers(*lengths: int) -> list[Document]:
    """Make documents of tokens below 128, including padding, of which about half are targets."""
    rng = np.random.default_rng(3)
    documents = []
    for length in lengths:
        mask = [0, *rng.integers(0, 2, length - 2).tolist(), 1]
        documents.append(Document(rng.integers(0, 128, length).tolist(), mask, [0] * length, [1.0] * length))
    return documents


def load_eager(path: str, **options: bool) -> PreTrainedModel:
    """Load the model in fp32 with transformers' own eager attention."""
    given = {"dtype": torch.float32, "attn_implementation": "eager", **options}
    has_images = type(AutoConfig.from_pretrained(path, **options)) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return (AutoModelForImageTextToText if has_images else AutoModelForCausalLM).from_pretrained(path, **given).eval()


def fill_adapters(model: torch.nn.Module) -> None:
    """Give each factor of adapters, or its shards, a value; at B's initial 0, A would have no gradient."""
    for name, parameter in model.named_parameters():
        if "lora_A" in name or "lora_B" in name:
            value = 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5))
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            parameter.data.copy_(value)


def pack_row(documents: Pack, pad_to: int | None = None) -> dict[str, torch.Tensor]:
    """Join documents into a row as a dataset yields it; ``pad_to`` pads it on the right."""
    row: dict[str, list] = {
        "input_ids": [t for d in documents for t in d.input_ids],
        "position_ids": [t for d in documents for t in range(len(d.input_ids))],
        "loss_mask": [t for d in documents for t in d.loss_mask],
        "category_ids": [t for d in documents for t in d.category_ids],
        "loss_weight": [t for d in documents for t in d.loss_weight],
    }
    tokens = len(row["input_ids"])
    if pad_to is not None:
        padding = pad_to - tokens
        row = {key: values + [0] * padding for key, values in row.items()}
        row["position_ids"][tokens:] = range(padding)
        row["attention_mask"] = [1] * tokens + [0] * padding
    tensors = {key: torch.tensor(values) for key, values in row.items()}
    tensors["loss_weight"] = tensors["loss_weight"].to(torch.float32)
    return tensors


def tree_row(documents: Pack, begins: Sequence[int] | None = None) -> dict[str, torch.Tensor]:
    """Join documents whose own tokens begin at ``begins``; None: with the last that each shares with the one before."""
    begins = begins_of(documents) if begins is None else begins
    row, pairs = pack_row(documents), list(zip(documents, begins, strict=True))
    row["input_ids"] = torch.tensor([token for d, begin in pairs for token in d.input_ids[begin:]])
    row["position_ids"] = torch.tensor([at for d, begin in pairs for at in range(begin, len(d.input_ids))])
    return row


def begins_of(documents: Pack) -> list[int]:
    """Return where each document's own tokens begin, with the last that it shares with the one before."""
    begins, before = [], []
    for ids in (document.input_ids for document in documents):
        common = next((at for at, (a, b) in enumerate(zip(before, ids)) if a != b), min(len(before), len(ids)))  # noqa: B905
        begins.append(max(common - 1, 0))
        before = ids
    return begins


class Reference:
    """Forward passes of single documents, which are kept so that every loss mode differentiates the same graph."""

    def __init__(self, model: PreTrainedModel, documents: Iterable[Document]) -> None:
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        found = {id(document): of_tokens(model, document) for document in documents}
        self.nll = {number: of_tokens[0] for number, of_tokens in found.items()}
        self.right = {number: of_tokens[1] for number, of_tokens in found.items()}
        self.entropy = {number: of_tokens[2] for number, of_tokens in found.items()}

    def step(
        self, packs: Sequence[Pack], mode: str, category_weights: Mapping[int, float], documents_per_pack: int = 30
    ) -> Expected:
        """Take an optimizer step over the packs; ``category_weights`` maps category ids to weights, 1 by default."""
        terms, normaliser = _coefficients(packs, mode, category_weights, documents_per_pack)
        loss = 0.0
        gradients = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in self.parameters.items()}
        for document, coefficients in terms:
            if not document.targets:
                continue
            share = (self.nll[id(document)] * torch.tensor(coefficients, dtype=torch.float64)).sum() / normaliser
            loss += share.item()
            found = torch.autograd.grad(share, list(self.parameters.values()), retain_graph=True)
            for gradient, part in zip(gradients.values(), found, strict=True):
                gradient += part
        losses, tokens = self._means(packs, self.nll)
        del losses[None], tokens[None]
        measures = (self._means(packs, values)[0] for values in (self.right, self.entropy))
        return Expected(loss, gradients, losses, tokens, *measures)

    def _means(
        self, packs: Sequence[Pack], values: Mapping[int, torch.Tensor]
    ) -> tuple[dict[int | None, float], dict[int | None, int]]:
        """Return a value's mean over the targets of each category and of all (None), and the numbers of targets."""
        found: dict[int | None, list[float]] = {None: []}
        for document in (d for pack in packs for d in pack):
            for value, category, is_target in zip(
                values[id(document)].tolist(), document.category_ids, document.loss_mask, strict=True
            ):
                for key in {None, category or None} if is_target else ():
                    found.setdefault(key, []).append(value)
        return {k: sum(each) / len(each) for k, each in found.items()}, {k: len(each) for k, each in found.items()}


def of_tokens(model: PreTrainedModel, document: Document) -> list[torch.Tensor]:
    """Return float64[T] for the token *at* t: ℓ_t, whether it is the likeliest, and the entropy; 0 for the first."""
    ids = torch.tensor([document.input_ids])
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].double()
    nll = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    right = (logits.argmax(-1) == ids[0, 1:]).double()
    logs = logits.detach().log_softmax(-1)
    entropy = -(logs.exp() * logs).sum(-1)
    return [torch.cat([x.new_zeros(1), x]) for x in (nll, right, entropy)]


def _coefficients(
    packs: Sequence[Pack], mode: str, category_weights: Mapping[int, float], documents_per_pack: int
) -> tuple[list[tuple[Document, list[float]]], float]:
    """Return a_t of every document, and Z."""
    terms = []
    sum_of_a = packs_with_target = documents_with_target = 0.0
    for pack in packs:
        in_pack = sum(document.targets for document in pack)
        packs_with_target += in_pack > 0  # a pack without a target has no token mean to average
        with_target = sum(document.targets > 0 for document in pack)
        for document in pack:
            documents_with_target += document.targets > 0
            coefficients = [0.0] * len(document.input_ids)
            for t in range(1, len(coefficients)):
                if document.loss_mask[t]:
                    g = {
                        "token": 1.0,
                        "sequence": 1 / document.targets,
                        "sqrt": 1 / sqrt(document.targets),
                        "pack": 1 / in_pack,
                        "longwriter": with_target / (documents_per_pack * in_pack),
                        "own": document.targets**-0.75 * len(document.input_ids),  # of tests/losses/test_own_loss.py
                    }[mode]
                    weight = category_weights.get(document.category_ids[t], 1.0)
                    coefficients[t] = document.loss_weight[t] * weight * g
            sum_of_a += sum(coefficients)
            terms.append((document, coefficients))
    counts = {"pack": packs_with_target, "longwriter": packs_with_target, "own": documents_with_target}
    return terms, counts.get(mode, sum_of_a)
