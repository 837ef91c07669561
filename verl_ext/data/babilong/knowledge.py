"""What a reader of the facts knows. Questions are asked about that alone, never about what only the world knows."""

from itertools import pairwise

from verl_ext.data.babilong.world import Event


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
