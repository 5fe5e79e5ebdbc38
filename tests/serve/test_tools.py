"""Tools: offered through the chat template, and calls read out of what the model writes, in whatever pieces."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from foredraft.llm import LLM
from foredraft.serve.chat import ChatForm, read_chat
from foredraft.serve.served import Served
from foredraft.serve.settings import ServerSettings
from foredraft.serve.tools import CallReader
from foredraft.sessions.outputs import StreamOutput
from serving import Running, with_template

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "</tool"}}\n</tool_call>'
FUNCTION = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
MESSAGES: Any = [{"role": "user", "content": "a"}]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.a }}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TEXTS: dict[str, tuple[str, str, list[tuple[str, Any]]]] = {
    "one": (CALL, "", [("add", {"a": 1, "b": "</tool"})]),
    "with text": (f"Let me see. {CALL}", "Let me see. ", [("add", {"a": 1, "b": "</tool"})]),
    "two": (f"{CALL}\n{CALL}", "", [("add", {"a": 1, "b": "</tool"})] * 2),
    "a list": ('<tool_call>[{"name": "f"}, {"name": "g", "arguments": {}}]</tool_call>', "", [("f", {}), ("g", {})]),
    "no end": ('<tool_call>{"name": "f"}', "", [("f", {})]),
    "no JSON": ("<tool_call>add(1)</tool_call>", "<tool_call>add(1)</tool_call>", []),
    "nearly": ("a <tool_cal and <", "a <tool_cal and <", []),
    "none": ("Nothing to call.", "Nothing to call.", []),
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_calls_are_read_in_any_pieces(name: str, size: int) -> None:
    text, said, calls = TEXTS[name]
    reader = CallReader()
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    found = [reader.read(piece, is_last=i == len(pieces) - 1) for i, piece in enumerate(pieces)]
    assert "".join(piece for piece, _ in found) == said
    read = list(itertools.chain.from_iterable(each for _, each in found))
    assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in read] == calls
    assert [call["index"] for call in read] == list(range(len(calls)))


@pytest.fixture(scope="module")
def templated(llm: LLM) -> Served:
    """The model with a template that knows tools."""
    return Served({"tiny": with_template(llm, TEMPLATE)})


def test_tools_reach_the_template_and_calls_the_client(templated: Served) -> None:
    settings = ServerSettings(tool_call_parser="hermes")
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 41}'}}
    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
    ]
    asking, form = read_chat({"messages": history, "tools": TOOLS, "stream": True}, templated, settings)
    prompt = asking.prompts[0]["prompt"]
    assert '"name": "add"' in prompt
    assert "assistant: 41" in prompt
    assert isinstance(form, ChatForm)
    texts = tuple(CALL[i : i + 5] for i in range(0, len(CALL), 5))
    delta = StreamOutput("0", 0, 0, CALL, (), tuple(range(len(texts))), 0, "stop", None, texts)
    chunks = [
        ChatCompletionChunk.model_validate_json(told.removeprefix(b"data: "), strict=True)
        for told in form.events([delta], dict)
    ]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ""
    (read,) = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or []]
    assert (read.function.name, read.index) == ("add", 0)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_model_that_calls_nothing_answers(start: Callable[..., Running], templated: Served) -> None:
    server = start(served=templated, tool_call_parser="hermes")
    create = server.client.chat.completions.create
    found = create(model="tiny", messages=MESSAGES, tools=TOOLS, max_tokens=8, temperature=0)
    ChatCompletion.model_validate(found.model_dump(), strict=True)
    assert found.choices[0].message.tool_calls is None
    assert found.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="has another"):
        create(model="tiny", messages=MESSAGES, tools=TOOLS, tool_choice="required")


def test_a_template_without_tools_is_refused_by_name(start: Callable[..., Running]) -> None:
    server = start(tool_call_parser="hermes")
    with pytest.raises(openai.BadRequestError, match="--chat-template"):
        server.client.chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS)
