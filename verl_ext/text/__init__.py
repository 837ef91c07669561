"""From files to tokens: sources, records, chats and texts, special tokens, and the folders that hold the result."""
