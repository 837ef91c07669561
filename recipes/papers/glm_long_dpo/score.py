"""Score an answer by the question alone, in place of the reward model of the small form of this recipe.

FACTS names the facts.json of make_data.py: what the scorer knows, as a reward model knows the world. It never sees the
chronicle, as GLM-Long's reward model never sees the long input.
"""

import json
import os
from pathlib import Path

FACTS = json.loads(Path(os.environ["FACTS"]).read_text(encoding="utf-8"))


def right_fact(messages: list[dict[str, str]], answer: str) -> float:
    """Return 1 for an answer with the right fact, else 0."""
    (question,) = messages
    return float(FACTS[question["content"]] in answer)
