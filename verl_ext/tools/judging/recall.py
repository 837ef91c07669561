"""Retrieval of facts from long texts: a needle, and BABILong."""

import ast
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import yaml  # type: ignore[import-untyped]

from verl_ext.data.families.babilong_answers import is_right_answer
from verl_ext.options import DataError, Options, first_line, must, option
from verl_ext.tools.endpoint.client import SamplingOptions
from verl_ext.tools.endpoint.quality import read_rating
from verl_ext.tools.judging.task import Case, Messages, Scores, Task, token_ends

# How BABILong puts a question: the order of its parts.
PUBLISHED_TEMPLATE = "{instruction}\n{examples}\n{post_prompt}\n<context>\n{context}\n</context>\nQuestion: {question}"
PROMPT_PARTS = ("instruction", "examples", "post_prompt")
_SENTENCE_ENDS = re.compile(r"(?<=[.!?。！？])\s*")


@dataclass(frozen=True)
class NeedleOptions(Options):
    """The options of a needle in a haystack."""

    prefix: ClassVar[str] = "needle"
    counts_tokens: ClassVar[bool] = True

    text: str | None = option(None, "sentence to hide; null: the published one, about San Francisco")
    question: str | None = option(None, "question that the sentence answers; null: the published one")
    expected: list[str] = option([], "words of a right answer; the score is the share found; []: the published ones")
    lengths: list[int] = option([1000, 4000, 16000, 32000, 64000], "tokens of the haystacks, the needle included")
    depths: list[int] = option([0, 25, 50, 75, 100], "positions of the needle, in percent of the haystack")

    def problems(self) -> Iterator[str]:
        """Yield a line for each impossible depth, length or needle."""
        for depth in self.depths:
            if not 0 <= depth <= 100:
                yield must("needle.depths", "be percentages from 0 to 100", depth)
        for length in self.lengths:
            if length < 1:
                yield must("needle.lengths", "be at least 1 token", length)
        given = [f"needle.{name}" for name in ("text", "question", "expected") if all(getattr(self, name) or [""])]
        if len(given) in (1, 2):
            yield must("needle", "have text, question and expected, or none of them", " and ".join(given))

    @property
    def published(self) -> "NeedleOptions":
        """These options, with the published sentence if none is given."""
        if self.text:
            return self
        text = "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day."
        question, expected = "What is the best thing to do in San Francisco?", ["sandwich", "Dolores Park", "sunny"]
        return replace(self, text=text, question=question, expected=expected)


class Needle(Task):
    """A sentence hidden in a long text, found by a question."""

    options: NeedleOptions
    node: ClassVar[str] = "needle"
    prompt_file: ClassVar[str] = "needle.txt"
    sampling: ClassVar[SamplingOptions] = SamplingOptions(temperature=0.0, max_tokens=128)
    judge_sampling: ClassVar[SamplingOptions] = SamplingOptions(temperature=0.0, max_tokens=512)
    asks_judge: ClassVar[bool] = True
    worst: ClassVar[Any] = 1.0
    headlines: ClassVar[tuple[str, ...]] = ("found", "rating")
    heat_map: ClassVar[tuple[str, str, str] | None] = ("length", "depth", "found")

    def cases(self) -> Iterator[Case]:
        """Yield a case per length and depth; raise DataError for short texts."""
        given, path = self.options.published, Path(self.path)
        files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
        try:
            text = "\n\n".join(file.read_text(encoding="utf-8").strip() for file in files)
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(must("cases", "be a text file or a folder of .txt files", f"{path}: {error}")) from error
        ends = [0, *token_ends(self.tokenizer, text)]
        needle = len(token_ends(self.tokenizer, str(given.text)))
        if (longest := max(given.lengths) - needle) >= len(ends):
            needed = f"cases must hold {longest:,} tokens for needle.lengths={max(given.lengths)}"
            raise DataError(f"{needed}; {path} has {len(ends) - 1:,}")
        for length, depth in product(given.lengths, given.depths):
            hay = text[: ends[max(length - needle, 0)]]
            before, after = _split_at_sentence(hay, depth)
            document = " ".join(part for part in (before, given.text, after) if part)
            prompt = f"{document}\n\n{given.question}"
            yield Case(f"{length}-{depth}", prompt, {"length": length, "depth": depth})

    def scores(self, case: Case, answer: str, verdicts: Sequence[Any]) -> Scores:
        """Return the share of expected words in the answer, ignoring case, and a judge's rating if there is one."""
        said = answer.lower()
        expected = self.options.published.expected
        found: Scores = {"found": sum(word.lower() in said for word in expected) / len(expected)}
        return {**found, "rating": verdicts[0]} if verdicts else found

    def questions(self, case: Case, answer: str) -> list[Messages]:
        """Return one request: question, hidden sentence and answer, never the document."""
        given = self.options.published
        parts = {"$QUESTION$": str(given.question), "$REFERENCE$": str(given.text), "$ANSWER$": answer}
        return [[{"role": "user", "content": self.filled(parts)}]]

    def verdict(self, text: str) -> float:
        """Return the rating from 1 to 10, also a bare number, as the published prompt asks for."""
        bare = re.fullmatch(r"\s*(?:rating|score)?\W*(10|[1-9])(?:\.0)?\W*", text, re.IGNORECASE)
        return float(bare[1]) if bare else read_rating(text)

    def groups(self, case: Case) -> dict[str, str]:
        """Return the length, the depth, and both as a cell."""
        length, depth = case.facts["length"], case.facts["depth"]
        return {"length": str(length), "depth": f"{depth}%", "cell": f"{length} at {depth}%"}


