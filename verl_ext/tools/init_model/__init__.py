"""The command `verl-ext init-model`: a Hugging Face folder with random weights and a tokenizer."""
