"""Read a chat template's Jinja source: what it names, compares and seeks."""

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from jinja2 import TemplateSyntaxError, nodes

LONGEST_SOUGHT = 64  # the maximum length of a variable's value that may be sought in words; prompts are longer
# Methods whose constant arguments are compared with the ends of words, and methods that look at nothing in words. The
# arguments of others are sought anywhere in them.
_AT_ENDS = ("startswith", "endswith", "removeprefix", "removesuffix")
_BLIND = ("strip", "lstrip", "rstrip", "get", "join", "append")


class TemplateSource(NamedTuple):
    """What a template names.

    Attributes:
        names: every word of the source, such as those of fields and arguments.
        message_fields: the fields that it reads of messages.
        roles: the texts that it compares with a message's role.
        sought: the texts that it may seek anywhere in words.
        compared: the texts that it may compare with words, or with their ends.
    """

    names: frozenset[str]
    message_fields: frozenset[str]
    roles: frozenset[str]
    sought: tuple[str, ...]
    compared: tuple[str, ...]

    def is_blind_to(self, texts: Sequence[str]) -> bool:
        """Return whether the template takes the same way for these texts as for any other ones."""
        together = "\0".join(texts)
        for sought in self.sought:
            if sought in together:
                return False
        return not any(text.startswith(self.compared) or text.endswith(self.compared) for text in texts)


@lru_cache
def read_source(sources: Sequence[str]) -> TemplateSource:
    """Read the sources of a template; of one that cannot be parsed, the names alone."""
    from verl_ext.text.chat.sandbox import parsed  # here: the writing process does not need transformers

    names = frozenset(re.findall(r"\w+", "\n".join(sources)))
    try:
        trees = [parsed(source) for source in sources]
    except TemplateSyntaxError:
        return TemplateSource(names, frozenset(), frozenset(), ("",), ())
    sought, compared = _constants(trees)
    fields = frozenset(field for tree in trees for field in _message_fields(tree))
    return TemplateSource(names, fields, frozenset(role for tree in trees for role in _roles(tree)), sought, compared)


def _field(node: nodes.Node) -> tuple[nodes.Node, str] | None:
    """Return what a node reads a field of, and the field's name; None if it reads none."""
    if isinstance(node, nodes.Getattr):
        return node.node, node.attr
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return node.node, str(node.arg.value)
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr == "get":
        names = [arg.value for arg in node.args[:1] if isinstance(arg, nodes.Const)]
        return (node.node.node, str(names[0])) if names else None
    return None


def _message_fields(tree: nodes.Node) -> Iterator[str]:
    def mentions_messages(node: nodes.Node) -> bool:
        names = [node, *node.find_all(nodes.Name)]
        return any(isinstance(name, nodes.Name) and "message" in name.name for name in names)

    # The variables that loops over messages set.
    loops = [loop.target for loop in tree.find_all(nodes.For) if mentions_messages(loop.iter)]
    messages = {target.name for target in loops if isinstance(target, nodes.Name)}
    for node in tree.find_all((nodes.Getattr, nodes.Getitem, nodes.Call)):
        if (read := _field(node)) is not None:
            holder = read[0].node if isinstance(read[0], nodes.Getitem) else read[0]
            if isinstance(holder, nodes.Name) and (holder.name in messages or "message" in holder.name):
                yield read[1]


def _roles(tree: nodes.Node) -> Iterator[str]:
    for node in tree.find_all((nodes.Compare, nodes.Test, nodes.Filter)):
        parts = [node, *node.find_all((nodes.Name, nodes.Getattr, nodes.Getitem, nodes.Call))]
        reads_role = any((read := _field(part)) and read[1] == "role" for part in parts)
        names_role = any(isinstance(part, nodes.Name) and "role" in part.name for part in parts)
        texts = {const.value for const in node.find_all(nodes.Const) if isinstance(const.value, str)}
        if reads_role or names_role or "role" in texts:
            yield from texts


def _constants(trees: Sequence[nodes.Node]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the texts that a template may seek in words, and those that it may compare.

    Words without them take the same way through the template as stand-ins.
    """
    compared: set[str] = set()
    sought: set[str] = set()

    def strings(node: nodes.Node) -> Iterator[str]:
        if isinstance(node, nodes.Const) and isinstance(node.value, str) and node.value:
            yield node.value
        for child in node.iter_child_nodes(["arg"] if isinstance(node, nodes.Getitem) else None):
            yield from strings(child)

    for tree in trees:
        # What stands beside `in` or is a method's argument may be sought anywhere in words; what is compared, at ends.
        for node in tree.find_all((nodes.Compare, nodes.Call, nodes.Filter, nodes.List, nodes.Tuple, nodes.Assign)):
            if isinstance(node, nodes.Compare):
                for operand in node.ops:
                    is_search = operand.op in ("in", "notin")
                    (sought if is_search else compared).update(strings(node.expr))
                    compared.update(strings(operand.expr))
                    if is_search and isinstance(operand.expr, nodes.Const):
                        sought.add("")  # words are sought in a text, so that none are plain
            elif isinstance(node, nodes.Filter):
                sought.update(text for given in node.args if node.name == "replace" for text in strings(given))
            elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):
                if (method := node.node.attr) not in _BLIND:
                    to = compared if method in _AT_ENDS else sought
                    to.update(text for given in node.args for text in strings(given))
            elif not isinstance(node, nodes.Call):  # a list or a variable, which may be used in any way
                for text in strings(node):
                    if len(text) <= LONGEST_SOUGHT:
                        (compared if text.isalnum() or not re.search(r"\w", text) else sought).add(text)
    return tuple(sought), tuple(compared)
