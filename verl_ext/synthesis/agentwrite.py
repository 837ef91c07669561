"""AgentWrite: a long text, planned and then written paragraph by paragraph (LongWriter, arXiv 2408.07055, section 3).

    instruction                               →  plan: a paragraph's main point and words on each line
    instruction, plan, text so far, its line  →  the next paragraph, and so on

The instruction states the requested length. A text is kept if its length is near that, by default if S_l is 80 or more:
ModelScope reports that the 666 of 6,000 records that pass this filter do as well as all (arXiv 2410.10210).
"""

import re

from verl_ext.endpoint.answer import UNPARSABLE, Answer, Unparsable
from verl_ext.endpoint.client import Client
from verl_ext.synthesis.items import Item, drawn
from verl_ext.synthesis.prompts import Prompts
from verl_ext.synthesis.records import Made, Making, question_and_answer
from verl_ext.text.word_count import count_words, language_of, length_score

LEAST_WORDS = 100  # a smaller number before "words" or 字 is not taken for the length of a long text
_PLAN_LINE = re.compile(
    r"^\W*(?:paragraph|段落|第)\s*\d+\s*段?\W+(?:main point|要点)\W*[:：]\s*(?P<point>.+?)\W+"
    r"(?:word count|字数)\W*[:：]?\s*(?:about|约)?\s*(?P<words>\d[\d,]*)",
    re.IGNORECASE,
)
_LABEL = re.compile(r"^\W*(?:paragraph\s+\d+|段落\s*\d+|第\s*\d+\s*段)[ *]*(?:[:：\-–—]|\n)[\s*]*", re.IGNORECASE)
_ASKED = re.compile(r"(\d[\d,]*)[\s-]*words?\b|([\d,.]*[\d一二两三四五六七八九十百千万]+)\s*个?汉?字", re.IGNORECASE)
_RANGE = re.compile(r"\d\s*(?:-|–|—|~|～|to|至|到)\s*$", re.IGNORECASE)
_DIGITS = {character: value for value, character in enumerate("一二三四五六七八九", start=1)} | {"两": 2}
_UNITS = {"十": 10, "百": 100, "千": 1000}


def asked_words(instruction: str) -> int | None:
    """Return the number of words or characters that an instruction asks for; None unless it names exactly one."""
    found = set()
    for match in _ASKED.finditer(instruction):
        if _RANGE.search(instruction[: match.start()]):
            return None
        number = _number((match[1] or match[2]).replace(",", ""))
        if number >= LEAST_WORDS:
            found.add(number)
    return found.pop() if len(found) == 1 else None


def _number(text: str) -> int:
    """Return the value of 2000, 5千, 1.5万 or 两千五百."""
    total = current = 0.0
    for part in re.findall(r"[\d.]+|.", text):
        if part[0].isdigit() and part[0].isascii():
            current = float(part.rstrip(".") if part.count(".") < 2 else 0)
        elif part in _DIGITS:
            current = _DIGITS[part]
        elif part in _UNITS:
            total, current = total + (current or 1) * _UNITS[part], 0.0
        elif part == "万":
            total, current = (total + current) * 10_000, 0.0
    return round(total + current)


def parse_plan(text: str) -> list[str]:
    """Return the lines of a plan that name a paragraph, its main point and its number of words, without headings."""
    found = [line.strip() for line in text.splitlines() if _PLAN_LINE.match(line.strip())]
    if not found:
        raise Unparsable("the answer has no line of the form `Paragraph 1 - Main Point: … - Word Count: 400`")
    return found


async def make(item: Item, client: Client, prompts: dict[str, Prompts], making: Making) -> Made:
    """Return the record of an instruction, or the reason why there is none."""
    own = prompts[language_of(item.text)]
    instruction, words = item.text, asked_words(item.text)
    if words is None:
        if not making.lengths or _ASKED.search(instruction):
            return Made("no_length", reason="the instruction must ask for exactly one number of words")
        words = making.lengths[drawn(making.seed, item.name, "length") % len(making.lengths)]
        instruction = own.filled("with_length", instruction=instruction, words=str(words))

    def messages(name: str, **values: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": own.filled(name, instruction=instruction, **values)}]

    answers: list[Answer] = [
        await client.ask(item.name, "plan", messages("plan"), making.sampling, parse_plan, making.parse_tries)
    ]
    if not answers[0].is_done:
        return Made.from_answer("plan", answers[0])
    steps = answers[0].parsed
    if len(steps) > making.max_paragraphs:
        return Made("plan_too_long", reason=f"the plan has {len(steps)} paragraphs, max_paragraphs is fewer")
    paragraphs: list[str] = []
    for number, step in enumerate(steps, start=1):
        asked = messages("write", plan="\n".join(steps), text="\n\n".join(paragraphs), step=step)
        answers.append(await client.ask(item.name, f"write/{number}", asked, making.sampling))
        if not answers[-1].is_done:
            return Made.from_answer(f"paragraph {number} of {len(steps)}", answers[-1])
        if not (paragraph := _LABEL.sub("", answers[-1].text).strip()):
            return Made(UNPARSABLE, reason=f"paragraph {number} of {len(steps)} is empty")
        paragraphs.append(paragraph)
    text = "\n\n".join(paragraphs)
    score = length_score(words, written := count_words(text))
    if score < making.min_length_score:
        return Made("length_score", reason=f"{written:,} words where {words:,} were asked for: S_l {score:.1f}")
    if making.passages.found_in(text):
        return Made("contaminated", reason="the text holds a passage of decontaminate")
    facts = {"words_asked": words, "words_written": written, "length_score": round(score, 1), "paragraphs": len(steps)}
    return question_and_answer(item, "agentwrite", instruction, text, own, answers, facts)
