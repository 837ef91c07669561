"""Documents that share beginnings in a pack, against plain transformers document by document."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.lib.errors import refused
from tests.lib.reference import Document, Reference, tree_row
from verl_ext.attention.kernels import PACKED_ATTENTION
from verl_ext.attention.packed import set_backend
from verl_ext.data import CategoryTable
from verl_ext.losses import MODES, LossSpec
from verl_ext.packing.shared import find_shared, plan_shared
from verl_ext.parallel.shards import document_layout
from verl_ext.parallel.trees import PackDocuments, TreeLayout, _TextRows, read_documents, text_rows, tree_layout
from verl_ext.trainer.batch import StepBatch
from verl_ext.trainer.collator import StepCollator

VOCABULARY, TOLERANCE = 61, 1e-5
CATEGORIES, WEIGHTS = CategoryTable((7, 9), ("gsm8k", "code")), {7: 0.5, 9: 2.0}
SIZES = {
    **{"vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 256},
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "mistral": {"sliding_window": 8},
    "gemma2": {"sliding_window": 8, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 12},
    "gpt_oss": {
        **{"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "gpt2": {"n_positions": 256},  # learned positions
}


@pytest.fixture(autouse=True)
def float64_and_sdpa():
    set_backend("sdpa")
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
    set_backend("auto")


@dataclass(frozen=True)
class Pack:
    """Documents in the order of a plan, and where the own tokens of each begin."""

    documents: list[Document]
    begins: list[int]

    @classmethod
    def of(cls, documents: list[Document], least: int) -> "Pack":
        tokens = [document.input_ids for document in documents]
        lengths = np.array([len(ids) for ids in tokens])

        def read(numbers: Any, starts: Any, sizes: Any) -> np.ndarray:
            parts = [tokens[d][s : s + n] for d, s, n in zip(numbers, starts, sizes, strict=True)]
            return np.array([token for part in parts for token in part], np.int64)

        kin = find_shared(lengths, least, read)
        plan = plan_shared(lengths, kin, int(lengths.sum()), "best_fit", seed=0)
        begins = np.zeros(len(documents), int) if plan.begins is None else plan.begins
        return cls([documents[document] for document in plan.document_index], begins.tolist())

    def row(self) -> dict[str, torch.Tensor]:
        """Return the pack as a dataset gives it."""
        return tree_row(self.documents, self.begins)


def random_trie(seed: int) -> list[Document]:
    """Documents that go on from another's beginning, with masks, categories and weights of their own."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(3, VOCABULARY, rng.integers(2, 30)).tolist()]
    for _ in range(rng.integers(1, 9)):
        parent = texts[rng.integers(len(texts))]
        text = parent[: rng.integers(len(parent) + 1)] + rng.integers(3, VOCABULARY, rng.integers(20)).tolist()
        texts.append(text or [3])
    texts += texts[:1]  # a duplicate
    documents = []
    for text in texts:
        mask = [0, *(rng.random(len(text) - 1) < 0.6).astype(int).tolist()]
        categories = (rng.choice([0, 7, 9], len(text)) * mask).tolist()
        weights = rng.choice([0.5, 1.0, 2.0], len(text)).tolist()
        documents.append(Document(text, mask, categories, weights))
    return documents


def models_of(kind: str) -> tuple[Any, Any]:
    """Return a model with transformers' own attention, and one of the same weights with packed attention."""
    config = AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind]})
    torch.manual_seed(0)
    eager = {
        "attn_implementation": "eager",
        "experts_implementation": "eager",
    }  # products of experts are not in float64
    plain, packed = (AutoModelForCausalLM.from_config(config, **eager).double().eval() for _ in range(2))
    packed.load_state_dict(plain.state_dict())
    packed.set_attn_implementation(PACKED_ATTENTION)
    return plain, packed


def collated(packs: list[Pack], mode: str) -> StepBatch:
    spec = LossSpec(mode, np.array([1.0, *WEIGHTS.values()]))
    return StepCollator(spec, CATEGORIES, shares_prefixes=True)([pack.row() for pack in packs])


def step_loss(model: Any, batch: StepBatch) -> torch.Tensor:
    """Return Σ a·ℓ / Z, where each pack runs with its tree."""
    total, begin = torch.zeros(()), 0
    for slot, length in enumerate(batch.pack_lengths):
        part = slice(begin, begin + length)
        ids, positions = batch.input_ids[part], batch.position_ids[part]
        layout = TreeLayout.from_documents(read_documents(positions.numpy()), "cpu")
        logits = model(ids[None], position_ids=positions[None], document_layout=layout, use_cache=False).logits[0]
        nll = -logits.log_softmax(-1)[torch.arange(length), ids.roll(-1)]
        targets = batch.targets_of(slot, np.zeros(0, np.int64))
        total = total + (torch.from_numpy(targets["coefficient"]) * nll[targets["row"] - begin]).sum()
        begin += length
    return total / batch.normalisers.item()


