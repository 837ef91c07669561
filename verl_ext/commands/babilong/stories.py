"""bAbI stories of qa1 to qa5: facts, and questions after some of them, in the words of bAbI v1.2.

A question is asked only about what the reader of the facts knows. It keeps bAbI's trailing space.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import ClassVar, NamedTuple

from verl_ext.values import Options, option

PLACES = ("bedroom", "kitchen", "garden", "hallway", "bathroom", "office")
OBJECTS = ("apple", "football", "milk")
# Where the actors of qa1, qa2 and qa3 stand before the first fact; no fact says so.
STARTS = {"John": "kitchen", "Mary": "bedroom", "Sandra": "garden", "Daniel": "hallway"}
GIVERS = ("Bill", "Fred", "Jeff", "Mary")  # the actors of qa5
VERBS = {
    "move": ("moved to", "went to", "journeyed to", "travelled to", "went back to"),
    "get": ("took", "got", "grabbed", "picked up"),
    "drop": ("dropped", "discarded", "put down", "left"),
    "give": ("gave", "handed", "passed"),
}
OPPOSITES = {"north": "south", "south": "north", "east": "west", "west": "east"}
FACTS_PER_QUESTION = {"qa1": 2, "qa2": 3, "qa3": 3}  # in bAbI: before every question; for qa2 and qa3 the fewest
MOST_UNRELATED = 5  # facts of qa5 between a give event and the question about it


@dataclass(frozen=True)
class StoryOptions(Options):
    """How long stories are."""

    prefix: ClassVar[str] = "story"

    questions: int = option(5, "questions of a story, each a sample with the facts before it (qa4: 1)", least=1)
    facts_per_question: int | None = option(
        None, "facts before each question: exactly of qa1 (null: 2), at least of qa2 and qa3 (null: 3)", least=1
    )
    max_facts: int | None = option(
        None, "most facts of a sample; null: the benchmark's, one for every 8 tokens (0k: any number)", least=1
    )

    def questions_of(self, task: str) -> int:
        """Return how many questions a story of the task has."""
        return 1 if task == "qa4" else self.questions

    def facts_between(self, task: str) -> int:
        """Return the number of facts before every question of qa1, and the fewest of qa2 and qa3."""
        return self.facts_per_question or FACTS_PER_QUESTION[task]


class Question(NamedTuple):
    """A question asked after the story's first `num_facts` facts, which are all that it needs."""

    num_facts: int
    text: str
    answer: str


class Event(NamedTuple):
    """A move of `actor` to the place `thing`, or a get, drop or give (to `recipient`) of the object `thing`."""

    kind: str
    actor: str
    thing: str
    recipient: str = ""


class World:
    """Places of actors and objects, and the part of them that a reader of the facts knows, by bAbI's rules.

    holders: of the objects that somebody holds; the others have a place in object_places. known_places: of actors, from
    the first move on. known_paths: for each object every place that it was in, in order: that of its holder, or where
    its holder dropped it; None while the holder's place is unknown.
    """

    def __init__(self, actor_places: Mapping[str, str], object_places: Mapping[str, str]) -> None:
        self.actor_places = dict(actor_places)
        self.object_places = dict(object_places)
        self.holders: dict[str, str] = {}
        self.known_places: dict[str, str] = {}
        self.known_paths: dict[str, list[str | None]] = {}

    def possible(self, kinds: Sequence[str]) -> list[Event]:
        """Return every event of these kinds that is valid now, in a fixed order."""
        here, events = self.actor_places, []
        for kind in kinds:
            if kind == "move":
                events += [Event(kind, *pair) for pair in product(here, PLACES) if pair not in here.items()]
            elif kind == "get":
                lying = product(here, self.object_places.items())
                events += [Event(kind, actor, thing) for actor, (thing, place) in lying if place == here[actor]]
            elif kind == "drop":
                events += [Event(kind, actor, thing) for thing, actor in self.holders.items()]
            else:
                for (thing, actor), other in product(self.holders.items(), here):
                    if other != actor and here[other] == here[actor]:
                        events.append(Event(kind, actor, thing, other))
        return events

    def perform(self, event: Event) -> None:
        """Change the state by a valid event."""
        actor, thing = event.actor, event.thing
        moved = [thing]
        if event.kind == "move":
            self.actor_places[actor] = self.known_places[actor] = thing
            moved = [held for held, holder in self.holders.items() if holder == actor]
        elif event.kind == "get":
            del self.object_places[thing]
            self.holders[thing] = actor
        elif event.kind == "drop":
            del self.holders[thing]
            self.object_places[thing] = self.actor_places[actor]
        else:
            self.holders[thing] = event.recipient
        place = self.known_places.get(actor)
        for each in moved:
            path = self.known_paths.setdefault(each, [])
            if not path or path[-1] != place:
                path.append(place)


@dataclass
class Story:
    """Facts in their order, and the questions of the story."""

    facts: list[str] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)

    def tell(self, world: World, groups: Sequence[Sequence[str]], rng: random.Random) -> Event:
        """Perform a random event and add its fact in words; everything but a move may end in "there".

        A group of kinds is drawn, again if none of its events is possible; a move always is.
        """
        events: list[Event] = []
        while not events:
            events = world.possible(rng.choice(groups))
        event = rng.choice(events)
        world.perform(event)
        receiver = f" to {event.recipient}" if event.recipient else ""
        there = rng.choice(("", " there")) if event.kind != "move" else ""
        self.facts.append(f"{event.actor} {rng.choice(VERBS[event.kind])} the {event.thing}{receiver}{there}.")
        return event

    def ask(self, text: str, answer: str) -> None:
        """Ask a question after the facts so far."""
        self.questions.append(Question(len(self.facts), text, answer))


