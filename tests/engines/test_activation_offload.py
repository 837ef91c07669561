"""Checkpointed activations on the host: the same bits as on the device, the device's memory freed, and no races.

Streams are simulated here, since a CPU has none: `Machine` keeps a vector clock for each, and finds two accesses to the
same memory, at least one of them a write, that no event and no wait puts in order. Freed memory counts as written by
the computation, because PyTorch's caching allocator reuses it; page-locked memory waits for its own copies.
"""

import copy
import weakref
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tests.lib.errors import names, refused
from tests.lib.tiny_model import write_tiny_model
from tests.lib.tiny_titans import tiny_titans
from tests.lib.training import into, refusals, small_run
from verl_ext.engines.activations import ActivationOptions, HostCheckpoints, apply_activation_options

SIZES = {"vocab_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 64}
GPT2 = {"vocab_size": 64, "n_layer": 3, "n_head": 4, "n_embd": 32, "resid_pdrop": 0.3, "attn_pdrop": 0.3}
MODELS = {
    "llama": ("LlamaConfig", SIZES),
    "gpt2_with_dropout": ("GPT2Config", GPT2),
    "gemma3": ("Gemma3TextConfig", {**SIZES, "head_dim": 8, "num_key_value_heads": 2}),
    "phi3": ("Phi3Config", {**SIZES, "pad_token_id": 0}),
    "qwen3_moe": ("Qwen3MoeConfig", {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
}
HOST = ActivationOptions(activation_offload=True)


def model_of(name: str) -> transformers.PreTrainedModel:
    config_class, fields = MODELS[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config_class)(**fields))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def steps(model: nn.Module, lengths: tuple[int, ...] = (17, 5)) -> dict[str, torch.Tensor]:
    """Return the summed gradients of micro-batches of these lengths, and their losses."""
    torch.manual_seed(1)
    losses = []
    for length in lengths:
        ids = torch.randint(48, (1, length))
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        losses.append(loss.detach())
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {**found, "loss": torch.stack(losses)}


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_of_plain_checkpoints_to_the_last_bit(name):
    model = model_of(name)
    expected = steps(copy.deepcopy(model))
    apply_activation_options(model, HOST)
    assert_same_bits(steps(model), expected)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_memory_that_reads_chunks_keeps_its_bits(depth):
    """Covers hidden states that a memory and its layer both read, and states that pass from chunk to chunk."""
    model = tiny_titans(depth=depth).train()
    model.gradient_checkpointing_enable()
    expected = steps(copy.deepcopy(model), lengths=(40, 21))
    apply_activation_options(model, HOST)
    assert_same_bits(steps(model, lengths=(40, 21)), expected)


@pytest.mark.parametrize("inputs_require_gradients", [True, False])
def test_adapters_on_frozen_weights_train_the_same(inputs_require_gradients):
    def adapted(options: ActivationOptions) -> nn.Module:
        model = model_of("llama")
        apply_activation_options(model, options)
        if inputs_require_gradients:
            model.enable_input_require_grads()
        else:
            model.disable_input_require_grads()
        torch.manual_seed(0)
        return get_peft_model(model, LoraConfig(r=4, lora_dropout=0.5, target_modules="all-linear"))

    assert_same_bits(steps(adapted(HOST)), steps(adapted(ActivationOptions())))


def test_under_autocast_the_same_bits():
    model = model_of("llama")
    with torch.autocast("cpu", torch.bfloat16):
        expected = steps(copy.deepcopy(model))
        apply_activation_options(model, HOST)
        assert_same_bits(steps(model), expected)


def test_a_graph_is_differentiated_twice_and_a_dropped_one_is_forgotten():
    plain = model_of("llama")
    kept = copy.deepcopy(plain)
    apply_activation_options(kept, HOST)
    ids = torch.randint(64, (1, 9))
    for model in (plain, kept):
        model(input_ids=ids, labels=ids)  # without a backward
        first = model(input_ids=ids, labels=ids).loss
        second = model(input_ids=ids[:, :4], labels=ids[:, :4]).loss
        first.backward(retain_graph=True)  # not in last-in, first-out order
        second.backward()
        first.backward()
    for name, parameter in plain.named_parameters():
        assert torch.equal(kept.get_parameter(name).grad, parameter.grad)


def test_layers_that_are_not_checkpointed_are_an_error():
    model = model_of("llama")
    model.gradient_checkpointing_disable()
    with refused("model.enable_gradient_checkpointing=true"):
        apply_activation_options(model, HOST)


class Stream:
    """A stream's vector clock: each stream's last operation that ends before the next operation of this one."""

    def __init__(self, machine: "Machine") -> None:
        self.machine, self.clock = machine, Counter()

    def wait_stream(self, other: "Stream") -> None:
        self._merge(other.clock, "wait_stream")

    def wait_event(self, event: Counter) -> None:
        self._merge(event, "wait_event")

    def record_event(self) -> Counter:
        return Counter(self.clock)

    def _merge(self, clock: Counter, call: str) -> None:
        if call != self.machine.deaf_to:
            self.clock |= clock


class Machine(TorchDispatchMode):
    """Streams for :class:`HostCheckpoints`, and a record of the operations on them."""

    def __init__(self, deaf_to: str | None = None) -> None:
        """deaf_to names a stream call that has no effect here, to check that the races it prevents are found."""
        super().__init__()
        self.deaf_to = deaf_to
        self.computation = self.current = Stream(self)
        self.accesses: dict[int, list[tuple[Stream, int, bool]]] = {}
        self.host: set[int] = set()
        self.bytes: dict[int, int] = {}
        self.log: list[str] = []
        self.races: list[str] = []

    def Stream(self) -> Stream:
        return Stream(self)

    def current_stream(self) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @property
    def device_bytes(self) -> int:
        """The bytes of all touched memory that is alive and not the host's."""
        return sum(size for key, size in self.bytes.items() if key not in self.host)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        output = function(*args, **kwargs)
        copies = self.current is not self.computation
        if copies:
            target, source = (tensor.untyped_storage()._cdata for tensor in args[:2])
            out = source not in self.host
            self.host.add(target if out else source)
            self.log.append("out" if out else "in")
        mutates = function._schema.is_mutable
        self.current.clock[self.current] += 1
        for index, tensor in enumerate(tree_leaves((args, kwargs))):
            self._touch(tensor, writes=mutates and index == 0)
        for tensor in tree_leaves(output):
            self._touch(tensor, writes=not mutates and tensor is not None)
        return output

    def _touch(self, tensor: object, writes: bool) -> None:
        if not isinstance(tensor, torch.Tensor):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.accesses:
            self.accesses[key] = []
            self.bytes[key] = storage.nbytes()
            weakref.finalize(storage, self._freed, key)
        self._access(key, writes, "used")

    def _access(self, key: int, writes: bool, how: str) -> None:
        for stream, moment, wrote in self.accesses[key]:
            if (writes or wrote) and stream is not self.current and self.current.clock[stream] < moment:
                self.races.append(f"memory is {how} before another stream has {'written' if wrote else 'read'} it")
        self.accesses[key].append((self.current, self.current.clock[self.current], writes))

    def _freed(self, key: int) -> None:
        if key not in self.host:
            with self.stream(self.computation):
                self._access(key, True, "freed")
        self.accesses.pop(key), self.bytes.pop(key)
        self.host.discard(key)


TOKENS, HIDDEN, LAYERS = 64, 32, 4


class Layer(nn.Module):
    """A residual layer that reads a second tensor without a gradient, and may fail in its recomputation."""

    def __init__(self, index: int, log: list[str]) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.index, self.log, self.calls, self.fails = index, log, 0, False

    def forward(self, hidden: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        again = self.calls % 2 == 0
        self.log.append(f"{'again' if again else 'forward'} {self.index}")
        if again and self.fails:
            self.calls = 0
            raise RuntimeError("out of memory")
        return hidden + scale * torch.tanh(self.linear(self.norm(hidden)))


def layers_of(log: list[str]) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Layer(index, log) for index in range(LAYERS))


def forward(layers: nn.ModuleList, keep) -> torch.Tensor:
    hidden, scale = torch.arange(TOKENS * HIDDEN).reshape(1, TOKENS, HIDDEN) / 1e3, torch.tensor(0.5)
    for layer in layers:
        hidden = keep(layer, hidden, scale)
    return hidden.square().mean()


def train(layers: nn.ModuleList, keep) -> list[torch.Tensor]:
    layers.zero_grad()
    forward(layers, keep).backward()
    return [parameter.grad.clone() for parameter in layers.parameters()]


def plainly(layer, *tensors):
    return checkpoint(layer, *tensors, use_reentrant=False)


def test_copies_go_out_before_their_layer_and_come_in_one_layer_ahead():
    machine = Machine()
    layers = layers_of(machine.log)
    with machine:
        train(layers, HostCheckpoints(machine))
    forward_order = [entry for index in range(LAYERS) for entry in ("out", f"forward {index}")]
    assert machine.log == [*forward_order, "in", "in", "again 3", "in", "again 2", "in", "again 1", "again 0"]


def test_no_memory_is_used_before_the_copies_on_it_have_ended():
    machine = Machine()
    layers, expected = layers_of(machine.log), train(layers_of([]), plainly)
    with machine:
        keep = HostCheckpoints(machine)
        for fails in (False, True, False):
            layers[1].fails = fails
            if fails:
                with pytest.raises(RuntimeError, match="out of memory"):
                    train(layers, keep)
                for layer in layers:
                    layer.calls = 0
                continue
            found = train(layers, keep)
        first, second = forward(layers, keep), forward(layers, keep)
        first.backward()  # the prefetched tensors are the second's
        second.backward()
    assert machine.races == []
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("call", ["wait_event", "wait_stream"])
def test_a_missing_wait_is_found(call):
    machine = Machine(deaf_to=call)
    with machine:
        train(layers_of([]), HostCheckpoints(machine))
    assert machine.races


@pytest.mark.parametrize(("keep", "on_device"), [(plainly, LAYERS), (None, 0)])
def test_after_the_forward_the_device_holds_no_hidden_state(keep, on_device):
    machine = Machine()
    layers = layers_of([])
    with machine:
        before = machine.device_bytes
        loss = forward(layers, keep or HostCheckpoints(machine))
    one = TOKENS * HIDDEN * 4
    weights = sum(parameter.untyped_storage().nbytes() for parameter in layers.parameters())
    held = (machine.device_bytes - before - weights) // one
    assert held == on_device + 1  # and the last layer's output, which the loss uses
    assert sum(size for key, size in machine.bytes.items() if key in machine.host) == (0 if on_device else LAYERS * one)
    loss.backward()
    assert not machine.host


@pytest.mark.parametrize("prepare", [torch.no_grad, torch.inference_mode])
def test_nothing_is_kept_without_gradients(prepare):
    machine = Machine()
    layers = layers_of(machine.log)
    with machine, prepare():
        forward(layers, HostCheckpoints(machine))
    assert machine.log == [f"forward {index}" for index in range(LAYERS)]


def test_what_a_hub_model_holds_after_its_forward_does_not_grow_with_its_layers(tmp_path):
    def held(layers: int, on_host: bool) -> int:
        folder = write_tiny_model(tmp_path / str(layers), num_hidden_layers=layers)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).train()
        model.gradient_checkpointing_enable()
        machine = Machine()
        for layer in model.modules() if on_host else ():
            if getattr(layer, "gradient_checkpointing", False):
                layer._gradient_checkpointing_func = HostCheckpoints(machine)
        with machine:
            output = model(input_ids=torch.zeros(1, 256, dtype=torch.long), use_cache=False, logits_to_keep=1)
        assert output.logits.requires_grad
        weights = sum(parameter.untyped_storage().nbytes() for parameter in model.parameters())
        return machine.device_bytes - weights

    one = 256 * 32 * 4
    assert held(6, False) - held(2, False) == pytest.approx(4 * one, abs=one / 4)
    assert held(6, True) - held(2, True) == pytest.approx(0, abs=one / 4)


def test_hidden_states_that_the_host_has_no_memory_for_are_refused_before_the_model_is_loaded(tiny_model, tmp_path):
    options = small_run(tmp_path, tiny_model, [20] * 4, into(tmp_path / "run"), "model.activation_offload=true")
    said, fits = refusals(options, [[f"data.max_tokens={2**52}"], ["data.max_tokens=64"]])
    assert names(said, "model.activation_offload=true", "host memory", "2 layers × 4,503,599,627,370,496")
    assert "\n" not in said
    assert fits == ""