@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_has_the_losses_and_gradients_of_its_documents(kind):
    plain, packed = models_of(kind)
    saved = 0
    for seed in range(6):
        documents = random_trie(seed)
        pack = Pack.of(documents, least=1 + seed % 3)
        batch = collated([pack], "sequence")
        saved += sum(len(document.input_ids) for document in documents) - len(batch.input_ids)
        wanted = Reference(plain, documents).step([pack.documents], "sequence", WEIGHTS)
        packed.zero_grad()
        loss = step_loss(packed, batch)
        loss.backward()
        assert loss.item() == pytest.approx(wanted.loss, rel=TOLERANCE)
        found = {name: p.grad for name, p in packed.named_parameters() if name in wanted.gradients}
        assert max(wanted.gradient_errors(found).values()) < TOLERANCE
    assert saved > 50


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_adds_the_coefficients_of_all_documents_that_have_a_target(mode):
    documents = random_trie(11)
    plain, packed = models_of("qwen3")
    packs = [Pack.of(documents[:5], 1), Pack.of(documents[5:], 2)]
    batch = collated(packs, mode)
    wanted = Reference(plain, documents).step([pack.documents for pack in packs], mode, WEIGHTS)
    assert step_loss(packed, batch).item() == pytest.approx(wanted.loss, rel=TOLERANCE)
    counts = np.bincount(batch.targets["slot"].numpy(), minlength=3)
    assert counts[1:].tolist() == [wanted.category_tokens.get(category, 0) for category in CATEGORIES.ids]
    tokens, computed = (batch.counts[name].item() for name in ("tokens", "computed_tokens"))
    assert tokens == sum(len(document.input_ids) for document in documents) == batch.copies.sum()
    assert computed == len(batch.input_ids) < tokens


def test_documents_without_a_common_beginning_are_laid_out_as_ever():
    documents = [Document([5, 6, 7], [0, 1, 1], [0, 7, 9], [1.0] * 3), Document([8, 9], [0, 1], [0, 7], [1.0] * 2)]
    pack = Pack.of(documents, least=1)
    assert pack.begins == [0, 0]
    ours, theirs = collated([pack], "sqrt"), StepCollator(LossSpec("sqrt", np.array([1.0, 0.5, 2.0])), CATEGORIES)
    alone = theirs([pack.row()])
    for name in ("input_ids", "position_ids", "copies"):
        assert getattr(ours, name).tolist() == getattr(alone, name).tolist()
    assert {name: x.tolist() for name, x in ours.targets.items()} == {n: x.tolist() for n, x in alone.targets.items()}
    assert ours.counts.values.tolist() == alone.counts.values.tolist()
    layout = TreeLayout.from_documents(read_documents(ours.position_ids.numpy()), "cpu")
    assert [run.keys for run in layout.runs] == [None]


def test_gradients_of_shared_rows_add_up_in_a_fixed_order(monkeypatch):
    documents = PackDocuments(np.array([6, 3, 2, 4]), np.array([0, 4, 4, 0]))
    (run, single) = TreeLayout.from_documents(documents, "cpu").runs
    assert single.keys is None
    assert [text.tolist() for text in text_rows(documents)][1] == [0, 1, 2, 3, 6, 7, 8]
    x, grad = torch.randn(11, 2, 3, requires_grad=True), torch.randn(6 + 7 + 6, 2, 3)
    _TextRows.apply(x, run.keys).backward(grad)
    wanted = torch.zeros_like(x).index_add_(0, run.keys.of_texts, grad)
    torch.testing.assert_close(x.grad, wanted)
    first, x.grad = x.grad, None
    monkeypatch.setattr("verl_ext.parallel.trees._SUMMED_BYTES", 1)  # one column at a time
    _TextRows.apply(x, run.keys).backward(grad)
    assert torch.equal(x.grad, first)


def test_layers_read_the_positions_of_texts():
    documents = PackDocuments(np.array([6, 3, 2, 4]), np.array([0, 4, 4, 0]))
    layout = TreeLayout.from_documents(documents, "cpu")
    assert layout.positions().tolist() == [*range(6), *range(4, 7), *range(4, 6), *range(4)]
    assert layout.padded(2).positions().tolist()[-2:] == [0, 1]


@pytest.mark.parametrize("positions", [[1, 2], [0, 1, 2, 4, 5], [0, 1, 0, 3], [0, 1, -1, 0]])
def test_a_beginning_that_the_document_before_does_not_have_is_refused(positions):
    with refused("data.share_prefixes"):
        read_documents(np.array(positions))


def test_an_engine_that_is_not_told_of_shared_tokens_refuses_them():
    positions = torch.tensor([0, 1, 2, 2, 3])
    assert isinstance(tree_layout(positions, "cpu"), TreeLayout)
    with refused("position_ids", "data.share_prefixes"):
        document_layout(positions)


def test_packs_that_share_are_refused_where_nobody_asked_for_them():
    pack = Pack.of([Document([5, 6, 7], [0, 1, 1], [0] * 3, [1.0] * 3)] * 2, least=1)
    assert any(pack.begins)
    with refused("`shared`"):
        StepCollator(LossSpec("token", np.ones(3)), CATEGORIES)([pack.row()])


def test_chunks_of_attention_are_refused():
    layout = TreeLayout.from_documents(PackDocuments(np.array([4, 2]), np.array([0, 2])), "cpu")
    with refused("data.share_prefixes"):
        layout.in_chunks(2)
    assert replace(layout, begins=(0, 2)).padded(3).offsets == (0, 4, 6, 9)
