"""The head of many architectures against plain Hugging Face: tied, biased, scaled, soft-capped, with adapters."""

import re
from collections import Counter

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from tests.lib.checked import typed
from tests.lib.packed_engine import build_worker, token_step
from tests.lib.ranks import run_cases
from tests.lib.reference import Document, Reference, fill_adapters, load_eager
from tests.lib.tiny_model import write_tiny_model
from verl_ext.config.compose import compose
from verl_ext.config.model import PackedModel
from verl_ext.engines.head import FusedHead, HeadInputs, TargetRows, cheapest_head
from verl_ext.parallel.shards import SequenceShards

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
# name: (config class, its fields, the head that it allows)
MODELS = {
    "qwen2": ("Qwen2Config", {}, "fused"),
    "qwen3_tied": ("Qwen3Config", {"tie_word_embeddings": True}, "fused"),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
        "fused",
    ),
    "llama": ("LlamaConfig", {}, "fused"),
    "mistral": ("MistralConfig", {"sliding_window": None}, "fused"),
    "gemma_tied": ("GemmaConfig", {"tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"}, "fused"),
    "gpt2_tied": (
        "GPT2Config",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "tie_word_embeddings": True}
        | {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2},
        "fused",
    ),
    "phi_with_bias": ("PhiConfig", {"partial_rotary_factor": 0.5}, "fused"),
    "granite_scaled": ("GraniteConfig", {"logits_scaling": 8.0}, "targets"),
    "cohere_scaled": ("CohereConfig", {"logit_scale": 0.25, "eos_token_id": 2, "bos_token_id": 1}, "targets"),
}


def documents() -> list[Document]:
    rng = np.random.default_rng(3)
    sizes = (19, 5, 12, 1, 8, 3)
    masks = [[0, *rng.integers(0, 2, size - 1).tolist()] for size in sizes]
    masks[2] = [0] * 12  # no target
    return [
        Document(rng.integers(4, 128, n).tolist(), mask, [0] * n, [1.0] * n)
        for n, mask in zip(sizes, masks, strict=True)
    ]


DOCUMENTS = documents()
PACKS = [[DOCUMENTS[0], DOCUMENTS[1]], [DOCUMENTS[2], DOCUMENTS[3]], [DOCUMENTS[4], DOCUMENTS[5]]]


HEADS = ("fused", "targets", "plain")
HALF = "qwen3_tied"  # this model also runs in half precision
TARGETS = ["q_proj", "lm_head"]  # the targets of the adapters on LLaMA


def train(model: str, kind: str):
    """Return the head that a folder's model allows, and a step by each head; a kind is a precision or "lora"."""
    dtype = "fp32" if kind == "lora" else kind
    overrides = [f"engine.mixed_precision={{param_dtype:{dtype},reduce_dtype:fp32,buffer_dtype:fp32}}"]
    if kind == "lora":
        overrides += ["model.lora_rank=4", "model.lora_alpha=8", f"model.target_modules=[{','.join(TARGETS)}]"]
    engine = build_worker(model, sequence_parallel=2, overrides=overrides).engine
    if engine.scaler is not None:  # gradients of few targets are large
        engine.scaler.load_state_dict({**engine.scaler.state_dict(), "scale": 1024.0})
    fill_adapters(engine.module)
    return engine.cheapest_head, [token_step(engine, PACKS, head) for head in HEADS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a function from :data:`MODELS` to folders, which writes a model on its first use."""
    written = {}

    def of(name: str):
        if name not in written:
            config_class, fields, _ = MODELS[name]
            path = tmp_path_factory.mktemp(name)
            written[name] = write_tiny_model(path, config_class=getattr(transformers, config_class), **fields)
        return written[name]

    return of


def gathers(model: str) -> dict[str, Counter]:
    """Count by head how often FSDP2 gathers each group of parameters in a step of one micro-batch."""
    engine = build_worker(model, sequence_parallel=2).engine
    counts = {}
    for head in HEADS:
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            token_step(engine, PACKS[:1], head)
        names = re.findall(r"FSDP::all_gather \((\S+)\)", " ".join(event.name for event in profiled.events()))
        counts[head] = Counter(names)
    return counts


@pytest.fixture(scope="module")
def found(folder):
    """Return each rank's result of a run, (name, kind), and its gathers."""
    runs = [*((name, "fp32") for name in MODELS), (HALF, "bf16"), (HALF, "fp16"), ("llama", "lora")]
    cases = {(name, kind): (2, train, str(folder(name)), kind) for name, kind in runs}
    return run_cases({**cases, "gathers": (2, gathers, str(folder("llama")))})


@pytest.mark.parametrize("name", MODELS)
def test_a_step_of_every_head_equals_plain_hugging_face_on_two_sequence_parallel_ranks(name, folder, found):
    use, steps = found[name, "fp32"][0]
    assert use == MODELS[name][2]
    assert_all_equal(steps, Reference(load_eager(str(folder(name))), DOCUMENTS).step(PACKS, "token", {}))


def test_backward_gathers_no_weight_that_it_does_not_need(found):
    counts = found["gathers"][0]
    for head in HEADS:
        assert counts[head]["model.embed_tokens"] == 1
        assert counts[head]["model.layers.0"] == counts[head]["model.layers.1"] == 2
        assert counts[head]["lm_head"] == (1 if head == "fused" else 2)


def test_a_step_with_an_adapter_on_the_head_equals_plain_hugging_face(folder, found):
    model = get_peft_model(
        load_eager(str(folder("llama"))), LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, lora_dropout=0.0)
    ).eval()
    fill_adapters(model)
    use, steps = found["llama", "lora"][0]
    assert use == "fused"
    assert_all_equal(steps, Reference(model, DOCUMENTS).step(PACKS, "token", {}))


