"""The openai client against the server: what it accumulates from streams, and its errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from foredraft.config.sampling import SamplingParams
from foredraft.llm import LLM
from foredraft.serve.served import Served
from foredraft.serve.settings import ServerSettings
from serving import Running, running, with_template

pytestmark = pytest.mark.full
pytest.importorskip("llguidance")

MESSAGES: Any = [{"role": "user", "content": "What is one and two?"}]
DIGITS = {"type": "integer", "minimum": 0, "maximum": 9}
ADD = {
    "type": "object",
    "properties": {"a": DIGITS, "b": DIGITS},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": ADD}}]
FLAT: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Running]:
    with running(Served({"tiny": with_template(llm)}), ServerSettings(tool_call_parser="hermes")) as found:
        yield found


@pytest.mark.parametrize("stream", [False, True])
def test_chat_and_responses_say_what_the_llm_says(server: Running, stream: bool) -> None:
    assert [model.id for model in server.client.models.list()] == ["tiny"]
    (expected,) = server.llm.chat(MESSAGES, SamplingParams(max_tokens=10, temperature=0))
    chat = server.client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=10, temperature=0, stream=stream
    )
    response = server.client.responses.create(
        model="tiny", input=MESSAGES, max_output_tokens=10, temperature=0, stream=stream
    )
    if stream:
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chat)
        assert [said, list(response)[-1].response.output_text] == [expected.outputs[0].text] * 2
    else:
        assert [chat.choices[0].message.content, response.output_text] == [expected.outputs[0].text] * 2


def test_streams_of_calls_are_accumulated(server: Running) -> None:
    with server.client.chat.completions.stream(
        model="tiny",
        messages=MESSAGES,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
        seed=4,
    ) as stream:
        kinds = {event.type for event in stream}
        (choice,) = stream.get_final_completion().choices
    assert "tool_calls.function.arguments.delta" in kinds
    (call,) = choice.message.tool_calls or []
    jsonschema.validate(json.loads(call.function.arguments), ADD)
    asked: dict[str, Any] = {"model": "tiny", "input": MESSAGES, "max_output_tokens": 200, "temperature": 0}
    with server.client.responses.stream(
        **asked, tools=FLAT, tool_choice={"type": "function", "name": "add"}
    ) as responses:
        responses.until_done()
        (item,) = responses.get_final_response().output
    assert item.type == "function_call"
    jsonschema.validate(json.loads(item.arguments), ADD)


def test_a_schema_of_a_response_is_accumulated(server: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    form: Any = {"type": "json_schema", "name": "it", "schema": schema | {"additionalProperties": False}}
    with server.client.responses.stream(
        model="tiny", input="Say it", temperature=0, max_output_tokens=40, text={"format": form}
    ) as stream:
        stream.until_done()
        found = stream.get_final_response()
    assert found.status == "completed"
    assert found.output_text.replace(" ", "") in ('{"a":"x"}', '{"a":"y"}')


def test_errors_have_their_types(server: Running, llm: LLM) -> None:
    create = server.client.completions.create
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        create(model="gpt", prompt="a")
    with pytest.raises(openai.BadRequestError):
        create(model="tiny", prompt="a", extra_body={"structured_outputs": {"regex": "("}})
    with running(Served({"tiny": llm}), ServerSettings(api_keys=("first",), max_queued_requests=0)) as other:
        with pytest.raises(openai.AuthenticationError):
            other.client.models.list()
        keyed = other.client.with_options(api_key="first")
        assert keyed.models.list().data
        other.server.bridge._num_running = 8  # as many as there are rows
        with pytest.raises(openai.RateLimitError):
            keyed.completions.create(model="tiny", prompt="a")
