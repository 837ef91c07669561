"""Long instruction data made by a model: `verl-ext synthesize`."""
