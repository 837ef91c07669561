"""Compare, in fp64, a pack on the ranks that share it with each of its documents alone in plain transformers."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from verl.utils.ulysses import set_ulysses_sequence_parallel_group

from tests.small_models import in_float64, packed_and_plain
from verl_ext.attention.rope import DocumentRope, choose_rope_by_document
from verl_ext.parallel.key_exchange import ContextGroups, ContextLayout
from verl_ext.parallel.shards import DocumentLayout, SequenceShards

# 120 tokens, which 2, 3 and 4 ranks share: longer than every chunk, shorter than a convolution, and a single token.
LENGTHS = [13, 7, 1, 77, 18, 4]


def _documents():
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 190, (length,), generator=generator) for length in LENGTHS]


def _alone(model, documents):
    """Return each document's loss, from its own forward, and the gradients of the sum of losses."""
    losses = []
    for document in documents:
        logits = model(input_ids=document[None], use_cache=False).logits[0]
        losses.append(F.cross_entropy(logits[:-1], document[1:], reduction="sum"))
        losses[-1].backward()
    return torch.stack(losses).detach(), {name: p.grad for name, p in model.named_parameters()}


def ranks_of_a_pack(ulysses, context):
    """Set up this rank's shards, the ranks of a pack and the context-parallel groups."""
    ranks = ulysses * context
    shards = SequenceShards(ulysses, context, dist.get_rank() if ranks > 1 else 0)
    set_ulysses_sequence_parallel_group(dist.group.WORLD if ranks > 1 else None)
    groups = None
    if context > 1:
        mesh = init_device_mesh("cpu", (context, ulysses), mesh_dim_names=("across", "inside"))
        groups = ContextGroups(shards, mesh.get_group("inside"), mesh.get_group("across"))
    return shards, dist.group.WORLD if ranks > 1 else None, groups


def largest_errors(kind, *layouts):
    """Return the largest relative error of a document's loss and a parameter's gradient, for each (ulysses, context).

    Models are in training mode without dropout. Every rank of a layout calls this; (1, 1) needs no other rank.
    """
    model, plain = packed_and_plain(kind)
    in_float64(model, plain)
    expected, gradients = _alone(plain.train(), _documents())
    choose_rope_by_document(model)
    return [_largest_error(model.train(), expected, gradients, *ranks_of_a_pack(*layout)) for layout in layouts]


def _largest_error(model, expected, gradients, shards, group, groups):
    model.zero_grad()
    for module in model.modules():
        if isinstance(module, DocumentRope):
            module.shards = shards
        else:
            module.running_pack.shards, module.running_pack.group = shards, group
    layout = DocumentLayout.from_lengths(LENGTHS, "cpu")
    layout = ContextLayout.from_layout(layout, groups) if groups else layout
    ids = torch.cat(_documents())
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    is_target = torch.cat([torch.arange(length) < length - 1 for length in LENGTHS])
    inputs = {"input_ids": shards.slice(ids)[None], "position_ids": shards.slice(positions)[None]}
    logits = model(**inputs, document_layout=layout, use_cache=False).logits[0]
    nll = F.cross_entropy(logits, shards.slice(ids.roll(-1)), reduction="none") * shards.slice(is_target)
    nll.sum().backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None and gradients[name] is not None]
    assert not missing, f"a rank gives no gradient of {missing}"
    parts = [nll.detach()]
    if group is not None:
        parts = [torch.empty_like(nll) for _ in range(shards.ranks)]
        dist.all_gather(parts, nll.detach())
    losses = torch.stack([part.sum() for part in shards.by_position(torch.cat(parts)).split(LENGTHS)])
    worst = float(((losses - expected).abs() / expected.clamp(min=1e-9)).max())
    largest = max(float(gradient.norm()) for gradient in gradients.values() if gradient is not None)
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if group is not None:
            dist.all_reduce(gradient)
        true = torch.zeros_like(parameter) if gradients[name] is None else gradients[name]
        worst = max(worst, float((gradient - true).norm()) / max(float(true.norm()), 1e-5 * largest))
    return worst
