"""Background prose without any download: sentences put together from phrases about an old harbour town.

Nothing in it is an actor, place or object of bAbI, nor a point of the compass, so that no sentence reads as a fact.
Every sentence has 15 words or more; there are over ten million different ones.
"""

import random

OPENINGS = (
    "In the autumn of that year",
    "Some weeks after the great storm",
    "Before the first carts had arrived",
    "During the long winter that followed",
    "On the third day of the fair",
    "When the tide had turned again",
    "According to an entry in the town records",
    "Shortly after the bells had stopped ringing",
    "While the rain was still falling",
    "Towards the end of a quiet summer",
    "Once the new bridge had been paid for",
    "As far as anybody could remember",
    "In spite of all that had been promised",
    "Late in the evening of a market day",
    "By the time the snow had melted",
    "To the surprise of the whole council",
    "Not long before the harvest was brought in",
    "Because the mail coach was late once more",
)
SUBJECTS = (
    "the keeper of the lighthouse",
    "an elderly clockmaker",
    "the captain of a small trading ship",
    "a travelling painter and his nephew",
    "the two daughters of the miller",
    "the youngest member of the council",
    "a retired judge with a wooden leg",
    "the schoolteacher of the lower town",
    "several fishermen and their families",
    "the owner of the printing house",
    "a doctor who had studied abroad",
    "the widow of the former mayor",
    "an apprentice from the shipyard",
    "the musicians of the summer theatre",
    "a merchant who dealt in wool and salt",
    "the librarian and two of her friends",
    "a surveyor sent by the government",
)
ACTIONS = (
    "began to repair",
    "wrote a long report about",
    "complained bitterly about",
    "quarrelled for hours over",
    "refused to pay for",
    "told everybody a story about",
    "made a careful drawing of",
    "dreamed almost every night of",
    "spent a small fortune on",
    "could not stop thinking about",
    "asked for permission to remove",
    "gathered a crowd in front of",
    "gave a lecture on the history of",
    "took great pride in",
    "had long forgotten about",
    "looked with some suspicion at",
    "promised to take better care of",
)
THINGS = (
    "the broken weather vane",
    "an ancient map of the coast",
    "the stone lions beside the fountain",
    "a collection of pressed flowers",
    "the clock above the town gate",
    "a heavy chest filled with letters",
    "the painted ceiling of the chapel",
    "an iron bell without a clapper",
    "the narrow staircase to the tower",
    "a flock of grey geese",
    "the toll house near the river",
    "a telescope made of brass",
    "the wooden figure of a sailor",
    "an unfinished portrait of the duke",
    "the ropes and sails of a wrecked ship",
    "a barrel of very old wine",
    "the long row of poplar trees",
)
DETAILS = (
    "which had stood there for three generations",
    "which nobody had seen since the flood",
    "although the matter was of little importance",
    "and hardly a word was said against it",
    "which was known far beyond the valley",
    "and the news spread quickly from house to house",
    "although two engineers had warned against it",
    "which was said to bring good luck to travellers",
    "and even the children came to watch",
    "which the old chronicle describes in great detail",
    "although there was not enough money for it",
    "and for a while there was peace again",
    "which had once belonged to a foreign prince",
    "and nobody ever found out the reason",
    "although the newspapers took no notice of it",
)
ENDINGS = (
    "",
    ", or so the story goes",
    ", as was the custom in those days",
    ", and the whole street talked about it until spring",
    ", while smoke rose slowly from the chimneys",
    ", much to the annoyance of the neighbours",
    ", as a letter from that time still shows",
    ", and that was the end of the affair",
    ", although opinions differ on this point",
    ", with a patience that surprised everyone",
    ", and the boats stayed in port for another week",
)


def filler_sentences(number: int) -> list[str]:
    """The first `number` sentences of one fixed sequence."""
    rng = random.Random("filler")
    return [_sentence(rng) for _ in range(number)]


def _sentence(rng: random.Random) -> str:
    opening, subject, action, thing, detail, ending = (
        rng.choice(part) for part in (OPENINGS, SUBJECTS, ACTIONS, THINGS, DETAILS, ENDINGS)
    )
    return f"{opening}, {subject} {action} {thing}, {detail}{ending}."
