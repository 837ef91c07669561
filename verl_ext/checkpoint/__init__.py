"""Checkpoints: their files, saving and restoring, the needs of a resume, and the export."""
