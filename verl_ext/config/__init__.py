"""The composition, typing and checks of a run's config, before any device or model is loaded."""

from verl_ext.config.compose import compose, compose_run

__all__ = ["compose", "compose_run"]
