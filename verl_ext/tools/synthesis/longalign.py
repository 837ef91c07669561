"""LongAlign: questions about long documents (arXiv 2401.18058, 3.1 and appendix A).

Both requests start with the same document, byte for byte:

    document, "write five questions of this kind"  →  five questions, one is drawn, or several
    document, that question                        →  the answer over the whole document

The published recipe keeps one question of a document. With more, documents begin alike, and data.share_prefixes
computes the document once.
"""

import re

from verl_ext.tools.endpoint.answer import Unparsable
from verl_ext.tools.endpoint.client import Client
from verl_ext.tools.synthesis.items import SourceItem, drawn
from verl_ext.tools.synthesis.prompts import PromptTexts
from verl_ext.tools.synthesis.records import Result, Settings, json_in, question_and_answer, refused_in_words
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


async def ask_of_document(
    item: SourceItem, client: Client, prompts: dict[str, PromptTexts], settings: Settings
) -> Result:
    """Return a document's records, or the reason why it has none."""
    own = prompts[language_of(item.text)]
    kinds = own.below("kinds")
    kind = kinds[drawn(settings.seed, item.name, "kind") % len(kinds)]
    instruction = own.filled("questions", kind=own.texts[f"kinds.{kind}"])
    message = {"role": "user", "content": f"{item.text}\n\n{instruction}"}
    questions = await client.ask(
        item.name, "questions", [message], settings.sampling, parse_questions, settings.parse_tries
    )
    if not questions.is_done:
        return Result.from_answer("questions", questions)
    found = questions.parsed
    first = drawn(settings.seed, item.name, "question") % len(found)
    results, asked_for = [], [questions]  # the request for questions counts for the first record
    for number in range(min(settings.questions, len(found))):
        question = found[(first + number) % len(found)]
        content = f"{item.text}\n\n{question}"
        asked = [{"role": "user", "content": content}]
        name = "answer" if number == 0 else f"answer/{number + 1}"
        answer = refused_in_words(await client.ask(item.name, name, asked, settings.sampling))
        if not answer.is_done:
            results.append(Result.from_answer(name, answer))
        elif settings.passages.found_in(f"{question}\n{answer.text}"):
            reason = "the question or its answer holds a passage of decontaminate"
            results.append(Result("contaminated", reason=reason))
        else:
            facts = {"questions": len(found), "spans": [[0, len(item.text)]]}
            answers = [*asked_for, answer]
            results.append(question_and_answer(item, f"longalign_{kind}", content, answer.text, own, answers, facts))
            asked_for = []
    return Result.joined(results)
