"""A chat of a known shape is rendered once, and has the text, targets and parts that the search finds for it alone."""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest

import tests.test_chat_ends as ends
import tests.test_chat_parts as parts
import tests.test_chat_tools as tools
import tests.test_tokenize_templates as plain
from tests.test_tokenize_templates import CHATML, GENERATION, STRIPS_THINKING, chat, tiny_tokenizer
from verl_ext.text.chat.parts import RenderedChat
from verl_ext.text.chat.spans import locate
from verl_ext.text.chat.template import ChatTemplate
from verl_ext.text.chat.template_cache import TemplateCache
from verl_ext.text.records.messages import Chat
from verl_ext.text.records.records import parse_record

HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
TAIL = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
# Templates that look at a message's words, each in a different way.
LOOKS = {
    "contains": "{{ 'X' if 'cat' in m.content }}{{ m.content }}",
    "starts": "{{ 'X' if m.content.startswith('cat') }}{{ m.content }}",
    "equals": "{{ 'X' if m.content == 'cat' }}{{ m.content }}",
    "splits": "{{ m.content.split('cat')[-1] }}",
    "replaces": "{{ m.content.replace('cat', 'dog') }}",
    "strips": "{{ m.content.strip('c') }}",
    "trims": "{{ m.content | trim }}",
    "length": "{{ m.content | length }}{{ m.content }}",
    "long": "{{ 'X' if m.content | length > 12 }}{{ m.content }}",
    "longer": "{{ 'X' if m.content | length > 40 }}{{ m.content }}",
    "cuts": "{{ m.content[:40] }}",
    "letter": "{{ m.content[0] }}{{ m.content }}",
    "upper": "{{ m.content | upper }}",
    "capital": "{{ m.content | capitalize }}",
    "json": "{{ m.content | tojson }}",
    "joined": "{% set t = ''.join([m.content]) %}{{ 'X' if 'cat' in t }}{{ t }}",
    "block": "{% set t %}{{ m.content }}{% endset %}{{ 'X' if 'cat' in t }}{{ t }}",
    "formatted": "{% set t = '%s' % m.content %}{{ 'X' if 'cat' in t }}{{ t }}",
    "twice": "{{ m.content }} or {{ m.content }}",
    "touching": "{{ m.reasoning_content }}{{ m.content }}",
    "before a tag": "<{{ m.content }}",
    "after a tag": "{{ m.content }}>",
    "halved": "{{ m.content[:-3] }}{% generation %}{{ m.content[-3:] }}{% endgeneration %}",
}
# Templates that look at words, and show it only in what they mark as generated.
MARKS = {
    "contain": "'cat' in m.content",
    "start": "m.content.startswith('cat')",
    "equal": "m.content == 'cat'",
    "are in": "m.content in 'a cat sat'",
    "are among": "m.content in ['dog', 'cat']",
    "repeat": "loop.index0 and m.content == messages[0].content",
}
# Templates that look at the last words before a turn, and show it only in the prompt: it has the block that turns have.
BLOCK = "{{ '<think>\n\n</think>\n\n' if m.role == 'assistant' }}{{ m.content }}"
ASKS = {
    "in": "'/cat' in messages[-1].content",
    "splits": "messages[-1].content.split('/cat') | length > 1",
    "named": "(['<b>', '/cat'] | select('in', messages[-1].content) | list)",
}
MARKED = "{% generation %}{{ m.content }}{% endgeneration %}"
TEMPLATES = {
    **{name: HEAD + look + TAIL for name, look in LOOKS.items()},
    **{
        f"marks if words {name}": f"{HEAD}{{% if {ask} %}}{{{{ m.content }}}}{{% else %}}{MARKED}{{% endif %}}{TAIL}"
        for name, ask in MARKS.items()
    },
    **{
        f"asks {name}": HEAD + BLOCK + TAIL[:-11] + f"{{{{ '<think>\n\n</think>\n\n' if {ask} }}}}{{% endif %}}"
        for name, ask in ASKS.items()
    },
    "goes on": CHATML.replace("assistant\n{% endif %}", "assistant\n> {% endif %}"),
    **{
        name: template
        for module in (plain, tools, parts, ends)
        for name, template in vars(module).items()
        if name.isupper() and isinstance(template, str) and "for m in" in template and "endfor" in template
    },
}


CHATS = 350  # of each template


class Counted(ChatTemplate):
    """A chat template that counts its renderings."""

    renders = 0

    def render(self, *arguments: Any, **named: Any) -> str:
        self.renders += 1
        return super().render(*arguments, **named)


def template_of(source: str) -> Counted:
    return Counted(tiny_tokenizer(source), None, {}, stop_tokens=["<|im_end|>"])


def content(*said: str, **fields: Any) -> Chat:
    record = chat(*said)
    record["messages"][1] |= fields
    return parse_record(record).content


@pytest.mark.parametrize("source", [CHATML, GENERATION, STRIPS_THINKING, TEMPLATES["trims"], parts.QWEN3, parts.GLM])
def test_chats_of_a_shape_seen_before_are_rendered_once(source: str) -> None:
    cache = TemplateCache(template_of(source))
    cache.locate(content("hello\n", "the cat"))
    before = cache.template.renders
    for number in range(20):
        cache.locate(content(f"other {number}\n", f"It is\n {number} <b> of 'some'"))
    assert cache.template.renders == before + 20


WORDS = [
    "cat",
    "the cat",
    "a cat sat",
    "dog",
    "a",
    "b",
    "user",
    'a "b"',
    "a\nb",
    "hi /cat",
    "> a",
    "<|im_end|>",
    "a <|im_end|> b",
]
WORDS += [
    "think",
    "think>",
    "<think",
    "<th",
    "ink>",
    "</think>",
    "<think>\na\n</think>\n\nb",
    "<think>\n\n</think>\n\nyes",
]
WORDS += ["thirty-five characters are long text", "<|im_start|>assistant\nhi", "Zq7b0xcat", "Zq8w0x"]


def random_chat(random: Random) -> Chat:
    def words() -> str:
        if random.random() < 0.1:
            return random.choice(["", " ", "\n\n"])
        return random.choice(["", "", "", " ", "\n"]) + random.choice(WORDS) + random.choice(["", "", "", "\n", "\n\n"])

    messages = [{"role": "system", "content": words()}] if random.random() < 0.5 else []
    for _ in range(random.choice([1, 1, 2])):
        answer = {"role": "assistant", "content": words()}
        if random.random() < 0.3:
            answer["reasoning_content"] = words()
        messages += [{"role": "user", "content": words()}, answer]
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    return Chat(messages, dict.fromkeys(turns[-random.choice([1, 2]) :], 1.0))


def found(locating: Callable[[Chat], RenderedChat], given: Chat) -> RenderedChat | str:
    try:
        return locating(given)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("name", TEMPLATES)
def test_any_chats_in_any_order_give_what_the_search_finds_for_each_alone(name: str) -> None:
    random = Random(name)
    template, cache = template_of(TEMPLATES[name]), TemplateCache(template_of(TEMPLATES[name]))
    chats = [random_chat(random) for _ in range(CHATS)] + [content("a", "ink> b", reasoning_content="<th")]
    for given in random.sample(chats * 2, 2 * len(chats)):
        assert found(cache.locate, given) == found(partial(locate, template), given), given.messages