def assert_all_equal(steps, expected):
    assert len(steps) == len(HEADS)
    for step in steps:
        expected.assert_taken(step, TOLERANCE, TOLERANCE, floor=0)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_in_half_precision_a_step_is_no_further_from_plain_hugging_face_than_that_of_plain_logits(dtype, folder, found):
    expected = Reference(load_eager(str(folder(HALF))), DOCUMENTS).step(PACKS, "token", {})
    names = list(expected.gradients)
    truth = torch.cat([expected.gradients[name].flatten() for name in names])
    _, steps = found[HALF, dtype][0]
    vectors = [torch.cat([step.gradients[name].double().flatten() for name in names]) for step in steps]
    fused, targets, plain = (float((vector - truth).norm() / truth.norm()) for vector in vectors)
    assert max(fused, targets) <= 1.2 * plain
    assert plain < 0.05
    for step in steps:
        assert step.report["train/loss"] == pytest.approx(expected.loss, rel=5e-3)


@pytest.mark.parametrize(
    ("name", "asked", "notice"),
    [
        ("qwen3_tied", "fused", None),
        ("granite_scaled", "fused", "loss.head=fused is targets here: GraniteForCausalLM"),
        ("granite_scaled", "plain", None),
        ("gpt2_tied", "fused", None),
    ],
)
def test_a_head_that_needs_more_memory_than_asked_for_is_reported(name, asked, notice, folder):
    config = compose([f"model.path={folder(name)}", "data.train_dir=unused", "parallel=cpu", f"loss.head={asked}"])
    notices = PackedModel.examine(typed(config), AutoConfig.from_pretrained(folder(name))).notices
    assert [line.startswith(notice) for line in notices if line.startswith("loss.head")] == [True] * (
        notice is not None
    )


@given(is_target=st.lists(st.booleans(), min_size=1, max_size=60), ulysses=st.integers(1, 5), groups=st.integers(1, 3))
def test_target_rows_are_shared_evenly_and_in_order(is_target, ulysses, groups):
    ranks = [SequenceShards(ulysses, groups, rank) for rank in range(ulysses * groups)]
    flags = torch.tensor([*is_target, *[False] * (-len(is_target) % ranks[0].multiple)])
    rows = flags.nonzero().flatten()
    twice = torch.cat([rows[1::2], rows])  # documents that share a row may both have a target there
    shares = [TargetRows.from_rows(twice, len(flags), rank) for rank in ranks]
    held = [rank.slice(torch.arange(len(flags)))[share.local] for rank, share in zip(ranks, shares, strict=True)]
    targets = torch.cat(held).tolist()
    assert sorted(targets) == rows.tolist()
    assert [at for share in shares for at in share.positions[share.part].tolist()] == targets
    for rank, share in enumerate(shares):
        assert share.positions.tolist() == targets
        assert sum(share.send) == len(share.local)
        assert sum(share.receive) == share.part.stop - share.part.start <= share.most
        assert share.receive == [other.send[rank] for other in shares]


def test_an_adapter_that_is_more_than_a_product_is_not_fused(folder):
    for more in ({"use_dora": True}, {"lora_bias": True}):
        base = AutoModelForCausalLM.from_pretrained(folder("llama"))
        assert cheapest_head(get_peft_model(base, LoraConfig(r=4, target_modules=["lm_head"], **more))) == "targets"


def adapted(folder, *modules):
    """Return a model with an adapter, the ids of a document, and the labels, coefficients and rows of its targets."""
    base = AutoModelForCausalLM.from_pretrained(folder("llama"))
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=[*modules]))
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    ids = torch.randint(4, 128, (1, 12))
    rows = TargetRows.from_rows(torch.arange(11), 12, SequenceShards())
    return model, ids, ids[0, 1:], torch.rand(11), rows


@pytest.mark.parametrize("merged", [False, True])
def test_a_fused_head_without_its_adapter_is_the_base_models(merged, folder):
    """In PEFT's contexts for a reference model, values and gradients are those of the model's own logits."""
    model, ids, labels, coefficients, rows = adapted(folder, "lm_head", "q_proj")
    embeddings = model.get_input_embeddings().weight.requires_grad_()

    def gradient(loss):
        (found,) = torch.autograd.grad(loss, [embeddings])
        return found

    def plain():
        nll = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1].float(), labels, reduction="none")
        return nll.detach(), gradient((coefficients * nll).sum())

    if merged:
        model.merge_adapter()
    with_adapter = plain()
    with model.disable_adapter():
        without = plain()
    if merged:
        model.merge_adapter()  # disabling had unmerged it
    head = FusedHead(model)

    def fused():
        with head.computing_loss(HeadInputs(labels, coefficients, rows, None, 3000)):
            terms, nll = model(ids, logits_to_keep=rows.local).logits[0].unbind(-1)
        return nll.detach(), gradient(terms.sum())

    assert not torch.allclose(without[0], with_adapter[0], rtol=1e-2)
    torch.testing.assert_close(fused(), with_adapter, rtol=1e-4, atol=1e-5)
    with model.disable_adapter():
        torch.testing.assert_close(fused(), without, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fused(), with_adapter if not merged else plain(), rtol=1e-4, atol=1e-5)
