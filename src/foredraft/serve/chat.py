"""``/v1/chat/completions``: parsing of requests and format of responses."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from foredraft.config.keywords import check_unicode
from foredraft.config.other_systems import UnsupportedOption
from foredraft.engine.frontend import RequestOutput, StreamOutput
from foredraft.errors import ConfigError, GrammarError, PromptError
from foredraft.prompts.prompts import chat_text
from foredraft.prompts.templates import NOT_VARIABLES
from foredraft.serve.calls import message_of
from foredraft.serve.errors import ApiError
from foredraft.serve.fields import REFUSED, SHARED, Fields, shown, text_of, wrong_field
from foredraft.serve.form import ChoicesForm
from foredraft.serve.parsed_request import ParsedRequest, read_form, read_request, with_prompts
from foredraft.serve.served import Served
from foredraft.serve.settings import ServerSettings
from foredraft.serve.strict_json import is_unicode, strict_json
from foredraft.serve.tokens import chat_logprobs, prompt_tables
from foredraft.serve.tools import Tools, called, read_tools, with_tools

KNOWN = SHARED | {
    "messages",
    "max_completion_tokens",
    "logprobs",
    "top_logprobs",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "return_prompt_text",
    "echo",
}
CHAT_REFUSED = {**REFUSED, "modalities": UnsupportedOption("answers are text")}
TEXT_ONLY = ("modalities", ["text"])
"""Field and value that request text output. The server has no other output."""
TEMPLATE_FIELDS: dict[str, Callable[[Fields, str], Any]] = {
    "reasoning_effort": Fields.text,
    "documents": Fields.objects,
}
"""Fields that are passed to chat templates that use them, with the functions that read them."""
FLAGS = {"add_generation_prompt", "continue_final_message"}
READ_TWICE = {**TEMPLATE_FIELDS, **dict.fromkeys(sorted(FLAGS), Fields.flag)}
"""Fields that may also be given in ``chat_template_kwargs``, with the functions that read them."""
IN_TEMPLATE = "chat_template_kwargs"
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
OLD_ROLES = {"developer": "system", "function": "tool"}
"""Roles that have another name in chat templates: "developer" is newer than most templates, "function" is older."""
PARTS_APART = "\n"
"""Separator between the text parts of one message, as in vLLM and llama.cpp."""
PASSED_ON = ("name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning")


def read_chat(body: dict[str, Any], served: Served, settings: ServerSettings) -> tuple[ParsedRequest, ChatForm]:
    """Parse the body of a request.

    Returns: the request and the format of its response.
    Raises: the errors of `read_conversation`.
    """
    body, has_functions = with_tools(body)
    parsed, tools = read_conversation(body, served, settings)
    given, (prompt,), text = Fields(body, body, {}), parsed.prompts, None
    if given.flag("return_prompt_text"):
        text = prompt["prompt"] if "prompt" in prompt else str(served.tokenizer.decode(prompt["prompt_token_ids"]))
    last = read_messages(given.get("messages"))[-1] if given.flag("echo") else {}
    echo = last["content"] if last.get("role") == "assistant" else ""
    return parsed, ChatForm(parsed, served, tools, has_functions, text, echo)


def read_conversation(body: dict[str, Any], served: Served, settings: ServerSettings) -> tuple[ParsedRequest, Tools]:
    """Parse the body of a request that has messages.

    Parsing renders and tokenizes the prompt, which is slow, so it must not be called in the event loop.

    Returns: the request and its tools.
    Raises: ApiError, PromptError.
    """
    template = str(served.tokenizer.chat_template or "")
    known = KNOWN | {name for name in TEMPLATE_FIELDS if name in template}
    given = Fields({name: value for name, value in body.items() if (name, value) != TEXT_ONLY}, known, CHAT_REFUSED)
    wants_logprobs, most = given.flag("logprobs"), given.whole("top_logprobs", 0, 0, settings.max_logprobs)
    if most and not wants_logprobs:
        raise ApiError(400, "top_logprobs is given, but logprobs is not true; set logprobs to true", "top_logprobs")
    longest = given.get("max_completion_tokens")
    longest = given.get("max_tokens") if longest is None else longest
    if given.get("logprob_token_ids") is not None and not wants_logprobs:
        message = "logprob_token_ids is given, but logprobs is not true; set logprobs to true"
        raise ApiError(400, message, "logprob_token_ids")
    logprobs = most if wants_logprobs else None
    tools = read_tools(given, settings.tool_call_parser, template, served.tokenizer)
    options = template_options(given, template)
    try:
        # a response_format constrains the whole output, so that no call can begin
        form = tools.form if tools.forced or read_form(given) is None else None
        parsed = read_request(given, served, settings, form, logprobs=logprobs, max_tokens=longest)
        parsed = replace(parsed, unknown=(*parsed.unknown, *(() if form is None else tools.annotations)))
    except GrammarError as error:
        if form is None:
            raise
        reason = str(error).removeprefix("structured_outputs.grammar is refused: ")
        what = "cannot be forced" if tools.forced else "cannot be made to follow their schemas (strict)"
        raise ApiError(400, f"calls of these tools {what}: {reason}", "tools") from None
    if parsed.streams and parsed.params.prompt_logprobs is not None:
        message = "prompt_logprobs is not available in chat streams; leave stream out, or use /v1/completions"
        raise ApiError(400, message, "prompt_logprobs")
    text = conversation(given, options, tools.offered, served)
    ids = served.encode(text, given.flag("add_special_tokens"), is_cut=parsed.truncate_prompt_tokens is not None)
    prompt = {"prompt": text, "prompt_token_ids": ids}
    return with_prompts(parsed, [prompt], served, settings), tools


def template_options(given: Fields, template: str) -> dict[str, Any]:
    """Return the template variables and flags of a request, given as top-level fields or in ``chat_template_kwargs``.

    Variables that the template does not use are added to `Fields.unknown`.

    Raises: ApiError.
    """
    written = given.mapping(IN_TEMPLATE)
    if wrong := sorted((NOT_VARIABLES | {"tools", "chat_template"}) & written.keys()):
        raise ApiError(400, f"{IN_TEMPLATE} cannot contain {wrong[0]}; leave it out", IN_TEMPLATE)
    if "documents" not in template and not REFUSED["documents"].is_harmless(written.get("documents")):
        message = f"{IN_TEMPLATE}.documents is not supported: {REFUSED['documents'].reason}"
        raise ApiError(400, message, IN_TEMPLATE, "unsupported_field")
    options = {name: value for name, value in written.items() if name not in READ_TWICE}
    named = {f"{IN_TEMPLATE}.{name}": value for name, value in written.items()}
    inside = Fields(named, named, {})
    for name, read in READ_TWICE.items():
        values = [read(given, name)] if given.get(name) is not None and (name in FLAGS or name in template) else []
        values += [read(inside, f"{IN_TEMPLATE}.{name}")] if written.get(name) is not None else []
        if len(values) == 2 and values[0] != values[1]:
            message = f"{name} is {shown(values[0])}, but {shown(values[1])} in {IN_TEMPLATE}; set only one of them"
            raise ApiError(400, message, name)
        if values:
            options[name] = values[0]
    if options.get("continue_final_message"):
        if options.get("add_generation_prompt"):
            message = "continue_final_message and add_generation_prompt exclude each other; leave one of them out"
            raise ApiError(400, message, "continue_final_message")
        options["add_generation_prompt"] = False
    given.unknown += [f"{IN_TEMPLATE}.{name}" for name in written.keys() - FLAGS if name not in template]
    return options


def conversation(given: Fields, options: dict[str, Any], tools: list[Any], served: Served) -> str:
    """Render a conversation with the chat template.

    Args:
      options: template variables.
      tools: tools for the template; empty for none.

    Raises: ApiError, PromptError.
    """
    messages = read_messages(given.get("messages"))
    if tools:
        options = {**options, "tools": tools}
    try:
        return chat_text(served.tokenizer, messages, **options)
    except ConfigError as error:
        raise ApiError(400, str(error), "messages", "no_chat_template") from None
    except PromptError as error:
        raise ApiError(400, str(error), "messages") from None


def read_messages(given: Any, name: str = "messages") -> list[dict[str, Any]]:
    """Return messages in the form that chat templates expect: known roles, text content joined, arguments of tool calls
    as objects.

    Raises: ApiError that names the message.
    """
    if not isinstance(given, list) or not given:
        wrong_field(name, given, "a list of messages with role and content")
    return [_message(message, f"{name}[{place}]") for place, message in enumerate(given)]


def _message(given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, dict) or given.get("role") not in ROLES:
        role = given.get("role") if isinstance(given, dict) else given
        raise ApiError(400, f"{where} has the role {shown(role)}; the roles are {', '.join(ROLES)}", f"{where}.role")
    if given.get("prefix"):
        why = f"{where}.prefix is not supported; use continue_final_message to continue the last message"
        raise ApiError(400, why, f"{where}.prefix", "unsupported_field")
    role = OLD_ROLES.get(given["role"], given["role"])
    message: dict[str, Any] = {"role": role, "content": _content(given.get("content"), where)}
    message |= {name: given[name] for name in PASSED_ON if given.get(name) is not None}
    if given.get("function_call") is not None:  # the older form, with a single call
        message.setdefault("tool_calls", [{"type": "function", "function": given["function_call"]}])
    if "tool_calls" in message:
        message["tool_calls"] = _calls(message["tool_calls"], f"{where}.tool_calls")
    return message


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    text = text_of(content, PARTS_APART)
    if text is None:
        raise ApiError(400, f"{where}.content must be text, or a list of parts of type text", f"{where}.content")
    check_unicode(text, f"{where}.content")
    return text


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls of an earlier response, with arguments parsed to objects as templates expect; arguments that are not
    JSON stay text."""
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls
    ):
        wrong_field(where, calls, "a list of {id: ..., type: 'function', function: {name: ..., arguments: ...}}")
    read = []
    for call in calls:
        arguments = call["function"].get("arguments")
        arguments = {} if arguments is None else arguments
        if isinstance(arguments, str):
            with suppress(ValueError):  # arguments may be cut off, or contain characters that no template can write
                arguments = _with_whole_characters(strict_json(arguments or "{}"))
        read.append({**call, "function": {**call["function"], "arguments": arguments}})
    return read


