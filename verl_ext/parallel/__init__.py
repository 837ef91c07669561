"""Who holds which tokens, keys and heads, and how they travel."""
