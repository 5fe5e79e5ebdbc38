"""``functions`` and ``function_call``: tools as the OpenAI API had them before there could be several calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foretoken.serve.errors import ApiError
from foretoken.serve.fields import wrong_field

OLD = ("functions", "function_call")


def with_tools(body: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """A body that has its functions as tools, of which one alone is called, and whether it had any.

    Raises: ApiError for functions beside tools, a call without functions, and what is neither.
    """
    functions, choice = (body.get(name) for name in OLD)
    if functions is None or functions == []:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "function_call is given without functions", "function_call")
        return body, False
    for name in ("tools", "tool_choice"):
        if body.get(name):
            raise ApiError(400, f"functions and {name} are given; leave one of them out", name)
    if not isinstance(functions, list):
        wrong_field("functions", functions, "a list of {name: ..., parameters: ...}")
    for place, function in enumerate(functions):
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            wrong_field(f"functions[{place}]", function, "{name: ..., parameters: ...}")
    if choice not in (None, "none", "auto"):
        if not isinstance(choice, dict) or choice.get("name") not in [function["name"] for function in functions]:
            wrong_field("function_call", choice, "'none', 'auto', or {name: ...} of one of the functions")
        choice = {"type": "function", "function": {"name": choice["name"]}}
    rest = {name: value for name, value in body.items() if name not in OLD}
    tools = [{"type": "function", "function": function} for function in functions]
    return rest | {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}, True


def called(calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first of some calls of tools, or a piece of it, as the field of a message that told the one of a function."""
    return {"function_call": calls[0]["function"]}
