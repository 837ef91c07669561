"""The command `verl-ext init-model`: a folder with a random model."""
