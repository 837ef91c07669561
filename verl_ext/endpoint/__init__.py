"""A client of OpenAI-compatible endpoints; its store keeps answers, so that each question is paid for once."""
