"""The expected results of a step of preferences: plain Hugging Face, a forward per document, the papers' formulas.

    L = Σ w·f / Σ w  +  nll_weight · Σ a·ℓ / Σ a of preferred answers  +  sft_weight · the same of other documents

This module shares no code with the package: sums come from Python loops over tokens, attention from transformers' own
eager implementation, and sums are in float64.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from tests.lib.reference import Document, ExpectedStep, begins_of, of_tokens, pack_row, tree_row


@dataclass(frozen=True)
class Unit:
    """Documents with their sides: 1 preferred, -1 rejected, 0 a document that is no answer."""

    documents: list[Document]
    sides: list[int]
    weight: float = 1.0

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Return the documents of each pair."""
        return [(0, number) for number in range(1, len(self.documents))]

    @property
    def category(self) -> int:
        """Return the category of the first target of the first document; 0 for none."""
        first = self.documents[0]
        return next((c for c, m in zip(first.category_ids, first.loss_mask, strict=True) if m), 0)


@dataclass(frozen=True)
class Loss:
    """A loss of preferences by its options, of which each mode uses some."""

    mode: str
    beta: float
    length: str = "sum"
    has_reference: bool = True
    smoothing: float = 0.0
    margin: float = 1.0
    penalty: float = 5.0
    tail_weight: float = 1.0
    nll_weight: float = 0.0
    nll_mode: str = "token"
    sft_weight: float = 1.0
    answers: str = "sum"
    desirable: float = 1.0
    undesirable: float = 1.0


@dataclass(frozen=True)
class Expected(ExpectedStep):
    """Also metrics by name."""

    metrics: dict[str, float]


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


def of_pair(o: Loss, c: torch.Tensor, r: torch.Tensor, c_ref: float, r_ref: float) -> torch.Tensor:
    """Return the loss of a pair from the sums of its answers, by the papers' formulas."""
    chosen, rejected = c - c_ref, r - r_ref
    h = chosen - rejected
    if o.mode in ("dpo", "dpo_norm", "simpo", "cpo"):  # the last two: without references
        margin = o.beta * h - (o.margin if o.mode == "simpo" else 0)
        return -(1 - o.smoothing) * torch.log(_sigmoid(margin)) - o.smoothing * torch.log(_sigmoid(-margin))
    if o.mode == "robust":
        both = -(1 - o.smoothing) * torch.log(_sigmoid(o.beta * h)) + o.smoothing * torch.log(_sigmoid(-o.beta * h))
        return both / (1 - 2 * o.smoothing)
    if o.mode == "ipo":
        return (h - 1 / (2 * o.beta)) ** 2
    if o.mode == "hinge":
        return torch.clamp(1 - o.beta * h, min=0)
    if o.mode == "orpo":
        odds = [torch.exp(x) / (1 - torch.exp(x)) for x in (c, r)]
        return -o.beta * torch.log(_sigmoid(torch.log(odds[0] / odds[1])))
    if o.mode == "apo_zero":
        return 1 - _sigmoid(o.beta * chosen) + _sigmoid(o.beta * rejected)
    if o.mode == "apo_down":
        return _sigmoid(o.beta * chosen) + 1 - _sigmoid(o.beta * h)
    assert o.mode == "dpop"
    return -torch.log(_sigmoid(o.beta * (h - o.penalty * torch.clamp(-chosen, min=0))))


def of_answer(o: Loss, side: int, ratio: torch.Tensor, baseline: float = 0.0) -> torch.Tensor:
    """Return the loss of an answer with a label from its log-ratio, by the papers' formulas."""
    return (o.desirable if side > 0 else o.undesirable) * (1 - _sigmoid(side * (o.beta * ratio - baseline)))


