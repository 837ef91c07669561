"""Attention inside documents: isolation to the last bit, windows, grouped heads, Ulysses, and refusals."""

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, MistralConfig, Qwen3Config, Qwen3ForCausalLM

import verl_ext.engines.packed
from tests.lib.attention_packs import LENGTHS, attention_pack
from tests.lib.errors import refused
from tests.lib.packed_engine import build_worker
from tests.lib.ranks import run_cases
from tests.lib.tiny_model import SHAPE
from verl_ext.attention import PACKED_ATTENTION
from verl_ext.attention.packed import packed_attention
from verl_ext.data import CategoryTable
from verl_ext.losses import LossSpec
from verl_ext.parallel.shards import document_layout
from verl_ext.trainer.collator import StepCollator

CONFIGS = {
    "qwen3": Qwen3Config(**SHAPE),
    "qwen3_one_kv_head": Qwen3Config(**{**SHAPE, "num_key_value_heads": 1}),
    "qwen3_no_gqa": Qwen3Config(**{**SHAPE, "num_key_value_heads": 4}),
    "qwen3_window": Qwen3Config(**SHAPE, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "mistral_window": MistralConfig(**SHAPE, sliding_window=5),
    "mistral_window_of_a_document": MistralConfig(**SHAPE, sliding_window=18),
}


def _pair(config) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Return one model twice: with packed attention, and with transformers' own eager attention."""
    models = []
    for attention in (PACKED_ATTENTION, "eager"):
        torch.manual_seed(0)
        # Use a copy, because a model writes its attention into its config.
        models.append(AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention).eval())
    assert [model.config._attn_implementation for model in models] == [PACKED_ATTENTION, "eager"]
    return models[0], models[1]


