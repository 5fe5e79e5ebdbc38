"""Structured output over HTTP: answers match what was asked for, as those of `LLM` do; what is no form is refused."""

from __future__ import annotations

import itertools
import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import openai
import pytest

from foredraft.config.sampling import SamplingParams
from foredraft.llm import LLM
from foredraft.serve.served import ServedModels
from schemas import HOSTILE, is_valid, random_schema
from serving import Running, running

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
        assert response.status_code == 400, error
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


class Answered(NamedTuple):
    """An answer of the server, and forwards that it took."""

    text: str
    token_ids: list[int]
    finish_reason: str
    num_steps: int


@pytest.mark.full
@pytest.mark.smollm2
@pytest.mark.parametrize("temperature", [0, 1])
def test_two_hundred_schemas_on_a_real_model(temperature: int) -> None:
    """Answers are those of plain decoding under the same masks, what ends validates, and forced tokens save forwards.

    Half of the schemas come as ``response_format``, with white space where the model wants it. Eight clients at once.
    Texts that the schema does not bound may run into the limit of tokens.
    """
    llm = LLM("zoo:smollm2", "none", max_num_seqs=8, num_cached_prefixes=8, prefill_chunk_size=64)
    draw = random.Random(200)
    schemas = [random_schema(draw) for _ in range(200)]
    with (
        running(ServedModels.of(["grammar"], ["default=suffix+eagle3"]).over(llm)) as server,
        ThreadPoolExecutor(8) as pool,
    ):

        def ask(number: int, **fields: Any) -> Answered:
            wanted: dict[str, Any] = {
                "response_format": {"type": "json_schema", "json_schema": {"schema": schemas[number]}}
            }
            if number % 2:
                wanted = {"structured_outputs": {"json": schemas[number], "disable_any_whitespace": True}}
            said = f"Answer question {number} in JSON: who are you, and what do you like?"
            sent = {"messages": [{"role": "user", "content": said}], "max_tokens": 600, "temperature": temperature}
            sent |= {"seed": number, "return_token_ids": True, "spec_decode_metrics": "summary", **wanted, **fields}
            response = server.post("/v1/chat/completions", **sent)
            assert response.status_code == 200, response.text
            found = response.json()
            (choice,) = found["choices"]
            num_steps = found["metrics"]["speculative_decoding"]["num_steps"]
            return Answered(choice["message"]["content"], choice["token_ids"], choice["finish_reason"], num_steps)

        ways: dict[str, dict[str, Any]] = {
            "plain": {"model": "grammar", "speculative": False},
            "grammar": {"model": "grammar"},
            "default": {"model": "default"},
        }
        found = {name: list(pool.map(lambda n, w=way: ask(n, **w), range(200))) for name, way in ways.items()}
    steps = {name: sum(answer.num_steps for answer in answers) for name, answers in found.items()}
    print(f"temperature {temperature}: forwards {steps}")
    for name, answers in found.items():
        assert [each[:3] for each in answers] == [each[:3] for each in found["plain"]], name
    ended = [number for number, answer in enumerate(found["plain"]) if answer.finish_reason == "stop"]
    assert len(ended) >= 180
    assert [number for number in ended if not is_valid(found["plain"][number].text, schemas[number])] == []
    assert steps["plain"] == sum(len(answer.token_ids) for answer in found["plain"])
    assert 1.5 * max(steps["grammar"], steps["default"]) <= steps["plain"]


NO_TOKEN: dict[str, dict[str, Any]] = {
    "banned": {"structured_outputs": {"choice": ["yes"]}, "bad_words": ["yes", "y", "ye"]},
    "longer than it can be": {"structured_outputs": {"choice": ["yes"]}, "min_tokens": 50, "max_tokens": 60},
}


@pytest.mark.parametrize("name", NO_TOKEN)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
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
    served = running_server.server.application.served
    assert served is not None
    assert running_server.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200
    assert sum(llm.num_unfinished for llm in served.llms) == 0
