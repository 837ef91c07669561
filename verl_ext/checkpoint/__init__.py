"""Checkpoints: what lies on the disk, what is saved and restored, what a resume must share, and the export."""
