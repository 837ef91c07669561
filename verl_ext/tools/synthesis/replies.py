"""What models write beside the answers that were asked for: refusals in words, JSON, yes and no."""

import json
import re
from dataclasses import replace
from typing import Any

from verl_ext.options import one_line
from verl_ext.tools.endpoint.answer import REFUSED, Answer

_LONGEST_REFUSAL = 600  # characters; a longer text is an answer, whatever it begins with
_SORRY = r"(?:i['’]m|i am) (?:so |very |really )?(?:sorry|afraid)|(?:my )?apologies|sorry|i apologi[sz]e|unfortunately"
_MODEL = r"as an ai(?: language)?(?: model| assistant)?"
_CANNOT = (
    r"i (?:\w+ly )?(?:can(?:no|['’])?t|can not|will not|won['’]t|(?:must|have to) decline to)"
    r"|i(?:['’]m| am) (?:\w+ly )?(?:unable|not able|not allowed) to"
)
_ASKED = (
    "assist|help|comply|fulfill?|provide|support|engage|continue|do (?:this|that)|write|create|generate|discuss|produce"
    "|accommodate|participate|answer (?:this|that|the) (?:request|question)"
)
_CHINESE = (
    r"(?:(?:很|非常|十分)?(?:抱歉|遗憾)|对不起|作为(?:一个|一名)?(?:AI|人工智能)[^，。,]{0,12})?[，,、。\s]*(?:但是?)?我?(?:目前)?"
    r"(?:不能|无法|不可以|没法)(?:协助|帮助|帮您|帮你|为您|为你|提供|满足|回答|处理|完成|继续|生成|撰写|写|讨论)"
)
_REFUSAL = re.compile(
    rf"^\W*(?:(?:(?:{_SORRY}|{_MODEL})\W+(?:but )?(?:that )?)*(?:{_CANNOT}) (?:\w+ly )?(?:{_ASKED})\b|{_CHINESE})",
    re.IGNORECASE,
)


def refused_in_words(answer: Answer, text: str | None = None) -> Answer:
    """Mark a finished answer as refused if its words refuse.

    text: the part of the answer that is read; None: all of it.
    """
    if not answer.is_done:
        return answer
    said = answer.text if text is None else text
    if len(said) > _LONGEST_REFUSAL or not _REFUSAL.match(said):
        return answer
    return replace(answer, outcome=REFUSED, reason=f"the answer is a refusal: {one_line(said[:80])}")


def json_in(text: str) -> Any:
    """Return the JSON of a text or code block, or None."""
    block = re.fullmatch(r"(?:.*?```(?:json)?\s*\n)?\s*([\[{].*[\]}])\s*(?:```.*)?", text.strip(), re.DOTALL)
    try:
        return json.loads(block[1], strict=False) if block else None
    except ValueError:
        return None


def yes_or_no(label: str, text: str) -> list[bool]:
    """Return the answers of the form `Label: yes` in a text. label: a pattern of its names."""
    found = re.findall(rf"(?:{label})[\s*_\"']*[:：][\s*_\"']*(yes|no|是|否|不是)", text, re.IGNORECASE)
    return [word.lower() in ("yes", "是") for word in found]