def make_story(task: str, rng: random.Random, options: StoryOptions) -> Story:
    """Return a story of the task, qa1 to qa5."""
    return _STORIES[task](rng, options)


def _objects(rng: random.Random) -> dict[str, str]:
    return {thing: rng.choice(PLACES) for thing in OBJECTS}


def _where_is_actor(rng: random.Random, options: StoryOptions) -> Story:
    story, world = Story(), World(STARTS, _objects(rng))
    for _ in range(options.questions):
        for _ in range(options.facts_between("qa1")):
            story.tell(world, [("move",)], rng)
        actor = rng.choice(sorted(world.known_places))
        story.ask(f"Where is {actor}? ", world.known_places[actor])
    return story


def _where_is_object(rng: random.Random, options: StoryOptions) -> Story:
    story = Story()
    for world in _object_worlds(story, rng, options.questions, options.facts_between("qa2")):
        places = {thing: path[-1] for thing, path in world.known_paths.items() if path[-1] is not None}
        if places:
            thing = rng.choice(sorted(places))
            story.ask(f"Where is the {thing}? ", places[thing])
    return story


def _where_was_object(rng: random.Random, options: StoryOptions) -> Story:
    story = Story()
    for world in _object_worlds(story, rng, options.questions, options.facts_between("qa3")):
        pairs = {}  # (place before, place), of places that the object was in once: "before the office" is one moment
        for thing, path in world.known_paths.items():
            if found := [(a, b) for a, b in pairwise(path) if a and b and path.count(b) == 1]:
                pairs[thing] = found
        if pairs:
            thing = rng.choice(sorted(pairs))
            before, place = rng.choice(pairs[thing])
            story.ask(f"Where was the {thing} before the {place}? ", before)
    return story


def _object_worlds(story: Story, rng: random.Random, questions: int, facts: int) -> Iterator[World]:
    """Tell of random gets, drops and moves; yield the world whenever a question may be asked, until all are.

    That is after one fact in two, from the fact number `facts` after a question on.
    """
    world = World(STARTS, _objects(rng))
    while len(story.questions) < questions:
        # A get or drop, whichever is possible, is twice as likely as a move.
        story.tell(world, [("get", "drop"), ("get", "drop"), ("move",)], rng)
        since_question = len(story.facts) - (story.questions[-1].num_facts if story.questions else 0)
        if since_question >= facts and rng.random() < 0.5:
            yield world


def _what_is_in_direction(rng: random.Random, options: StoryOptions) -> Story:
    """Return three rooms in a line: two relations in either order, and a question about one of them.

    Each is told from the side of either room. As in bAbI a question means the relation that a fact states: rooms two
    steps away do not count.
    """

    def from_either_side(place: str, direction: str, other: str) -> tuple[str, str, str]:
        return (other, OPPOSITES[direction], place) if rng.random() < 0.5 else (place, direction, other)

    first, middle, last = rng.sample(PLACES, 3)
    direction = rng.choice(("north", "east"))
    relations = [(first, direction, middle), (middle, direction, last)]
    rng.shuffle(relations)
    told = [from_either_side(*relation) for relation in relations]
    story = Story([f"The {place} is {direction} of the {other}." for place, direction, other in told])
    place, direction, other = from_either_side(*rng.choice(relations))
    forms = (f"What is {direction} of the {other}? ", f"What is the {other} {OPPOSITES[direction]} of? ")
    story.ask(rng.choice(forms), place)
    return story


def _who_gave_what(rng: random.Random, options: StoryOptions) -> Story:
    """Return gets and moves until somebody gives something, up to five unrelated facts, and a question about the gift.

    It is the last gift of the story so far, so that no later event answers the question otherwise.
    """
    story, world = Story(), World({actor: rng.choice(PLACES) for actor in GIVERS}, _objects(rng))
    for _ in range(options.questions):
        gift = None
        while gift is None or gift.kind != "give":
            gift = story.tell(world, [("get",), ("give",), ("move",)], rng)
        for _ in range(rng.randint(0, MOST_UNRELATED)):
            story.tell(world, [("get",), ("move",)], rng)
        _, giver, thing, receiver = gift
        forms = (
            (f"What did {giver} give to {receiver}? ", thing),
            (f"Who gave the {thing} to {receiver}? ", giver),
            (f"Who did {giver} give the {thing} to? ", receiver),
            (f"Who gave the {thing}? ", giver),
            (f"Who received the {thing}? ", receiver),
        )
        story.ask(*rng.choice(forms))
    return story


_STORIES: dict[str, Callable[[random.Random, StoryOptions], Story]] = {
    "qa1": _where_is_actor,
    "qa2": _where_is_object,
    "qa3": _where_was_object,
    "qa4": _what_is_in_direction,
    "qa5": _who_gave_what,
}
TASKS = tuple(_STORIES)
