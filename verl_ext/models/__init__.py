"""The models of this project, from torch and transformers alone."""
