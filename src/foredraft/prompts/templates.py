"""Chat templates, rendered in a separate process because a template is an untrusted program."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from marshal import dumps
from pathlib import Path
from threading import Event, Lock, Timer
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import get_json_schema

from foredraft.errors import ConfigError
from foredraft.prompts import template_worker
from foredraft.prompts.template_worker import BYTES, FAILED, HEAD, NO_MEMORY, SECONDS, TEXT, UNREADABLE

WALL_SECONDS = 10.0
"""Time after which a worker that uses no processor time is killed."""

_PASSED_ON = (
    "PATH",
    "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH",
    "SYSTEMROOT",
    "TZ",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "LC_TIME",
)
"""Environment variables that Python and the clock need. Other variables, such as API keys of a server, are hidden from
templates."""

NOT_VARIABLES = frozenset({
    "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs", "sanitize_control_tokens", "conversation", "messages",
})  # fmt: skip
"""Arguments of ``apply_chat_template`` that are not template variables and are not supported by foredraft."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys under which a message may contain reasoning."""
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marker after a message that is to be continued. The marker shows where the message ends in the rendered text."""


class TemplateFailure(Exception):
    """Error of a template that renders no text.

    Args:
      reason: explanation for the user.
      is_unreadable: whether the template is not valid Jinja, independent of its variables.
    """

    def __init__(self, reason: str, is_unreadable: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.is_unreadable = reason, is_unreadable


class TemplateRenderer:
    """Renders templates one at a time, each within `SECONDS` of processor time and `BYTES` of memory.

    The worker process is started by the first template, and restarted after a template that exceeds its time.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._worker: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None

    def render(self, template: str, variables: Mapping[str, Any] | None) -> str:
        """Render a template.

        Args:
          variables: values of plain types; None to only check the template.

        Raises: TemplateFailure; ValueError for variables that are nested too deeply.
        """
        data = dumps((template, None if variables is None else dict(variables)))
        with self._lock:
            kind, text = self._answer(data) or self._answer(data) or (FAILED, "the process that renders it has ended")
        if kind == NO_MEMORY:
            raise TemplateFailure(f"the template needs more than {BYTES >> 20} MB")
        if kind != TEXT:
            raise TemplateFailure(text, is_unreadable=kind == UNREADABLE)
        return text

    def _answer(self, data: bytes) -> tuple[int, str] | None:
        """Response to a request; None if the worker has ended for another reason than its time limits."""
        worker, is_late = self._started(), Event()

        def give_up() -> None:
            is_late.set()
            worker.kill()

        timer = Timer(WALL_SECONDS, give_up)
        timer.daemon = True
        timer.start()
        answer = None
        try:
            answer = _round_trip(worker, data)
        finally:
            timer.cancel()
            if answer is None:  # also after an interrupt
                self._end()
        if answer is None and (is_late.is_set() or worker.returncode == -getattr(signal, "SIGPROF", 0)):
            return FAILED, f"the template takes more than {SECONDS:g} s of processor time"
        return answer

    def _started(self) -> subprocess.Popen[bytes]:
        worker = self._worker
        if worker is None or worker.poll() is not None:
            self._end()
            found = filter(None, map(find_spec, ("jinja2", "markupsafe")))
            places = dict.fromkeys(str(Path(str(spec.origin)).parents[1]) for spec in found)
            worker = self._worker = subprocess.Popen(
                [sys.executable, "-I", "-S", template_worker.__file__, *places],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _PASSED_ON if name in os.environ},
            )
            self._end = weakref.finalize(self, _end, worker)
        return worker


def _round_trip(worker: subprocess.Popen[bytes], data: bytes) -> tuple[int, str] | None:
    """Send a request to a worker and return its response; None if the worker has ended."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        worker.stdin.write(HEAD.pack(len(data)) + data)
        worker.stdin.flush()
    except OSError:  # the worker has ended
        return None
    head = worker.stdout.read(1 + HEAD.size)
    if len(head) <= HEAD.size:
        return None
    length = HEAD.unpack(head[1:])[0]
    text = worker.stdout.read(length)
    return (head[0], text.decode("utf-8", "surrogatepass")) if len(text) == length else None


def _end(worker: subprocess.Popen[bytes]) -> None:
    """End a worker. The worker exits by itself when its input is closed."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    with suppress(OSError):
        worker.stdin.close()
    try:
        worker.wait(1)
    except subprocess.TimeoutExpired:
        worker.kill()
        worker.wait()
    worker.stdout.close()


@cache
def renderer() -> TemplateRenderer:
    """Renderer of this process."""
    return TemplateRenderer()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=renderer.cache_clear)  # a worker serves only one process


