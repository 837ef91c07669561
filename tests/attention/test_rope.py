"""Rotary embeddings of every type: packed documents compute as if alone, also on ranks that share the pack."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Phi3Config, PhimoeConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import verl_ext.attention.packed  # noqa: F401  registers the attention with transformers
from tests.lib.errors import refused
from tests.lib.packed_engine import build_worker
from tests.lib.ranks import in_turn, run_ranks
from tests.lib.rope_types import _FACTORS, BY_TYPE, POSITIONS, SHAPE
from tests.lib.tensor_calls import Copies
from verl_ext.attention import PACKED_ATTENTION
from verl_ext.attention.rope import choose_rope_by_document
from verl_ext.data import CategoryTable
from verl_ext.losses import LossSpec
from verl_ext.parallel.shards import document_layout
from verl_ext.trainer.collator import StepCollator
from verl_ext.trainer.loss import StepLoss

pytestmark = pytest.mark.slow

# Short and long documents in turn, including one at a type's limit and one a token longer; 80 tokens.
PACKS = [(7, 30, 16, 17, 10), (3, 40, 5, 32)]
_LONGROPE = {"rope_type": "longrope", **_FACTORS, "original_max_position_embeddings": POSITIONS}
_EXTENDED = {**SHAPE, "max_position_embeddings": 4 * POSITIONS}


def _qwen3(rope_type: str, **rope: object) -> Qwen3Config:
    shape = SHAPE if rope_type == "dynamic" else _EXTENDED
    return Qwen3Config(**shape, head_dim=8, rope_parameters={"rope_type": rope_type, "rope_theta": 100.0, **rope})


def _gemma3(**full_attention: object) -> Gemma3TextConfig:
    """One rotary embedding with parameters for each layer type."""
    rope = {"full_attention": full_attention, "sliding_attention": {"rope_type": "default"}}
    layers = ["sliding_attention", "full_attention"]
    shape = SHAPE if full_attention["rope_type"] == "dynamic" else _EXTENDED
    return Gemma3TextConfig(
        **shape,
        head_dim=8,
        sliding_window=9,
        layer_types=layers,
        rope_parameters={name: {"rope_theta": 100.0, **values} for name, values in rope.items()},
    )


CONFIGS = {
    **{name: _qwen3(name, **rope) for name, rope in BY_TYPE.items()},
    "phi3": Phi3Config(**_EXTENDED, original_max_position_embeddings=POSITIONS, rope_parameters=dict(_LONGROPE)),
    "gemma3_dynamic": _gemma3(rope_type="dynamic", factor=4.0),
    "gemma3_longrope": _gemma3(**_LONGROPE),
}


# Its rotary embedding also scales with the length; its router is random in training, so eval mode is compared.
_PHIMOE = PhimoeConfig(
    **_EXTENDED,
    num_local_experts=2,
    original_max_position_embeddings=POSITIONS,
    rope_parameters={**_LONGROPE, "short_mscale": 1.1, "long_mscale": 1.3, "rope_theta": 100.0},
)


def test_every_rope_type_of_transformers_is_among_the_cases():
    assert set(BY_TYPE) == {"default", *ROPE_INIT_FUNCTIONS}


def _ids(pack: int) -> torch.Tensor:
    return torch.randint(64, (sum(PACKS[pack]),), generator=torch.Generator().manual_seed(pack))


def _steps(
    folders: dict[str, str], tokenizer: str, ulysses: int, groups: int
) -> dict[str, tuple[list[torch.Tensor], dict]]:
    """Return by model this rank's log-probabilities of next tokens, a tensor per pack, and their sum's gradients."""
    found = {}
    context = [f"parallel.context_parallel_size={groups}"]
    for name, folder in folders.items():
        engine = build_worker(folder, ulysses, [*context, f"model.tokenizer_path={tokenizer}"]).engine
        rank, ranks = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
        rows = []
        for pack in range(rank, len(PACKS), ranks):
            ids, positions = _ids(pack), torch.cat([torch.arange(n) for n in PACKS[pack]])
            row = {"input_ids": ids, "position_ids": positions, "category_ids": torch.zeros_like(ids)}
            rows.append({**row, "loss_mask": (positions > 0).long()})
        loss, log_probs = StepLoss(1.0, ranks, None), []

        def keep(model_output, data, dp_group=None, loss=loss, log_probs=log_probs):
            log_probs.append(model_output["log_probs"].values().detach())
            return loss(model_output, data, dp_group)

        batch = StepCollator(LossSpec(), CategoryTable((), ()))(rows)
        with engine.train_mode():
            engine.optimizer_zero_grad()
            engine.accumulate(list(batch.micro_batches(1)), keep)
            gradients = {name: p.grad.full_tensor().clone() for name, p in engine.module.named_parameters()}
        found[name] = log_probs, gradients
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Save random models of :data:`CONFIGS`."""
    root = tmp_path_factory.mktemp("rope")
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(copy.deepcopy(config)).save_pretrained(root / name)
    return {name: str(root / name) for name in CONFIGS}


@pytest.fixture(scope="module")
def alone(folders):
    """Return by model plain transformers' log-probabilities of next tokens and gradients, one document at a time.

    Each document gets a freshly loaded rotary embedding, because a forward changes its state for the next one.
    """
    found = {}
    for name, folder in folders.items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        rotary, log_probs = model.model.rotary_emb, []
        for pack, lengths in enumerate(PACKS):
            for ids in _ids(pack).split(lengths):
                model.model.rotary_emb = copy.deepcopy(rotary)
                logits = model(input_ids=ids[None], use_cache=False).logits[0]
                log_probs.append(logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None]).squeeze(-1))
        (-torch.cat(log_probs).sum()).backward()
        found[name] = [part.detach() for part in log_probs], {n: p.grad for n, p in model.named_parameters()}
    return found


