"""Composing, typing and checking a run's config, before a device is touched or a model loaded."""

from verl_ext.config.compose import compose, compose_run

__all__ = ["compose", "compose_run"]
