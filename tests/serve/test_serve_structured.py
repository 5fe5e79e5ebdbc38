"""Structured output over HTTP: answers match what was asked for, as those of `LLM` do; what is no form is refused."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import openai
import pytest

from foretoken.config.sampling import SamplingParams
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


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
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
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        {"response_format": {"type": "xml"}},
        {"response_format": 1},
        {"guided_json": {}},
    ],
)
def test_what_is_no_form_is_refused(running_server: Running, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError):
        running_server.client.completions.create(model="tiny", prompt="a", extra_body=fields)
    assert running_server.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_or_answered(running_server: Running, name: str) -> None:
    """One that gave up within a text was an error inside the server."""
    wanted = HOSTILE[name]
    response = running_server.post("/v1/completions", prompt="a", max_tokens=4, structured_outputs=wanted, timeout=60)
    if response.status_code != 200:
        error = response.json()["error"]
        assert response.status_code == 400 or error["code"] == "no_token_possible", error
        assert "Traceback" not in response.text
    assert running_server.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200


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
    assert "the grammar gave up" in response.text
