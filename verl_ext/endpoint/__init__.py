"""Questions to an OpenAI-compatible endpoint, each paid for once; `synthesis` and `judging` use it."""
