"""GLM-Long's instructions from a model with a short context, about documents longer than that context.

One of three ways is drawn for a document (Zhipu AI, "GLM Long: Scaling Pre-trained Model Contexts to Millions", 2024):

    chunk     one stretch as long as the window                       →  a question and its answer
    chunks    stretches from all over the text, a window in total     →  a question over several of them, and its answer
    summary   summaries of all parts of a window's length, summarized
              again while they are longer than a window together      →  the answer to an instruction to summarize

The record asks the same question about the whole document.
"""

import re

from verl_ext.endpoint.answer import UNPARSABLE, Answer, Unparsable
from verl_ext.endpoint.client import Client
from verl_ext.synthesis.items import Item, drawn
from verl_ext.synthesis.prompts import Prompts
from verl_ext.synthesis.records import Made, Making, question_and_answer
from verl_ext.text.word_count import language_of

WAYS = ("chunk", "chunks", "summary")
STRETCHES = 4  # stretches of a text, for a question over several of them
_PAIR = re.compile(
    r"^[\s*#]*(?:Question|问题)[\s*]*[:：][\s*]*(.+?)\n[\s*#]*(?:Answer|答案|回答)[\s*]*[:：][\s*]*(.+)",
    re.IGNORECASE | re.DOTALL | re.MULTILINE,
)


def parse_pair(text: str) -> tuple[str, str]:
    """Return the question and the answer of a text of the form `Question: … Answer: …`."""
    found = _PAIR.search(text)
    if not found or not found[1].strip() or not found[2].strip():
        raise Unparsable("the answer is not of the form `Question: …`, `Answer: …`")
    return found[1].strip(), found[2].strip()


async def make(item: Item, client: Client, prompts: dict[str, Prompts], making: Making) -> Made:
    """Return the record of a document, or the reason why there is none."""
    way = WAYS[drawn(making.seed, item.name, "way") % len(WAYS)]
    own = prompts[language_of(item.text)]
    if way == "summary":
        return await _summary(item, client, own, making)
    assert making.lengths_of is not None
    number = 1 if way == "chunk" else STRETCHES
    spans, size = [], making.window // number
    for stretch in range(number):  # equal parts of the text; the start of a chunk in each part is drawn
        first, end = item.tokens * stretch // number, item.tokens * (stretch + 1) // number
        start = first + drawn(making.seed, item.name, "start", str(stretch)) % max(end - first - size + 1, 1)
        spans.append((start, min(start + size, end)))
    characters = making.lengths_of.characters(item.text, spans)
    text = "\n\n----------\n\n".join(item.text[begin:end] for begin, end in characters)
    tasks = own.below("tasks")
    task = tasks[drawn(making.seed, item.name, "task") % len(tasks)]
    name = "question" if way == "chunk" else "questions_over_parts"
    content = own.filled(name, text=text, task=own.texts[f"tasks.{task}"])
    answer = await client.ask(
        item.name, way, [{"role": "user", "content": content}], making.sampling, parse_pair, making.parse_tries
    )
    if not answer.is_done:
        return Made.from_answer(way, answer)
    question, reply = answer.parsed
    if making.passages.found_in(f"{question}\n{reply}"):
        return Made("contaminated", reason="the question or its answer holds a passage of decontaminate")
    facts = {"task": task, "spans": [list(span) for span in characters]}
    content = f"{item.text}\n\n{question}"
    return question_and_answer(item, f"glm_long_{way}", content, reply, own, [answer], facts)


async def _summary(item: Item, client: Client, own: Prompts, making: Making) -> Made:
    """Return the record of a summary, for which the model reads the text window by window."""
    assert making.lengths_of is not None
    count, answers, text, level = making.lengths_of, list[Answer](), item.text, 0
    while (tokens := count.count(text)) > making.window:
        level += 1
        starts = range(0, tokens, making.window)
        spans = count.characters(text, [(start, min(start + making.window, tokens)) for start in starts])
        summaries = []
        for number, (begin, end) in enumerate(spans, start=1):
            asked = [{"role": "user", "content": own.filled("part", text=text[begin:end])}]
            answers.append(await client.ask(item.name, f"part/{level}/{number}", asked, making.sampling))
            if not answers[-1].is_done:
                return Made.from_answer(f"part {number} of {len(spans)}", answers[-1])
            summaries.append(answers[-1].text)
        text = "\n\n".join(summaries)
        if count.count(text) >= tokens:
            return Made(UNPARSABLE, reason="the summaries of the parts are as long as the parts")
    names = own.below("summaries")
    name = names[drawn(making.seed, item.name, "task") % len(names)]
    instruction = own.texts[f"summaries.{name}"]
    asked = [{"role": "user", "content": own.filled("whole", text=text, instruction=instruction)}]
    answers.append(await client.ask(item.name, "whole", asked, making.sampling))
    if not answers[-1].is_done:
        return Made.from_answer("whole", answers[-1])
    if making.passages.found_in(answers[-1].text):
        return Made("contaminated", reason="the summary holds a passage of decontaminate")
    facts = {"task": name, "levels": level, "spans": [[0, len(item.text)]]}
    content = f"{item.text}\n\n{instruction}"
    return question_and_answer(item, "glm_long_summary", content, answers[-1].text, own, answers, facts)
