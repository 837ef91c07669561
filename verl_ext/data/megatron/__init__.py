"""Megatron's indexed form of pretraining data: files, sample indices and blends. numpy in, numpy out; no torch."""
