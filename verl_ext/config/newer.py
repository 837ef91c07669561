"""Versions of what lies below this package: those that were tried, and what newer ones have."""

from collections.abc import Mapping

from packaging.version import Version

# The oldest and the newest with which the tests ran. Past verl's bound on transformers: docs/reference/newer_models.md.
TRIED = {"verl": ("0.9.1", "0.9.1"), "transformers": ("5.9.0", "5.24.0"), "torch": ("2.11.0", "2.14.1")}
_SINCE = {  # of transformers: the model types for text, with images or without, that 5.10 lacks
    "5.11": "cosmos3_omni deepseek_v32 diffusion_gemma",
    "5.12": "minimax_m3_vl minimax_m3_vl_text",
    "5.13": "hunyuan_vl kimi_k25 mimo_v2_flash minicpm3 zaya",
    "5.14": "inkling_mm_model inkling_text",
    "5.15": "axk1 axk2 cosmos3_edge granite_swa granitemoe_swa muse_glimmer",
    "5.16": "cohere_compass cohere_compass_text qwen4_exp qwen4_exp_text step3p7",
    "5.17": "glm5_next hy_v4 kimi_linear",
    "5.18": "hyperclovax_vision_v2 minicpmv4_7 nemotron_h_omni",
    "5.20": "bailing_hybrid kolibri1 molmo2 moss_transcribe_diarize muse_spark unlimited_ocr",
    "5.21": "beam flint minicpm_ocr",
    "5.22": "mistral_large4",
    "5.23": "dots3_note dots3_note_text granite_docling inkling2 inkling2_text internlm3 iquestcoder lfm3 lfm3_vl",
    "5.24": "apertus1p5 apertus1p5_text dory exaone hy_v4_vl inkling2_loop inkling2_loop_text lara_mini sarvam_mla "
    "sarvam_moe",
}
FIRST_VERSION = {kind: of for of, kinds in _SINCE.items() for kind in kinds.split()}


def untried(versions: Mapping[str, str]) -> str | None:
    """Return a line about versions, by package, outside those of :data:`TRIED`."""
    parts = []
    for name, (first, last) in TRIED.items():
        release = Version(versions[name]).base_version
        if not Version(first) <= Version(release) <= Version(last):
            parts.append(f"{name} {versions[name]} (but with {first}{f' to {last}' * (first != last)})")
    return f"the tests of this version did not run with {', '.join(parts)}" if parts else None
