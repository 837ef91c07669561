"""Compare, in fp64, a pack on the ranks that share it with each of its documents alone in plain transformers."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from verl.utils.ulysses import set_ulysses_sequence_parallel_group

from tests.lib.small_models import in_float64, packed_and_plain
from verl_ext.attention.rope import DocumentRope, choose_rope_by_document
from verl_ext.parallel.key_exchange import ContextGroups, ContextLayout
from verl_ext.parallel.shards import SequenceShards
from verl_ext.parallel.trees import read_documents, text_rows, tree_layout

# 120 tokens, which 2, 3 and 4 ranks share: longer than every chunk, shorter than a convolution, and a single token.
LENGTHS = [13, 7, 1, 77, 18, 4]
# Those of documents that share tokens, with the number shared with the one before: 120 tokens in the pack.
SHARED = [(40, 0), (52, 40), (43, 42), (9, 0), (44, 5), (44, 44), (15, 1)]


def _documents(shares):
    """Return the documents of a pack, and the position of each one's first own token."""
    generator, documents, begins = torch.Generator().manual_seed(7), [], []
    for length, shared in SHARED if shares else [(length, 0) for length in LENGTHS]:
        own = torch.randint(3, 190, (length - shared,), generator=generator)
        documents.append(torch.cat([documents[-1][:shared], own]) if shared else own)
        begins.append(max(shared - 1, 0))
    return documents, begins


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


def largest_errors(kind, *layouts, shares=False):
    """Return the largest relative error of a document's loss and a parameter's gradient, for each (ulysses, context).

    shares: documents begin with tokens of those before, which the pack has once. Models are in training mode without
    dropout. Every rank of a layout calls this; (1, 1) needs no other rank.
    """
    model, plain = packed_and_plain(kind)
    in_float64(model, plain)
    documents, begins = _documents(shares)
    expected, gradients = _alone(plain.train(), documents)
    choose_rope_by_document(model)
    pack = model.train(), documents, begins
    return [_largest_error(*pack, expected, gradients, *ranks_of_a_pack(*layout)) for layout in layouts]


def _largest_error(model, documents, begins, expected, gradients, shards, group, groups):
    model.zero_grad()
    for module in model.modules():
        if isinstance(module, DocumentRope):
            module.shards = shards
        else:
            module.running_pack.shards, module.running_pack.group = shards, group
    pairs = list(zip(documents, begins, strict=True))
    ids = torch.cat([document[begin:] for document, begin in pairs])
    positions = torch.cat([torch.arange(begin, len(document)) for document, begin in pairs])
    layout = tree_layout(positions, "cpu")
    layout = ContextLayout.from_layout(layout, groups) if groups else layout
    rows = [
        torch.from_numpy(text[:-1]) for text in text_rows(read_documents(positions.numpy()))
    ]  # that predict a token
    times = torch.bincount(torch.cat(rows), minlength=len(ids))
    inputs = {"input_ids": shards.slice(ids)[None], "position_ids": shards.slice(positions)[None]}
    logits = model(**inputs, document_layout=layout, use_cache=False).logits[0]
    nll = F.cross_entropy(logits, shards.slice(ids.roll(-1)), reduction="none")
    (nll * shards.slice(times)).sum().backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None and gradients[name] is not None]
    assert not missing, f"a rank gives no gradient of {missing}"
    parts = [nll.detach()]
    if group is not None:
        parts = [torch.empty_like(nll) for _ in range(shards.ranks)]
        dist.all_gather(parts, nll.detach())
    of_pack = shards.by_position(torch.cat(parts))
    losses = torch.stack([of_pack[of_document].sum() for of_document in rows])
    worst = float(((losses - expected).abs() / expected.clamp(min=1e-9)).max())
    largest = max(float(gradient.norm()) for gradient in gradients.values() if gradient is not None)
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if group is not None:
            dist.all_reduce(gradient)
        true = torch.zeros_like(parameter) if gradients[name] is None else gradients[name]
        worst = max(worst, float((gradient - true).norm()) / max(float(true.norm()), 1e-5 * largest))
    return worst
