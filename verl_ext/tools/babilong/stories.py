"""Generated bAbI stories of qa1 to qa5, worded as in bAbI v1.2.

The rules follow the published files (en-10k). An actor and a kind of event are drawn until the actor can do it. After
every two facts a question is asked, if the last five facts contain something to ask about.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from verl_ext.values import Options, option

PLACES = ("bedroom", "kitchen", "garden", "hallway", "bathroom", "office")
OBJECTS = ("apple", "football", "milk")
ACTORS = ("John", "Mary", "Sandra", "Daniel")  # in qa1, qa2 and qa3
GIVERS = ("Bill", "Fred", "Jeff", "Mary")  # in qa5
VERBS = {
    "move": ("moved to", "went to", "journeyed to", "travelled to", "went back to"),
    "get": ("took", "got", "grabbed", "picked up"),
    "drop": ("dropped", "discarded", "put down", "left"),
    "give": ("gave", "handed", "passed"),
}
KINDS = ("move", "get", "drop")
GIVING_KINDS = KINDS * 2 + ("give",) * 7  # the frequencies in the published stories
OPPOSITES = {"north": "south", "south": "north", "east": "west", "west": "east"}
RECENT = 5  # the facts before a question, one of which concerns its subject
TASKS = ("qa1", "qa2", "qa3", "qa4", "qa5")


@dataclass(frozen=True)
class StoryOptions(Options):
    """The length of generated stories."""

    prefix: ClassVar[str] = "story"

    questions: int = option(5, "questions per story (qa4: 1); each is a sample with the facts before it", least=1)
    facts_per_question: int = option(
        2, "facts before each question; qa2, qa3 and qa5 add as many again until one is possible", least=1
    )
    max_facts: int | None = option(
        None, "maximum number of facts in a sample; null: the benchmark's, one per 8 tokens (0k: any number)", least=1
    )

    def questions_of(self, task: str) -> int:
        """Return the number of questions in a story of the task."""
        return 1 if task == "qa4" else self.questions


class StoryQuestion(NamedTuple):
    """A question about the first `num_facts` facts of the story."""

    num_facts: int
    text: str
    answer: str


class Event(NamedTuple):
    """A move to the place `thing`, or an act with that object."""

    kind: str
    actor: str
    thing: str
    recipient: str = ""


@dataclass
class Story:
    """The ordered facts and the questions of a story."""

    facts: list[str] = field(default_factory=list)
    questions: list[StoryQuestion] = field(default_factory=list)


class World:
    """Where actors and objects are; no fact tells the initial state."""

    def __init__(self, actors: Sequence[str], rng: random.Random) -> None:
        self.rng = rng
        self.places = {actor: rng.choice(PLACES) for actor in actors}
        self.objects = {thing: rng.choice(PLACES) for thing in OBJECTS}

    def next_event(self, kinds: Sequence[str]) -> Event:
        """Apply and return a random possible event of these kinds."""
        while True:
            actor, kind = self.rng.choice(list(self.places)), self.rng.choice(kinds)
            here = self.places[actor]
            others = [other for other, place in self.places.items() if place == here and other != actor]
            if kind == "move":
                things = [self.rng.choice(PLACES)]
            else:
                things = [thing for thing, at in self.objects.items() if at == (here if kind == "get" else actor)]
            if not things or things == [here] or (kind == "give" and not others):
                continue
            thing, recipient = self.rng.choice(things), self.rng.choice(others) if kind == "give" else ""
            if kind == "move":
                self.places[actor] = thing
            else:
                self.objects[thing] = {"get": actor, "drop": here, "give": recipient}[kind]
            return Event(kind, actor, thing, recipient)


def make_story(task: str, rng: random.Random, options: StoryOptions) -> Story:
    """Return a story of the task, qa1 to qa5."""
    if task == "qa4":
        return _rooms(rng)
    ask = {"qa1": _where_is_actor, "qa2": _where_is_object, "qa3": _where_was_object, "qa5": _who_gave_what}[task]
    world = World(GIVERS if task == "qa5" else ACTORS, rng)
    kinds = {"qa1": ("move",), "qa5": GIVING_KINDS}.get(task, KINDS)
    there = {"get": 0.2 if task == "qa3" else 1, "drop": 0.2}  # the shares of facts that end with "there"
    story, events = Story(), []
    while len(story.questions) < options.questions:
        for _ in range(options.facts_per_question):
            event = world.next_event(kinds)
            events.append(event)
            end = f" to {event.recipient}" if event.recipient else ""
            end += " there" if rng.random() < there.get(event.kind, 0) else ""
            story.facts.append(f"{event.actor} {rng.choice(VERBS[event.kind])} the {event.thing}{end}.")
        if asked := ask(events, rng):
            story.questions.append(StoryQuestion(len(events), *asked))
    return story


def _where_is_actor(events: list[Event], rng: random.Random) -> tuple[str, str]:
    actor = rng.choice(events[-RECENT:]).actor
    return f"Where is {actor}? ", [event.thing for event in events if event.actor == actor][-1]


def _where_is_object(events: list[Event], rng: random.Random) -> tuple[str, str] | None:
    """Ask for an object carried to, or dropped at, a known place."""
    for thing, before, carried in _recent_objects(events, rng):
        if places := carried or before:
            return f"Where is the {thing}? ", places[-1]
    return None


def _where_was_object(events: list[Event], rng: random.Random) -> tuple[str, str] | None:
    """Ask for an object's place before its last visit to another."""
    for thing, _, carried in _recent_objects(events, rng):
        if len(carried) > 1:
            place = rng.choice(carried[1:])
            last = max(number for number, each in enumerate(carried) if each == place)
            return f"Where was the {thing} before the {place}? ", carried[last - 1]
    return None


