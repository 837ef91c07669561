"""The bAbI world of qa1, qa2, qa3 and qa5: four actors, six places and three objects, and what may happen in it.

What a reader of the facts knows. Questions are asked about that alone, never about what only the world knows.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

PLACES = ("bedroom", "kitchen", "garden", "hallway", "bathroom", "office")
OBJECTS = ("apple", "football", "milk")
# Where the actors of qa1, qa2 and qa3 stand before the first fact; no fact tells it.
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
    """The true state: where every actor is, and where every object lies or who holds it."""

    def __init__(self, actor_places: Mapping[str, str], object_places: Mapping[str, str]) -> None:
        self.actor_places = dict(actor_places)
        self.object_places = dict(object_places)  # objects that nobody holds
        self.holders: dict[str, str] = {}

    def possible(self, kinds: Sequence[str]) -> list[Event]:
        """Every event of these kinds that is valid now, in a fixed order."""
        return [event for kind in kinds for event in getattr(self, f"_{kind}s")()]

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

    def _moves(self) -> list[Event]:
        """A move to the place where the actor is already is none."""
        here = self.actor_places
        return [Event("move", actor, place) for actor in here for place in PLACES if place != here[actor]]

    def _gets(self) -> list[Event]:
        return [
            Event("get", actor, thing)
            for actor, here in self.actor_places.items()
            for thing, place in self.object_places.items()
            if place == here
        ]

    def _drops(self) -> list[Event]:
        return [Event("drop", actor, thing) for thing, actor in self.holders.items()]

    def _gives(self) -> list[Event]:
        return [
            Event("give", actor, thing, other)
            for thing, actor in self.holders.items()
            for other, place in self.actor_places.items()
            if other != actor and place == self.actor_places[actor]
        ]


def tracking_world(rng: random.Random) -> World:
    """The world of qa1, qa2 and qa3: actors at their fixed hidden places, objects anywhere."""
    return World(STARTS, {thing: rng.choice(PLACES) for thing in OBJECTS})


def giving_world(rng: random.Random) -> World:
    """The world of qa5: actors and objects anywhere."""
    return World({actor: rng.choice(PLACES) for actor in GIVERS}, {thing: rng.choice(PLACES) for thing in OBJECTS})


def draw_event(world: World, groups: Sequence[Sequence[str]], rng: random.Random) -> Event:
    """One valid event: a group of kinds, all groups alike, then one of its events; drawn again while there is none.

    Some group must have a valid event; a move always is one.
    """
    while True:
        events = world.possible(rng.choice(groups))
        if events:
            return rng.choice(events)


class Knowledge:
    """Places as narrated, by bAbI's rules.

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
            for thing, holder in self.holders.items():
                if holder == event.actor:
                    self._put(thing, event.thing)
            return
        assert event.kind in ("get", "drop"), event
        if event.kind == "get":
            self.holders[event.thing] = event.actor
        else:
            self.holders.pop(event.thing, None)
        self._put(event.thing, self.actor_places.get(event.actor))

    def object_places(self) -> dict[str, str]:
        """The objects whose place is known now."""
        return {thing: path[-1] for thing, path in self.object_paths.items() if path[-1] is not None}

    def earlier_places(self) -> dict[str, list[tuple[str, str]]]:
        """For each object its pairs (place before, place) of neighbouring places, both known.

        Only places that the object was in once: "before the office" is then one moment.
        """
        pairs = {}
        for thing, path in self.object_paths.items():
            found = [(a, b) for a, b in pairwise(path) if a and b and path.count(b) == 1]
            if found:
                pairs[thing] = found
        return pairs

    def _put(self, thing: str, place: str | None) -> None:
        path = self.object_paths.setdefault(thing, [])
        if not path or path[-1] != place:
            path.append(place)
