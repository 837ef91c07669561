"""A verl plugin and recipes for long-context SFT."""

__version__ = "0.1.0"
