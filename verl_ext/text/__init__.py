"""Read files, records and chats, and tokenize them into dataset folders."""
