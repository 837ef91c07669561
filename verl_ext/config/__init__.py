"""Composition, typing and checks of a run's config, before loading models."""

from verl_ext.config.compose import compose, compose_run

__all__ = ["compose", "compose_run"]
