"""Megatron's indexed form of pretraining data, in numpy without torch."""
