"""Structured output over HTTP: answers match what was asked for, as those of `LLM` do; what is no form is refused."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest

from foredraft.config.sampling import SamplingParams
from schemas import HOSTILE
from serving import Running

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["fox", "dog"]}, "legs": {"enum": [2, 4]}},
    "required": ["name", "legs"],
    "additionalProperties": False,
}
MESSAGES: Any = [{"role": "user", "content": "Which animal?"}]


@pytest.mark.parametrize(("temperature", "stream"), [(0, False), (1, True)])
def test_a_schema_is_kept(running_server: Running, temperature: int, stream: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}
    body = {"messages": MESSAGES, "response_format": form, "max_tokens": 60, "temperature": temperature, "seed": 4}
    if stream:
        chunks = running_server.events("/v1/chat/completions", body)
        text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    else:
        text = running_server.post("/v1/chat/completions", **body).json()["choices"][0]["message"]["content"]
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=4, structured_outputs={"json": SCHEMA})
    expected = running_server.llm.chat(MESSAGES, params)[0].outputs[0]
    assert text == expected.text
    if expected.finish_reason == "stop":  # a toy at temperature 1 may spend its budget on white space
        found = json.loads(text)
        assert (found["name"], found["legs"]) in itertools.product(("fox", "dog"), (2, 4))
    assert temperature or expected.finish_reason == "stop"


def test_keywords_that_no_mask_holds_are_named(running_server: Running) -> None:
    """`set`, `SecretStr` and `Path` of pydantic were refused."""
    schema = {
        "type": "object",
        "properties": {
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True, "maxItems": 2},
            "key": {"type": "string", "format": "password", "maxLength": 3},
            "at": {"type": "string", "format": "path", "maxLength": 3},
        },
        "required": ["tags", "key", "at"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    found = running_server.post(
        "/v1/chat/completions", messages=MESSAGES, response_format=form, max_tokens=80, temperature=0
    )
    assert found.status_code == 200, found.text
    for name in ("uniqueItems", "format 'password'", "format 'path'"):
        assert name in found.headers["x-foredraft-warning"]
    assert set(json.loads(found.json()["choices"][0]["message"]["content"])) == {"tags", "key", "at"}


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [({"regex": "[ab]{3}"}, "[ab]{3}"), ({"choice": ["yes", "no"]}, "yes|no"), ({"json_object": True}, r"\s*\{.*")],
)
def test_other_forms(running_server: Running, wanted: dict[str, Any], pattern: str) -> None:
    found = running_server.post("/v1/completions", prompt="a", structured_outputs=wanted, temperature=0, max_tokens=12)
    assert re.fullmatch(pattern, found.json()["choices"][0]["text"], flags=re.DOTALL), found.text


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"regex": "("}},
        {"structured_outputs": {"json": {"type": "nonsense"}}},
        {"structured_outputs": {}},
        {"structured_outputs": "json"},
        {"structured_outputs": {"json_object": ["["]}},  # was 500, as the next
        {"structured_outputs": {"regex": "a", "disable_any_whitespace": {}}},
        {"structured_outputs": {"json_object": 1}},
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        {"response_format": {"type": "xml"}},
        {"response_format": 1},
        {"guided_json": {}},
    ],
)
def test_what_is_no_form_is_refused(running_server: Running, fields: dict[str, Any]) -> None:
    assert running_server.post("/v1/completions", prompt="a", **fields).status_code == 400


@pytest.mark.full
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_or_answered(running_server: Running, name: str) -> None:
    """One that gave up within a text was an error inside the server; bounds are in tests/engine/test_structured.py."""
    wanted = HOSTILE[name]
    response = running_server.post("/v1/completions", prompt="a", max_tokens=4, structured_outputs=wanted, timeout=60)
    if response.status_code != 200:
        error = response.json()["error"]
        assert response.status_code == 400, error
        assert "Traceback" not in response.text
    assert running_server.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200


@pytest.mark.sample(1)
@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_gives_up_within_a_text_is_told(running_server: Running, stream: bool) -> None:
    """Streaming or not, with the reason that the matcher has."""
    sent = {"prompt": "a", "max_tokens": 4, "structured_outputs": HOSTILE["schema of patterns"], "stream": stream}
    response = running_server.post("/v1/completions", **sent)
    if stream:
        assert '"error"' in response.text
        assert response.text.endswith("data: [DONE]\n\n")
    else:
        assert response.status_code == 400
    assert "matching the grammar failed" in response.text


NO_TOKEN: dict[str, dict[str, Any]] = {
    "banned": {"structured_outputs": {"choice": ["yes"]}, "bad_words": ["yes", "y", "ye"]},
    "longer than it can be": {"structured_outputs": {"choice": ["yes"]}, "min_tokens": 50, "max_tokens": 60},
}


@pytest.mark.parametrize("name", NO_TOKEN)
@pytest.mark.parametrize(("n", "stream"), [(1, False), (3, True)])
def test_a_request_that_contradicts_itself_is_refused(running_server: Running, name: str, n: int, stream: bool) -> None:
    """No token is possible: that is the request's fault (400; was 500), one of several texts or all of them."""
    sent = {"prompt": "a", "n": n, "max_tokens": 20, "stream": stream, **NO_TOKEN[name]}
    response = running_server.post("/v1/completions", **sent)
    if stream:
        *_, last, done = [line for line in response.text.split("\n\n") if line]
        assert done == "data: [DONE]"
        error = json.loads(last.removeprefix("data: "))["error"]
    else:
        assert response.status_code == 400
        error = response.json()["error"]
    assert (error["code"], error["type"]) == ("no_token_possible", "invalid_request_error")
    assert "leave no token possible" in error["message"]
    assert running_server.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200
    assert running_server.num_rows == 0
