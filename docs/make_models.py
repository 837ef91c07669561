"""Writes docs/reference/models.md, the model types that are trained: python docs/make_models.py, which takes minutes.

Under a transformers above the bound of verl (CONTRIBUTING.md) it writes docs/reference/newer_models.md.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from packaging.version import Version

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.lib.small_models import KINDS, SIZES, model_class, model_config, refusal
from verl_ext.config.architecture import Architecture
from verl_ext.flops import windowed_layers
from verl_ext.layers import mixers_of
from verl_ext.layers.experts import experts_problem, has_experts
from verl_ext.layers.trial import shrunk

DOCS = Path(__file__).parent
PAGES = {"Models": DOCS / "reference" / "models.md", "Newer models": DOCS / "reference" / "newer_models.md"}
VERSION = Version(transformers.__version__)
TITLE = "Models" if Version("5.11") > VERSION else "Newer models"
_INSTALL = """
verl 0.9.1 caps transformers below 5.11, and pip takes no version above a cap. This project is tested with newer ones as
well (`make test TRANSFORMERS=5.24.0`); a run tells once of versions that were not tried. A second install, of
transformers alone, brings what it requires, and pip says that verl's requirement is not met:

```bash
pip install .
pip install transformers==5.24.0
```

With uv, a project's `pyproject.toml` lifts the cap:

```toml
[tool.uv]
override-dependencies = ["transformers==5.24.0"]
```

From transformers 5.23 on verl 0.9.1's own trainer and its code for models of images and text cannot be imported; this
project's trainer and engine use neither. All nodes of a run need the same version.
"""
_FLASH = "`flash_attn`, `varlen` (`fa3`, `fa4`), else `sdpa`"
_FLA = "flash-linear-attention, else torch by document"
# mechanism: (kernels on a CPU, on a GPU, what ranks of a pack exchange, whether a plan predicts its memory)
MECHANISMS = {
    "attention": ("`sdpa`", _FLASH, "heads; keys and values between groups", "yes"),
    "attention with windows": ("`sdpa` by blocks", _FLASH, "the same, as far as a window reaches", "yes"),
    "soft caps": ("scores by blocks", "`flash_attn`, else scores by blocks", "as attention", "yes"),
    "sinks": ("scores by blocks", "torch's flash kernels with a backward of our own", "as attention", "yes"),
    "chunks, temperature by place": ("`sdpa`", _FLASH, "as attention, inside chunks", "yes"),
    "gated delta nets": ("torch by document", _FLA, "3 tokens before each rank; tokens for heads", "no"),
    "Mamba 2": ("torch by chunk", _FLA, "the same", "no"),
    "short convolutions": ("torch by document", _FLA, "the last tokens before each rank", "no"),
    "Mamba 1, lightning attention": ("transformers' code", "the same", "whole documents, dealt to ranks", "no"),
}
_OF_TIME = {
    "delta": "gated delta nets",
    "state_space": "Mamba 2",
    "convolution": "short convolutions",
    "documents": "Mamba 1, lightning attention",
    "attention": "chunks, temperature by place",
}


def mechanism(model: Any) -> str:
    """Name the row of MECHANISMS of a small model."""
    times = {mixer.time for _, mixer in mixers_of(model)}
    for time, name in _OF_TIME.items():
        if time in times:
            return name
    if any(name.endswith("sinks") for name, _ in model.named_parameters()):
        return "sinks"
    if Architecture(model.config).softcap:
        return "soft caps"
    return "attention with windows" if windowed_layers(model.config.get_text_config())[0] else "attention"


def described(kind: str) -> tuple[str, str]:
    """Return (mechanism, the type with the mark of its experts) of a model type that is trained."""
    model = model_class(kind)._from_config(shrunk(model_config(kind), **SIZES.get(kind, {})))
    mark = "" if not has_experts(model) else "\\*" if experts_problem(model, "grouped_mm") is None else "†"
    return mechanism(model), f"`{kind}`{mark}"


def page() -> str:
    """The text of docs/reference/models.md."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    refusals = {kind: refusal(kind) for kind in KINDS}
    trained = [kind for kind, cause in refusals.items() if cause is None]
    version = ".".join(transformers.__version__.split(".")[:2])
    yield from (
        f"# {TITLE}",
        *(_INSTALL.splitlines() if TITLE != "Models" else ()),
        "",
        f"Of the {len(KINDS)} model types that transformers {version} has for text, with images or without, "
        f"{len(trained)} are trained exactly:",
        "`pytest tests/models/test_model_types.py` compares the loss and every gradient of a pack with its documents",
        "alone in plain transformers, in fp64, on one rank, with Ulysses 2 and with context parallelism 2. The others",
        "are refused before a model is loaded. `python docs/make_models.py` writes this page, and the test compares it",
        "with what it finds. Kernels of GPUs have not run yet."
        + " [Newer models](newer_models.md): the types of newer versions." * (TITLE == "Models"),
        "",
        "## Trained",
        "",
        "| mechanism | model types | CPU | GPU | ranks of a pack exchange | `plan.gpu_memory` |",
        "|---|---|---|---|---|---|",
    )
    rows: dict[str, list[str]] = {name: [] for name in MECHANISMS}
    for kind in trained:
        name, marked = described(kind)
        rows[name].append(marked)
    for name, (cpu, gpu, ranks, plan) in MECHANISMS.items():
        if rows[name]:
            yield f"| {name} | {', '.join(rows[name])} | {cpu} | {gpu} | {ranks} | {plan} |"
    yield from (
        "",
        "\\* a mixture of experts by grouped products (`model.experts`); † by its class's own code, slow on a GPU.",
        "",
        "Ulysses takes up to as many ranks as a model has query heads, and context parallelism any number of groups,",
        "for all of them. LoRA's `all-linear` adapts linear layers and, of types whose experts PEFT knows (Mixtral,",
        "Qwen2 to Qwen3-Next, OLMoE and others), the weights of routers and experts too; other experts stay as they",
        "are, unless `model.target_parameters` names them. Where a layer reads a buffer of its router (DeepSeek-V3,",
        "GLM-4.5 and others), PEFT cannot wrap the router, and `all-linear` leaves its weight as it is. Types",
        "that are encoders by default (BERT's kin) are trained with `is_decoder=true`, and of pairs (BART's kin) the",
        "decoder alone.",
        "",
        "## Refused",
        "",
        "| model types | cause |",
        "|---|---|",
    )
    causes: dict[str, list[str]] = {}
    for kind, cause in refusals.items():
        if cause is not None:
            causes.setdefault(_without_names(cause), []).append(f"`{kind}`")
    for cause, kinds in sorted(causes.items(), key=lambda item: -len(item[1])):
        yield f"| {', '.join(kinds)} | {cause} |"


def _without_names(cause: str) -> str:
    """Leave names and sizes of one class out of a refusal, so that types share a row."""
    cause = re.sub(r"^model\.path: \w+ ", "", cause)
    kinds = "ForCausalLM|ForConditionalGeneration|LMHeadModel|ModelWithLMHead"
    cause = re.sub(rf"\b(?:a )?[\w-]+({kinds})\b", "the class", cause)
    cause = cause.replace("cannot be tried with packed attention: 'verl_ext_packed'", "computes attention of its own")
    return cause.replace("|", "\\|").replace("`", "")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    PAGES[TITLE].write_text(page(), encoding="utf-8")