def _logits(model: torch.nn.Module, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return a pack's logits ``[T, V]``."""
    layout = document_layout(positions)
    output = model(
        input_ids=ids[None], position_ids=positions[None], attention_mask=None, use_cache=False, document_layout=layout
    )
    return output.logits[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_pack_gives_what_each_document_gives_alone(name):
    packed, eager = _pair(CONFIGS[name])
    ids, positions = attention_pack()
    logits = _logits(packed, ids, positions)
    alone = torch.cat([eager(input_ids=part[None], use_cache=False).logits[0] for part in ids.split(LENGTHS)])
    torch.testing.assert_close(logits, alone, rtol=1e-5, atol=1e-5)

    weights = torch.randn_like(logits)
    (logits * weights).sum().backward()
    (alone * weights).sum().backward()
    for (parameter, own), plain in zip(packed.named_parameters(), eager.parameters(), strict=True):
        assert (own.grad - plain.grad).norm() <= 1e-5 * plain.grad.norm(), parameter


@pytest.mark.parametrize("changed", range(len(LENGTHS)))
@pytest.mark.parametrize("name", ["qwen3", "qwen3_window"])
def test_changing_a_document_changes_no_other_documents_logits_at_all(name, changed):
    model, _ = _pair(CONFIGS[name])
    ids, positions = attention_pack()
    with torch.no_grad():
        before = _logits(model, ids, positions).split(LENGTHS)
        other = ids.clone()
        other.split(LENGTHS)[changed].add_(1).remainder_(64)
        after = _logits(model, other, positions).split(LENGTHS)
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        assert torch.equal(old, new) is (index != changed)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_window", "mistral_window"])
def test_transformers_builds_no_mask_of_all_tokens_by_all_tokens(name):
    model, _ = _pair(CONFIGS[name])
    masks = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: masks.append(kwargs.get("attention_mask")), with_kwargs=True
        )
    _logits(model, *attention_pack())
    assert masks == [None, None]


def test_no_gradient_flows_from_one_document_to_another():
    model, _ = _pair(CONFIGS["qwen3"])
    ids, positions = attention_pack()
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    output = model(
        inputs_embeds=embedded[None],
        position_ids=positions[None],
        attention_mask=None,
        use_cache=False,
        document_layout=document_layout(positions),
    ).logits[0]
    output.split(LENGTHS)[2].square().sum().backward()
    reached = [bool(part.any()) for part in embedded.grad.split(LENGTHS)]
    assert reached == [False, False, True, False]


def test_neighbours_do_not_matter_to_the_last_bit():
    model, _ = _pair(CONFIGS["qwen3"])
    ids, positions = attention_pack()
    part, own = ids.split(LENGTHS)[2], torch.arange(LENGTHS[2])
    with torch.no_grad():
        attention = [_first_attention(model, i, p) for i, p in ((ids, positions), (part, own))]
    assert torch.equal(attention[0].split(LENGTHS)[2], attention[1])


def _first_attention(model: torch.nn.Module, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return packed attention ``[T, H·E]`` over token-by-token projections, so that nothing else mixes tokens."""
    layer = model.model.layers[0].self_attn
    hidden = model.get_input_embeddings()(ids)
    query, key, value = (
        torch.stack([projection(token) for token in hidden]).unflatten(-1, (-1, 8)).transpose(0, 1)[None]
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    output, _ = packed_attention(layer, query, key, value, document_layout=document_layout(positions))
    return output[0].flatten(1)


def test_without_a_layout_each_row_is_one_document():
    packed, eager = _pair(CONFIGS["qwen3"])
    ids = torch.randint(64, (3, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(
            packed(input_ids=ids, use_cache=False).logits,
            eager(input_ids=ids, use_cache=False).logits,
            rtol=1e-5,
            atol=1e-5,
        )


# position_ids   0 1 2 | 0 1 2 3 | 0        offsets 0 3 7 8
@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(0, 7))
def test_a_layout_gives_back_the_lengths_it_was_made_from(lengths, pad):
    layout = document_layout(torch.cat([torch.arange(n) for n in lengths]))
    padded = layout.padded(pad)
    for found, expected in ((layout, lengths), (padded, [*lengths, pad] if pad else lengths)):
        sizes = [end - start for start, end in zip(found.offsets[:-1], found.offsets[1:], strict=True)]
        assert sizes == expected
        assert found.offsets[0] == 0
        assert found.offsets[-1] == sum(expected)
        assert found.max_length == max(expected)
        assert found.cu_seqlens.dtype == torch.int32
        assert tuple(found.cu_seqlens.tolist()) == found.offsets


def test_a_micro_batch_that_begins_inside_a_document_is_a_broken_one():
    with refused("first token", error=AssertionError):
        document_layout(torch.tensor([1, 2, 0, 1]))


@pytest.mark.parametrize(
    ("given", "is_causal", "things"),
    [
        ({"attention_mask": torch.ones(1, 1, 5, 5)}, True, ("attn_implementation=sdpa",)),
        (
            {"attention_mask": torch.ones(1, 1, 5, 5), "document_layout": document_layout(torch.arange(5))},
            True,
            ("model.path: Linear", "attention mask"),
        ),
        ({"is_causal": False}, True, ("model.path: Linear", "bidirectional")),
        ({}, False, ("model.path: Linear", "bidirectional")),
    ],
)
def test_attention_that_no_backend_computes_is_refused(given, is_causal, things):
    module, query = torch.nn.Linear(1, 1), torch.randn(1, 4, 5, 8)
    module.is_causal = is_causal
    with refused(*things):
        packed_attention(module, query, query, query, **given)


@pytest.mark.parametrize("name", ["position_bias", "sinks", "indices", "block_indices", "a_name_of_the_future"])
def test_a_keyword_that_nothing_reads_is_refused_by_name_unless_it_is_none(name):
    query = torch.randn(1, 4, 5, 8)
    module = torch.nn.Linear(1, 1)
    plain, _ = packed_attention(module, query, query, query)
    assert torch.equal(packed_attention(module, query, query, query, **{name: None})[0], plain)
    with refused("model.path: Linear", name, "verl_ext_packed"):
        packed_attention(module, query, query, query, **{name: torch.zeros(1)})


# --- on ranks -------------------------------------------------------------------------------------------------------


_COLLECTIVES = ("all_to_all", "all_to_all_single", "all_gather", "all_gather_into_tensor", "all_reduce", "broadcast")


@dataclass
class Seen:
    """One forward pass on a rank: its results, and the names of its sequence-parallel collectives in order."""

    log_probs: torch.Tensor
    collectives: list[str]
    layouts: int


def _count(module: object, name: str, record: Callable[[tuple], None]) -> None:
    """Wrap ``module.name`` so that it first calls ``record`` with its arguments, unless FSDP2 is the caller."""
    original = getattr(module, name)

    def wrapper(*args, **kwargs):
        if "_fully_shard" not in sys._getframe(1).f_code.co_filename:
            record((*args, *kwargs.values()))
        return original(*args, **kwargs)

    setattr(module, name, wrapper)


def _forward(model: str, sequence_parallel: int, packs: list[tuple[int, ...]]) -> list[Seen]:
    """Run a micro-batch of each pack through one engine, and record every collective of torch.distributed."""
    engine = build_worker(model, sequence_parallel, ["model.enable_gradient_checkpointing=false"]).engine
    group = engine.ulysses_device_mesh.get_group("sp") if sequence_parallel > 1 else dist.group.WORLD
    collectives: list[str] = []
    layouts: list[tuple] = []
    for name in _COLLECTIVES:
        _count(dist, name, lambda used, name=name: collectives.append(name) if group in used else None)
    _count(verl_ext.engines.packed, "document_layout", layouts.append)
    answers = []
    for lengths in packs:
        collectives.clear()
        layouts.clear()
        with engine.eval_mode(), torch.no_grad():
            _, answer = engine.forward_step(_micro_batch(lengths), None, forward_only=True)
        log_probs = answer["model_output"]["log_probs"].values()
        answers.append(Seen(log_probs, list(collectives), len(layouts)))
    return answers


def _micro_batch(lengths: tuple[int, ...]):
    ids, positions = attention_pack(lengths)
    zeros = torch.zeros_like(ids)
    pack = {"input_ids": ids, "position_ids": positions, "loss_mask": zeros, "category_ids": zeros}
    return next(StepCollator(LossSpec(), CategoryTable((), ()))([pack]).micro_batches(1))


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory):
    """Write a model with eight heads and two key/value heads, fewer than four ranks."""
    folder = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, "num_attention_heads": 8})).save_pretrained(folder)
    return str(folder)


def _log_probs_alone(model: torch.nn.Module, lengths: tuple[int, ...]) -> list[torch.Tensor]:
    """Return each document's log-probabilities of its next tokens, from transformers' eager attention."""
    alone = []
    for ids in attention_pack(lengths)[0].split(lengths):
        log_softmax = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        alone.append(log_softmax[:-1].gather(-1, ids[1:, None]).squeeze(-1))
    return alone


PACKS = [LENGTHS, (1, 1), (8,)]


@pytest.fixture(scope="module")
def found(wide_model):
    return run_cases({ranks: (ranks, _forward, wide_model, ranks, PACKS) for ranks in (1, 2, 4)})


# 37 tokens are padded to 38 and 40; two tokens are fewer than four ranks; with four ranks, each has two query heads
# and a copy of one key/value head.
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ulysses_gives_what_documents_give_alone_with_no_exchange_but_its_own(ranks, wide_model, found):
    eager = AutoModelForCausalLM.from_pretrained(wide_model, dtype=torch.float32, attn_implementation="eager")
    for answers in found[ranks]:
        for lengths, seen in zip(PACKS, answers, strict=True):
            with torch.no_grad():
                expected = _log_probs_alone(eager, lengths)
            for own, alone in zip(seen.log_probs.split(lengths), expected, strict=True):
                torch.testing.assert_close(own[:-1], alone, rtol=1e-5, atol=1e-5)
            assert seen.layouts == 1
            # Two a layer (queries, keys and values; output), and one gather of log-probabilities after the last layer.
            in_layers = ["all_to_all_single"] * 2 * SHAPE["num_hidden_layers"]
            assert seen.collectives[: len(in_layers)] == (in_layers if ranks > 1 else [])
            assert len(seen.collectives) == (len(in_layers) + 1 if ranks > 1 else 0)