class PairReference:
    """Forward passes of single documents by two models, of which the first is differentiated."""

    def __init__(self, model: PreTrainedModel, reference: PreTrainedModel, units: Sequence[Unit]) -> None:
        self.models = model, reference
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        documents = {id(document): document for unit in units for document in unit.documents}
        self.nll = {number: of_tokens(model, document)[0] for number, document in documents.items()}
        with torch.no_grad():
            self.reference_nll = {number: of_tokens(reference, document)[0] for number, document in documents.items()}

    def scales(self, unit: Unit, number: int, o: Loss) -> list[float]:
        """Return s_t of each token of a document."""
        document = unit.documents[number]
        shortest, seen, scales = min(each.targets for each in unit.documents), 0, []
        for mask, weight in zip(document.loss_mask, document.loss_weight, strict=True):
            by_length = {"sum": 1.0, "mean": 1 / max(document.targets, 1)}.get(o.length)
            if by_length is None:
                by_length = 1.0 if seen < shortest else o.tail_weight
            scales.append(mask * weight * by_length)
            seen += mask
        return scales

    def sum_of(self, unit: Unit, number: int, o: Loss, nll: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Return Σ s_t·log π of a document."""
        scales = torch.tensor(self.scales(unit, number, o), dtype=torch.float64)
        return -(nll[id(unit.documents[number])] * scales).sum()

    def reference_sums(self, unit: Unit, o: Loss) -> list[float]:
        """Return the reference's sum of each document; zeros for a loss without one."""
        numbers = range(len(unit.documents))
        return [float(self.sum_of(unit, n, o, self.reference_nll)) if o.has_reference else 0.0 for n in numbers]

    @torch.no_grad()
    def mismatched(self, pack: Sequence[Unit]) -> list[tuple[float, float]]:
        """Return the log-probability of each answer after the prompt of the next unit, by both models."""
        answered = [unit for unit in pack if unit.sides[0]]
        if len(answered) < 2:
            return []
        found = []
        for place, unit in enumerate(answered):
            other = answered[(place + 1) % len(answered)].documents[0]
            prompt = other.input_ids[: other.loss_mask.index(1)]
            for document in unit.documents:
                first = document.loss_mask.index(1)
                columns = (values[first:] for values in (document.input_ids, document.loss_mask, document.loss_weight))
                ids, mask, weights = columns
                nothing = [0] * len(prompt)
                whole = Document([*prompt, *ids], [*nothing, *mask], [*nothing, *nothing], [*nothing, *weights])
                scales = torch.tensor([m * w for m, w in zip(whole.loss_mask, whole.loss_weight, strict=True)])
                of_models = [of_tokens(model, whole)[0] for model in self.models]
                found.append(tuple(-float((nll * scales.double()).sum()) for nll in of_models))
        return found

    def rows(self, packs: Sequence[Sequence[Unit]], o: Loss, shared: bool) -> list[dict[str, torch.Tensor]]:
        """Make the packs as a dataset yields them, with the reference's sums of their documents."""
        rows = [unit_row(pack, [self.reference_sums(unit, o) for unit in pack], shared) for pack in packs]
        for row, pack in zip(rows, packs, strict=True):
            row["mismatched_reference"] = torch.tensor([sum(other for _, other in self.mismatched(pack))]).double()
        return rows

    def baseline(self, packs: Sequence[Sequence[Unit]], o: Loss) -> float:
        """Return z of kto, the mean of the scaled log-ratios of mismatched answers, at least 0."""
        ratios = [o.beta * (policy - other) for pack in packs for policy, other in self.mismatched(pack)]
        return max(0.0, sum(ratios) / len(ratios)) if ratios else 0.0

    def step(self, packs: Sequence[Sequence[Unit]], o: Loss, category_weights: Mapping[int, float]) -> Expected:
        """Take an optimizer step over the packs."""
        units = [unit for pack in packs for unit in pack]
        z = self.baseline(packs, o) if o.mode == "kto" else 0.0
        terms: list[tuple[float, torch.Tensor]] = []
        rewards: dict[str, list[tuple[float, float]]] = {"chosen": [], "rejected": [], "margin": [], "right": []}
        for unit in units:
            sums = [self.sum_of(unit, n, o, self.nll) for n in range(len(unit.documents))]
            references = self.reference_sums(unit, o)
            weight = unit.weight * category_weights.get(unit.category, 1.0)
            has_labels = o.mode == "kto" or (o.mode == "apo_zero" and not unit.pairs)
            for number, side in enumerate(unit.sides if has_labels else ()):
                ratio = sums[number] - references[number]
                if side:
                    terms.append((weight, of_answer(o, side, ratio, z)))
                    rewards["chosen" if side > 0 else "rejected"].append((weight, o.beta * float(ratio.detach())))
            for c, r in unit.pairs if o.mode != "kto" else ():
                of_term = weight / (len(unit.pairs) if o.answers == "mean" else 1)
                terms.append((of_term, of_pair(o, sums[c], sums[r], references[c], references[r])))
                of_answers = [o.beta * (float(sums[n].detach()) - references[n]) for n in (c, r)]
                numbers = {"chosen": of_answers[0], "rejected": of_answers[1], "margin": of_answers[0] - of_answers[1]}
                numbers["right"] = float(of_answers[0] > of_answers[1]) + 0.5 * (of_answers[0] == of_answers[1])
                for name, number in numbers.items():
                    rewards[name].append((of_term, number))
        parts = [sum(weight * f for weight, f in terms) / sum(weight for weight, _ in terms)]
        means = {name: sum(w * x for w, x in each) / sum(w for w, _ in each) for name, each in rewards.items() if each}
        metrics = {f"reward_{name}": mean for name, mean in means.items() if name != "right"}
        if "right" in means:
            metrics["reward_accuracy"] = means["right"]
        metrics["preference"] = float(parts[0].detach())
        for name, side, factor in (("chosen_nll", 1, o.nll_weight), ("document_nll", 0, o.sft_weight)):
            if (mean := self._likelihood(units, side, o, category_weights)) is not None:
                metrics[name] = float(mean.detach())
                parts.append(factor * mean)
        loss = sum(parts)
        gradients = torch.autograd.grad(loss, list(self.parameters.values()), retain_graph=True)
        of_names = dict(zip(self.parameters, (gradient.double() for gradient in gradients), strict=True))
        return Expected(float(loss.detach()), of_names, metrics)

    def _likelihood(
        self, units: Sequence[Unit], side: int, o: Loss, category_weights: Mapping[int, float]
    ) -> torch.Tensor | None:
        """Return the mean of the token losses of documents of a side; None without any."""
        total, normaliser = torch.zeros((), dtype=torch.float64), 0.0
        for unit in units:
            for document, of_document in zip(unit.documents, unit.sides, strict=True):
                if of_document != side or not document.targets:
                    continue
                of_mode = {"token": 1.0, "sequence": 1 / document.targets}[o.nll_mode]
                columns = zip(document.loss_mask, document.loss_weight, document.category_ids, strict=True)
                a = [m * w * category_weights.get(c, 1.0) * of_mode for m, w, c in columns]
                a = [unit.weight * x for x in a] if side else a
                total = total + (self.nll[id(document)] * torch.tensor(a, dtype=torch.float64)).sum()
                normaliser += sum(a)
        return total / normaliser if normaliser else None


def unit_row(units: Sequence[Unit], references: Sequence[Sequence[float]], shared: bool) -> dict[str, torch.Tensor]:
    """Make a pack of units as a dataset yields it, with the reference's sums of their documents."""
    documents = [document for unit in units for document in unit.documents]
    begins = [begin for unit in units for begin in begins_of(unit.documents)]
    row = tree_row(documents, begins) if shared else pack_row(documents)
    columns = {
        "unit": [n for unit in units for n in (len(unit.documents), *[0] * (len(unit.documents) - 1))],
        "answer": [side for unit in units for side in unit.sides],
        "pair_weight": [unit.weight for unit in units for _ in unit.documents],
        "reference": [value for of_unit in references for value in of_unit],
    }
    kinds = {"unit": np.int64, "answer": np.int64, "pair_weight": np.float64, "reference": np.float64}
    return row | {name: torch.from_numpy(np.array(values, kinds[name])) for name, values in columns.items()}
