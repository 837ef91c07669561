"""LongAlign: a question about a long document, and its answer (arXiv 2401.18058, section 3.1 and appendix A).

Both requests start with the same document, byte for byte:

    document, "write five questions of this kind"  →  five questions, one is drawn
    document, that question                        →  the answer over the whole document
"""

import re

from verl_ext.endpoint.answer import Answer, Unparsable
from verl_ext.endpoint.client import Client
from verl_ext.synthesis.items import Item, drawn
from verl_ext.synthesis.prompts import Prompts
from verl_ext.synthesis.records import Made, Making, question_and_answer
from verl_ext.text.word_count import language_of

_NUMBERED = re.compile(
    r"^[\s*#>-]*(?:Q(?:uestion)?\s*|问题\s*)?(\d+)[\s*]*[:.)、：．）][\s*]*(.+?)[\s*]*$", re.IGNORECASE
)


def parse_questions(text: str) -> list[str]:
    """Return the questions of a numbered list (`1: `, `2.`, `**3:**`, `4)`), without the text around it."""
    found = [match[2] for line in text.splitlines() if (match := _NUMBERED.match(line))]
    if not found:
        raise Unparsable("the answer has no numbered question")
    return found


async def make(item: Item, client: Client, prompts: dict[str, Prompts], making: Making) -> Made:
    """Return the record of a document, or the reason why there is none."""
    own = prompts[language_of(item.text)]
    kinds = own.below("kinds")
    kind = kinds[drawn(making.seed, item.name, "kind") % len(kinds)]
    answers: list[Answer] = []

    instruction = own.filled("questions", kind=own.texts[f"kinds.{kind}"])
    message = {"role": "user", "content": f"{item.text}\n\n{instruction}"}
    answers.append(
        await client.ask(item.name, "questions", [message], making.sampling, parse_questions, making.parse_tries)
    )
    if not answers[-1].is_done:
        return Made.from_answer("questions", answers[-1])
    questions = answers[-1].parsed
    question = questions[drawn(making.seed, item.name, "question") % len(questions)]
    content = f"{item.text}\n\n{question}"
    answers.append(await client.ask(item.name, "answer", [{"role": "user", "content": content}], making.sampling))
    if not answers[-1].is_done:
        return Made.from_answer("answer", answers[-1])
    if making.passages.found_in(f"{question}\n{answers[-1].text}"):
        return Made("contaminated", reason="the question or its answer holds a passage of decontaminate")
    facts = {"questions": len(questions), "spans": [[0, len(item.text)]]}
    return question_and_answer(item, f"longalign_{kind}", content, answers[-1].text, own, answers, facts)
