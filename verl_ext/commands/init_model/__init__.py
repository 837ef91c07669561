"""`verl-ext init-model`: a model from scratch, a Hugging Face folder with random weights and a tokenizer."""
