"""Tokenized documents: folders, categories, what only their tokens tell, and the files that must not change."""
