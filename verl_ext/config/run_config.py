"""The config of a run: conf/sft.yaml under a command line, checked for typos, adapted and resolved."""

from collections.abc import Sequence

from omegaconf import DictConfig

from verl_ext.config.composition import CONF, PRIMARY, composed


def compose(overrides: Sequence[str]) -> DictConfig:
    """The composed config of conf/sft.yaml under overrides, as on the command line of the trainer.

    Mandatory values may still be missing (`data.train_dir`, `model.path`): check_run tells them, all at once. Raises
    ValueError: one line for each override or YAML key that does not exist or cannot be read.
    """
    return compose_run(overrides)[0]


def compose_run(overrides: Sequence[str]) -> tuple[DictConfig, list[str]]:
    """(config, notices): compose, and what was translated on the way, to be said once by rank 0."""
    from verl_ext.config.overrides import prepare_overrides
    from verl_ext.config.resolution import resolve_config
    from verl_ext.config.schema import check_keys

    prepared, notices = prepare_overrides(overrides)
    flags = [word for word in prepared if word.startswith("-")]
    if flags:
        raise ValueError(f"an override is written key=value; got {flags[0]}")
    config = composed(CONF, PRIMARY, prepared)
    check_keys(config)
    return config, notices + resolve_config(config)
