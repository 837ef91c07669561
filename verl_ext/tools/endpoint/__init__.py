"""A client of OpenAI-compatible endpoints, and a store that saves paid answers."""
