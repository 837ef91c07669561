"""Who holds which tokens, keys and heads of a pack, and how ranks exchange them."""
