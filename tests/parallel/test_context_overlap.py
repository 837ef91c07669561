"""Keys and values that travel between groups of ranks while a kernel computes."""

import math
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.lib.flash_stand_ins import register_flash_stand_ins
from tests.lib.packed_engine import build_worker, train_step
from tests.lib.ranks import run_cases
from tests.lib.reference import Reference, documents_of_answers, load_eager, pack_row
from verl_ext.attention.kernels import KERNELS, Kernel, KernelOptions, sdpa
from verl_ext.attention.packed import packed_attention, set_backend
from verl_ext.attention.sinks import FLASH, LseAttention
from verl_ext.data import CategoryTable
from verl_ext.losses import LossSpec
from verl_ext.parallel.key_exchange import ContextGroups, ContextLayout, LseKernel
from verl_ext.parallel.shards import DocumentLayout, SequenceShards
from verl_ext.trainer.collator import StepCollator

pytestmark = pytest.mark.slow


def _recorded(kernel: LseKernel, events: list[str]) -> LseKernel:
    """Wrap the kernel so that it records whether its keys are the group's own."""

    def noted(function):
        def call(*given, causal=True):
            events.append("own" if causal else "foreign")
            return function(*given, causal=causal)

        return call

    return LseKernel(*map(noted, kernel))


# Two groups, chunks of 4 tokens: group 0 has the chunks 0 and 3, group 1 has the chunks between them.
@pytest.mark.parametrize(
    ("lengths", "group", "foreign"),
    [
        ([16], 0, 1),  # chunk 3 sees the chunks between
        ([16], 1, 2),  # chunk 1 and chunk 2 see chunk 0
        ([6, 10], 0, 1),
        ([6, 10], 1, 1),  # chunk 2 has its document's beginning
        ([8, 8], 0, 1),
        ([4, 12], 1, 0),  # it only sends
    ],
)
def test_own_keys_are_seen_between_the_sending_and_the_waiting(lengths, group, foreign):
    register_flash_stand_ins(torch.float32)
    events = []

    def exchange(received, sent, *sizes, group, async_op):
        assert async_op
        events.append("send")
        received.fill_(torch.nan)

        def wait():
            events.append("wait")
            received.fill_(0)

        return SimpleNamespace(wait=wait)

    groups = ContextGroups(SequenceShards(1, 2, group), None, None)
    layout = ContextLayout.from_layout(DocumentLayout.from_lengths(lengths, "cpu"), groups)
    inputs = [torch.randn(8, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    kernel = layout.overlapped(_recorded(FLASH, events), KernelOptions())
    with patch("torch.distributed.all_to_all_single", exchange):
        output = LseAttention.apply(*inputs, None, layout, KernelOptions(), kernel)
        assert events == ["send", "own", "wait", *["foreign"] * foreign]
        events.clear()
        output.sum().backward()
    assert events == [*["foreign"] * foreign, "send", "own", "wait"]
    assert all(x.isfinite().all() for x in (output, *(x.grad for x in inputs)))


@pytest.mark.parametrize(
    ("kernel", "lengths", "window", "is_overlapped"),
    [
        ("varlen", [16], None, True),
        ("varlen", [4, 4, 4, 4], None, False),  # no document crosses groups
        ("varlen", [16], 3, False),  # two keys of each chunk travel
        ("flash_attn", [16], None, False),
        ("sdpa", [16], None, False),
    ],
)
def test_layers_that_gain_nothing_and_kernels_without_a_log_sum_exp_are_called_once_all_keys_are_there(
    kernel, lengths, window, is_overlapped, monkeypatch
):
    called = []
    noted = Kernel(lambda *given: called.append("whole") or sdpa(*given), KERNELS[kernel].lse and FLASH)
    monkeypatch.setattr(LseAttention, "apply", lambda query, *_: called.append("parts") or query)
    monkeypatch.setattr("verl_ext.attention.packed._requested", noted)
    monkeypatch.setattr("torch.distributed.all_to_all_single", lambda *_, **__: SimpleNamespace(wait=lambda: None))
    layout = ContextLayout.from_layout(
        DocumentLayout.from_lengths(lengths, "cpu"), ContextGroups(SequenceShards(1, 2, 0), None, None)
    )
    inputs = [torch.zeros(1, heads, 8, 8) for heads in (4, 2, 2)]
    packed_attention(torch.nn.Module(), *inputs, sliding_window=window, document_layout=layout)
    assert set(called) == {"parts" if is_overlapped else "whole"}


# --- on ranks -------------------------------------------------------------------------------------------------------

PACKS = ([24], [3, 1, 20], [11, 2, 10, 1], [6, 12, 6])


def _with_sinks(ulysses: int, groups: int) -> list[list[torch.Tensor]]:
    """Return, by pack, how outputs and gradients of keys in parts differ from a kernel with sinks of its own."""
    register_flash_stand_ins(torch.float64)
    mesh = init_device_mesh("cpu", (groups, ulysses), mesh_dim_names=("across", "inside"))
    shards = SequenceShards(ulysses, groups, dist.get_rank())
    owned = ContextGroups(shards, mesh.get_group("inside"), mesh.get_group("across"))
    differences = []
    for lengths in PACKS:
        found = []
        for backend in ("sdpa", "varlen"):
            set_backend(KERNELS[backend])
            torch.manual_seed(0)
            tensors = [torch.randn(24, heads, 8, dtype=torch.float64) for heads in (4, 2, 2)]
            inputs = [shards.slice(x).transpose(0, 1)[None].requires_grad_() for x in tensors]
            sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
            layout = ContextLayout.from_layout(DocumentLayout.from_lengths(lengths, "cpu"), owned)
            output, _ = packed_attention(torch.nn.Module(), *inputs, s_aux=sinks, document_layout=layout)
            (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
            found.append([output.detach(), *(x.grad for x in (*inputs, sinks))])
        differences.append([(ours - plain).abs().max() for plain, ours in zip(*found, strict=True)])
    return differences


DOCUMENTS = documents_of_answers(21, 2, 13, 30, 9, 17)
MICRO_BATCHES = [[DOCUMENTS[0], DOCUMENTS[1]], [DOCUMENTS[3]], [DOCUMENTS[4], DOCUMENTS[2], DOCUMENTS[5]]]


def _step(model: str, checkpointing: bool):
    """Take a step on 2 × 2 ranks, and return the names of this rank's operations between groups, in order."""
    register_flash_stand_ins(torch.float32)
    events, original = [], dist.all_to_all_single

    def sent(*given, async_op=False, **named):
        events.extend(["send"] if async_op else [])
        return original(*given, async_op=async_op, **named)

    options = ["parallel.context_parallel_size=2", f"model.enable_gradient_checkpointing={checkpointing}"]
    engine = build_worker(model, 2, options).engine
    set_backend(Kernel(sdpa, _recorded(FLASH, events)))
    collate = StepCollator(LossSpec("token", torch.ones(1).numpy()), CategoryTable((), ()))
    with patch.object(dist, "all_to_all_single", sent):
        step = train_step(engine, [pack_row(pack) for pack in MICRO_BATCHES], collate, 3, "fused")
    return step, events


LAYOUTS = [(1, 2), (2, 2)]  # ranks of Ulysses, groups


@pytest.fixture(scope="module")
def found(tiny_model):
    """Return each rank's answers with sinks by layout, and of steps by checkpointing."""
    cases = {layout: (math.prod(layout), _with_sinks, *layout) for layout in LAYOUTS}
    return run_cases(cases | {kept: (4, _step, str(tiny_model), kept) for kept in (True, False)})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sinks_are_joined_with_keys_that_come_in_parts(layout, found):
    assert torch.tensor(found[layout]).max() < 1e-12


@pytest.mark.parametrize("checkpointing", [True, False])
def test_a_step_in_parts_equals_plain_hugging_face_and_sends_in_the_same_order_on_every_rank(
    checkpointing, tiny_model, found
):
    answers = found[checkpointing]
    plain = load_eager(str(tiny_model))
    expected = Reference(plain, DOCUMENTS).step(MICRO_BATCHES, "token", {})
    expected.assert_taken(answers[0][0])
    passes = 3 if checkpointing else 2  # forward, backward, and recomputation
    layers = plain.config.num_hidden_layers * len(MICRO_BATCHES)
    for _, events in answers:
        assert [event for event in events if event != "foreign"] == ["send", "own"] * passes * layers
    assert any("foreign" in events for _, events in answers)
