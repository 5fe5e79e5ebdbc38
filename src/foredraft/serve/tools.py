"""Tools of a request, the older ``functions``, and grammars for responses that must call a tool."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from foredraft.config.keywords import check_unicode
from foredraft.config.structured import MAX_CHARACTERS
from foredraft.errors import GrammarError
from foredraft.serve.calls import BETWEEN, CLOSE, HEAD, OPEN, TAIL, CallReader
from foredraft.serve.errors import ApiError
from foredraft.serve.fields import Fields, shown, wrong_field
from foredraft.structured.schemas import prepared

MOST_OF_NAME = 256
"""Maximum number of characters in the name of a tool that a grammar calls."""
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""Schema of the arguments of a tool without ``parameters``, as in the OpenAI API."""
TEXT = r"TEXT: /(.|\n)*/"
NO_CALL = rf"NO_CALL: /(.|\n)*/ & ~/(.|\n)*{OPEN}(.|\n)*/"
"""Grammar terminals: any text (`TEXT`), and any text in which no call begins (`NO_CALL`)."""
SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space in the arguments of a call, exactly as chat templates write the calls of earlier responses."""
ANY: dict[str, Any] = {"type": "object", "x-guidance": SPACED}
"""Schema of the arguments of a tool that is not strict, used when another tool is strict."""
OLD = ("functions", "function_call")


@dataclass(frozen=True)
class Tools:
    """Tools of a request, and the rules for calling them.

    Args:
      offered: tools that the chat template shows to the model.
      forced: tools of which the model must call one; empty if the model may also write text.
      strict: all callable tools if at least one of them is ``strict``; empty if calls are not constrained.
      is_named: whether the request names the tool to call.
      is_single: whether the response may contain only one call.
      has_tags: whether the tokenizer has one token for each of the tags around a call; no other tokens can then spell
        the tags.
    """

    offered: list[dict[str, Any]]
    forced: tuple[dict[str, Any], ...] = ()
    strict: tuple[dict[str, Any], ...] = ()
    is_named: bool = False
    is_single: bool = False
    has_tags: bool = False

    def reader(self) -> CallReader | None:
        """Return a parser of the calls in the output; None if no tools are offered."""
        if not self.offered:
            return None
        return CallReader(is_single=self.is_single, is_forced=bool(self.forced), is_named=self.is_named)

    @property
    def annotations(self) -> tuple[str, ...]:
        """Keywords in the schemas of grammar-constrained arguments that the grammar does not enforce.

        Raises: GrammarError.
        """
        held = [tool["function"] for tool in self.forced or self.strict]
        held = held if self.forced else [function for function in held if function.get("strict") is True]
        return tuple(dict.fromkeys(one for function in held for one in _prepared(function)[1]))

    @property
    def form(self) -> dict[str, Any] | None:
        """Output constraint in the form of ``structured_outputs``; None if the output is free."""
        tools = self.forced or self.strict
        if not tools:
            return None
        places = range(len(tools))
        opened, closed = (OPEN, CLOSE) if self.has_tags else (_quoted(OPEN), _quoted(CLOSE))
        call = f"{_quoted(HEAD.removeprefix(OPEN))} ({' | '.join(f'tool_{place}' for place in places)})"
        call += f" {_quoted(TAIL.removesuffix(CLOSE))} {closed}"
        if self.forced:
            rules = [f"start: call{'' if self.is_single else _more()}", f"call: {opened} {call}"]
        else:
            rules = [f"start: call{'?' if self.is_single else '*'} NO_CALL", f"call: opened {call}", NO_CALL, TEXT]
            rules.append(f"opened: NO_CALL {OPEN}" if self.has_tags else f"opened[lazy]: TEXT {_quoted(OPEN)}")
        for place, tool in zip(places, tools, strict=True):
            function = tool["function"]
            name = json.dumps(function["name"], ensure_ascii=False)
            rules.append(f"tool_{place}: {_quoted(name + BETWEEN)} arguments_{place}")
            schema = _schema(function) if self.forced or function.get("strict") is True else ANY
            rules.append(f"arguments_{place}: %json {json.dumps(schema)}")
        return {"grammar": "\n".join(["%llguidance {}", *rules])}


def _more() -> str:
    return f" ({_quoted(chr(10))} call)*"


def _quoted(text: str) -> str:
    """Quote text for a grammar."""
    return json.dumps(text, ensure_ascii=False)


def _schema(function: dict[str, Any]) -> dict[str, Any]:
    """Schema of the arguments of a function, with the fixed white space."""
    return {**_prepared(function)[0], "x-guidance": SPACED}


def _prepared(function: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the schema of a function's arguments and the keywords in it that the grammar does not enforce.

    Raises: GrammarError.
    """
    try:
        return prepared({**(function.get("parameters") or NOTHING), "type": "object"})
    except (ValueError, RecursionError) as error:
        raise GrammarError(str(error)) from None


