"""A Qwen with a memory: its start, the states that pass between chunks, its gradients."""

import copy

import pytest
import torch
from accelerate import init_empty_weights
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from tests.lib.errors import refused
from tests.lib.tiny_titans import CHUNK, VOCABULARY, each_form, random_tokens, tiny_base, tiny_config, tiny_titans
from verl_ext.titans import QwenTitansConfig, QwenTitansForCausalLM, is_memory_parameter


def _close(own: torch.Tensor, exact: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(own, exact, rtol=tolerance, atol=tolerance)


def _same_state(own, exact) -> None:
    for name, memory in own.memories.items():
        _close(memory.state, exact.memories[name].state)


def _base_folder(folder, name: str = "qwen3", **fields):
    """Write a plain Qwen, and return its folder and its logits chunk by chunk for ``ids``."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(tiny_base(name, **fields)).eval()
    model.save_pretrained(folder)
    return model


def _by_chunk(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return torch.cat([model(input_ids=part, use_cache=False).logits for part in ids.split(CHUNK, 1)], 1)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
@each_form
def test_a_new_memory_leaves_the_base_model_run_by_chunk_as_it_is(tmp_path, name, form, attention):
    """The layers run the same operations on the same shapes, so they are equal to the last bit. The head sees all
    chunks at once, and a kernel's sums depend on its shapes, so the logits are equal to fp32's precision."""
    base = _base_folder(tmp_path, name)
    base.set_attn_implementation(attention)
    config = tiny_config(tiny_base(name), **form, layers=[0, 2])
    model = QwenTitansForCausalLM.from_pretrained(tmp_path, config=config, attn_implementation=attention).eval()
    ids = random_tokens(2, 2 * CHUNK + 5)
    assert model.model.config._attn_implementation == attention
    before_norm: dict[str, list[torch.Tensor]] = {"base": [], "memory": []}
    for key, found in (("base", base), ("memory", model)):
        found.model.norm.register_forward_pre_hook(lambda _, args, key=key: before_norm[key].append(args[0]))
    logits, wanted = model(ids).logits, _by_chunk(base, ids)
    assert torch.equal(*(torch.cat(parts, 1) for parts in before_norm.values()))
    torch.testing.assert_close(logits, wanted)


@pytest.mark.parametrize("tied", [False, True])
def test_a_plain_qwen_folder_gives_the_base_weights_and_a_seeded_memory(tmp_path, tied):
    base = _base_folder(tmp_path, tie_word_embeddings=tied)
    config = tiny_config(tiny_base(tie_word_embeddings=tied))
    models = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        models.append(QwenTitansForCausalLM.from_pretrained(tmp_path, config=copy.deepcopy(config)))
    own = models[0].state_dict()
    for name, tensor in base.state_dict().items():
        assert torch.equal(own.pop(name), tensor)
    assert own.keys() == models[0].memory_state_dict().keys()
    assert all(is_memory_parameter(name) for name in own)
    assert (models[0].lm_head.weight is models[0].model.embed_tokens.weight) is tied
    keys = "memory.1.long_term_memory.k_proj.weight"
    assert torch.equal(own[keys], models[1].state_dict()[keys])
    assert not torch.equal(own[keys], models[2].state_dict()[keys])


def test_a_folder_opens_without_storage_as_verl_does_on_other_ranks(tmp_path):
    _base_folder(tmp_path)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_pretrained(tmp_path, config=tiny_config())
    whole = QwenTitansForCausalLM.from_pretrained(tmp_path, config=tiny_config())
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert {name: p.shape for name, p in model.named_parameters()} == {n: p.shape for n, p in whole.named_parameters()}


def test_a_memory_for_random_base_weights_may_start_with_a_say():
    for std in (0.0, 0.1):
        memory = tiny_titans(perturbed=False, output_std=std).memory["1"]
        assert memory.long_term_memory.out_proj.weight.std().item() == pytest.approx(std, rel=0.3)


def test_memory_layers_stand_in_the_upper_half_unless_named():
    for layers, expected in ((1, [0]), (2, [1]), (3, [1]), (12, [6, 9]), (28, [14, 17, 21, 24])):
        config = QwenTitansConfig.from_base(tiny_base(num_hidden_layers=layers, layer_types=None))
        assert config.memory["layers"] == expected


@each_form
def test_the_first_chunk_reaches_the_last_through_the_memory(form):
    model = tiny_titans(**form)
    ids = random_tokens(1, 3 * CHUNK)
    changed = ids.clone()
    changed[:, 3] = (changed[:, 3] + 1) % VOCABULARY
    difference = (model(changed).logits - model(ids).logits)[:, 2 * CHUNK :].abs().amax(-1)
    assert (difference > 1e-6).all()


def test_without_a_memory_nothing_reaches_the_next_chunk():
    model = tiny_titans(layers=[])
    ids = random_tokens(1, 2 * CHUNK)
    changed = ids.clone()
    changed[:, :CHUNK] = random_tokens(1, CHUNK, seed=1)
    assert torch.equal(model(ids).logits[:, CHUNK:], model(changed).logits[:, CHUNK:])


@pytest.mark.parametrize("place", [0, 9, 20])
@each_form
def test_no_token_sees_a_later_one(form, place):
    model = tiny_titans(**form, layers=[0, 1, 2])
    ids = random_tokens(1, 2 * CHUNK)
    changed = ids.clone()
    changed[:, place:] = random_tokens(1, 2 * CHUNK - place, seed=1)
    assert torch.equal(model(ids).logits[:, :place], model(changed).logits[:, :place])


@each_form
@torch.no_grad()
def test_padding_changes_no_logits_and_no_state(form):
    model = tiny_titans(**form, layers=[0, 2])
    lengths, width = (21, CHUNK, 3), 3 * CHUNK
    ids = random_tokens(len(lengths), width)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    padded = model(ids, mask).logits
    state = model(ids, mask, use_cache=True).past_key_values
    for row, length in enumerate(lengths):
        alone = model(ids[row : row + 1, :length], use_cache=True)
        _close(padded[row, :length], alone.logits[0])
        state_of_row = copy.deepcopy(state)
        state_of_row.reorder_cache(torch.tensor([row]))
        _same_state(state_of_row, alone.past_key_values)


@pytest.mark.parametrize("batch", [1, 2])
@each_form
def test_what_leaves_a_memory_is_no_view_of_its_parameters(form, batch):
    # FSDP2 frees their storage when the memory's forward ends.
    memory = tiny_titans(**form).memory["1"]
    left = memory(torch.randn(batch, CHUNK, 24), None, None)
    own = {parameter.untyped_storage().data_ptr() for parameter in memory.parameters()}
    assert not own & {tensor.untyped_storage().data_ptr() for tensor in left}


def test_ten_chunks_at_many_times_the_trained_size_stay_finite():
    model = tiny_titans(layers=[0, 1, 2])
    with torch.no_grad():
        model.model.embed_tokens.weight *= 1e4
    assert model(random_tokens(1, 10 * CHUNK)).logits.isfinite().all()


def test_a_bf16_model_keeps_its_state_in_fp32():
    model = tiny_titans().bfloat16()
    output = model(random_tokens(1, 2 * CHUNK), use_cache=True)
    assert output.logits.dtype == torch.bfloat16
    assert {memory.state.dtype for memory in output.past_key_values.memories.values()} == {torch.float32}


def test_the_loss_shifts_over_the_whole_sequence():
    model = tiny_titans()
    ids = random_tokens(2, 2 * CHUNK + 3)
    labels = ids.clone()
    labels[0, :5] = -100
    output = model(ids, labels=labels)
    expected = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(output.loss, expected)
    boundary = torch.full_like(labels, -100)
    boundary[:, CHUNK] = ids[:, CHUNK]
    expected = F.cross_entropy(output.logits[:, CHUNK - 1], ids[:, CHUNK])
    torch.testing.assert_close(model(ids, labels=boundary).loss, expected)
    last_four = model(ids, labels=labels, logits_to_keep=4)
    expected = F.cross_entropy(output.logits[:, -4:-1].flatten(0, 1), labels[:, -3:].flatten())
    torch.testing.assert_close(last_four.loss, expected)


def test_the_head_sees_the_kept_positions_alone():
    model = tiny_titans()
    ids = random_tokens(2, CHUNK + 4)
    logits = model(ids).logits
    seen = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[:-1].numel()))
    kept = torch.zeros_like(ids, dtype=torch.bool)
    kept[0, 3] = kept[1, 0] = kept[1, -1] = True
    _close(model(ids, logits_to_keep=kept).logits, torch.stack([logits[0, 3], logits[1, 0], logits[1, -1]]))
    _close(model(ids, logits_to_keep=2).logits, logits[:, -2:])
    _close(model(ids, logits_to_keep=torch.tensor([1, 5])).logits, logits[:, [1, 5]])
    assert seen == [3, 4, 4]


def _gradients(model: torch.nn.Module, ids: torch.Tensor, last: int) -> dict[str, torch.Tensor]:
    """Return gradients of the loss on the ``last`` tokens by parameter name; 0 for a missing one."""
    labels = ids.clone()
    labels[:, :-last] = -100
    model.zero_grad()
    model(ids, labels=labels).loss.backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


@each_form
def test_the_first_chunks_writes_are_trained_by_the_last_chunks_loss(form):
    # With one write a chunk, the last chunk reads only the writes of earlier chunks.
    ids = random_tokens(1, 3 * CHUNK)
    full, cut = (
        _gradients(tiny_titans(**form, sub_chunk=CHUNK, bptt_chunks=chunks), ids, CHUNK // 2) for chunks in (None, 1)
    )
    for name in ("k_proj.weight", "v_proj.weight", "rates.weight"):
        assert full[f"memory.1.long_term_memory.{name}"].any()
        assert not cut[f"memory.1.long_term_memory.{name}"].any()
    assert cut["memory.1.long_term_memory.q_proj.weight"].any()


def test_gradients_reach_back_as_many_chunks_as_asked_for():
    ids = torch.arange(4).repeat_interleave(CHUNK)[None]  # one token a chunk, whose embedding identifies it
    reached = {}
    for chunks in (None, 1, 2, 3, 4, 9):
        gradients = _gradients(tiny_titans(bptt_chunks=chunks), ids, CHUNK // 2)
        reached[chunks] = gradients["model.embed_tokens.weight"][:4].any(-1).tolist()
    assert reached == {
        None: [True] * 4,
        1: [False, False, False, True],
        2: [False, False, True, True],
        3: [False, True, True, True],
        4: [True] * 4,
        9: [True] * 4,
    }


@each_form
def test_gradient_checkpointing_changes_no_gradient(form):
    ids = random_tokens(2, 2 * CHUNK + 5)
    model = tiny_titans(**form, layers=[0, 2]).train()
    plain = _gradients(model, ids, 2 * CHUNK)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    calls = []
    # Inside the memory: hooks of a checkpointed layer itself run once from transformers 5.23 on.
    model.memory["0"].memory_gate.register_forward_pre_hook(lambda *_: calls.append(1))
    checkpointed = _gradients(model, ids, 2 * CHUNK)
    assert len(calls) == 3 * 2  # each of three chunks forward and again in the backward
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, rtol=1e-5, atol=1e-7)


def test_reentrant_checkpointing_is_refused():
    with refused("gradient_checkpointing_kwargs.use_reentrant", "model.memory", "True"):
        tiny_titans().gradient_checkpointing_enable({"use_reentrant": True})


def test_a_cache_beside_gradient_checkpointing_is_refused():
    model, ids = tiny_titans().train(), random_tokens(1, CHUNK)
    model.gradient_checkpointing_enable()
    with refused("use_cache", "a cache"):
        model(ids, use_cache=True)
    assert model.eval()(ids, use_cache=True).past_key_values is not None


def test_padding_before_text_is_refused_without_a_cache():
    model, ids = tiny_titans(), random_tokens(2, CHUNK)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    with refused("attention_mask", "right"):
        model(ids, attention_mask=mask)
    assert model(ids, attention_mask=mask, use_cache=True).logits.isfinite().all()


@pytest.mark.parametrize("use_cache", [False, True])
def test_no_position_may_be_kept(use_cache):
    model, ids = tiny_titans(), random_tokens(2, CHUNK + 3)
    assert model(ids, logits_to_keep=torch.zeros_like(ids).bool(), use_cache=use_cache).logits.shape[0] == 0


@each_form
def test_training_the_memory_alone_leaves_the_base_without_gradients(form):
    model = tiny_titans(**form, perturbed=False).train()
    model.gradient_checkpointing_enable()
    model.freeze_base()
    ids = random_tokens(2, 2 * CHUNK)
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) <= is_memory_parameter(name)
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())