def _recent_objects(events: list[Event], rng: random.Random) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield (object, before, carried) of recent objects in random order.

    Every get, drop and give among the last :data:`RECENT` facts yields one.

    carried: the places to which the object's last holder moved with it. before: the holder's places before the get,
    only if the object was dropped afterwards; bAbI asks about a held object after its holder has moved.
    """
    for recent in rng.sample(events[-RECENT:], min(RECENT, len(events))):
        touched = [number for number, event in enumerate(events) if event.thing == recent.thing]
        if recent.kind == "move":
            continue
        got = max(number for number in touched if events[number].kind == "get")
        end = touched[-1] if touched[-1] > got else len(events)
        moves = [
            (number, event.thing)
            for number, event in enumerate(events[:end])
            if event.kind == "move" and event.actor == events[got].actor
        ]
        before = [place for number, place in moves if number < got and end < len(events)]
        yield recent.thing, before, [place for number, place in moves if number > got]


def _who_gave_what(events: list[Event], rng: random.Random) -> tuple[str, str] | None:
    """Ask about a recent object's last gift, a third for the object."""
    recent = [event.thing for event in events[-RECENT:] if event.kind == "give"]
    if not recent:
        return None
    thing = rng.choice(recent)
    gift = [event for event in events if event.kind == "give" and event.thing == thing][-1]
    giver, receiver = gift.actor, gift.recipient
    what = (f"What did {giver} give to {receiver}? ", thing)
    return rng.choice(
        (
            what,
            what,
            (f"Who gave the {thing} to {receiver}? ", giver),
            (f"Who gave the {thing}? ", giver),
            (f"Who did {giver} give the {thing} to? ", receiver),
            (f"Who received the {thing}? ", receiver),
        )
    )


def _rooms(rng: random.Random) -> Story:
    """Return three rooms in a line, and a question about them.

    Two facts relate them; the question asks for a fact's subject. In bAbI the middle room is the subject of a third of
    the facts.
    """
    middle, *ends = rng.sample(PLACES, 3)
    direction = rng.choice(list(OPPOSITES))
    told = [
        (middle, OPPOSITES[way], end) if rng.random() < 1 / 3 else (end, way, middle)
        for end, way in zip(ends, (direction, OPPOSITES[direction]), strict=True)
    ]
    room, way, other = rng.choice(told)
    text = rng.choice((f"What is {way} of the {other}?", f"What is the {other} {OPPOSITES[way]} of?"))
    facts = [f"The {subject} is {way} of the {other}." for subject, way, other in told]
    return Story(facts, [StoryQuestion(len(facts), text, room)])
