"""The choice of the attention kernel, and its arguments."""

import importlib
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.attention_packs import of_all_scores
from tests.lib.errors import names, refused
from tests.lib.flash_stand_ins import flash_attn_package, register_flash_stand_ins
from tests.lib.tensor_calls import MadeTensors
from verl_ext.attention import (
    AttentionNeeds,
    AttentionOptions,
    KernelDevice,
    choose_backend,
    fallback_notices,
    flash_limit,
    unusable,
)
from verl_ext.attention.head_groups import by_groups_of_heads
from verl_ext.attention.kernels import KERNELS, KernelOptions, in_autocast_dtype, sdpa, varlen
from verl_ext.parallel.shards import DocumentLayout, document_layout

CPU, GPU, PLAIN = KernelDevice("cpu"), KernelDevice("cuda"), AttentionNeeds()


def test_the_fastest_backend_of_a_device_is_chosen():
    assert choose_backend("auto", PLAIN, CPU) == "sdpa"
    assert choose_backend("auto", PLAIN, GPU) == ("varlen" if unusable("flash_attn") else "flash_attn")
    assert choose_backend("sdpa", PLAIN, GPU) == "sdpa"
    assert choose_backend("varlen", PLAIN, GPU) == "varlen"


@pytest.mark.parametrize("backend", ["varlen", "flash_attn"])
def test_a_gpu_backend_is_refused_on_cpu(backend):
    with refused(f"attention.backend={backend}", "CUDA GPU", "cpu"):
        choose_backend(backend, PLAIN, CPU)


def test_an_unknown_backend_is_refused():
    for choose in (lambda: choose_backend("eager", PLAIN, CPU), lambda: AttentionOptions("eager")):
        with refused("attention.backend", "auto, flash_attn", "eager"):
            choose()


@pytest.mark.skipif(not unusable("flash_attn"), reason="the flash-attn package is installed")
def test_flash_attn_without_its_package_is_refused():
    with refused("attention.backend=flash_attn", "flash-attn"):
        choose_backend("flash_attn", PLAIN, GPU)


@pytest.mark.parametrize(
    ("needs", "capability", "things"),
    [
        ({"dtype": torch.float32}, None, ("half precision", "torch.float32")),
        ({"head_size": 512}, None, (256, 512)),
        ({"head_size": 12}, None, (8, 12)),
        ({}, (7, 0), ("8.0", "7.0")),  # V100
        ({}, (7, 5), ("8.0", "7.5")),  # T4
        ({"has_sinks": True, "dropout": 0.1}, None, ("sinks", "dropout")),
        ({"has_sinks": True, "softcap": 50.0}, None, ("sinks", "soft cap")),
    ],
)
def test_what_flash_kernels_cannot_compute_goes_to_sdpa_or_is_refused(needs, capability, things):
    facts = AttentionNeeds(**needs), KernelDevice("cuda", capability)
    assert choose_backend("auto", *facts) == choose_backend("sdpa", *facts) == "sdpa"
    with refused("attention.backend=varlen", *things):
        choose_backend("varlen", *facts)


def test_gpus_from_ampere_on_run_flash_kernels():
    gpus = [KernelDevice("cuda", capability) for capability in ((8, 0), (8, 9), (9, 0), (12, 0))]
    assert [flash_limit(PLAIN, gpu) for gpu in gpus] == [None] * 4


def test_attention_dropout_goes_to_a_kernel_that_has_it_or_is_refused():
    needs = AttentionNeeds(dropout=0.1)
    assert choose_backend("auto", needs, GPU) == ("sdpa" if unusable("flash_attn") else "flash_attn")
    with refused("attention.backend=varlen", "dropout", 0.1):
        choose_backend("varlen", needs, GPU)


def test_a_soft_cap_is_computed_by_the_kernels_that_know_it():
    assert choose_backend("auto", AttentionNeeds(softcap=50.0), CPU) == "sdpa"
    with refused("attention.backend=varlen", "soft cap", 50.0):
        choose_backend("varlen", AttentionNeeds(softcap=50.0), KernelDevice("cuda", (9, 0)))


def test_a_deterministic_run_takes_no_kernel_whose_backward_is_not(monkeypatch):
    monkeypatch.setattr("verl_ext.attention.kernels.unusable", lambda name: None if name == "fa3" else "not here")
    hopper = KernelDevice("cuda", (9, 0))
    for size, exact, chosen in ((256, False, "fa3"), (256, True, "varlen"), (192, True, "fa3")):
        needs = AttentionNeeds(head_size=size, deterministic=exact)
        assert choose_backend("auto", needs, hopper) == chosen
        assert fallback_notices(chosen, needs, hopper) == []
    with refused("attention.backend=fa3", 192, "engine.full_determinism=true", 256):
        choose_backend("fa3", AttentionNeeds(head_size=256, deterministic=True), hopper)


