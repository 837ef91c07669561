"""Composition, typing and checks of a run's config, before loading models."""
