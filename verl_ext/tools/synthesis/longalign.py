"""LongAlign: questions about long documents (arXiv 2401.18058, 3.1 and appendix A).

Both requests start with the same document, byte for byte:

    document, "write five questions of this kind"  →  five questions, one is drawn, or several
    document, that question                        →  the answer over the whole document

The published recipe keeps one question of a document. With more, documents begin alike, and data.share_prefixes
computes the document once.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from verl_ext.options import option
from verl_ext.tools.endpoint.answer import Answer, Unparsable, Usage
from verl_ext.tools.synthesis.estimate import ANSWER, PROMPT
from verl_ext.tools.synthesis.items import SourceItem, drawn
from verl_ext.tools.synthesis.options import DocumentOptions, SynthesizeOptions
from verl_ext.tools.synthesis.replies import json_in
from verl_ext.tools.synthesis.report import Result
from verl_ext.tools.synthesis.task import DocumentTask, attempted
from verl_ext.tools.word_count import language_of

_NUMBERS = "一二三四五六七八九十"
_NUMBERED = re.compile(  # 1: … | 2. … | **3:** … | (4) … | [5] … | 6 - … | 七、… | Question 8 | Q9: …
    rf"^[\s*#>_\-]*(?P<name>Q(?:uestion)?\s*|问题\s*)?(?P<open>[(（\[【])?\s*(?P<number>\d{{1,2}}|[{_NUMBERS}])\s*"
    r"(?(open)[)）\]】][\s*_]*[:：.、\-–—]?|[\s*_]*(?:[:.)、：．）]|[\-–—](?!\d)|(?(name)$|(?!))))[\s*_]*(?P<text>.*)$",
    re.IGNORECASE,
)


def parse_questions(text: str) -> list[str]:
    """Return the numbered or JSON questions; raise Unparsable without any.

    A question ends before the next number or a blank line.
    """
    if found := _json_questions(text):
        return found
    questions: list[str] = []
    is_open = False  # whether the next line belongs to the last question
    for line in text.splitlines():
        match = _NUMBERED.match(line)
        if match and _value(match["number"]) == len(questions) + 1:
            questions.append(match["text"])
            is_open = True
        elif is_open and line.strip():
            questions[-1] += f"\n{line}"
        elif questions and questions[-1].strip():
            is_open = False
    found = [question.strip().strip("*").strip() for question in questions]
    if not found or not all(found):
        raise Unparsable("the answer has no questions numbered from 1")
    return found


def _value(number: str) -> int:
    return int(number) if number.isdigit() else _NUMBERS.index(number) + 1


def _json_questions(text: str) -> list[str] | None:
    """Return the questions of JSON texts or objects, or None."""
    found = json_in(text)
    if isinstance(found, dict):
        found = next((value for value in found.values() if isinstance(value, list)), list(found.values()))
    named = [next(iter(each.values()), None) if isinstance(each, dict) else each for each in found or []]
    texts = [each for each in named if isinstance(each, str) and each.strip()]
    return texts if texts and len(texts) == len(named) else None


@dataclass(frozen=True)
class LongAlignOptions(DocumentOptions):
    """Five questions about a document, and the answers to one of them or several."""

    questions: int = option(1, "questions kept of a document, whose tokens data.share_prefixes computes once", least=1)
    estimate: bool = option(False, "true: only estimate the requests, tokens and cost; nothing is asked or written")


class LongAlign(DocumentTask):
    """Questions about documents, each answered over the whole document."""

    name: ClassVar[str] = "longalign"
    options_class: ClassVar[type[SynthesizeOptions]] = LongAlignOptions
    options: LongAlignOptions

    def requests(self, item: SourceItem) -> Iterator[tuple[float, Usage]]:
        """Yield the requests: the document stands in each, and is cached after the first."""
        yield 1, Usage(item.tokens + PROMPT, 0, ANSWER // 2)
        yield min(self.options.questions, 5), Usage(item.tokens + PROMPT, item.tokens, ANSWER)

    async def make(self, item: SourceItem) -> Result:
        """Return a document's records; raise NoRecord without questions."""
        seed, own = self.options.seed, self.prompts[language_of(item.text)]
        kinds = own.below("kinds")
        kind = kinds[drawn(seed, item.name, "kind") % len(kinds)]
        instruction = own.filled("questions", kind=own.texts[f"kinds.{kind}"])
        listed = await self.ask(item, "questions", f"{item.text}\n\n{instruction}", parse_questions)
        questions = listed.parsed
        first = drawn(seed, item.name, "question") % len(questions)
        results, before = [], [listed]
        for number in range(min(self.options.questions, len(questions))):
            question = questions[(first + number) % len(questions)]
            stage = "answer" if number == 0 else f"answer/{number + 1}"
            facts = {"document_tokens": item.tokens, "questions": len(questions), "spans": [[0, len(item.text)]]}
            results.append(await attempted(self._answered(item, stage, kind, question, before, facts)))
            before = [] if results[-1].records else before  # the request for questions counts for the first record
        return Result.joined(results)

    async def _answered(
        self, item: SourceItem, stage: str, kind: str, question: str, before: list[Answer], facts: dict[str, object]
    ) -> Result:
        """Return the record of a question. before: the answers that count for it beside its own."""
        own, content = self.prompts[language_of(item.text)], f"{item.text}\n\n{question}"
        answer = await self.ask(item, stage, content)
        self.check_passages(f"{question}\n{answer.text}", "the question or its answer")
        return self.record_of(item, f"longalign_{kind}", content, answer.text, own, [*before, answer], facts)
