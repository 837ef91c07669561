"""Small BABILong files and byte-level tokenizers for tests."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

FACTS = ("Mary went to the kitchen. ", "John moved to the garden. ", "Sandra travelled to the office. ")
PLACES = ("kitchen", "garden", "office", "hallway")


def record(sentences: int, place: str = "kitchen", question: str = "Where is Mary? ") -> dict[str, str]:
    """Make a record whose input has that many sentences; `question` keeps bAbI's trailing space."""
    text = "".join(FACTS[number % 3] for number in range(sentences)).strip()
    return {"input": text, "question": question, "target": place}


def records(count: int, sentences: int = 3) -> list[dict[str, str]]:
    """Make records that differ in their question."""
    return [record(sentences, PLACES[number % 4], f"Where is number {number}? ") for number in range(count)]


def write_records(path: Path, content: Sequence[object]) -> str:
    """Write `content` as a JSON list to `path`, and make its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


def byte_tokenizer(special: bool = True, pad: bool = True, trim_offsets: bool = False) -> PreTrainedTokenizerFast:
    """Build a byte-level BPE whose merges cross ends of sentences and lines; special: texts have <bos> and <eos>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_pattern(), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    texts = [f"{fact.strip()}\n\nQuestion: Where is Mary? \nAnswer: {place}" for fact in FACTS for place in PLACES]
    tokenizer.train_from_iterator(
        texts * 20,
        trainers.BpeTrainer(
            vocab_size=360,
            special_tokens=["<pad>", "<bos>", "<eos>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
        )
    elif trim_offsets:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>", pad_token="<pad>" if pad else None
    )


def _pattern() -> "object":
    from tokenizers import Regex

    return Regex(r" ?[A-Za-z]+| ?[^\sA-Za-z]+[\r\n]*|\s*[\r\n]+|\s+")


MOVE = "Mary moved to the bathroom.|John went to the hallway.|Where is {}? \tbathroom\t1"


# Lines of two questions of each task, in the forms of bAbI v1.2: "|" ends a line, and numbers are added later.
FORMS = {
    "qa1": MOVE.format("Mary") + "|John moved to the office.|Where is John? \toffice\t4",
    "qa2": "Mary moved to the office.|Mary got the milk there.|Mary went to the garden."
    "|Where is the milk? \tgarden\t2 3|Mary dropped the milk.|Where is the milk? \tgarden\t5 3",
    "qa3": "Mary got the milk.|Mary went to the office.|Mary went to the garden.|Mary left the milk there."
    "|Where was the milk before the garden? \toffice\t4 3 2|John went to the garden."
    "|Where was the milk before the garden? \toffice\t4 3 2",
    "qa4": "The office is north of the kitchen.|The garden is south of the kitchen."
    "|What is north of the kitchen?\toffice\t1",
    "qa5": "Bill picked up the football there.|Bill gave the football to Fred."
    "|What did Bill give to Fred? \tfootball\t2|Fred put down the football there.|Who received the football? \tFred\t2",
    "qa6": "Mary moved to the bathroom.|Is Mary in the office? \tno\t1|Is Mary in the bathroom? \tyes\t1",
    "qa7": "Mary got the milk there.|How many objects is Mary carrying? \tone\t1|Mary dropped the milk."
    "|How many objects is Mary carrying? \tnone\t1 3",
    "qa8": "Mary got the milk there.|Mary got the apple there.|What is Mary carrying? \tmilk,apple\t1 2"
    "|What is John carrying? \tnothing",
    "qa9": "Mary is no longer in the bedroom.|Is Mary in the bedroom? \tno\t1|John is in the park."
    "|Is John in the park? \tyes\t3",
    "qa10": "Fred is either in the school or the park.|Is Fred in the park? \tmaybe\t1|Fred moved to the cinema."
    "|Is Fred in the park? \tno\t3",
    "qa11": "Mary moved to the office.|After that she went to the bedroom.|Where is Mary? \tbedroom\t1 2",
    "qa12": "Mary and John went to the office.|Where is John? \toffice\t1",
    "qa13": "Mary and John went to the office.|Following that they moved to the garden.|Where is John? \tgarden\t1 2",
    "qa14": "Yesterday Julie went to the office.|This morning Julie went to the school."
    "|Where was Julie before the school? \toffice\t1 2",
    "qa15": "Mice are afraid of wolves.|Gertrude is a mouse.|What is gertrude afraid of?\twolf\t2 1",
    "qa16": "Lily is a swan.|Greg is a swan.|Lily is gray.|What color is Greg?\tgray\t2 1 3",
    "qa17": "The triangle is above the pink rectangle.|The blue square is to the left of the triangle."
    "|Is the pink rectangle to the right of the blue square?\tyes\t1 2|Is the blue square below the triangle?\tno\t2",
    "qa18": "The box fits inside the chest.|The box of chocolates fits inside the box."
    "|Does the chest fit in the box of chocolates?\tno\t1 2|Is the chest bigger than the box?\tyes\t1",
    "qa19": "The garden is west of the office.|The office is south of the kitchen."
    "|How do you go from the kitchen to the garden?\ts,w\t2 1",
    "qa20": "Sumit is tired.|Where will sumit go?\tbedroom\t1|Sumit went back to the bedroom."
    "|Why did sumit go to the bedroom?\ttired\t1",
}


def write_forms(folder: Path, split: str = "train", plain_names: bool = False, stories: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for task, form in FORMS.items():
        lines = [f"{number} {line}\n" for number, line in enumerate(form.split("|"), 1)]
        name = f"{task}_{split}.txt" if plain_names else f"{task}_some-name_{split}.txt"
        (folder / name).write_text("".join(lines * stories), encoding="utf-8")
