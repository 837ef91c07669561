"""A text's quality as a model judges it (LongWriter, arXiv 2408.07055)."""

import json
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

from verl_ext.tools.endpoint.answer import Unparsable

DIMENSIONS = ("Relevance", "Accuracy", "Coherence", "Clarity", "Breadth and Depth", "Reading Experience")
# The JSON that the prompt asks for, analysis first.
QUALITY_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"Analysis": {"type": "string"}, **{name: {"type": "integer"} for name in DIMENSIONS}},
    "required": ["Analysis", *DIMENSIONS],
    "additionalProperties": False,
}


def quality_prompt() -> str:
    """Return our own prompt for the judge, with $INST$ and $RESPONSE$."""
    return resources.files("verl_ext.tools.endpoint").joinpath("writing.txt").read_text(encoding="utf-8")


def filled_names(prompt: str, parts: Mapping[str, str]) -> str:
    """Replace the $NAMES$ of a prompt, in one pass."""
    return "".join(parts.get(piece, piece) for piece in re.split(r"(\$[A-Z]+\$)", prompt))


def quality_score(dimension: float) -> float:
    """Map a score of a dimension from 1..5 to 0..100."""
    return (dimension - 1) * 25


def read_quality(text: str) -> dict[str, float]:
    """Return the six dimensions, 1 to 5; raise Unparsable without them.

    The text contains a JSON object: alone, in a code block, or among other words.
    """
    block = re.search(r"```(?:json)?\s*(\{.*\})\s*```", text, re.DOTALL)
    text = block[1] if block else text
    try:
        # Judges write line breaks inside the analysis, which strict JSON forbids.
        found, _ = json.JSONDecoder(strict=False).raw_decode(text[text.index("{") :])
        given = {name: float(found[name]) for name in DIMENSIONS}
    except (ValueError, KeyError, TypeError) as error:
        raise Unparsable(f"no object with the six dimensions: {error!r}") from error
    if not all(1 <= score <= 5 for score in given.values()):
        raise Unparsable(f"a dimension is not from 1 to 5: {given}")
    return given


def read_rating(text: str) -> float:
    """Return the last [[rating]] from 1 to 10; raise Unparsable without one."""
    ratings = re.findall(r"\[\[([^\]]+)\]\]", text)
    numbers = re.findall(r"\d+\.\d+|\d+", ratings[-1]) if ratings else []
    if not numbers or not 1 <= float(numbers[0]) <= 10:
        raise Unparsable("no [[rating]] from 1 to 10")
    return float(numbers[0])