def _split_at_sentence(text: str, depth: int) -> tuple[str, str]:
    """Split a text at its last sentence end before `depth` percent."""
    if depth == 100:
        return text.rstrip(), ""
    ends = [end.end() for end in _SENTENCE_ENDS.finditer(text, 0, round(len(text) * depth / 100))]
    place = ends[-1] if ends else 0
    return text[:place].rstrip(), text[place:]


@dataclass(frozen=True)
class BABILongPrompts(Options):
    """The options of BABILong."""

    prefix: ClassVar[str] = "babilong"

    prompts: str | None = option(
        None,
        "the benchmark's prompts.py (read, not executed), or YAML {qa1: {instruction, examples, post_prompt}, …}; null:"
        " our own short instruction",
    )


def read_prompts(path: str) -> tuple[str, dict[str, dict[str, str]]]:
    """Return the template and {task: {part: text}} of BABILong's prompts.py or a YAML file.

    Raises DataError for any other file.
    """
    template = PUBLISHED_TEMPLATE
    try:
        text = Path(path).read_text(encoding="utf-8")
        if path.endswith(".py"):
            assigned = {
                target.id: node.value
                for node in ast.parse(text).body
                if isinstance(node, ast.Assign)
                for target in node.targets
                if isinstance(target, ast.Name)
            }
            found = ast.literal_eval(assigned["DEFAULT_PROMPTS"])
            template = ast.literal_eval(assigned["DEFAULT_TEMPLATE"]) if "DEFAULT_TEMPLATE" in assigned else template
        else:
            found = yaml.safe_load(text)
        prompts = {task: {part: of_task[part] for part in PROMPT_PARTS} for task, of_task in found.items()}
        if not prompts or not all(isinstance(each, str) for parts in prompts.values() for each in parts.values()):
            raise ValueError("each task must have texts")
    except (OSError, ValueError, SyntaxError, LookupError, TypeError, AttributeError, yaml.YAMLError) as error:
        needed, why = f"hold {{task: {{{', '.join(PROMPT_PARTS)}}}}}", f"{type(error).__name__}: {first_line(error)}"
        raise DataError(must("babilong.prompts", needed, f"{path}: {why}")) from error
    return template, prompts


class BABILong(Task):
    """BABILong's questions, scored by the published rule and a corrected one."""

    options: BABILongPrompts | None
    node: ClassVar[str] = "babilong"
    sampling: ClassVar[SamplingOptions] = SamplingOptions(temperature=0.0, max_tokens=20)
    headlines: ClassVar[tuple[str, ...]] = ("right",)
    heat_map: ClassVar[tuple[str, str, str] | None] = ("length", "task", "right")
    instruction: ClassVar[str] = (
        "Somewhere in the text below are facts about people, places and things. Answer the question about them in as "
        "few words as possible: the word or the name that is asked for."
    )

    def cases(self) -> Iterator[Case]:
        """Yield the files' questions; raise DataError if one is not BABILong's."""
        from verl_ext.data.families.babilong import FIELDS, find_task_files  # imports torch, which --help does not need

        try:
            found = find_task_files([self.path], "cases")
        except ValueError as error:
            raise DataError(str(error)) from error
        given = None if self.options is None else self.options.prompts
        template, prompts = (None, {}) if given is None else read_prompts(given)
        for file, category in found:
            task = category.partition("_")[0]
            if template is not None and task not in prompts:
                raise DataError(f"babilong.prompts must hold the prompts of {task}; {given} has {', '.join(prompts)}")
            try:
                rows = json.loads(Path(file.path).read_text(encoding="utf-8"))
                asked = [[row[name] for name in FIELDS] for row in rows]
            except (OSError, ValueError, KeyError, TypeError) as error:
                fields = ", ".join(FIELDS)
                raise DataError(f"cases must be JSON lists of {{{fields}}}; {file.path} is not: {error!r}") from error
            for number, (text, question, target) in enumerate(asked):
                prompt = f"{self.instruction}\n\n<context>\n{text}\n</context>\n\nQuestion: {question}\nAnswer:"
                if template is not None:
                    parts: dict[str, str] = {**prompts[task], "context": text, "question": question}
                    pieces = re.split(r"(\{\w+\})", template)
                    prompt = "".join(parts.get(piece.strip("{}"), piece) for piece in pieces).strip()
                facts = {"question": question, "target": target, "category": category}
                yield Case(f"{category}-{number}", prompt, facts)

    def scores(self, case: Case, answer: str, verdicts: Sequence[Any]) -> Scores:
        """Return 1 or 0 by the published and the whole-word rule."""
        asked = [answer, *(case.facts[name] for name in ("target", "question", "category"))]
        return {"right": float(is_right_answer(*asked)), "right_words": float(is_right_answer(*asked, words=True))}

    def groups(self, case: Case) -> dict[str, str]:
        """Return the task, the length if known, and both as cell."""
        task, _, size = case.facts["category"].partition("_")
        return {"task": task, "cell": f"{task} {size}"} | ({"length": size} if size else {})