# Packages that a machine may have: their files by name.
FLASH_ATTN = {"flash_attn/__init__.py": "def flash_attn_varlen_func(): ..."}
OTHER_TORCH = {"flash_attn/__init__.py": "raise ImportError('undefined symbol: _ZN3c105Error')"}
NO_LIBRARY = {"flash_attn/__init__.py": "raise OSError('libcudart.so.12: cannot open shared object file')"}
FA4_ALONE = {"flash_attn/cute/interface.py": "_flash_attn_fwd = _flash_attn_bwd = None"}
FA3 = {
    "flash_attn_interface.py": (
        "import torch\nlibrary = torch.library.Library('flash_attn_3', 'DEF')\n"
        "for name in ('fwd', 'bwd'):\n    library.define(name + '(Tensor x) -> Tensor')\n"
    )
}
FA3_OF_ANOTHER_TORCH = {"flash_attn_interface.py": "raise ImportError('undefined symbol: aoti')"}


def _choose(folder, requested, needs, device):
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    unusable.cache_clear()
    try:
        chosen = choose_backend(requested, needs, device)
    except ValueError as error:
        return str(error), []
    return chosen, fallback_notices(chosen, needs, device)


def choice(folder, packages, requested, capability, **needs):
    """Return (the backend or the refusal, notices) from a process of its own that has these packages."""
    for name, text in packages.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    # Not a Pool, which ends by SIGTERM: a process with the handler of a command that a test ran here may survive that.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as process:
        facts = AttentionNeeds(**needs), KernelDevice("cuda", capability)
        return process.submit(_choose, folder, requested, *facts).result()


@pytest.mark.parametrize(
    ("packages", "capability", "given", "chosen", "notice"),
    [
        (FLASH_ATTN, (8, 0), {}, "flash_attn", ""),
        (FLASH_ATTN, (8, 0), {"dropout": 0.1}, "flash_attn", ""),
        (OTHER_TORCH, (8, 0), {}, "varlen", "undefined symbol: _ZN3c105Error"),
        (NO_LIBRARY, (8, 0), {"dropout": 0.1}, "sdpa", "libcudart.so.12"),
        (FA4_ALONE, (9, 0), {}, "varlen", "flash_attn_varlen_func"),
        (FA4_ALONE, (10, 0), {}, "fa4", ""),
        (FA4_ALONE, (10, 0), {"head_size": 256}, "varlen", "flash_attn_varlen_func"),
        ({**FA3, **FLASH_ATTN}, (9, 0), {}, "fa3", ""),
        ({**FA3, **FLASH_ATTN}, (9, 0), {"dropout": 0.1}, "flash_attn", ""),
        ({**FA3, **FLASH_ATTN}, (8, 0), {}, "flash_attn", ""),
        ({**FA3_OF_ANOTHER_TORCH, **FLASH_ATTN}, (9, 0), {}, "flash_attn", "undefined symbol: aoti"),
    ],
)
def test_auto_takes_the_fastest_package_that_can_be_imported(tmp_path, packages, capability, given, chosen, notice):
    found, notices = choice(tmp_path, packages, "auto", capability, **given)
    assert found == chosen
    assert len(notices) == bool(notice)
    assert all(notice in line and f"attention.backend=auto uses {chosen}: " in line for line in notices)


@pytest.mark.parametrize(
    ("packages", "requested", "capability", "given", "why"),
    [
        (OTHER_TORCH, "flash_attn", (8, 0), {}, "undefined symbol: _ZN3c105Error"),
        (FA4_ALONE, "flash_attn", (9, 0), {}, "flash_attn_varlen_func"),
        (FLASH_ATTN, "fa3", (9, 0), {}, "No module named 'flash_attn_interface'"),
        (FA3_OF_ANOTHER_TORCH, "fa3", (9, 0), {}, "undefined symbol: aoti"),
        (FA3, "fa3", (8, 0), {}, "9.0; got 8.0"),
        (FA3, "fa3", (9, 0), {"dropout": 0.1}, "attention dropout"),
        (FA4_ALONE, "fa4", (9, 0), {}, "10.0; got 9.0"),
        (FA4_ALONE, "fa4", (10, 0), {"head_size": 192}, 128),
    ],
)
def test_a_kernel_asked_for_by_name_that_cannot_run_is_one_line(tmp_path, packages, requested, capability, given, why):
    refusal, _ = choice(tmp_path, packages, requested, capability, **given)
    assert names(refusal, f"attention.backend={requested}", why)
    assert "\n" not in refusal


def test_a_kernel_asked_for_by_name_is_taken(tmp_path):
    assert choice(tmp_path / "3", FA3, "fa3", (9, 0)) == ("fa3", [])
    assert choice(tmp_path / "4", FA4_ALONE, "fa4", (10, 0)) == ("fa4", [])