def rendered_chat(tokenizer: PreTrainedTokenizerBase, messages: Any, options: Mapping[str, Any]) -> str:
    """Render one conversation with a tokenizer's chat template; the text equals that of ``apply_chat_template``.

    Args:
      messages: mappings, dataclasses or pydantic models.
      options: ``tools``, ``documents``, ``chat_template``, ``add_generation_prompt``, ``continue_final_message``, and
        template variables.

    Raises: TemplateFailure; ConfigError for an unsupported option; TypeError, ValueError for invalid messages or tools.
    """
    for name in sorted(NOT_VARIABLES & options.keys()):
        raise ConfigError(
            f"chat does not support {name!r}, because the template only renders text and foredraft tokenizes it; leave "
            "it out"
        )
    given = dict(options)
    tools, field = given.pop("tools", None), given.pop("continue_final_message", False)
    template = tokenizer.get_chat_template(given.pop("chat_template", None), tools)
    messages = [_with_reasoning(message) for message in _messages(messages)]
    if field and given.get("add_generation_prompt"):
        raise ValueError("continue_final_message and add_generation_prompt exclude each other; leave one out")
    final = _tag_last(messages, field if isinstance(field, str) else "content", template) if field else None
    variables = {
        "add_generation_prompt": False,
        "documents": None,
        **tokenizer.special_tokens_map,
        **given,
        "messages": messages,
        "tools": None if tools is None else [_schema(tool) for tool in tools],
    }
    if any(not isinstance(document, Mapping) for document in variables["documents"] or ()):
        raise TypeError("documents must be a list of mappings, such as {'title': ..., 'text': ...}")
    text = renderer().render(template, {name: _plain(value) for name, value in variables.items()})
    return text if final is None else _up_to_tag(text, final)


def _schema(tool: Any) -> Any:
    """Convert a tool to the form that templates expect.

    Raises: ValueError for a value that is neither a schema nor a documented function.
    """
    if isinstance(tool, Mapping):
        return tool
    try:
        return get_json_schema(tool)
    except Exception as error:
        raise ValueError(f"a tool is {tool!r}; give a JSON schema, or a documented function ({error})") from None


def _messages(given: Any) -> list[dict[str, Any]]:
    """Convert messages to dictionaries of plain values without None values.

    Raises: TypeError for a value that is not a message; ValueError for an empty conversation.
    """
    messages = _plain(list(getattr(given, "messages", given)))
    if not messages:
        raise ValueError("the conversation is empty; give at least one message")
    for message in messages:
        if not isinstance(message, dict):
            raise TypeError(f"a message is {message!r}; give a mapping with role and content")
    return [{name: value for name, value in message.items() if value is not None} for message in messages]


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Add the reasoning of a message under all keys that templates use."""
    found = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _tag_last(messages: list[dict[str, Any]], field: str, template: str) -> str:
    """Mark the end of the last message with `_TAG`.

    Returns: the text of the message.
    Raises: ValueError if the message has no text in the field, or the template does not use the field.
    """
    last = messages[-1]
    said = last.get(field)
    if said is None:
        raise ValueError(f"continue_final_message is set, but the last message has no {field!r}")
    fields = [name for name in _REASONING if last.get(name) == said] if field in _REASONING else [field]
    if not any(name in template for name in fields):
        raise ValueError(f"continue_final_message is {field!r}, but the template does not use {field!r}")
    if isinstance(said, str):
        last.update(dict.fromkeys(fields, said + _TAG))
        return said
    texts = [part for part in said if isinstance(part, dict) and "text" in part] if isinstance(said, Sequence) else []
    if not texts:
        raise ValueError("continue_final_message is set, but the last message has no text")
    text = str(texts[-1]["text"])
    texts[-1]["text"] = text + _TAG
    return text


def _up_to_tag(text: str, final: str) -> str:
    """Text up to the marker.

    Raises: ValueError if the template has changed the last message.
    """
    place = text.rfind(_TAG.strip())
    if place < 0 or final.strip() not in text:
        raise ValueError("continue_final_message is set, but the template does not write the last message unchanged")
    return text[:place] if text.startswith(_TAG, place) else text[:place].rstrip()


def _plain(value: Any) -> Any:
    """Convert a value to plain types that can be marshalled, as transformers shows values to templates. The plain form
    has no methods."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind.__str__(value) if kind is str else kind(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(_plain, value)) if isinstance(value, list) else tuple(map(_plain, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):
        return _plain(dump())
    if getattr(value, "shape", None) == () and callable(item := getattr(value, "item", None)):
        return _plain(item())  # a numpy number
    return f"<{type(value).__name__}>"
