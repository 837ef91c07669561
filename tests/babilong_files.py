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
    """Build a byte-level BPE whose merges cross the end of a sentence and the line breaks (".\\n\\n" is a token).

    special: texts begin with <bos> and end with <eos>. trim_offsets: offsets exclude white space, like RoBERTa's.
    """
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