def test_under_autocast_queries_keys_and_values_have_its_type():
    mixed = (torch.zeros(1), torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16))
    assert [x.dtype for x in in_autocast_dtype(*mixed)] == [torch.float32, torch.float32, torch.bfloat16]
    with torch.autocast("cpu", torch.bfloat16):
        assert {x.dtype for x in in_autocast_dtype(*mixed)} == {torch.bfloat16}


@pytest.mark.parametrize("is_told_of_grouped_heads", [True, False])
def test_varlen_gets_grouped_heads_and_narrow_values_in_the_form_its_torch_takes(monkeypatch, is_told_of_grouped_heads):
    """The kernel itself needs CUDA, so its arguments are checked here."""
    import torch.nn.attention.varlen as module

    given = {}

    def plain(query, key, value, *lengths, scale, window_size):
        given.update(heads=(query.size(1), key.size(1)), sizes=(query.size(2), value.size(2)), window=window_size)
        return value.repeat_interleave(2, dim=1)

    def told(query, key, value, *lengths, scale, window_size, enable_gqa=False):
        assert enable_gqa
        return plain(query, key, value, *lengths, scale=scale, window_size=window_size)

    monkeypatch.setattr(module, "varlen_attn", told if is_told_of_grouped_heads else plain)
    query, key, value = torch.rand(6, 4, 16), torch.rand(6, 2, 16), torch.rand(6, 2, 8)
    layout = document_layout(torch.tensor([0, 1, 2, 0, 1, 2]))
    output = varlen(query, key, value, layout, KernelOptions(window=3))
    assert given == {"heads": (4, 2), "sizes": (16, 16), "window": (2, 0)}
    assert torch.equal(output, value.repeat_interleave(2, dim=1))


@pytest.mark.parametrize("window", [None, 1, 3, 40, 600])
def test_queries_that_are_the_last_of_more_keys_are_attended_to_as_such_by_every_kernel(window, monkeypatch):
    register_flash_stand_ins(torch.float64)
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn_package(torch.float64))
    queries, keys = (3, 1, 700, 5, 600), (3, 9, 700, 11, 1300)  # several blocks of sdpa
    layout = DocumentLayout.from_lengths(queries, "cpu", keys)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(tokens, heads, size, generator=generator, dtype=torch.float64)
        for tokens, heads, size in ((sum(queries), 4, 8), (sum(keys), 2, 8), (sum(keys), 2, 6))
    )
    options = KernelOptions(scale=0.3, window=window)
    expected = of_all_scores(query, key, value, layout, options)
    for kernel in KERNELS.values():
        torch.testing.assert_close(kernel(query, key, value, layout, options), expected)


@pytest.mark.parametrize(("variable", "expected"), [("1", True), ("0", False), (None, False)])
def test_flash_attn_is_deterministic_where_verls_full_determinism_asks_for_it(variable, expected, monkeypatch):
    given = []

    def flash(query, *_, deterministic, **__):
        given.append(deterministic)
        return query

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=flash))
    monkeypatch.delenv("FLASH_ATTENTION_DETERMINISTIC", raising=False)
    if variable is not None:
        monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", variable)
    x = torch.ones(3, 2, 8)
    KERNELS["flash_attn"](x, x, x, DocumentLayout.from_lengths([3], "cpu"), KernelOptions())
    assert given == [expected]


def test_a_window_makes_no_tensor_of_all_tokens_by_all_tokens():
    x = torch.randn(4096, 1, 8)
    with MadeTensors() as made:
        KERNELS["sdpa"](x, x, x, DocumentLayout.from_lengths([4096], "cpu"), KernelOptions(window=100))
    assert max(each.bytes for each in made.seen) < 4096 * 4096 / 4


@settings(max_examples=25)
@given(shared=st.sampled_from([1, 2, 4, 6]), keys=st.integers(1, 4), most=st.integers(0, 30))
def test_a_kernel_over_groups_of_heads_is_that_of_all_heads(shared, keys, most):
    """most: the query heads of one call, which a limit in bytes sets."""
    layout, size, calls = DocumentLayout.from_lengths([3, 7], torch.device("cpu")), 4, []

    def counted(query, key, value, *given):
        calls.append(query.size(1))
        assert query.size(1) % key.size(1) == 0
        return sdpa(query, key, value, *given)

    inputs = [
        torch.randn(10, heads, size, dtype=torch.float64, requires_grad=True) for heads in (keys * shared, keys, keys)
    ]
    answers = []
    for kernel in (sdpa, by_groups_of_heads(counted, most * 10 * size * 4)):
        output = kernel(*inputs, layout, KernelOptions())
        weights = torch.linspace(-1, 1, output.numel()).view_as(output)
        answers.append([output, *torch.autograd.grad((output * weights).sum(), inputs)])
    for ours, theirs in zip(*answers, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert sum(calls) == keys * shared
    assert max(calls) <= max(most, 1)
