"""``functions`` and ``function_call``, which the OpenAI API had before tools: tools of which one is called."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from foredraft.engine.frontend import StreamOutput
from foredraft.llm import LLM
from foredraft.serve.chat import ChatForm, read_chat
from foredraft.serve.served import Served
from foredraft.serve.settings import ServerSettings
from serving import Running, running, with_template

pytest.importorskip("llguidance")

MESSAGES: Any = [{"role": "user", "content": "What is one and two?"}]
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
ADD = {
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": DIGIT}, "required": ["a"], "additionalProperties": False},
}
SUB = ADD | {"name": "sub"}
NAMED = {"name": "add"}
TWO = "".join(f'<tool_call>\n{{"name": "{name}", "arguments": {{"a": 1}}}}\n</tool_call>\n' for name in ("add", "sub"))


@pytest.fixture(scope="module")
def templated(llm: LLM) -> Served:
    return Served({"tiny": with_template(llm)})


@pytest.fixture(scope="module")
def server(templated: Served) -> Iterator[Running]:
    with running(templated, ServerSettings(tool_call_parser="hermes")) as found:
        yield found


def ask(server: Running, **fields: Any) -> Any:
    sent = {"messages": MESSAGES, "functions": [ADD, SUB], "max_tokens": 100, "temperature": 0}
    return server.post("/v1/chat/completions", **sent | fields)


def test_a_named_function_is_called_whole_and_streamed(server: Running) -> None:
    found = ChatCompletion.model_validate_json(ask(server, function_call=NAMED).content, strict=True)
    message = found.choices[0].message
    assert message.function_call is not None
    assert (message.content, message.tool_calls, found.choices[0].finish_reason) == (None, None, "stop")
    assert message.function_call.name == "add"
    assert json.loads(message.function_call.arguments)["a"] in range(10)
    body = {"messages": MESSAGES, "functions": [ADD, SUB], "function_call": NAMED, "max_tokens": 100, "temperature": 0}
    chunks = [
        ChatCompletionChunk.model_validate(event, strict=True) for event in server.events("/v1/chat/completions", body)
    ]
    pieces = [chunk.choices[0].delta.function_call for chunk in chunks]
    told = [piece for piece in pieces if piece is not None]
    assert [piece.name for piece in told if piece.name] == ["add"]
    assert "".join(piece.arguments or "" for piece in told) == message.function_call.arguments


def test_a_function_means_what_a_tool_means(server: Running) -> None:
    by_function = ask(server, function_call=NAMED, n=2, seed=3, temperature=1).json()
    tools = [{"type": "function", "function": function} for function in (ADD, SUB)]
    named = {"type": "function", "function": NAMED}
    by_tool = ask(server, functions=None, tools=tools, tool_choice=named, n=2, seed=3, temperature=1).json()
    assert by_function["usage"] == by_tool["usage"]
    calls = [choice["message"]["tool_calls"][0]["function"] for choice in by_tool["choices"]]
    assert [choice["message"]["function_call"] for choice in by_function["choices"]] == calls


@pytest.mark.parametrize("choice", [None, "none", "auto"])
def test_a_model_may_answer_without_a_call(server: Running, choice: Any) -> None:
    found = ask(server, function_call=choice)
    assert found.status_code == 200, found.text
    assert "x-foredraft-warning" not in found.headers
    assert found.json()["choices"][0]["message"]["content"]


def test_the_first_call_alone_is_told(templated: Served) -> None:
    settings = ServerSettings(tool_call_parser="hermes")
    _, form = read_chat({"messages": MESSAGES, "functions": [ADD, SUB], "stream": True}, templated, settings)
    assert isinstance(form, ChatForm)
    delta = StreamOutput("0", 0, 0, TWO, (), (1, 2), 0, "stop", None, (TWO[:40], TWO[40:]))
    chunks = [json.loads(told.removeprefix(b"data: "))["choices"][0] for told in form.events([delta], dict)]
    told = [chunk["delta"]["function_call"] for chunk in chunks if "function_call" in chunk["delta"]]
    assert told == [{"name": "add", "arguments": '{"a": 1}'}]
    assert chunks[-1]["finish_reason"] == "function_call"


def test_without_parallel_calls_the_first_tool_alone_is_told(templated: Served) -> None:
    """As in vLLM; a model may write more, and clients that wanted one got two."""
    tools = [{"type": "function", "function": function} for function in (ADD, SUB)]
    sent = {"messages": MESSAGES, "tools": tools, "stream": True}
    for is_parallel, names in ((True, ["add", "sub"]), (False, ["add"])):
        _, form = read_chat(
            sent | {"parallel_tool_calls": is_parallel}, templated, ServerSettings(tool_call_parser="hermes")
        )
        delta = StreamOutput("0", 0, 0, TWO, (), (1,), 0, "stop", None, (TWO,))
        (chunk,) = [json.loads(told.removeprefix(b"data: "))["choices"][0] for told in form.events([delta], dict)]
        assert [call["function"]["name"] for call in chunk["delta"]["tool_calls"]] == names


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"function_call": {"name": "mul"}}, "of one of the functions"),
        ({"function_call": "required"}, "of one of the functions"),
        ({"functions": None, "function_call": NAMED}, "without functions"),
        ({"functions": [{"type": "function"}]}, "functions[0]"),
        ({"functions": "add"}, "a list of"),
        ({"tools": [{"type": "function", "function": ADD}]}, "functions and tools"),
        ({"tool_choice": "auto"}, "functions and tool_choice"),
    ],
)
def test_what_is_no_function_is_refused_by_name(server: Running, fields: dict[str, Any], said: str) -> None:
    found = ask(server, **fields)
    assert found.status_code == 400
    assert said in found.json()["error"]["message"]
