"""Recognize what a record holds: a chat, a text, tokens."""
