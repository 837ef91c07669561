"""The trainer, from a composed configuration to a checkpoint."""
