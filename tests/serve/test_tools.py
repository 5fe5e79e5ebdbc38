"""Tools: offered through the chat template, and calls as clients get them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from foredraft.engine.frontend import StreamOutput
from foredraft.llm import LLM
from foredraft.serve.chat import ChatForm, read_chat
from foredraft.serve.served import Served
from foredraft.serve.settings import ServerSettings
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
