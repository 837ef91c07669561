"""What a step must give, computed the slow way: plain Hugging Face, a forward pass a document, the formula as written.

    L = Σ_t a_t·ℓ_t / Z        a_t = loss_mask_t · loss_weight_t · c[category_t] · g

Shares no code with the package: coefficients come from Python loops over tokens, attention from transformers' own eager
implementation, and sums run in float64.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


@dataclass(frozen=True)
class Document:
    """One document's columns; all equally long, and the first token no target."""

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
class Expected:
    """A step's loss, each category's mean and token count, each parameter's gradient, and the norm of them all."""

    loss: float
    category_loss: dict[int, float]
    category_tokens: dict[int, int]
    gradients: dict[str, torch.Tensor]

    @property
    def grad_norm(self) -> float:
        """The 2-norm over all parameters."""
        return sqrt(sum(float(gradient.square().sum()) for gradient in self.gradients.values()))


def load_eager(path: str, **options: bool) -> PreTrainedModel:
    """The model in fp32 with transformers' own eager attention."""
    given = {"dtype": torch.float32, "attn_implementation": "eager", **options}
    return AutoModelForCausalLM.from_pretrained(path, **given).eval()


def pack_row(documents: Pack, pad_to: int | None = None) -> dict[str, torch.Tensor]:
    """The documents one after the other as a dataset yields them; with ``pad_to``, padded on the right."""
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


class Reference:
    """Forward passes of single documents, kept, so that every loss mode differentiates the same graph."""

    def __init__(self, model: PreTrainedModel, documents: Iterable[Document]) -> None:
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.nll = {id(document): _nll(model, document) for document in documents}

    def step(
        self, packs: Sequence[Pack], mode: str, category_weights: Mapping[int, float], documents_per_pack: int = 30
    ) -> Expected:
        """One optimizer step over the packs; ``category_weights`` by category id, 1 where it has none."""
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
        sums, tokens = self._categories(packs)
        return Expected(loss, {c: sums[c] / tokens[c] for c in sums}, tokens, gradients)

    def _categories(self, packs: Sequence[Pack]) -> tuple[dict[int, float], dict[int, int]]:
        sums: dict[int, float] = {}
        tokens: dict[int, int] = {}
        for document in (d for pack in packs for d in pack):
            nll = self.nll[id(document)].tolist()
            for t, category in enumerate(document.category_ids):
                if document.loss_mask[t] and category:
                    sums[category] = sums.get(category, 0.0) + nll[t]
                    tokens[category] = tokens.get(category, 0) + 1
        return sums, tokens


def _nll(model: PreTrainedModel, document: Document) -> torch.Tensor:
    """float64[T]: ℓ_t of the token *at* t; 0 for the first, which nothing predicts."""
    ids = torch.tensor([document.input_ids])
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    nll = torch.nn.functional.cross_entropy(logits.double(), ids[0, 1:], reduction="none")
    return torch.cat([nll.new_zeros(1), nll])


def _coefficients(
    packs: Sequence[Pack], mode: str, category_weights: Mapping[int, float], documents_per_pack: int
) -> tuple[list[tuple[Document, list[float]]], float]:
    """a_t of every document, and Z."""
    terms = []
    sum_of_a = packs_with_target = documents_with_target = 0.0
    for pack in packs:
        in_pack = sum(document.targets for document in pack)
        packs_with_target += in_pack > 0  # a pack without a target has no token mean to average
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
                        "longwriter": len(pack) / (documents_per_pack * in_pack),
                        "own": document.targets**-0.75 * len(document.input_ids),  # of tests/test_own_loss.py
                    }[mode]
                    weight = category_weights.get(document.category_ids[t], 1.0)
                    coefficients[t] = document.loss_weight[t] * weight * g
            sum_of_a += sum(coefficients)
            terms.append((document, coefficients))
    counts = {"pack": packs_with_target, "longwriter": packs_with_target, "own": documents_with_target}
    return terms, counts.get(mode, sum_of_a)