def _with_whole_characters(value: Any) -> Any:
    """Return the value unchanged.

    Raises: ValueError if it contains an unpaired surrogate, which no template can write.
    """
    if not is_unicode(json.dumps(value, ensure_ascii=False)):
        raise ValueError("it contains an unpaired surrogate")
    return value


class ChatForm(ChoicesForm):
    """Response format of ``/v1/chat/completions``.

    Args:
      tools: tools of the request.
      has_functions: whether calls are written as ``function_call``, the older form.
      prompt_text: rendered prompt to include in the response; None to leave it out.
      echo: text at the start of every response; the last message if the response continues it, otherwise empty.
    """

    prefix = "chatcmpl"
    kinds = ("chat.completion", "chat.completion.chunk")

    def __init__(
        self,
        parsed: ParsedRequest,
        served: Served,
        tools: Tools,
        has_functions: bool,
        prompt_text: str | None,
        echo: str = "",
    ) -> None:
        super().__init__(parsed, served)
        self._has_functions = has_functions
        self._readers = [tools.reader() for _ in range(parsed.params.n)]
        self._tools = tools
        self._prompt_text, self._echo = prompt_text, echo

    def opening(self) -> list[bytes]:
        return self._chunks(self.first_choices(), **self._of_prompt())

    def body(self, outputs: Sequence[RequestOutput], usage: dict[str, Any], beside: dict[str, Any]) -> dict[str, Any]:
        found, most = self._of_prompt(), self._parsed.params.prompt_logprobs
        if most is not None:
            found["prompt_logprobs"] = prompt_tables(outputs[0].prompt_logprobs, most)
        return super().body(outputs, usage, beside) | found

    def _of_prompt(self) -> dict[str, Any]:
        """Response fields of the prompt, which all samples share."""
        (prompt,) = self._parsed.prompts
        ids = {"prompt_token_ids": list(prompt["prompt_token_ids"])} if self._parsed.returns_ids else {}
        return ids | ({} if self._prompt_text is None else {"prompt_text": self._prompt_text})

    def first_choices(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": self._echo or (None if self._tools.forced else "")}
        return [self._choice(index, "delta", delta, None, None) for index in range(self._parsed.params.n)]

    def choices(self, delta: StreamOutput) -> list[dict[str, Any]]:
        length = len(delta.token_ids)
        if not length:
            return [self._part(delta, slice(0, 0), delta.text, is_last=delta.finish_reason is not None)]
        return [
            self._part(
                delta, part, "".join(delta.texts[part]), is_last=part.stop == length and bool(delta.finish_reason)
            )
            for part in self._parts(delta)
        ]

    def _part(self, delta: StreamOutput, part: slice, text: str, is_last: bool) -> dict[str, Any]:
        reader = self._readers[delta.index]
        said: dict[str, Any] = {"content": text}
        reason = delta.finish_reason if is_last else None
        if reader is not None:
            parts = reader.read(text, is_last)
            said = {} if self._tools.forced else {"content": "".join(each for each in parts if isinstance(each, str))}
            if calls := [each for each in parts if not isinstance(each, str)]:
                said |= self._fields_of_calls(calls)
            reason = self._reason if reason == "stop" and reader.ends_with_calls else reason
        choice = self._choice(delta.index, "delta", said, reason, delta.stop_reason if is_last else None)
        if delta.logprobs is not None:
            choice["logprobs"] = self._logprobs(delta.token_ids[part], delta.logprobs[part])
        return self._tell(choice, delta, part)

    def _fields_of_calls(self, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """Tool calls, or pieces of them, as the field of a message."""
        return called(calls) if self._has_functions else {"tool_calls": calls}

    @property
    def _reason(self) -> str:
        """Finish reason of a row that the model ends with tool calls."""
        return "function_call" if self._has_functions else "tool_calls"

    def _logprobs(self, ids: Sequence[int], tables: Sequence[Mapping[int, Any]]) -> dict[str, Any]:
        params = self._parsed.params
        return chat_logprobs(self._names, ids, tables, params.logprobs or 0, is_named=bool(params.logprob_token_ids))

    @staticmethod
    def _choice(index: int, kind: str, said: dict[str, Any], reason: str | None, stop: Any) -> dict[str, Any]:
        return {"index": index, kind: said, "logprobs": None, "finish_reason": reason, "stop_reason": stop}

    def whole(self, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        choices = []
        for text in outputs[0].outputs:
            message: dict[str, Any] = {"role": "assistant", "content": text.text, "refusal": None}
            reason = text.finish_reason
            if (reader := self._tools.reader()) is not None:
                message["content"], calls = message_of(reader.read(text.text, is_last=True))
                if calls:
                    message |= self._fields_of_calls(calls)
                if calls or self._tools.forced:
                    message["content"] = message["content"] or None
                reason = self._reason if reason == "stop" and reader.ends_with_calls else reason
            if self._echo:
                message["content"] = self._echo + (message["content"] or "")
            choice = self._choice(text.index, "message", message, reason, text.stop_reason)
            if text.logprobs is not None:
                choice["logprobs"] = self._logprobs(text.token_ids, text.logprobs)
            if self._parsed.returns_ids:
                choice["token_ids"] = list(text.token_ids)
            choices.append({**choice, "seed": text.seed})
        return choices
