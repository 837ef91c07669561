"""A model from scratch: a Hugging Face folder with random weights and a tokenizer, for `-m verl_ext init-model`."""
