"""Layers with a recurrent state compute a packed document as if it were alone, on any number of ranks."""

import math
import re
import sys
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers

from tests.lib.documents_alone import largest_errors, ranks_of_a_pack
from tests.lib.ranks import run_cases
from tests.lib.small_models import KINDS, packed_and_plain
from verl_ext.layers import MIXERS, RunningPack, mixers_of, unknown_mixers
from verl_ext.layers.convolution import convolve
from verl_ext.layers.documents import dealt
from verl_ext.parallel.shards import DocumentLayout

MODELS = Path(transformers.__file__).parent / "models"
SEAMS = ("qwen3_5_text", "nemotron_h", "lfm2", "olmo_hybrid")
SCORES = ("gpt_oss", "gemma2", "llama4_text")  # sinks, a soft cap, chunks
LEARNED = ("bart", "pegasus", "roberta", "bigbird_pegasus")  # positions that transformers counts differently
POSITIONS = (
    *("blenderbot", "blenderbot-small", "camembert", "data2vec-text", "marian", "mbart", "plbart"),
    *("roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
)
NEWER = sorted({"bailing_hybrid", "kimi_linear", "lara_mini", "lfm3"}.intersection(KINDS))  # of newer transformers
FAMILIES = (  # on one rank and on two: test_model_types.py
    *SEAMS,
    *("qwen3_next", "qwen3_5_moe_text", "bamba", "granitemoehybrid", "falcon_h1", "zamba2", "mamba2", "lfm2_moe"),
    *("minimax", "jamba", "zamba", "mamba", "falcon_mamba"),
    *SCORES,
    *LEARNED,
    *NEWER,
)


def _errors(families, ulysses, context):
    """Return by family the largest relative error of a document's loss and a parameter's gradient."""
    return {family: largest_errors(family, (ulysses, context))[0] for family in families}


def test_a_pack_has_the_losses_and_gradients_of_its_documents_alone(quick):
    (errors,) = quick["alone"]
    assert max(errors.values()) < 1e-11, errors


@pytest.fixture(scope="module")
def on_ranks():
    families = (*SEAMS, "jamba", "minimax", "gpt_oss", "llama4_text", *NEWER[1:2])
    return run_cases({layout: (math.prod(layout), _errors, families, *layout) for layout in ((3, 1), (2, 2))})


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(3, 1), (2, 2)])
def test_ranks_that_do_not_divide_the_heads_and_groups_of_ranks_have_them(layout, on_ranks):
    for errors in on_ranks[layout]:
        assert max(errors.values()) < 1e-11, errors


def _convolutions(ulysses, context, taps=4):
    """Return the largest error of this rank's slices of each document's convolution and its input's gradient."""
    shards, group, _ = ranks_of_a_pack(ulysses, context)
    torch.manual_seed(0)
    weight, bias = torch.randn(3, taps, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    even, errors = shards.multiple, []
    for lengths in ([even], [1] * even, [1, 2 * even - 1], [even, 7 * even], [3, 5, 8 * even - 8]):
        lengths = [length for length in lengths if length]
        tokens = sum(lengths)
        x, wanted = torch.randn(tokens, 3, dtype=torch.float64), torch.randn(tokens, 3, dtype=torch.float64)
        whole = x.clone().requires_grad_()
        parts = [
            F.conv1d(F.pad(whole[start:end].T, (taps - 1, 0)), weight[:, None], bias, groups=3).T
            for start, end in pairwise((0, *accumulate(lengths)))
        ]
        expected = F.silu(torch.cat(parts))
        expected.backward(wanted)
        pack = RunningPack(shards, group)
        pack.layout = DocumentLayout.from_lengths(lengths, "cpu")
        own = shards.slice(x).requires_grad_()
        output = convolve(pack, own.T[None], weight, bias, "silu")[0].T
        output.backward(shards.slice(wanted))
        for found, exact in ((output, shards.slice(expected)), (own.grad, shards.slice(whole.grad))):
            assert found.shape == exact.shape
            errors.append(float((found - exact).abs().max()))
    return max(errors)


@pytest.fixture(scope="module")
def quick():
    """Return the errors of families on one rank, and of convolutions by layout of ranks."""
    cases = {layout: (math.prod(layout), _convolutions, *layout) for layout in LAYOUTS}
    return run_cases({**cases, "alone": (1, _errors, (*SEAMS, "jamba", *SCORES, *LEARNED), 1, 1)})


LAYOUTS = [(1, 1), (4, 1), (2, 2)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_convolution_reads_its_document_alone_however_few_tokens_a_rank_has(layout, quick):
    assert max(quick[layout]) < 1e-12


def test_each_document_is_dealt_to_one_rank_and_the_longest_first():
    offsets = (0, *accumulate([5, 1, 9, 2, 2]))
    documents = dealt(offsets, 2)
    assert sorted(d for own in documents for d in own) == [0, 1, 2, 3, 4]
    assert documents == [[1, 2], [0, 3, 4]]  # 9 | 5, then 5 + 2, 7 + 2, 9 + 1
    assert dealt((0, 7), 3) == [[0], [], []]


@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba", "lfm2", "olmo_hybrid", "mamba"])
def test_without_a_pack_a_layer_computes_what_transformers_computes(family):
    model, plain = packed_and_plain(family)
    ids = torch.randint(3, 190, (2, 11))
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = "eager"
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)


def test_a_layer_that_the_table_lacks_is_named():
    class ForgetfulMixer(torch.nn.Module):
        pass

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), ForgetfulMixer())
    assert unknown_mixers(model) == ["ForgetfulMixer"]
    assert not list(mixers_of(model))


def test_every_row_of_the_table_is_a_layer_of_a_family_here():
    seen = set()
    for family in (*FAMILIES, *POSITIONS):
        model, _ = packed_and_plain(family)
        assert unknown_mixers(model) == []
        seen |= {type(layer).__name__ for layer, _ in mixers_of(model)}
    known = "\n".join(path.read_text(encoding="utf-8") for path in MODELS.glob("*/modeling_*.py"))
    assert seen == {name for name in MIXERS if re.search(rf"^class {name}\b", known, re.MULTILINE)}


def test_a_pack_leaves_the_names_of_a_modeling_module_as_they_were():
    model, _ = packed_and_plain("bamba")
    scope = vars(sys.modules[type(next(mixers_of(model))[0]).__module__])
    names = {"causal_conv1d_fn", "mamba_chunk_scan_combined", "mamba2_chunk_scan"} & scope.keys()
    before = {name: scope[name] for name in names}
    assert len(names) == 2  # the second is an older transformers', the third a newer one's
    positions = torch.cat([torch.arange(9), torch.arange(11)])
    layout = DocumentLayout.from_lengths([9, 11], "cpu")
    model(
        input_ids=torch.randint(3, 190, (1, 20)), position_ids=positions[None], document_layout=layout, use_cache=False
    )
    assert {name: scope[name] for name in before} == before
