"""The bAbI world of qa1, qa2, qa3 and qa5: four actors, six places and three objects, and what may happen in it."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
