"""Tools that a request offers, and the grammar of an answer that has to call one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from foretoken.config.keywords import check_unicode
from foretoken.config.structured import MAX_CHARACTERS
from foretoken.serve.calls import BETWEEN, CLOSE, HEAD, OPEN, TAIL, CallReader, ForcedReader
from foretoken.serve.errors import ApiError
from foretoken.serve.fields import Fields, shown, wrong_field

MOST_OF_NAME = 256
"""Characters in the name of a tool that is to be called."""
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""Arguments of a tool that names none, as in the OpenAI API."""
SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space of arguments: as templates write those of earlier calls, and nowhere else."""


@dataclass(frozen=True)
class Tools:
    """What the model may call, or must.

    Args:
      offered: through the template.
      forced: those of which one has to be called; none where the model may say anything.
      is_named: whether the request names the one.
      is_single: whether one call is all that may come.
    """

    offered: list[dict[str, Any]]
    forced: tuple[dict[str, Any], ...] = ()
    is_named: bool = False
    is_single: bool = False

    def reader(self) -> CallReader | ForcedReader | None:
        """What takes calls out of a text; None where there are none in it."""
        if self.forced:
            return ForcedReader(self.is_named)
        return CallReader() if self.offered else None

    @property
    def form(self) -> dict[str, Any] | None:
        """What the output must match, as ``structured_outputs`` has it; None for anything."""
        if not self.forced:
            return None
        places = range(len(self.forced))
        call = f"{_quoted(HEAD)} ({' | '.join(f'tool_{place}' for place in places)}) {_quoted(TAIL)}"
        rules = [f"start: call{'' if self.is_single else _more()}", f"call: {call}"]
        for place, tool in zip(places, self.forced, strict=True):
            function = tool["function"]
            name = json.dumps(function["name"], ensure_ascii=False)
            rules.append(f"tool_{place}: {_quoted(name + BETWEEN)} arguments_{place}")
            rules.append(f"arguments_{place}: %json {json.dumps(_schema(function))}")
        return {"grammar": "\n".join(["%llguidance {}", *rules])}


def _more() -> str:
    return f" ({_quoted(chr(10))} call)*"


def _quoted(text: str) -> str:
    """A text in a grammar."""
    return json.dumps(text, ensure_ascii=False)


def _schema(function: dict[str, Any]) -> dict[str, Any]:
    """Of the arguments of a function, which are an object."""
    return {**(function.get("parameters") or NOTHING), "type": "object", "x-guidance": SPACED}


def read_tools(given: Fields, parser: str | None, template: str) -> Tools:
    """The tools of a request.

    Raises: ApiError where tools cannot be offered, or none of those that are to be called can be forced.
    """
    tools, choice = given.get("tools"), given.get("tool_choice")
    if tools is None or tools == []:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice is given without tools", "tool_choice")
        return Tools([])
    if not isinstance(tools, list) or not all(_is_tool(tool) for tool in tools):
        wrong_field("tools", tools, "a list of {type: 'function', function: {name: ...}}")
    if choice == "none":
        return Tools([])
    if parser is None:
        raise ApiError(400, "tools need a parser of calls; start the server with --tool-call-parser hermes", "tools")
    if "tools" not in template:
        raise ApiError(
            400, "the chat template of this model has no tools; start the server with --chat-template FILE", "tools"
        )
    if choice in (None, "auto"):
        return Tools(tools)
    found = Tools(tools, _forced(tools, choice, template), choice != "required", _is_single(given, choice))
    _check_size(found)
    return found


def _check_size(tools: Tools) -> None:
    """Raises: ApiError for schemas that are too long, or too deep, for a grammar."""
    try:
        size = len((tools.form or {"grammar": ""})["grammar"])
    except RecursionError:
        raise ApiError(400, "the parameters of a tool are nested too deeply; make them flatter", "tools") from None
    if size > MAX_CHARACTERS:
        message = f"tools of which one has to be called have {size} characters, and may have {MAX_CHARACTERS}"
        raise ApiError(400, f"{message}; offer fewer, or name one", "tools")


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _is_single(given: Fields, choice: Any) -> bool:
    return not given.flag("parallel_tool_calls", True) or choice != "required"


def _forced(tools: list[dict[str, Any]], choice: Any, template: str) -> tuple[dict[str, Any], ...]:
    """Those of the tools of which one has to be called.

    Raises: ApiError for one that is not there, or cannot be called by a grammar.
    """
    if OPEN not in template or CLOSE not in template or "<function=" in template:
        raise ApiError(
            400,
            f"a call can be forced in the format {OPEN}{{...}}{CLOSE} alone, and the chat template of this model has "
            "another; use tool_choice 'auto' or 'none'",
            "tool_choice",
        )
    if choice != "required":
        wanted = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
        if not isinstance(wanted, dict) or not isinstance(wanted.get("name"), str):
            wrong_field(
                "tool_choice", choice, "'none', 'auto', 'required' or {type: 'function', function: {name: ...}}"
            )
        name = wanted["name"]
        tools = [tool for tool in tools if tool["function"]["name"] == name]
        if not tools:
            raise ApiError(400, f"tool_choice names {shown(name)}, which is none of the tools", "tool_choice")
    for place, tool in enumerate(tools):
        _check_function(tool["function"], f"tools[{place}].function")
    return tuple(tools)


def _check_function(function: dict[str, Any], where: str) -> None:
    """Raises: ApiError, PromptError for a function that no grammar can call."""
    name, parameters = function["name"], function.get("parameters")
    if not 0 < len(name) <= MOST_OF_NAME:
        wrong_field(f"{where}.name", name, f"a text of 1 to {MOST_OF_NAME} characters")
    check_unicode(name, f"{where}.name")
    if parameters is not None and not isinstance(parameters, dict):
        wrong_field(f"{where}.parameters", parameters, "a JSON schema")
    if (kind := (parameters or NOTHING).get("type", "object")) != "object":
        wrong_field(f"{where}.parameters.type", kind, "'object'")
