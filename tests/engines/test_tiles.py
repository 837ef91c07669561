"""Layers and MLPs over tiles of tokens give the values and gradients of the whole sequence in a tile's memory."""

import copy
import math
import types
from collections import Counter

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from tests.lib.checked import checked, typed
from tests.lib.errors import refused
from tests.lib.ranks import in_turn, only_rank, run_ranks
from tests.lib.tensor_calls import MadeTensors
from verl_ext.attention import packed as _packed  # noqa: F401 - registers it
from verl_ext.attention.kernels import PACKED_ATTENTION
from verl_ext.config.architecture import Architecture
from verl_ext.config.compose import compose
from verl_ext.config.support import model_notices, option_problems
from verl_ext.engines.activations import ActivationOptions, apply_activation_options
from verl_ext.engines.tiles import TiledModule, tile, tileable
from verl_ext.parallel.shards import document_layout
from verl_ext.tools.plan.fake_gpu import MemoryTracker

H, INTERMEDIATE = 24, 80
SIZES = {
    "vocab_size": 64,
    "hidden_size": H,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"vocab_size": 64, "n_embd": H, "n_layer": 2, "n_head": 4, "n_inner": INTERMEDIATE, "resid_pdrop": 0.0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = {  # transformers' model type: fields of its config
    **dict.fromkeys(["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "phi"], SIZES),
    "gpt2": GPT2,
    "qwen3_moe_with_a_dense_layer": {**SIZES, **EXPERTS, "mlp_only_layers": [1]},
}


def config_of(name: str, **more: object) -> transformers.PreTrainedConfig:
    fields = {**FAMILIES.get(name, SIZES), **more}
    return transformers.AutoConfig.for_model(name.removesuffix("_with_a_dense_layer"), **fields)


def model_of(name: str, **more: object) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config_of(name, **more)).train()


def mlps_of(model: nn.Module) -> list[nn.Module]:
    return [part.mlp for part in model.modules() if hasattr(part, "mlp") and hasattr(part.mlp, "parameters")]


def gradients(module: nn.Module, output: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Return the output, and gradients of its weighted sum with respect to the inputs and the parameters."""
    weights = torch.linspace(-1, 1, output.numel()).view(output.shape).to(output.dtype)
    wanted = [*inputs, *(p for p in module.parameters() if p.requires_grad)]
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), wanted)]


def assert_models_close(
    model: nn.Module, expected: nn.Module, ids: torch.Tensor, tolerance: float = 1e-5, **more: object
) -> None:
    """Assert that the logits and the gradients of all parameters are close."""
    assert_close(
        *(gradients(m, m(input_ids=ids, use_cache=False, **more).logits) for m in (model, expected)), tolerance
    )


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = 1e-6) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert float((ours - theirs).norm()) <= tolerance * float(theirs.norm())


@settings(max_examples=25)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    rows=st.integers(1, 2),
    tokens=st.integers(1, 40),
    tokens_of_tile=st.integers(1, 50),
)
def test_an_mlp_of_any_family_is_that_of_the_whole_sequence(family, rows, tokens, tokens_of_tile):
    whole = mlps_of(model_of(family))[-1].double()
    tiled = copy.deepcopy(whole)
    TiledModule(tiled, tokens_of_tile)
    x = torch.randn(rows, tokens, H, dtype=torch.float64, requires_grad=True)
    assert_close(gradients(tiled, tiled(x), x), gradients(whole, whole(x), x), tolerance=1e-13)
    with torch.no_grad():
        torch.testing.assert_close(tiled(x), whole(x))


@settings(max_examples=30)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    implementation=st.sampled_from(["sdpa", PACKED_ATTENTION]),
    checkpointing=st.booleans(),
    rows=st.integers(1, 2),
    tokens=st.integers(1, 40),
    tokens_of_tile=st.integers(1, 50),
)
def test_a_model_of_any_family_is_that_of_the_whole_sequence(
    family, implementation, checkpointing, rows, tokens, tokens_of_tile
):
    dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0} if family == "gpt2" else {}
    softcap = {"attn_logit_softcapping": None} if family == "gemma2" else {}
    if family == "gemma2":
        implementation = PACKED_ATTENTION  # from transformers 5.11 on, it has no sdpa
    expected = model_of(family, attn_implementation=implementation, **dropout, **softcap)
    model = copy.deepcopy(expected)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    tile(model, tokens_of_tile)
    ids = torch.randint(64, (rows, tokens))
    assert_models_close(model, expected, ids)
    with torch.no_grad():
        torch.testing.assert_close(*(m(input_ids=ids, use_cache=False).logits for m in (model, expected)))


def test_a_checkpointed_layer_is_one_checkpoint_with_tiles_as_without():
    model = model_of("llama")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    checkpoints = []
    for layer in model.model.layers:
        layer._gradient_checkpointing_func = lambda *args: checkpoints.append(1) or checkpoint(
            *args, use_reentrant=False
        )
    tile(model, 8)
    model(input_ids=torch.randint(64, (1, 40)), use_cache=False).logits.sum().backward()
    assert len(checkpoints) == 2


def test_layers_of_frozen_weights_pass_gradients_to_the_adapters_of_all_layers():
    model = get_peft_model(model_of("qwen3"), LoraConfig(r=4, target_modules=["q_proj", "o_proj", "down_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    expected = copy.deepcopy(model)
    tile(model, 7)
    assert_models_close(model, expected, torch.randint(64, (1, 30)))


def test_documents_of_a_pack_stay_apart_and_keep_their_positions():
    expected = model_of("qwen3", attn_implementation=PACKED_ATTENTION)
    model = copy.deepcopy(expected)
    tile(model, 7)
    positions = torch.cat([torch.arange(11), torch.arange(19)])[None]
    layout = document_layout(positions[0], torch.device("cpu"))
    given = {"position_ids": positions, "document_layout": layout}
    assert_models_close(model, expected, torch.randint(64, (1, 30)), **given)


@pytest.mark.parametrize("adapted", [False, True])
def test_dropout_draws_the_same_masks_again(adapted):
    """The dropout is the layer's own or an adapter's; the reference runs the same tiles in turn and keeps them all."""
    model = model_of("gpt2", resid_pdrop=0.4)
    mlp = mlps_of(model)[0]
    if adapted:
        get_peft_model(model, LoraConfig(r=4, lora_dropout=0.5, target_modules=["c_fc"], fan_in_fan_out=True))
    reference = copy.deepcopy(mlp)
    TiledModule(mlp, 6)
    x = torch.randn(1, 20, H, requires_grad=True)
    torch.manual_seed(3)
    expected = torch.cat([reference(part) for part in x.split(6, dim=1)], dim=1)
    torch.manual_seed(3)
    output = mlp(x)
    torch.rand(5)  # other random draws in between
    drawn = torch.get_rng_state()
    assert_close(gradients(mlp, output, x), gradients(reference, expected, x))
    assert torch.equal(torch.get_rng_state(), drawn)


def test_half_precision_sums_the_tiles_of_a_weight_in_fp32():
    whole = mlps_of(model_of("llama"))[0]
    exact, tiled = copy.deepcopy(whole).double(), copy.deepcopy(whole).bfloat16()
    exact.load_state_dict(tiled.state_dict())
    untiled = copy.deepcopy(tiled)
    TiledModule(tiled, 2)
    x = torch.randn(1, 400, H).bfloat16().requires_grad_()
    reference = gradients(exact, exact(x.double()), x)

    def error(mlp: nn.Module) -> float:
        return max(float((g - r).norm() / r.norm()) for g, r in zip(gradients(mlp, mlp(x), x), reference, strict=True))

    assert error(tiled) < 1.1 * error(untiled)


def test_under_autocast_values_and_gradients_are_those_of_the_whole_sequence():
    whole = mlps_of(model_of("llama"))[0]
    tiled = copy.deepcopy(whole)
    TiledModule(tiled, 8)
    x = torch.randn(1, 30, H, requires_grad=True)
    answers = []
    for mlp in (tiled, whole):
        with torch.autocast("cpu", torch.bfloat16):
            output = mlp(x)
        assert output.dtype == torch.bfloat16
        answers.append(gradients(mlp, output, x))
    assert_close(*answers, tolerance=5e-3)


def test_a_forward_that_a_kernel_package_has_put_in_its_place_is_tiled():
    """Like liger: a method bound to the instance, whose backward overwrites its saved tensors with gradients."""

    class SiLUMul(torch.autograd.Function):
        @staticmethod
        def forward(ctx, gate, up):
            ctx.save_for_backward(gate, up)
            return nn.functional.silu(gate) * up

        @staticmethod
        def backward(ctx, upstream):
            gate, up = ctx.saved_tensors
            share = torch.sigmoid(gate)
            of_gate = upstream * up * share * (1 + gate * (1 - share))
            up.copy_(upstream * gate * share)
            return gate.copy_(of_gate), up

    def swiglu(self, x):
        return self.down_proj(SiLUMul.apply(self.gate_proj(x), self.up_proj(x)))

    model = model_of("qwen2")
    expected = copy.deepcopy(model)
    for mlp in mlps_of(model):
        mlp.forward = types.MethodType(swiglu, mlp)
    apply_activation_options(model, ActivationOptions(tile_tokens=7))
    ids = torch.randint(64, (1, 30))
    answers = [gradients(m, m(input_ids=ids).logits) for m in (model, expected)]
    assert_close(*answers, tolerance=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_no_intermediate_activation_is_larger_than_a_tile(checkpointing):
    model = model_of("llama")
    if checkpointing:
        model.gradient_checkpointing_enable()
    ids = torch.randint(64, (1, 300))

    def largest() -> int:
        with MadeTensors() as made:
            model(input_ids=ids, use_cache=False, logits_to_keep=1).logits.sum().backward()
        shapes = [each.shape for each in made.seen if len(each.shape) > 1 and each.shape[-1] == INTERMEDIATE]
        return max(math.prod(shape[:-1]) for shape in shapes)

    assert largest() == 300
    apply_activation_options(model, ActivationOptions(tile_tokens=32))
    assert largest() == 32


@pytest.mark.parametrize(("checkpointing", "times"), [(False, 2), (True, 2)])
def test_each_tile_is_computed_twice_also_where_the_layer_is_recomputed(checkpointing, times):
    model = model_of("llama")
    calls = []
    for mlp in mlps_of(model):
        mlp.act_fn.register_forward_hook(lambda _, __, output: calls.append(output.shape[-2]))
    if checkpointing:
        model.gradient_checkpointing_enable()
    apply_activation_options(model, ActivationOptions(tile_tokens=10))
    model(input_ids=torch.randint(64, (1, 25)), use_cache=False).logits.sum().backward()
    assert sorted(calls) == sorted([10, 10, 5] * 2 * times)


@pytest.mark.parametrize(
    ("family", "offload"), [("llama", False), ("llama", True), ("gpt2", True), ("qwen3_moe_with_a_dense_layer", False)]
)
def test_a_layer_adds_one_hidden_state_and_its_gradients_to_the_peak_of_a_step(family, offload):
    """With an offload, that hidden state is the copy on the host, which the same tracker counts on a CPU."""
    tokens, sizes = 900, [2, 4]
    positions = torch.arange(tokens)[None]
    peaks, weights = [], []
    for layers in sizes:
        depth = {"n_layer" if family == "gpt2" else "num_hidden_layers": layers}
        dense = {"mlp_only_layers": list(range(layers))} if "moe" in family else {}
        model = model_of(family, attn_implementation=PACKED_ATTENTION, **depth, **dense)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        apply_activation_options(model, ActivationOptions(tile_tokens=450, activation_offload=offload))
        given = {"document_layout": document_layout(positions[0], torch.device("cpu")), "position_ids": positions}
        tracker = MemoryTracker("cpu", fake=False)
        with tracker:
            tracker.assign("parameters", [*model.parameters(), *model.buffers()])
            output = model(input_ids=torch.zeros_like(positions), **given, use_cache=False, logits_to_keep=1)
            output.logits.sum().backward()
        peaks.append(sum(tracker.peak.values()))
        weights.append(2 * sum(parameter.nbytes for parameter in model.parameters()))  # and their gradients
    (fewer, more), (of_fewer, of_more) = peaks, weights
    one = tokens * H * 4
    grown = (more - fewer - (of_more - of_fewer)) / one / (sizes[1] - sizes[0])
    assert grown < 1.1, grown


def _collectives(options: ActivationOptions) -> dict[str, int]:
    """Count the collectives of a step of two micro-batches on FSDP2, with gradient checkpointing."""
    model = model_of("llama")
    model.gradient_checkpointing_enable()
    apply_activation_options(model, options)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with MadeTensors() as made:
        for _ in range(2):
            model(input_ids=torch.randint(64, (1, 30)), use_cache=False).logits.sum().backward()
    return dict(Counter(name for each in made.seen if (name := str(each.operation)).startswith("c10d.")))


def test_parameters_are_gathered_and_gradients_reduced_as_often_as_without_tiles():
    both = (ActivationOptions(), ActivationOptions(tile_tokens=4))
    whole, tiled = run_ranks(in_turn, 2, [(_collectives, options) for options in both])[0]
    assert tiled == whole
    assert {"c10d._allgather_base_", "c10d._reduce_scatter_base_"} <= whole.keys()


def test_a_parameter_that_is_not_gathered_around_the_tiles_is_an_error():
    """This happens if FSDP wraps a part of it; no gradient may be lost in silence."""
    mlp = mlps_of(model_of("llama"))[0]
    TiledModule(mlp, 4)
    with only_rank():
        fully_shard(mlp.up_proj)
        with refused("FSDP", error=AssertionError):
            mlp(torch.randn(1, 9, H))


@pytest.fixture(scope="module")
def told():
    """Return (problems, notices) for a model with tiles of 64 tokens."""
    composed = compose(["model.path=unused", "data.train_dir=unused", "parallel=cpu", "model.tile_tokens=64"])
    config = typed(composed)

    def of(name: str, **more: object) -> tuple[list[str], list[str]]:
        model = Architecture(config_of(name, **more))
        notices = model_notices(config, model, config.loss.head)
        return list(option_problems(config, model)), [line for line in notices if "model.tile_tokens" in line]

    return of


def test_of_layers_of_experts_norms_alone_are_tiled_and_a_notice_says_so(told):
    for family in FAMILIES:
        problems, notices = told(family)
        assert problems == []
        assert [line.split(":")[0] for line in notices] == (
            ["model.tile_tokens=64 is of 1 of 2 layers"] if "moe" in family else []
        )
    for family, experts in {"qwen3_moe": EXPERTS, "mixtral": {"num_local_experts": 4}}.items():
        problems, (notice,) = told(family, **experts)
        assert problems == []
        assert notice.startswith("model.tile_tokens=64 is of 0 of 2 layers")
        model, expected = model_of(family, **experts), model_of(family, **experts)
        tile(model, 7)
        assert_models_close(model, expected, torch.randint(64, (1, 30)))


def test_a_model_without_anything_to_tile_is_refused_in_one_line():
    with refused("model.tile_tokens", "Linear", 64):
        tile(nn.Linear(3, 3), 64)


def test_a_layer_or_mlp_of_remote_code_or_of_unknown_parts_is_not_tiled():
    model = model_of("llama")
    first, second = model.model.layers
    first.mlp.shift = nn.Conv1d(H, H, 3)
    second.mlp.__class__ = type("LlamaMLP", (type(second.mlp),), {"__module__": "remote"})
    layers, modules = tileable(model)
    assert layers == []
    assert not {first.mlp, second.mlp} & set(modules)


@pytest.mark.parametrize("model", ["packed", "lora", "qwen_titans"])
def test_what_the_options_need_is_told_in_one_line(model):
    words = ["model.activation_offload=true", "model.enable_gradient_checkpointing=false"]
    config = compose(["model.path=unused", "data.train_dir=unused", "parallel=cpu", f"model={model}", *words])
    things = ("model.activation_offload=true", "model.enable_gradient_checkpointing=true", False)
    with refused(*things, alone=False):
        checked(config)
