"""The trainer: what runs between a composed configuration and a checkpoint."""
