"""Chats of a shape that was proven for a template get the text and targets that rendering gives."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.test_tokenize_templates import CHATML, GENERATION, STRIPS_THINKING, chat, tiny_tokenizer
from verl_ext.text.chat.spans import locate
from verl_ext.text.chat.template import ChatTemplate
from verl_ext.text.chat.template_cache import ProvenChats
from verl_ext.text.records.records import parse_record

HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
TAIL = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TRIMS = HEAD + "{{ m.content | trim }}" + TAIL
# Templates whose text depends on a word of the message, each in a different way.
LOOKS = {
    "contains": "{{ 'X' if 'cat' in m.content }}{{ m.content }}",
    "starts": "{{ 'X' if m.content.startswith('cat') }}{{ m.content }}",
    "equals": "{{ 'X' if m.content == 'cat' }}{{ m.content }}",
    "splits": "{{ m.content.split('cat')[-1] }}",
    "replaces": "{{ m.content.replace('cat', 'dog') }}",
    "strips": "{{ m.content.strip('c') }}",
    "length": "{{ m.content | length }}{{ m.content }}",
    "letter": "{{ m.content[0] }}{{ m.content }}",
    "upper": "{{ m.content | upper }}",
    "json": "{{ m.content | tojson }}",
    "joined": "{% set t = ''.join([m.content]) %}{{ 'X' if 'cat' in t }}{{ t }}",
    "tilde": "{% set t = m.content ~ '' %}{{ 'X' if 'cat' in t }}{{ t }}",
    "block": "{% set t %}{{ m.content }}{% endset %}{{ 'X' if 'cat' in t }}{{ t }}",
    "added": "{% set t = '' + m.content %}{{ 'X' if 'cat' in t }}{{ t }}",
    "sought": "{{ 'X' if m.content in 'a cat sat' }}{{ m.content }}",
    "formatted": "{% set t = '%s' % m.content %}{{ 'X' if 'cat' in t }}{{ t }}",
}


class Counted(ChatTemplate):
    """A chat template that counts its renderings."""

    renders = 0

    def render(self, *arguments: Any, **named: Any) -> str:
        self.renders += 1
        return super().render(*arguments, **named)


def chats_of(template: str) -> ProvenChats:
    return ProvenChats(Counted(tiny_tokenizer(template), None, {}))


def test_chats_of_a_shape_seen_before_are_not_rendered() -> None:
    for template in (CHATML, GENERATION, STRIPS_THINKING, TRIMS):
        chats = chats_of(template)
        for number in range(3):
            chats.located(parse_record(chat(f"q {number}", f"a {number}")).content)
        before = chats.template.renders
        for number in range(100):
            chats.located(parse_record(chat(f"other {number}", f"word {number}")).content)
        assert chats.template.renders == before


words = st.text(st.sampled_from('catX \n"\\é<>/'), min_size=1, max_size=8) | st.sampled_from(
    ["cat", " cat ", "the cat", "cat sat", "a", "<think>\na\n</think>\n\nb", "</think>"]
)


@pytest.mark.parametrize("look", [*LOOKS.values(), "{{ m.content | trim }}"], ids=[*LOOKS, "trims"])
def test_what_a_template_sees_of_words_is_as_when_it_is_rendered(look: str) -> None:
    chats = chats_of(HEAD + look + TAIL)
    plain = ChatTemplate(tiny_tokenizer(HEAD + look + TAIL), None, {})
    for answer in ("dog", "dogs", "a bird", "cat", "the cat", "cats sat", " cat\n", 'a "cat"', "a"):
        content = parse_record(chat("hello", answer)).content
        try:
            expected: Any = locate(plain, content)
        except ValueError as error:
            expected = str(error)
        try:
            found: Any = chats.located(content)
        except ValueError as error:
            found = str(error)
        assert found == expected, answer


@settings(max_examples=60)
@given(st.lists(st.tuples(words, words), min_size=4, max_size=8), st.sampled_from([CHATML, STRIPS_THINKING, TRIMS]))
def test_any_words_give_what_rendering_gives(pairs: list[tuple[str, str]], template: str) -> None:
    chats, plain = chats_of(template), ChatTemplate(tiny_tokenizer(template), None, {})
    for question, answer in pairs:
        if answer.strip():
            content = parse_record(chat(question, answer)).content
            assert chats.located(content) == locate(plain, content)
