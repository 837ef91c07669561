"""Hydra's compose API as one function: safe to call again, inside tests and under a running Hydra application.

From a command line to Hydra overrides: old names translated, needless plus signs dropped, typos told.

The config of a run: conf/sft.yaml under a command line, checked for typos, adapted and resolved.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

CONF = "verl_ext.conf"
PRIMARY = "sft"


def composed(module: str, primary: str, overrides: Sequence[str]) -> DictConfig:
    """The config `primary` of a package of configs under Hydra overrides.

    Raises ValueError in one line for whatever Hydra or OmegaConf refuses, interpolations that lead nowhere included.
    """
    try:
        with _without_hydra(), initialize_config_module(module, version_base=None):
            config = hydra_compose(primary, overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_one_line(error)) from None
    check_interpolations(config)
    return config


def check_interpolations(config: DictConfig) -> None:
    """Raises ValueError, in one line, when a value refers to a key that does not exist."""
    try:
        OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:
        raise ValueError(_one_line(error)) from None


@contextmanager
def _without_hydra() -> Iterator[None]:
    """Hydra keeps one global state; a running application's is set aside and put back."""
    running = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = running


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("object_type", "reference_type", "See https"))]
    if isinstance(error, OmegaConfBaseException):
        key = getattr(error, "full_key", None)
        return f"{key} cannot be read: {lines[0]}" if key else lines[0]
    return " ".join(lines[:2])
