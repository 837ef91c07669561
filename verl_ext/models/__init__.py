"""The models of this project, in Hugging Face form; they import torch and transformers alone."""
