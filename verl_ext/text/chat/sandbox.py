"""transformers' sandbox for chat templates, faster for the most usual attributes.

    message.content        an item of a dict
    content.strip          a method of a string, unless it formats
    loop.first, ns.seen    what Jinja itself keeps; namespace()

The values are those of `ImmutableSandboxedEnvironment`, whose checks take half the time of a rendering.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import BuiltinMethodType
from typing import Any

from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from transformers.utils import chat_template_utils
from transformers.utils.chat_template_utils import _compile_jinja_template, _render_with_assistant_indices

_OF_DICTS = frozenset(dir(dict))
_OF_STRINGS = frozenset(name for name in dir(str) if not name.startswith("_")) - {"format", "format_map"}


class ChatSandbox(ImmutableSandboxedEnvironment):
    """The sandbox that transformers sets up for a template; `compiled` makes it."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an object's attribute or item as the sandbox allows it."""
        kind = type(obj)
        if kind is dict and attribute not in _OF_DICTS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        is_plain = kind is str and attribute in _OF_STRINGS
        if is_plain or ((kind is LoopContext or kind is Namespace) and not attribute.startswith("_")):
            try:
                return getattr(obj, attribute)
            except AttributeError:
                pass
        return super().getattr(obj, attribute)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call an object as the sandbox allows it."""
        is_plain = type(obj) is BuiltinMethodType and type(obj.__self__) is str and obj.__name__ in _OF_STRINGS
        if obj is Namespace or is_plain:
            kwargs.pop("_loop_vars", None)  # which Jinja passes to functions that ask for the context
            kwargs.pop("_block_vars", None)
            return obj(*args, **kwargs)
        return super().call(context, obj, *args, **kwargs)


@lru_cache
def compiled(source: str) -> Callable[[Mapping[str, Any]], str]:
    """Return a template's function from variables to text. Raises Jinja's errors."""
    sandbox = object.__new__(ChatSandbox)
    vars(sandbox).update(vars(_compile_jinja_template(source).environment))  # its filters, globals and extensions
    template = sandbox.from_string(source)
    shared = dict(template.globals)

    def render(variables: Mapping[str, Any]) -> str:
        context = sandbox.context_class(sandbox, {**shared, **variables}, template.name, template.blocks)
        return "".join(template.root_render_func(context))

    return render


def render_with_blocks(source: str, variables: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """Return a chat's text, and the spans of its `{% generation %}` blocks."""
    # Not by `render_jinja_template`, which from transformers 5.24 on takes no function, as `strftime_now` is one.
    given = {"documents": None, "add_generation_prompt": False, **variables}
    return _render_with_assistant_indices(_compile_jinja_template(source), **given)


def with_reasoning(messages: Sequence[Any]) -> list[Any]:
    """Return messages whose reasoning has every name that this transformers gives it."""
    alias = getattr(chat_template_utils, "_alias_reasoning_fields", list)  # from transformers 5.24 on
    return alias(messages)


def parsed(source: str) -> Any:
    """Return a template's syntax tree. Raises `TemplateSyntaxError`."""
    return _compile_jinja_template(source).environment.parse(source)
