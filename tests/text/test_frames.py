"""A chat of a known shape is rendered once, and has the text, targets and parts that the search finds for it alone."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest

from tests.lib import chat_templates
from tests.lib.chat_templates import (
    CHATML,
    GENERATION,
    GLM,
    HEAD,
    INSTRUCTIONS,
    QWEN3,
    STRIPS_THINKING,
    TAIL,
    chat,
    tiny_tokenizer,
)
from verl_ext.text.chat.frames import ArgumentCaches, FrameCache
from verl_ext.text.chat.parts import RenderedChat
from verl_ext.text.chat.spans import locate
from verl_ext.text.chat.template import ChatTemplate
from verl_ext.text.records.messages import Chat, TurnMask
from verl_ext.text.records.records import parse_record

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
    **chat_templates.TEMPLATES,
}


CHATS = 350  # of each template


class Counted(ChatTemplate):
    """A chat template that counts its renderings, with those of its copies."""

    def render(self, *arguments: Any, **named: Any) -> str:
        self.__dict__.setdefault("counts", []).append(1)
        return super().render(*arguments, **named)

    @property
    def renders(self) -> int:
        """The number of renderings so far."""
        return len(vars(self)["counts"])


def template_of(source: str, **arguments: Any) -> Counted:
    return Counted(tiny_tokenizer(source), None, arguments, stop_tokens=["<|im_end|>"])


def content(*said: str, **fields: Any) -> Chat:
    record = chat(*said)
    record["messages"][1] |= fields
    return parse_record(record).content


@pytest.mark.parametrize("source", [CHATML, GENERATION, STRIPS_THINKING, TEMPLATES["trims"], QWEN3, GLM])
def test_chats_of_a_shape_seen_before_are_rendered_once(source: str) -> None:
    cache = FrameCache(template_of(source))
    cache.locate(content("hello\n", "the cat"))
    before = cache.template.renders
    for number in range(20):
        cache.locate(content(f"other {number}\n", f"It is\n {number} <b> of 'some'"))
    assert cache.template.renders == before + 20


def test_thoughts_in_words_cost_no_search_of_a_template_that_does_not_look_for_them() -> None:
    cache = FrameCache(template_of(CHATML))
    cache.locate(content("hello", "the cat"))
    before = cache.template.renders
    rendered = cache.locate(content("hello", "<think>\nwhy\n</think>\n\nthe dog"))
    assert cache.template.renders == before + 1
    assert [border.kind for border in rendered.targets[0].borders] == ["reasoning", "answer", "end_of_turn"]


@pytest.mark.parametrize("prompt", ["> ", "Sure\n"])
def test_words_that_are_the_end_of_the_prompt_are_no_target(prompt: str) -> None:
    template = template_of(CHATML.replace("assistant\n{% endif %}", f"assistant\n{prompt}{{% endif %}}"))
    for said, learnt in ((prompt, "<|im_end|>"), (f"{prompt}a", "a<|im_end|>"), ("a", "a<|im_end|>")):
        rendered = FrameCache(template).locate(content("hello", said))
        assert [rendered.text[start:stop] for start, stop in rendered.spans] == [learnt]


WORDS = ["cat", "the cat", "a cat sat", "dog", "a", "b", "user", 'a "b"', "a\nb", "hi /cat", "> a", ">", "<|im_end|>"]
WORDS += ["a <|im_end|> b", "think", "think>", "<think", "<th", "ink>", "</think>", "<think>\na\n</think>\n\nb"]
WORDS += ["<think>\n\n</think>\n\nyes"]
WORDS += ["thirty-five characters are long text", "<|im_start|>assistant\nhi", "Zq7b0xcat", "Zq7w0x", "Zq8w0x"]


def random_chat(random: Random) -> Chat:
    def words() -> str:
        if random.random() < 0.1:
            return random.choice(["", " ", "\n\n"])
        after = random.choice(["", "", "", " ", "\n", "\n\n"])
        return random.choice(["", "", "", " ", "\n"]) + random.choice(WORDS) + after

    messages = [{"role": "system", "content": words()}] if random.random() < 0.5 else []
    for _ in range(random.choice([1, 1, 2])):
        answer = {"role": "assistant", "content": words()}
        if random.random() < 0.3:
            answer["reasoning_content"] = words()
        messages += [{"role": "user", "content": words()}, answer]
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    masks = {}
    if random.random() < 0.1:
        length = len(messages[turns[-1]]["content"])
        masks[turns[-1]] = TurnMask(stretches={"content": [(length // 2, 0.0), (length, 1.0)]})
    return Chat(messages, dict.fromkeys(turns[-random.choice([1, 2]) :], 1.0), masks=masks)


def found(locating: Callable[[Chat], RenderedChat], given: Chat) -> RenderedChat | str:
    try:
        return locating(given)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("name", TEMPLATES)
def test_any_chats_in_any_order_give_what_the_search_finds_for_each_alone(name: str) -> None:
    random = Random(name)
    template, cache = template_of(TEMPLATES[name]), FrameCache(template_of(TEMPLATES[name]))
    chats = [random_chat(random) for _ in range(CHATS)] + [content("a", "ink> b", reasoning_content="<th")]
    for given in random.sample(chats * 2, 2 * len(chats)):
        assert found(cache.locate, given) == found(partial(locate, template), given), given.messages


ARGUED = {
    "instructions": INSTRUCTIONS,
    "shown in the prompt": TEMPLATES["asks in"].replace("'/cat' in", "xml_tools and '/cat' in"),
    "said in a turn": HEAD + "{{ custom_instructions if m.role == 'assistant' }}{{ m.content }}" + TAIL,
    "sought": HEAD + "{{ '<think>' if '/cat' in custom_instructions }}{{ m.content }}" + TAIL,
    "counted": HEAD + "{{ 'X' * (xml_tools or []) | length }}{{ m.content }}" + TAIL,
    "last": HEAD + "{{ m.content }}" + TAIL + "{{ custom_instructions if not add_generation_prompt }}",
}


def random_arguments(random: Random) -> dict[str, Any]:
    instructions = random.choice(["", "a", "hi /cat", "Be kind to cats.", "<think>a</think>", "Zq7b0x", "cat"])
    tools = [random.choice(["a tool", {"name": "sit", "n": 3}, "/no_think"]) for _ in range(random.randrange(4))]
    arguments = {"custom_instructions": instructions, "xml_tools": tools, "enable_thinking": random.random() < 0.5}
    return {name: value for name, value in arguments.items() if name == "custom_instructions" or random.random() < 0.7}


@pytest.mark.parametrize("name", ARGUED)
def test_any_arguments_in_any_order_give_what_a_template_of_them_alone_gives(name: str) -> None:
    random = Random(name)
    caches, alone = ArgumentCaches(template_of(ARGUED[name], custom_instructions="")), []
    for _ in range(CHATS):
        given, arguments = random_chat(random), random_arguments(random)
        alone = found(partial(locate, template_of(ARGUED[name], **arguments)), given)
        located = caches.of(arguments).locate
        assert found(located, replace(given, template_kwargs=arguments)) == alone, (given.messages, arguments)


def test_other_words_in_arguments_cost_a_probe_and_no_search() -> None:
    template = template_of(INSTRUCTIONS)
    caches, record = ArgumentCaches(template), content("hello", "the cat")
    costs = []
    for number in range(20):
        arguments = {"custom_instructions": f"Be kind {number}.", "xml_tools": [f"tool {n}" for n in range(number + 1)]}
        before = template.renders
        caches.of(arguments).locate(replace(record, template_kwargs=arguments))
        costs.append(template.renders - before)
    assert max(costs[1:]) <= 5 < costs[0]
