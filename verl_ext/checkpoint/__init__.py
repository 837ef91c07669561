"""Checkpoints: their files, saving, resuming and export."""
