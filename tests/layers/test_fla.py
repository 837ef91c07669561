"""Where flash-linear-attention is installed: a stand-in whose parts raise on a CPU, as the real ones do."""

import functools
import sys
from types import ModuleType

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig
from transformers.models.olmo_hybrid import modeling_olmo_hybrid
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next

from tests.lib.checked import support_problems
from tests.lib.errors import names, refused
from verl_ext.config import architecture
from verl_ext.layers import UNAWARE, scans, torch_forms
from verl_ext.layers.convolution import convolution_kernel, convolve_documents
from verl_ext.layers.pack import fla_lengths, import_fla
from verl_ext.parallel.shards import document_layout

LAYOUT = document_layout(torch.tensor([0, 1, 2, 3, 0, 1, 0]))


class FusedRMSNormGated(nn.Module):
    def __init__(self, size, **_):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, *_):
        raise RuntimeError("Pointer argument cannot be accessed from Triton (cpu tensor?)")


class ShortConvolution(nn.Conv1d):
    def __init__(self, hidden_size, kernel_size, bias, activation):
        super().__init__(hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=bias)

    forward = FusedRMSNormGated.forward


def on_gpu_alone(*_, **__):
    raise RuntimeError("Pointer argument cannot be accessed from Triton (cpu tensor?)")


@pytest.fixture
def installed(monkeypatch):
    """Let transformers' modeling modules have the stand-ins."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    for module in modeling_qwen3_5, modeling_qwen3_next, modeling_olmo_hybrid:
        if not hasattr(module, "FusedRMSNormGated"):  # from transformers 5.15 on, functions that know the package
            rule = functools.partial(on_gpu_alone)
            monkeypatch.setattr(
                module,
                "torch_chunk_gated_delta_rule",
                functools.update_wrapper(rule, module.torch_chunk_gated_delta_rule),
            )
            continue
        monkeypatch.setattr(module, "FusedRMSNormGated", FusedRMSNormGated)
        monkeypatch.setattr(module, "chunk_gated_delta_rule", on_gpu_alone)
    if hasattr(modeling_olmo_hybrid, "ShortConvolution"):
        monkeypatch.setattr(modeling_olmo_hybrid, "ShortConvolution", ShortConvolution)


@pytest.mark.parametrize("name", ["Qwen3_5TextConfig", "Qwen3NextConfig", "OlmoHybridConfig"])
def test_a_hybrid_is_tried_in_torchs_forms(name, installed):
    assert support_problems(getattr(transformers, name)(max_position_embeddings=4096)) == []  # not tried before


@pytest.mark.skipif(not hasattr(modeling_olmo_hybrid, "ShortConvolution"), reason="transformers 5.15 has none")
def test_the_engine_leaves_out_a_convolution_that_knows_no_documents_and_nothing_else(installed):
    with torch_forms(modeling_olmo_hybrid.OlmoHybridForCausalLM, UNAWARE):
        assert modeling_olmo_hybrid.ShortConvolution is None
        assert modeling_olmo_hybrid.FusedRMSNormGated is FusedRMSNormGated
    assert modeling_olmo_hybrid.ShortConvolution is ShortConvolution


@pytest.fixture(params=["conv", "causal_conv1d"])  # of 0.5, and of 0.6
def package(monkeypatch, request):
    """Put a package `fla` into the process, whose convolution knows silu alone, and which registers a config."""

    def causal_conv1d(x, weight, bias, activation=None, cu_seqlens=None, cu_seqlens_cpu=None):
        assert cu_seqlens.tolist() == list(LAYOUT.offsets)
        known = activation if activation in ("silu", "swish") else None
        return convolve_documents(x[0], weight, bias, known, LAYOUT).unsqueeze(0), None

    fla, modules, convolution = map(ModuleType, ("fla", "fla.modules", f"fla.modules.{request.param}"))
    fla.__path__ = modules.__path__ = []
    convolution.causal_conv1d = causal_conv1d
    for module in fla, modules, convolution:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    config = type(
        "Mamba2Config", (transformers.PreTrainedConfig,), {"model_type": "mamba2", "__module__": "fla.models"}
    )
    AutoConfig.register("mamba2", config, exist_ok=True)
    convolution_kernel.cache_clear()
    yield convolution
    convolution_kernel.cache_clear()


@pytest.mark.parametrize("activation", [None, "silu", "swish", "gelu", "relu"])
def test_its_convolution_gets_every_activation(activation, package):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(LAYOUT.offsets[-1], 6), torch.randn(6, 3), torch.randn(6)
    found = convolution_kernel("cuda")(x, weight, bias, activation, LAYOUT)
    assert torch.equal(found, convolve_documents(x, weight, bias, activation, LAYOUT))


def test_its_import_leaves_transformers_configs_as_they_are(package):
    assert import_fla(package.__name__.removeprefix("fla.")) is package
    assert type(AutoConfig.for_model("mamba2")) is transformers.Mamba2Config


def test_all_layers_of_a_micro_batch_give_its_caches_the_same_boundaries():
    first, second = fla_lengths(LAYOUT), fla_lengths(LAYOUT)
    assert all(first[name] is second[name] for name in first)
    assert first["cu_seqlens"].tolist() == first["cu_seqlens_cpu"].tolist() == [0, 4, 6, 7]
    assert first["cu_seqlens"].dtype == torch.int64


@pytest.mark.parametrize(
    ("triton", "capability", "refused"),
    [
        ("3.6.0", (9, 0), True),
        ("3.7.0", (9, 0), True),
        ("3.7.1", (9, 0), False),
        ("3.3.1", (9, 0), False),
        ("3.6.0", (8, 0), False),
    ],
)
def test_a_triton_that_compiles_it_wrongly_on_hopper_is_refused(triton, capability, refused, monkeypatch):
    monkeypatch.setattr(scans, "version", lambda name: triton)
    problem = scans.kernels_problem(capability)
    assert (problem is not None) is refused
    assert problem is None or names(problem, "triton 3.7.1", "Hopper")


@pytest.mark.parametrize("line", ["import triton_of_another_torch", "raise AttributeError('no compile')"])
def test_a_package_without_triton_or_for_another_torch_is_one_line_on_a_gpu(line, tmp_path, monkeypatch):
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").write_text(line)
    monkeypatch.syspath_prepend(tmp_path)
    assert scans.kernels_problem((8, 0)) is None  # not needed where there is no GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    why = "No module named 'triton_of_another_torch'" if line.startswith("import") else "no compile"
    problem = scans.kernels_problem((8, 0)) or ""
    assert names(problem, "flash-linear-attention", f"torch {torch.__version__} ({why})")


def test_without_the_package_its_import_says_so():
    with pytest.raises(ImportError, match="fla"):
        import_fla("ops")


def test_a_class_that_a_broken_package_keeps_from_its_import_is_one_line(monkeypatch):
    """Before transformers 5.15, a class imports the package where there is a GPU."""

    def fail(_):
        raise ModuleNotFoundError("Could not import module") from ModuleNotFoundError("No module named 'triton'")

    monkeypatch.setattr(architecture, "model_class", fail)
    with refused("model.path", "Qwen3NextConfig", f"torch {torch.__version__}"):
        support_problems(transformers.Qwen3NextConfig())
