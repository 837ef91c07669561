"""Render chats, and find what is learnt in them."""
