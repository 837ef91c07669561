"""The bAbI world of qa1, qa2, qa3 and qa5: what may happen in it, and what a reader of the facts knows.

Questions are asked about what the reader knows, never about what only the world knows.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

PLACES = ("bedroom", "kitchen", "garden", "hallway", "bathroom", "office")
OBJECTS = ("apple", "football", "milk")
# Where the actors of qa1, qa2 and qa3 stand before the first fact; no fact says so.
STARTS = {"John": "kitchen", "Mary": "bedroom", "Sandra": "garden", "Daniel": "hallway"}
GIVERS = ("Bill", "Fred", "Jeff", "Mary")  # the actors of qa5


@dataclass(frozen=True)
class Event:
    """move: actor to the place `thing`; get, drop: the object `thing`; give: the object `thing` to `recipient`."""

    kind: str
    actor: str
    thing: str
    recipient: str = ""


class World:
    """The true state: where every actor is, where every object lies that nobody holds, and who holds the others."""

    def __init__(self, actor_places: Mapping[str, str], object_places: Mapping[str, str]) -> None:
        self.actor_places = dict(actor_places)
        self.object_places = dict(object_places)
        self.holders: dict[str, str] = {}

    def possible(self, kinds: Sequence[str]) -> list[Event]:
        """Every event of these kinds that is valid now, in a fixed order."""
        return [event for kind in kinds for event in self._possible(kind)]

    def _possible(self, kind: str) -> Iterator[Event]:
        here = self.actor_places
        if kind == "move":
            yield from (Event(kind, *pair) for pair in product(here, PLACES) if pair not in here.items())
        elif kind == "get":
            for actor, (thing, place) in product(here, self.object_places.items()):
                if place == here[actor]:
                    yield Event(kind, actor, thing)
        elif kind == "drop":
            yield from (Event(kind, actor, thing) for thing, actor in self.holders.items())
        else:
            for (thing, actor), other in product(self.holders.items(), here):
                if other != actor and here[other] == here[actor]:
                    yield Event(kind, actor, thing, other)

    def perform(self, event: Event) -> None:
        """Change the state by a valid event."""
        if event.kind == "move":
            self.actor_places[event.actor] = event.thing
        elif event.kind == "get":
            del self.object_places[event.thing]
            self.holders[event.thing] = event.actor
        elif event.kind == "drop":
            del self.holders[event.thing]
            self.object_places[event.thing] = self.actor_places[event.actor]
        else:
            self.holders[event.thing] = event.recipient

    def perform_random(self, groups: Sequence[Sequence[str]], rng: random.Random) -> Event:
        """Perform an event and return it: of a random group of kinds, drawn again while none of the group is possible.

        Some group must have a possible event; a move always is.
        """
        events: list[Event] = []
        while not events:
            events = self.possible(rng.choice(groups))
        event = rng.choice(events)
        self.perform(event)
        return event


def tracking_world(rng: random.Random) -> World:
    """The world of qa1, qa2 and qa3: actors at their fixed hidden places, objects anywhere."""
    return World(STARTS, {thing: rng.choice(PLACES) for thing in OBJECTS})


def giving_world(rng: random.Random) -> World:
    """The world of qa5: actors and objects anywhere."""
    return World({actor: rng.choice(PLACES) for actor in GIVERS}, {thing: rng.choice(PLACES) for thing in OBJECTS})


class Knowledge:
    """Places as the facts tell them, by bAbI's rules.

    An actor's place is known from the first move on. An object's place is that of its holder, or where its holder
    dropped it; it is unknown (None) while the holder's place is.
    """

    def __init__(self) -> None:
        self.actor_places: dict[str, str] = {}
        self.holders: dict[str, str] = {}
        self.object_paths: dict[str, list[str | None]] = {}  # every place an object was in, in order

    def learn(self, event: Event) -> None:
        """Read the fact of a move, get or drop."""
        if event.kind == "move":
            self.actor_places[event.actor] = event.thing
            moved = [thing for thing, holder in self.holders.items() if holder == event.actor]
        elif event.kind == "get":
            self.holders[event.thing] = event.actor
            moved = [event.thing]
        else:
            self.holders.pop(event.thing, None)
            moved = [event.thing]
        for thing in moved:
            path, place = self.object_paths.setdefault(thing, []), self.actor_places.get(event.actor)
            if not path or path[-1] != place:
                path.append(place)

    def object_places(self) -> dict[str, str]:
        """The objects whose place is known now."""
        return {thing: path[-1] for thing, path in self.object_paths.items() if path[-1] is not None}

    def earlier_places(self) -> dict[str, list[tuple[str, str]]]:
        """For each object its pairs (place before, place) of successive places, both known.

        Only places that the object was in once: "before the office" is then one moment.
        """
        pairs = {}
        for thing, path in self.object_paths.items():
            found = [(a, b) for a, b in pairwise(path) if a and b and path.count(b) == 1]
            if found:
                pairs[thing] = found
        return pairs
