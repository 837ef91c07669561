"""Tools for data, models and judging; the core never imports them."""