def read_tools(given: Fields, parser: str | None, template: str, tokenizer: Any) -> Tools:
    """Parse the tools of a request.

    ``strict`` is added to the ignored fields if the model may choose whether to call a tool and grammars do not support
    the call format of the template.

    Raises: ApiError if the tools cannot be offered, or a required call cannot be forced.
    """
    tools, choice = given.get("tools"), given.get("tool_choice")
    if tools is None or tools == []:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice is set, but there are no tools; send tools", "tool_choice")
        return Tools([])
    if not isinstance(tools, list):
        wrong_field("tools", tools, "a list of {type: 'function', function: {name: ...}}")
    for place, tool in enumerate(tools):
        refuse_custom(tool, f"tools[{place}]")
        if not _is_tool(tool):
            wrong_field(f"tools[{place}]", tool, "{type: 'function', function: {name: ...}}")
    if choice == "none":
        return Tools([])
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        tools, choice = _allowed(tools, choice.get("allowed_tools"))
    if parser is None:
        raise ApiError(
            400, "tools need a parser of tool calls; start the server with --tool-call-parser hermes", "tools"
        )
    if "tools" not in template:
        raise ApiError(
            400,
            "the chat template of this model does not support tools; start the server with --chat-template FILE",
            "tools",
        )
    has_tags = {OPEN, CLOSE} <= tokenizer.get_added_vocab().keys()
    if choice in (None, "auto"):
        is_single = not given.flag("parallel_tool_calls", True)
        found = Tools(tools, strict=_strict(tools, template, given), is_single=is_single, has_tags=has_tags)
    else:
        forced, is_single = _forced(tools, choice, template), _is_single(given, choice)
        found = Tools(tools, forced, is_named=choice != "required", is_single=is_single, has_tags=has_tags)
    _check_size(found)
    return found


def _allowed(tools: list[dict[str, Any]], allowed: Any) -> tuple[list[dict[str, Any]], str]:
    """Return the allowed tools, and the mode "auto" or "required". All other tools are left out of the prompt.

    Raises: ApiError for an invalid choice, or a tool that is not among the tools of the request.
    """
    given = allowed if isinstance(allowed, dict) else {}
    mode, choices = given.get("mode"), given.get("tools")
    if (
        mode not in ("auto", "required")
        or not isinstance(choices, list)
        or not choices
        or not all(map(_is_tool, choices))
    ):
        what = "{mode: 'auto' or 'required', tools: [{type: 'function', function: {name: ...}}]}"
        wrong_field("tool_choice.allowed_tools", allowed, what)
    names = {choice["function"]["name"] for choice in choices}
    if missing := names - {tool["function"]["name"] for tool in tools}:
        message = f"tool_choice names {shown(min(missing))}, which is not among the tools of the request"
        raise ApiError(400, message, "tool_choice")
    return [tool for tool in tools if tool["function"]["name"] in names], mode


