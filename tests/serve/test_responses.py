"""``/v1/responses``: its text part, by the types of the openai client, beside the same request of chat."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from foredraft.config.sampling import SamplingParams
from foredraft.serve.errors import ApiError
from serving import Running

INPUT: list[Any] = [
    {"role": "user", "content": [{"type": "input_text", "text": "The quick"}]},
    {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": " brown fox", "annotations": []}],
    },
    {"role": "user", "content": "Once upon a time"},
]
MESSAGES: list[Any] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "The quick"},
    {"role": "assistant", "content": " brown fox"},
    {"role": "user", "content": "Once upon a time"},
]
GIVEN: dict[str, Any] = {
    "model": "tiny",
    "input": INPUT,
    "instructions": "Be short.",
    "max_output_tokens": 20,
    "temperature": 0.8,
    "top_p": 0.9,
    "metadata": {"kind": "test"},
    "seed": 4,
}
PARAMS = SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, seed=4)


def test_a_response_says_what_chat_says(running_server: Running) -> None:
    (expected,) = running_server.llm.chat(MESSAGES, PARAMS)
    found = Response.model_validate(running_server.post("/v1/responses", **GIVEN).json(), strict=True)
    assert found.output_text == expected.outputs[0].text
    assert found.status == ("incomplete" if expected.outputs[0].finish_reason == "length" else "completed")
    assert (found.instructions, found.metadata, found.temperature) == ("Be short.", {"kind": "test"}, 0.8)
    counts = (found.usage.input_tokens, found.usage.output_tokens)
    assert counts == (len(expected.prompt_token_ids), len(expected.outputs[0].token_ids))


def test_a_stream_has_the_events_of_the_api(running_server: Running) -> None:
    whole = Response.model_validate(running_server.post("/v1/responses", **GIVEN).json())
    found = running_server.events("/v1/responses", GIVEN)
    events: list[Any] = [TypeAdapter(ResponseStreamEvent).validate_python(event, strict=True) for event in found]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", whole.status]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert "".join(event.delta for event in events[4:-4]) == events[-4].text == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage == whole.usage


def test_an_error_in_a_stream_is_two_events(running_server: Running) -> None:
    body = {"input": "a", "stream": True, "ignore_eos": True}
    with running_server.http.stream("POST", "/v1/responses", json=body) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        for _ in range(6):  # the first words are there
            next(lines)
        running_server.server.bridge.abort_all(ApiError(503, "no more", code="ended"))
        *_, error, failed = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert (error["type"], error["code"], error["message"]) == ("error", "ended", "no more")
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"]["message"] == "no more"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("previous_response_id", "resp_1", "stores no responses"),
        ("background", True, "runs no background jobs"),
        ("tools", [{"type": "web_search"}], "runs no built-in tools"),
        ("n", 2, "one sample"),
        ("messages", [], "use input"),
        ("max_tokens", 3, "max_output_tokens"),
        ("truncation", "auto", "shorten it"),
        ("input", [{"type": "web_search_call", "id": "a"}], "input[0].type"),
        ("input", [{"type": "function_call_output", "output": "a"}], "input[0].call_id"),
        ("input", [{"type": "function_call", "call_id": "a", "name": "f"}], "input[0].arguments"),
        ("input", [{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content"),
        ("input", [], "input is []"),
        ("metadata", {"a": 1}, "metadata"),
        ("text", {"format": {"type": "verse"}}, "response_format"),
        ("max_output_tokens", 0, "max_output_tokens is 0"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(running_server: Running, name: str, value: Any, said: str) -> None:
    found = running_server.post("/v1/responses", **{"input": "a", name: value})
    assert found.status_code == 400
    assert said in found.json()["error"]["message"]
