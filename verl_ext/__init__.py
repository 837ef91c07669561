"""A verl plugin and long-context SFT recipes: token-budget packs, exact losses, Ulysses, per-category loss."""

__version__ = "0.1.0"
