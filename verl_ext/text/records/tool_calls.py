"""Read tool calls and tool definitions in their several forms.

call        {"name": "f", "arguments": {"n": 1}}    or {"function": {…}}; the arguments may also be JSON text
tool        {"type": "function", "function": {"name": "f", "parameters": {…}}}    or the bare function
"""

from collections.abc import Iterable, Iterator
from typing import Any

from verl_ext.options import must
from verl_ext.text.read.bad_record import BadRecord, short_text
from verl_ext.text.read.json_records import from_json, parse_json

_FIELDS = {"name", "arguments", "id", "type", "index", "function"}  # of a call and of its function


def functions_called(messages: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield each tool call's function, with its name and arguments."""
    return (function_of(call) for message in messages for call in message.get("tool_calls") or [])


def function_of(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call's name and arguments, held by it or its function."""
    return call if call.get("function") is None else call["function"]


def read_calls(raw: Any, where: str) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """Read tool calls with objects as arguments, and arguments that were text."""
    calls, texts = from_json(raw, f"{where}: tool_calls"), {}
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and isinstance(function_of(call), dict) for call in calls
    ):
        raise BadRecord("bad_tools", f"{where}: tool_calls must be a list of objects, each with a function")
    read = []
    for number, call in enumerate(calls):
        function, place = function_of(call), f"{where}: arguments of tool call {number + 1}"
        given = function.get("arguments")
        others = [key for key in function.keys() - _FIELDS if function[key] is not None]
        if given is None and others and "arguments" in function:
            raise BadRecord("bad_arguments", must(place, "be a JSON object", f"null beside {', '.join(others)}"))
        if given is not None or not others:  # otherwise the template may read those others, such as `parameters`
            function = {**function, "arguments": _arguments(given, place)}
            if isinstance(given, str) and function["arguments"]:
                texts[number] = given
        read.append(function if function_of(call) is call else {**call, "function": function})
    return read, texts


def _arguments(given: Any, where: str) -> dict[str, Any]:
    """Return a call's arguments, nothing as an empty object. Raises `BadRecord`."""
    value, why = given, ""
    if isinstance(given, str):
        try:
            value = parse_json(given) if given.strip() else None
        except BadRecord as error:
            value, why = given, f": {error}"
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRecord("bad_arguments", must(where, "be a JSON object", f"{short_text(given)}{why}"))
    return value


def called(calls: Any, name: str) -> dict[str, Any]:
    """Return the assistant's message with calls, a list or JSON text."""
    calls = from_json(calls, name)
    if not isinstance(calls, list) or not all(isinstance(call, dict) and "name" in call for call in calls):
        raise BadRecord("bad_tools", f"{name} must be a list of tool calls, each with a name")
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": c} for c in calls]}


def tool_list(raw: Any, name: str) -> list[Any] | None:
    """Read tool definitions, also bare `functions`, from objects or JSON text."""
    if raw in (None, "", []):
        return None
    tools = from_json(raw, name)
    tools = [from_json(tool, name) for tool in tools] if isinstance(tools, list) else tools
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRecord("bad_tools", f"{name} must be a list of JSON schemas")
    return [_as_tool(tool, name) for tool in tools] or None


def _as_tool(tool: dict[str, Any], name: str) -> dict[str, Any]:
    """Wrap a bare function in the form of `tools`."""
    is_bare = isinstance(tool.get("name"), str) and tool.get("type") in (None, "function")
    if "function" in tool or not (is_bare or name == "functions"):
        return tool
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
