"""Chat templates, rendered in a process of their own: a template is a program, and anybody's."""

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
"""Time until a worker that uses no processor time is given up."""

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
"""Variables of the environment that Python and the clock need. Keys of a server are none of a template's business."""

NOT_VARIABLES = frozenset({
    "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs", "sanitize_control_tokens", "conversation", "messages",
})  # fmt: skip
"""Arguments of ``apply_chat_template`` that are no variables of a template, and have no meaning here."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning."""
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Put behind a message that is to be continued, so that its end is found in the text."""


class TemplateFailure(Exception):
    """A template gives no text.

    Args:
      reason: for the user.
      is_unreadable: whether it is not Jinja, whatever it is given.
    """

    def __init__(self, reason: str, is_unreadable: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.is_unreadable = reason, is_unreadable


class TemplateRenderer:
    """Renders templates one after another, each within `SECONDS` of processor time and `BYTES` of memory.

    The process is started by the first template, and again after one that has used up its time.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._worker: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None

    def render(self, template: str, variables: Mapping[str, Any] | None) -> str:
        """The text of a template.

        Args:
          variables: values of plain types; None to read the template only.

        Raises: TemplateFailure; ValueError for variables that are nested too deeply.
        """
        data = dumps((template, None if variables is None else dict(variables)))
        with self._lock:
            kind, text = self._answer(data) or self._answer(data) or (FAILED, "its process has ended")
        if kind == NO_MEMORY:
            raise TemplateFailure(f"it needs more than {BYTES >> 20} MB")
        if kind != TEXT:
            raise TemplateFailure(text, is_unreadable=kind == UNREADABLE)
        return text

    def _answer(self, data: bytes) -> tuple[int, str] | None:
        """The answer to a request; None where the process has ended, which may have another reason."""
        worker, is_late = self._started(), Event()

        def give_up() -> None:
            is_late.set()
            worker.kill()

        timer = Timer(WALL_SECONDS, give_up)
        timer.daemon = True
        timer.start()
        answer = None
        try:
            answer = _asked(worker, data)
        finally:
            timer.cancel()
            if answer is None:  # also where the wait was broken off
                self._end()
        if answer is None and (is_late.is_set() or worker.returncode == -getattr(signal, "SIGPROF", 0)):
            return FAILED, f"it takes more than {SECONDS:g} s of processor time"
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


def _asked(worker: subprocess.Popen[bytes], data: bytes) -> tuple[int, str] | None:
    """The answer of a worker; None where it has ended."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        worker.stdin.write(HEAD.pack(len(data)) + data)
        worker.stdin.flush()
    except OSError:  # nobody reads any more
        return None
    head = worker.stdout.read(1 + HEAD.size)
    if len(head) <= HEAD.size:
        return None
    length = HEAD.unpack(head[1:])[0]
    text = worker.stdout.read(length)
    return (head[0], text.decode("utf-8", "surrogatepass")) if len(text) == length else None


def _end(worker: subprocess.Popen[bytes]) -> None:
    """End a worker, which ends by itself when nothing more can come."""
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
    """The renderer of this process."""
    return TemplateRenderer()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=renderer.cache_clear)  # a worker answers one process


def rendered_chat(tokenizer: PreTrainedTokenizerBase, messages: Any, options: Mapping[str, Any]) -> str:
    """One conversation as a tokenizer's template writes it; the text of ``apply_chat_template``.

    Args:
      messages: mappings, dataclasses or pydantic models.
      options: ``tools``, ``documents``, ``chat_template``, ``add_generation_prompt``, ``continue_final_message``, and
        variables of the template.

    Raises: TemplateFailure; ConfigError for an option without meaning; TypeError, ValueError for messages and tools of
      another kind.
    """
    for name in sorted(NOT_VARIABLES & options.keys()):
        raise ConfigError(
            f"chat takes no {name!r}: the template makes a text, and its tokens are made here; leave it out"
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
    """A tool as templates take it.

    Raises: ValueError for what is neither a schema nor a function that describes itself.
    """
    if isinstance(tool, Mapping):
        return tool
    try:
        return get_json_schema(tool)
    except Exception as error:
        raise ValueError(f"a tool is {tool!r}; give a JSON schema, or a documented function ({error})") from None


def _messages(given: Any) -> list[dict[str, Any]]:
    """Messages as dictionaries of plain values, without those that are None.

    Raises: TypeError for what is no message, ValueError for none at all.
    """
    messages = _plain(list(getattr(given, "messages", given)))
    if not messages:
        raise ValueError("the conversation is empty; give at least one message")
    for message in messages:
        if not isinstance(message, dict):
            raise TypeError(f"a message is {message!r}; give a mapping with role and content")
    return [{name: value for name, value in message.items() if value is not None} for message in messages]


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose reasoning has every name that templates read."""
    found = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _tag_last(messages: list[dict[str, Any]], field: str, template: str) -> str:
    """Mark the end of the last message.

    Returns: its text.
    Raises: ValueError where it has no text in the field, or the template does not read that.
    """
    last = messages[-1]
    said = last.get(field)
    if said is None:
        raise ValueError(f"continue_final_message is set, and the last message has no {field!r}")
    fields = [name for name in _REASONING if last.get(name) == said] if field in _REASONING else [field]
    if not any(name in template for name in fields):
        raise ValueError(f"continue_final_message is {field!r}, and the template has no {field!r}")
    if isinstance(said, str):
        last.update(dict.fromkeys(fields, said + _TAG))
        return said
    texts = [part for part in said if isinstance(part, dict) and "text" in part] if isinstance(said, Sequence) else []
    if not texts:
        raise ValueError("continue_final_message is set, and the last message has no text")
    text = str(texts[-1]["text"])
    texts[-1]["text"] = text + _TAG
    return text


def _up_to_tag(text: str, final: str) -> str:
    """The text up to the mark in it.

    Raises: ValueError where the template has changed the last message.
    """
    place = text.rfind(_TAG.strip())
    if place < 0 or final.strip() not in text:
        raise ValueError("continue_final_message is set, and the template does not write the last message as it is")
    return text[:place] if text.startswith(_TAG, place) else text[:place].rstrip()


def _plain(value: Any) -> Any:
    """A value in types that can be sent, as transformers shows them to templates: nothing with methods of its own."""
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
        return _plain(item())  # a number of numpy
    return f"<{type(value).__name__}>"