def _strict(tools: list[dict[str, Any]], template: str, given: Fields) -> tuple[dict[str, Any], ...]:
    """Return all tools if one of them is ``strict``. Each call that the model begins then follows the schema of its
    tool.

    Raises: ApiError, PromptError for a tool that a grammar cannot call.
    """
    if not any(tool["function"].get("strict") is True for tool in tools):
        return ()
    if not _has_format(template) or find_spec("llguidance") is None:
        given.unknown.append("tools.function.strict")
        return ()
    return _checked(tools)


def _check_size(tools: Tools) -> None:
    """Refuse schemas that are too long or too deeply nested for a grammar.

    Raises: ApiError.
    """
    try:
        size = len((tools.form or {"grammar": ""})["grammar"])
    except RecursionError:
        raise ApiError(400, "the parameters of a tool are nested too deeply; make them flatter", "tools") from None
    if size > MAX_CHARACTERS:
        message = f"the grammar for calls of these tools has {size} characters; the limit is {MAX_CHARACTERS}"
        raise ApiError(400, f"{message}; offer fewer tools, or name one in tool_choice", "tools")


def refuse_custom(tool: Any, where: str) -> None:
    """Refuse a custom tool. A custom tool has input that is not JSON, but the input of every call in Hermes format is
    JSON.

    Raises: ApiError.
    """
    if isinstance(tool, dict) and tool.get("type") == "custom":
        message = (
            f"{where} is custom, but the model can only call functions; offer a function with a parameter of type "
        )
        message += "'string' instead"
        raise ApiError(400, message, where, "unsupported_field")


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _is_single(given: Fields, choice: Any) -> bool:
    return not given.flag("parallel_tool_calls", True) or choice != "required"


def _forced(tools: list[dict[str, Any]], choice: Any, template: str) -> tuple[dict[str, Any], ...]:
    """Return the tools of which the model must call one.

    Raises: ApiError for a tool that is not among the tools of the request, or that a grammar cannot call.
    """
    if not _has_format(template):
        raise ApiError(
            400,
            f"a call can be forced only in the format {OPEN}{{...}}{CLOSE}, and the chat template of this model uses "
            "another format; use tool_choice 'auto' or 'none'",
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
            message = f"tool_choice names {shown(name)}, which is not among the tools of the request"
            raise ApiError(400, message, "tool_choice")
    return _checked(tools)


def _has_format(template: str) -> bool:
    """Whether a template writes calls in the format of the grammars."""
    return OPEN in template and CLOSE in template and "<function=" not in template


def _checked(tools: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Check that a grammar can call every tool.

    Raises: ApiError, PromptError.
    """
    for place, tool in enumerate(tools):
        _check_function(tool["function"], f"tools[{place}].function")
    return tuple(tools)


def _check_function(function: dict[str, Any], where: str) -> None:
    """Check that a grammar can call a function.

    Raises: ApiError, PromptError.
    """
    name, parameters = function["name"], function.get("parameters")
    if not 0 < len(name) <= MOST_OF_NAME:
        wrong_field(f"{where}.name", name, f"a string of 1 to {MOST_OF_NAME} characters")
    check_unicode(name, f"{where}.name")
    if parameters is not None and not isinstance(parameters, dict):
        wrong_field(f"{where}.parameters", parameters, "a JSON schema")
    if (kind := (parameters or NOTHING).get("type", "object")) != "object":
        wrong_field(f"{where}.parameters.type", kind, "'object'")


def with_tools(body: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Convert the older fields ``functions`` and ``function_call`` to tools, with at most one call.

    Returns: the converted body, and whether it had functions.
    Raises: ApiError for functions together with tools, a ``function_call`` without functions, or invalid values.
    """
    functions, choice = (body.get(name) for name in OLD)
    if functions is None or functions == []:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "function_call is set, but there are no functions; send functions", "function_call")
        return body, False
    for name in ("tools", "tool_choice"):
        if body.get(name):
            raise ApiError(400, f"functions and {name} are both set; leave one of them out", name)
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
    """Convert the first tool call, or a piece of it, to the older field ``function_call`` of a message."""
    return {"function_call": calls[0]["function"]}
