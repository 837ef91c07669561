"""Facts and questions in the words of bAbI v1.2. Questions keep bAbI's trailing space."""

import random

from verl_ext.data.babilong.world import Event

VERBS = {
    "move": ("moved to", "went to", "journeyed to", "travelled to", "went back to"),
    "get": ("took", "got", "grabbed", "picked up"),
    "drop": ("dropped", "discarded", "put down", "left"),
    "give": ("gave", "handed", "passed"),
}
OPPOSITES = {"north": "south", "south": "north", "east": "west", "west": "east"}


def tell(event: Event, rng: random.Random) -> str:
    """An event as a fact; everything but a move may end in "there"."""
    receiver = f" to {event.recipient}" if event.recipient else ""
    there = rng.choice(("", " there")) if event.kind != "move" else ""
    return f"{event.actor} {rng.choice(VERBS[event.kind])} the {event.thing}{receiver}{there}."


def ask_actor(actor: str) -> str:
    """qa1."""
    return f"Where is {actor}? "


def ask_object(thing: str) -> str:
    """qa2."""
    return f"Where is the {thing}? "


def ask_before(thing: str, place: str) -> str:
    """qa3."""
    return f"Where was the {thing} before the {place}? "


def tell_relation(place: str, direction: str, other: str, rng: random.Random) -> str:
    """qa4: that `place` is in that direction of `other`, told from either of them."""
    if rng.random() < 0.5:
        place, direction, other = other, OPPOSITES[direction], place
    return f"The {place} is {direction} of the {other}."


def ask_relation(place: str, direction: str, other: str, rng: random.Random) -> tuple[str, str]:
    """qa4: question and answer about `place` being in that direction of `other`; either of them is asked for."""
    if rng.random() < 0.5:
        place, direction, other = other, OPPOSITES[direction], place
    forms = (f"What is {direction} of the {other}? ", f"What is the {other} {OPPOSITES[direction]} of? ")
    return rng.choice(forms), place


def ask_gift(event: Event, rng: random.Random) -> tuple[str, str]:
    """qa5: one of five questions about a give event, and its answer."""
    giver, thing, receiver = event.actor, event.thing, event.recipient
    return rng.choice(
        (
            (f"What did {giver} give to {receiver}? ", thing),
            (f"Who gave the {thing} to {receiver}? ", giver),
            (f"Who did {giver} give the {thing} to? ", receiver),
            (f"Who gave the {thing}? ", giver),
            (f"Who received the {thing}? ", receiver),
        )
    )