# Models by layout of two ranks: (ranks of a Ulysses group, groups that share a pack).
LAYOUTS = {
    "data_parallel": (1, 1, tuple(CONFIGS)),
    "ulysses": (2, 1, tuple(CONFIGS)),
    "two_groups": (1, 2, ("dynamic", "gemma3_longrope")),
}
RUNS = [(layout, name) for layout, (_, _, names) in LAYOUTS.items() for name in names]


def _frequencies(folder: str) -> tuple[str, dict[str, torch.Tensor]]:
    module = build_worker(folder, 1, ["engine.model_dtype=bf16"]).engine.module
    return str(next(module.parameters()).dtype), dict(module.named_buffers())


@pytest.fixture(scope="module")
def packed(folders, tiny_model):
    """Return {layout: {model: the engine's results for the packs}} on two ranks that have a pack each or half of each
    pack, and what `_frequencies` returned on each rank."""
    calls = [
        (_steps, {name: folders[name] for name in names}, str(tiny_model), ulysses, groups)
        for ulysses, groups, names in LAYOUTS.values()
    ]
    (*first, buffers), (*second, others) = run_ranks(in_turn, 2, [*calls, (_frequencies, str(tiny_model))])
    results = {}
    for (layout, (ulysses, groups, names)), mine, other in zip(LAYOUTS.items(), first, second, strict=True):
        halves = {name: (mine[name][0] + other[name][0], mine[name][1]) for name in names}
        results[layout] = mine if ulysses * groups == 2 else halves
    return results, [buffers, others]


@pytest.mark.parametrize(("layout", "name"), RUNS)
def test_a_document_in_a_pack_has_the_rotary_frequencies_that_it_has_alone(layout, name, packed, alone):
    (log_probs, gradients), (expected, expected_gradients) = packed[0][layout][name], alone[name]
    documents = [part for values, lengths in zip(log_probs, PACKS, strict=True) for part in values.split(lengths)]
    for found, want in zip(documents, expected, strict=True):
        torch.testing.assert_close(found[:-1], want, rtol=1e-5, atol=1e-5)
    assert gradients.keys() == expected_gradients.keys()
    deviation = {
        key: float((gradients[key] - want).norm() / want.norm())
        for key, want in expected_gradients.items()
        if want.any()
    }
    worst = max(deviation, key=deviation.get)
    assert deviation[worst] < 1e-5, f"{worst} is off by {deviation[worst]:.1e} of its norm"


def test_a_scale_that_depends_on_the_length_is_the_documents_own():
    torch.manual_seed(0)
    eager = AutoModelForCausalLM.from_config(copy.deepcopy(_PHIMOE), attn_implementation="eager").eval()
    packed = AutoModelForCausalLM.from_config(copy.deepcopy(_PHIMOE), attn_implementation=PACKED_ATTENTION).eval()
    packed.load_state_dict(eager.state_dict())
    choose_rope_by_document(packed)
    positions = torch.cat([torch.arange(n) for n in PACKS[0]])
    with torch.no_grad():
        logits = packed(
            input_ids=_ids(0)[None],
            position_ids=positions[None],
            use_cache=False,
            document_layout=document_layout(positions),
        ).logits[0]
        alone = [eager(input_ids=ids[None], use_cache=False).logits[0] for ids in _ids(0).split(PACKS[0])]
    torch.testing.assert_close(logits, torch.cat(alone), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["dynamic", "phi3", "gemma3_dynamic", "gemma3_longrope"])
def test_frequencies_are_chosen_without_reading_the_device_or_waiting_for_it(name):
    """The device is torch's ``meta``, which holds no values, so code that reads one raises."""
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name])).model
    choose_rope_by_document(model)
    rotary, positions = model.rotary_emb, torch.cat([torch.arange(n) for n in PACKS[0]])
    rotary.set_layout(model, (), {"document_layout": document_layout(positions)})
    arguments = ("full_attention",) if name.startswith("gemma3") else ()
    expected = rotary(torch.empty(0), positions[None], *arguments)
    rotary, x, positions = rotary.to("meta"), torch.empty(0, device="meta"), positions.to("meta")
    with Copies() as seen:
        found = rotary(x, positions[None], *arguments)
    assert [x.shape for x in found] == [x.shape for x in expected]
    assert {x.device.type for x in found} == {"meta"}
    assert all(seen.non_blocking)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_without_a_layout_each_row_is_one_document_whatever_was_read_before(name):
    """transformers' own dynamic scaling keeps the frequencies of the longest sequence so far."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), attn_implementation="sdpa").eval()
    choose_rope_by_document(model)
    long, short = _ids(0)[None, :40], _ids(0)[None, :5]
    with torch.no_grad():
        before = model(input_ids=short, use_cache=False).logits
        model(input_ids=long, use_cache=False)
        assert torch.equal(model(input_ids=short, use_cache=False).logits, before)


def test_a_model_that_chooses_frequencies_in_code_of_its_own_is_refused():
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS["dynamic"]))
    model.model.rotary_emb = torch.nn.Identity()
    with refused("model.path", "Qwen3ForCausalLM", "rotary frequencies"):
        choose_rope_by_document(model)


def test_weights_in_bfloat16_leave_rotary_frequencies_in_float32(tiny_model, packed):
    plain = dict(AutoModelForCausalLM.from_pretrained(tiny_model).named_buffers())
    for dtype, buffers in packed[1]:
        assert dtype == "torch.bfloat16"
        assert buffers.keys() == plain.keys()
        for name, buffer in buffers.items():
            torch.testing.assert_close(buffer, plain[name], rtol=0, atol=0)
