"""The ``verl.plugins`` entry point: what verl loads by itself at ``import verl`` once this package is installed.

Installing changes nothing for other verl programs. The CPU platform is registered under its own name, which only
``VERL_PLATFORM=cpu`` selects. The engine and the attention are registered when ``VERL_ENGINE_VENDOR=verl_ext`` asks for
them, as our trainer does: importing verl's engines at every ``import verl`` would slow down programs that need none.
"""

import os
import warnings

VENDOR = "verl_ext"


def register_platform() -> None:
    """Make ``VERL_PLATFORM=cpu`` known to verl."""
    import verl_ext.cpu_platform  # noqa: F401


def register_engine() -> None:
    """Register the packed engine under vendor ``verl_ext`` and the packed attention under its own name; idempotent."""
    with warnings.catch_warnings():
        # verl announces each optional engine (megatron, veomni, …) that is not installed; nobody asked for them here.
        warnings.filterwarnings("ignore", message=".* engine is not available")
        import verl_ext.engine  # noqa: F401


def select_engine() -> None:
    """Make this process (and the Ray workers that inherit its environment) use the packed engine."""
    os.environ["VERL_ENGINE_VENDOR"] = VENDOR
    register_engine()


register_platform()
if os.environ.get("VERL_ENGINE_VENDOR") == VENDOR:
    register_engine()
