"""Models of this project, in Hugging Face form; torch and transformers alone."""
