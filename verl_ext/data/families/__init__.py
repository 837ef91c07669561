"""Families of datasets: each opens its documents, and says how they are grouped into packs."""
