"""The ``verl.plugins`` entry point, which ``import verl`` loads.

Installing this package changes nothing for other verl programs. The CPU platform is registered under its own name,
which only ``VERL_PLATFORM=cpu`` selects. An engine is registered when ``VERL_ENGINE_VENDOR`` asks for it, as our
trainer does: importing verl's engines at every ``import verl`` would slow down programs that need none.
"""

import importlib
import os
import warnings

import verl_ext.cpu_platform  # noqa: F401  registers itself

PACKED, CHUNKED = "verl_ext", "verl_ext_chunked"
_MODULES = {PACKED: "verl_ext.engines.packed", CHUNKED: "verl_ext.engines.chunked"}


def register_engine(vendor: str = PACKED) -> None:
    """Register this vendor's engine with its attention and models; idempotent."""
    with warnings.catch_warnings():
        # verl warns about each optional engine (megatron, veomni, …) that is not installed, but none is needed here.
        warnings.filterwarnings("ignore", message=".* engine is not available")
        importlib.import_module(_MODULES[vendor])


def select_engine(vendor: str = PACKED) -> None:
    """Make this process and its Ray workers use this vendor's engine."""
    os.environ["VERL_ENGINE_VENDOR"] = vendor
    register_engine(vendor)


if os.environ.get("VERL_ENGINE_VENDOR") in _MODULES:
    register_engine(os.environ["VERL_ENGINE_VENDOR"])
