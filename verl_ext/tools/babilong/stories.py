"""Generated bAbI stories of qa1 to qa5, worded as in bAbI v1.2.

The rules follow the published files (en-10k). An actor and a kind of event are drawn until the actor can do it. After
every two facts a question is asked, if the last five facts contain something to ask about.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import ClassVar, NamedTuple

from verl_ext.options import Options, option
from verl_ext.tools.babilong import babi
from verl_ext.tools.babilong.babi import Sample

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
_TRIES = 50  # to find further questions about the same facts
RECENT = 5  # the facts before a question, one of which concerns its subject
TASKS = babi.TASKS[:5]


@dataclass(frozen=True)
class StoryOptions(Options):
    """The length of generated stories."""

    prefix: ClassVar[str] = "story"

    questions: int = option(5, "questions per story (qa4: 1); each is a sample with the facts before it", least=1)
    facts_per_question: int = option(
        2, "facts before each question; qa2, qa3 and qa5 add as many again until one is possible", least=1
    )
    questions_per_text: int = option(
        1, "questions about the same facts and text, each a sample (qa4: 1); most: 3", least=1, most=3
    )
    max_facts: int | None = option(
        None, "maximum number of facts in a sample; null: the benchmark's, one per 8 tokens (0k: any number)", least=1
    )

    def questions_of(self, task: str) -> int:
        """Return the number of samples in a story of the task."""
        return 1 if task == "qa4" else self.questions * self.questions_per_text

    def of_text(self, task: str) -> int:
        """Return the number of samples that have the same facts and text."""
        return 1 if task == "qa4" else self.questions_per_text


class Event(NamedTuple):
    """A move to the place `thing`, or an act with that object."""

    kind: str
    actor: str
    thing: str
    recipient: str = ""


def make_story(task: str, rng: random.Random, options: StoryOptions) -> list[Sample]:
    """Return the questions of a story of the task, qa1 to qa5."""
    if task == "qa4":
        return [_rooms(rng)]
    ask = {"qa1": _where_is_actor, "qa5": _who_gave_what}.get(task, partial(_where_object, was=task == "qa3"))
    kinds = {"qa1": ("move",), "qa5": GIVING_KINDS}.get(task, KINDS)
    possible = _possible_events(GIVERS if task == "qa5" else ACTORS, kinds, rng)
    there = {"get": 0.2 if task == "qa3" else 1, "drop": 0.2}  # the shares of facts that end with "there"
    samples: list[Sample] = []
    events: list[Event] = []
    facts: list[str] = []
    while len(samples) < options.questions_of(task):
        for event in islice(possible, options.facts_per_question):
            events.append(event)
            end = f" to {event.recipient}" if event.recipient else ""
            end += " there" if rng.random() < there.get(event.kind, 0) else ""
            facts.append(f"{event.actor} {rng.choice(VERBS[event.kind])} the {event.thing}{end}.")
        if question := ask(events, rng):
            asked = {question[0]: question}
            # Further questions may be about any fact; a story of few facts may not have them.
            for _ in range(_TRIES if options.questions_per_text > 1 else 0):
                if len(asked) < options.questions_per_text and (other := ask(events, rng, recent=len(events))):
                    asked.setdefault(other[0], other)
            if len(asked) == options.questions_per_text:
                samples += [Sample(facts.copy(), *each) for each in asked.values()]
    return samples


def _possible_events(actors: Sequence[str], kinds: Sequence[str], rng: random.Random) -> Iterator[Event]:
    """Yield random events that are possible, one after the other.

    No fact tells where actors and objects are at the start.
    """
    places = {actor: rng.choice(PLACES) for actor in actors}
    objects = {thing: rng.choice(PLACES) for thing in OBJECTS}  # in a place, or with an actor
    while True:
        actor, kind = rng.choice(actors), rng.choice(kinds)
        here = places[actor]
        others = [other for other, place in places.items() if place == here and other != actor]
        if kind == "move":
            things = [rng.choice(PLACES)]
        else:
            things = [thing for thing, at in objects.items() if at == (here if kind == "get" else actor)]
        if not things or things == [here] or (kind == "give" and not others):
            continue
        thing, recipient = rng.choice(things), rng.choice(others) if kind == "give" else ""
        if kind == "move":
            places[actor] = thing
        else:
            objects[thing] = {"get": actor, "drop": here, "give": recipient}[kind]
        yield Event(kind, actor, thing, recipient)


def _where_is_actor(events: list[Event], rng: random.Random, recent: int = RECENT) -> tuple[str, str]:
    actor = rng.choice(events[-recent:]).actor
    return f"Where is {actor}? ", [event.thing for event in events if event.actor == actor][-1]


def _where_object(events: list[Event], rng: random.Random, was: bool, recent: int = RECENT) -> tuple[str, str] | None:
    """Ask for a recent object's place, or with `was` an earlier one.

    An object is recent if one of the last `recent` facts is its get or drop. It is in the last place of the actor
    who got it; bAbI asks about a held object only after its holder has moved with it.
    """
    for last_act in rng.sample(events[-recent:], min(recent, len(events))):
        if last_act.kind == "move":
            continue
        *_, got, end = [0] + [number for number, event in enumerate(events) if event.thing == last_act.thing]
        if is_held := events[end].kind == "get":
            got, end = end, len(events)
        moves = [n for n, event in enumerate(events[:end]) if (event.kind, event.actor) == ("move", events[got].actor)]
        carried = [events[number].thing for number in moves if number > got]
        if was and len(carried) > 1:
            place = rng.choice(carried[1:])
            last = max(number for number, each in enumerate(carried) if each == place)
            return f"Where was the {last_act.thing} before the {place}? ", carried[last - 1]
        if not was and moves and (carried or not is_held):
            return f"Where is the {last_act.thing}? ", events[moves[-1]].thing
    return None


def _who_gave_what(events: list[Event], rng: random.Random, recent: int = RECENT) -> tuple[str, str] | None:
    """Ask about a recent object's last gift, a third for the object."""
    given = [event.thing for event in events[-recent:] if event.kind == "give"]
    if not given:
        return None
    thing = rng.choice(given)
    gift = [event for event in events if event.kind == "give" and event.thing == thing][-1]
    what = (f"What did {gift.actor} give to {gift.recipient}? ", thing)
    others = (
        (f"Who gave the {thing} to {gift.recipient}? ", gift.actor),
        (f"Who gave the {thing}? ", gift.actor),
        (f"Who did {gift.actor} give the {thing} to? ", gift.recipient),
        (f"Who received the {thing}? ", gift.recipient),
    )
    between = [event for event in events if (event.actor, event.recipient) == (gift.actor, gift.recipient)]
    if recent > RECENT and between[-1] is not gift:  # a later gift answers `what`
        return rng.choice(others)
    return rng.choice((what, what, *others))


def _rooms(rng: random.Random) -> Sample:
    """Return two facts of three rooms in a line, and a question.

    The question asks for a fact's subject. In bAbI the middle room is the subject of a third of the facts.
    """
    middle, *ends = rng.sample(PLACES, 3)
    direction = rng.choice(list(OPPOSITES))
    relations = [
        (middle, OPPOSITES[way], end) if rng.random() < 1 / 3 else (end, way, middle)
        for end, way in zip(ends, (direction, OPPOSITES[direction]), strict=True)
    ]
    room, way, other = rng.choice(relations)
    text = rng.choice((f"What is {way} of the {other}?", f"What is the {other} {OPPOSITES[way]} of?"))
    facts = [f"The {subject} is {way} of the {other}." for subject, way, other in relations]
    return Sample(facts, text, room)
