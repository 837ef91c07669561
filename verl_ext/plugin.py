"""The ``verl.plugins`` entry point, which ``import verl`` loads.

Installing this package changes nothing for other verl programs. The CPU platform is registered under its own name,
which only ``VERL_PLATFORM=cpu`` selects. An engine is registered when ``VERL_ENGINE_VENDOR`` asks for it, as our
trainer does: importing verl's engines at every ``import verl`` would slow down programs that need none.
"""

import importlib
import os
import warnings

import verl_ext.cpu_platform  # noqa: F401  registers itself

PACKED, _PACKED_ENGINE = "verl_ext", "verl_ext.engines.packed"
ARCHITECTURES = {"qwen_titans": "verl_ext.titans"}  # that transformers lacks: {model_type: the module that adds it}


def register_engine(module: str = _PACKED_ENGINE) -> None:
    """Import the module that registers an engine with its attention and models; idempotent."""
    with warnings.catch_warnings():
        # verl warns about each optional engine (megatron, veomni, …) that is not installed, but none is needed here.
        warnings.filterwarnings("ignore", message=".* engine is not available")
        importlib.import_module(module)


def select_engine(vendor: str = PACKED, module: str = _PACKED_ENGINE) -> None:
    """Make this process use the engine of this vendor, which the module registers."""
    os.environ["VERL_ENGINE_VENDOR"] = vendor
    register_engine(module)


def register_architectures() -> None:
    """Let transformers' Auto classes open the folders of `ARCHITECTURES`."""
    for module in ARCHITECTURES.values():
        importlib.import_module(module)


if os.environ.get("VERL_ENGINE_VENDOR") == PACKED:
    register_engine()
