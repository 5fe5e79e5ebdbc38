"""What the server refuses, with the error bodies of the OpenAI API; nothing of it touches other requests."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Strip
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from foredraft.llm import LLM
from foredraft.serve.app import SMALL_BYTES
from foredraft.serve.completions import read_completion
from foredraft.serve.errors import ApiError
from foredraft.serve.fields import MOST_ENTRIES
from foredraft.serve.guards import with_local_hosts
from foredraft.serve.served import Served
from foredraft.serve.server import Server
from foredraft.serve.settings import ServerSettings
from foredraft.serve.tokens import LOWEST, characters_per_token
from foredraft.testing import toy_model
from serving import Running, received, running

TEXT, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
ASKS: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
BODIES: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "no prompt": (TEXT, {}, 400, "prompt is null"),
    "empty prompt": (TEXT, {"prompt": []}, 400, "prompt"),
    "no tokens": (TEXT, {"prompt": [[]]}, 400, "no token ids"),
    "foreign token": (TEXT, {"prompt": [10**9]}, 400, "token ids between"),
    "half a pair": (TEXT, {"prompt": "a\ud800"}, 400, "not valid Unicode"),
    "long prompt": (TEXT, {"prompt": [5] * 5000}, 400, "no room for a new token"),
    "temperature": (TEXT, {"prompt": "a", "temperature": -1}, 400, "temperature is -1"),
    "long key": (TEXT, {"prompt": "a", "logit_bias": {"9" * 5000: 1}}, 400, "logit_bias is '999"),
    "kind": (TEXT, {"prompt": "a", "max_tokens": "ten"}, 400, "max_tokens is 'ten'"),
    "many samples": (TEXT, {"prompt": "a", "n": 1000}, 400, "n is 1000"),
    "many prompts": (TEXT, {"prompt": ["a"] * 2000}, 400, "2000 prompts"),
    "many texts": (TEXT, {"prompt": ["a"] * 100, "n": 64}, 400, "6400 completions"),
    "many logprobs": (TEXT, {"prompt": "a", "logprobs": 50}, 400, "logprobs is 50"),
    "suffix": (TEXT, {"prompt": "a", "suffix": "b"}, 400, "suffix is not supported"),
    "beams": (TEXT, {"prompt": "a", "best_of": 3}, 400, "best_of is not supported"),
    "usage of no stream": (TEXT, {"prompt": "a", "stream_options": {}, "stream": 1}, 400, "stream is 1"),
    "granularity": (TEXT, {"prompt": "a", "stream_granularity": "word"}, 400, "token or step"),
    "drafter": (TEXT, {"prompt": "a", "speculative": "eagle3"}, 400, "has no drafting method"),
    "timeout": (TEXT, {"prompt": "a", "timeout": 0}, 400, "timeout is 0"),
    "model": (TEXT, {"prompt": "a", "model": "b"}, 404, "does not exist"),
    "no messages": (CHAT, {}, 400, "messages is null"),
    "role": (CHAT, {"messages": [{"role": "<|im_start|>", "content": ""}]}, 400, "has the role"),
    "prompt in a stream": (CHAT, ASKS | {"stream": True, "prompt_logprobs": 1}, 400, "leave stream out"),
    "picture": (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "text"),
    "template": (CHAT, {"messages": [], "chat_template": "x"}, 400, "chat_template is not"),
    "tools": (CHAT, ASKS | {"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "--tool-call-parser"),
    "json": (CHAT, {"messages": [], "response_format": {"type": "nonsense"}}, 400, "response_format"),
    "custom tool": (CHAT, ASKS | {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, 400, "tools[0] is custom"),
    "custom tool of a response": (
        RESPONSES,
        {"input": "a", "tools": [{"type": "custom", "name": "f"}]},
        400,
        "tools[0] is custom",
    ),
    "words by name": (TEXT, {"prompt": "a", "bad_words": {"a": 1}}, 400, "it must be a list"),
    "tokens": ("/detokenize", {"tokens": [-1]}, 400, "tokens must be"),
    "path": ("/v1/embeddings", {}, 404, "Not Found"),
    "method": ("/v1/models", {}, 405, "Method Not Allowed"),
}


@pytest.mark.parametrize("name", BODIES)
def test_errors_name_what_is_wrong(running_server: Running, name: str) -> None:
    path, body, status, message = BODIES[name]
    response = running_server.http.post(path, content=_json(body))
    error = response.json()["error"]
    assert (response.status_code, set(error)) == (status, {"message", "type", "param", "code"}), error
    assert message in error["message"]
    assert "Traceback" not in response.text
    assert "/work" not in response.text


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_any_time_may_be_asked_for(running_server: Running, path: str) -> None:
    """Whole numbers too large for a float were 500."""
    text = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "input": "a"}
    name = {"/v1/completions": "prompt", "/v1/chat/completions": "messages", "/v1/responses": "input"}[path]
    assert running_server.post(path, **{name: text[name], "timeout": 10**400}).status_code == 200


def test_an_error_is_short_whatever_it_repeats(running_server: Running) -> None:
    """Five thousand characters of a field came back, and would have of five million. Both ends are told."""
    found = running_server.post("/v1/completions", prompt="a", temperature="b" * 5000).json()["error"]
    assert found["message"].startswith("temperature is 'bbb")
    assert found["message"].endswith("0 is greedy decoding")
    assert len(found["message"]) < 1100


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"prompt": NaN}', b'{"x": -1e400}', b"[" * 10**5, b"\xff", b"9" * 10**4]
)
def test_bodies_that_are_no_object(running_server: Running, body: bytes) -> None:
    response = running_server.http.post("/v1/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


def test_keys(running_server: Running) -> None:
    client = running_server.under("second", api_keys=("first", "second"))
    assert client.get("/v1/models").status_code == 200
    for header in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic second"},
        {"Authorization": "second"},
    ):
        for path in ("/v1/models", "/metrics", "/tokenizer_info", "/nothing"):
            response = client.get(path, headers={"Authorization": "", **header})
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
    for path in ("/health", "/"):
        assert client.get(path, headers={"Authorization": ""}).status_code == 200


def test_unknown_fields_are_named_or_refused(running_server: Running) -> None:
    body = {"prompt": "a", "max_tokens": 1, "temprature": 0, "x\r\nset-cookie: a": 1, "user": "me"}
    response = running_server.post("/v1/completions", **body)
    assert response.status_code == 200
    assert response.headers["x-foredraft-warning"].endswith(r"temprature, x\r\nset-cookie: a")
    assert "set-cookie" not in response.headers
    blank = running_server.post("/v1/completions", **{"prompt": "a", "max_tokens": 1, "": 1, " b ": 1})
    assert blank.headers["x-foredraft-warning"].endswith('"", b')  # no space at an end, which is no header
    strict = running_server.under(strict_fields=True)
    refused = strict.post("/v1/completions", json=body)
    assert refused.status_code == 400
    assert "unknown fields: temprature" in refused.json()["error"]["message"]
    for name, said in (("temprature", "did you mean temperature?"), ("xyzzy", "unknown fields: xyzzy; leave them out")):
        message = strict.post("/v1/completions", json={"prompt": "a", name: 1}).json()["error"]["message"]
        assert message.endswith(said)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("OPTIONS", "/v1/completions", {"POST"}), ("POST", "/v1/models", {"GET", "HEAD"}), ("BREW", "/", {"GET", "HEAD"})],
)
def test_another_method_is_told_which_there_are(
    running_server: Running, method: str, path: str, allowed: set[str]
) -> None:
    response = running_server.http.request(method, path)
    assert response.status_code == 405
    assert set(response.headers["allow"].split(", ")) == allowed
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.full
def test_a_body_that_is_not_wanted_is_read_before_the_answer(start: Callable[..., Running]) -> None:
    """A client that writes all of it first got a reset connection instead of 413, or of 401.

    One that asks first, by "Expect", has its answer before it has sent anything.
    """
    server = start(key="key", max_body_bytes=1000, api_keys=("key",))
    assert server.post("/v1/completions", prompt="a" * 100, max_tokens=1).status_code == 200
    body = b"x" * 5_000_000
    sent = {
        f"Content-Length: {len(body)}": body,
        "Transfer-Encoding: chunked": b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body),
        "Content-Length: 9\r\nExpect: 100-continue": b"",
    }
    for head, data in sent.items():
        for key, status, kind in (("key", 413, "request_too_large"), ("none", 401, "authentication_error")):
            if not data and status == 413:
                continue
            told = f"Host: a\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n{head}"
            with server.connected() as client:
                client.sendall(f"POST /v1/completions HTTP/1.1\r\n{told}\r\n\r\n".encode() + data)
                answer = received(client)
            assert answer.startswith(f"HTTP/1.1 {status} ".encode())
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == kind


@pytest.mark.parametrize("coding", ["gzip", "identity, GZIP", "nonsense"])
def test_a_coded_body_is_refused_by_name(running_server: Running, coding: str) -> None:
    """It was called a body that is not JSON."""
    body = gzip.compress(json.dumps({"prompt": "a"}).encode())
    found = running_server.http.post("/v1/completions", content=body, headers={"Content-Encoding": coding})
    assert found.status_code == 415
    assert coding.split()[-1] in found.json()["error"]["message"]
    assert found.headers["accept-encoding"] == "identity"
    as_it_is = {"content": b'{"prompt": "a", "max_tokens": 1}', "headers": {"Content-Encoding": "identity"}}
    assert running_server.http.post("/v1/completions", **as_it_is).status_code == 200


@pytest.mark.parametrize(("name", "most"), MOST_ENTRIES.items())
def test_lists_that_slow_every_token_have_a_limit(running_server: Running, name: str, most: int) -> None:
    entries = [[5, 7]] * most if name == "bad_words_ids" else [f"zq{place}" for place in range(most)]
    assert running_server.post("/v1/completions", prompt="a", max_tokens=1, **{name: entries}).status_code == 200
    found = running_server.post("/v1/completions", prompt="a", max_tokens=1, **{name: [*entries, entries[0]]})
    assert found.status_code == 400
    assert found.json()["error"]["param"] == name
    assert f"the limit is {most}" in found.json()["error"]["message"]


@pytest.mark.parametrize("name", ["prompt", "prediction"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_text_that_cannot_fit_is_not_read(
    running_server: Running, monkeypatch: pytest.MonkeyPatch, path: str, name: str
) -> None:
    """3.6 MB were turned into tokens for three seconds before they were refused; of line ends in a prediction, 17."""
    text = " " * (33 * 4096)
    given = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "prediction": None}
    given |= {"prompt": text, "messages": [{"role": "user", "content": text}]} if name == "prompt" else {}
    given |= {"prediction": {"type": "content", "content": text}} if name == "prediction" else {}
    reader = "served.encode" if name == "prompt" else "parsed_request.read_params"
    monkeypatch.setattr(f"foredraft.serve.{reader}", lambda *_: pytest.fail("it is read"))
    response = running_server.post(path, **given)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", name)
    assert "characters" in error["message"]


def test_the_longest_token_is_known_where_nothing_is_left_out(llm: LLM) -> None:
    assert llm.tokenizer is not None
    each = characters_per_token(llm.tokenizer)
    assert each == max(map(len, llm.tokenizer.get_vocab())) == 33
    assert len("\n" + " " * 32) == each * len(llm.tokenizer("\n" + " " * 32)["input_ids"])
    words = Tokenizer(WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    assert characters_per_token(PreTrainedTokenizerFast(tokenizer_object=words)) is None
    folding = Tokenizer.from_str(llm.tokenizer.backend_tokenizer.to_str())
    folding.normalizer = Strip()
    assert characters_per_token(PreTrainedTokenizerFast(tokenizer_object=folding)) is None


def test_long_texts_do_not_keep_others_from_being_read(
    running_server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()

    def slow(body: dict[str, Any], *others: Any) -> Any:
        assert len(body["prompt"]) < SMALL_BYTES or gate.wait(60)
        return read_completion(body, *others)

    monkeypatch.setattr("foredraft.serve.app.read_completion", slow)
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(running_server.post, "/v1/completions", prompt="a" * SMALL_BYTES)
        try:
            assert running_server.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200
            assert not large.done()
        finally:
            gate.set()
        assert large.result(60).status_code == 400


def test_texts_are_tokens_before_the_engine_has_them(llm: LLM, served: Served) -> None:
    """Its thread steps all rows, and would read a long prediction meanwhile."""
    body = {"prompt": "a", "prediction": "the one two three", "bad_words": ["fox"]}
    params = read_completion(body, served, ServerSettings())[0].params
    assert llm.tokenizer is not None
    assert params.prediction == tuple(llm.tokenizer("the one two three")["input_ids"])
    assert not params.bad_words
    assert params.bad_words_ids


def test_web_pages_may_call_where_they_are_let(running_server: Running) -> None:
    client = running_server.under("key", cors_origins=("https://a.example",), api_keys=("key",))
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    for origin, allowed in (("https://a.example", "https://a.example"), ("https://b.example", None)):
        response = client.options("/v1/completions", headers={"Origin": origin, **asked})
        assert response.headers.get("access-control-allow-origin") == allowed


AS_MANY_AS_ROWS = {"prompt": "a", "n": 8, "max_tokens": 1900, "ignore_eos": True, "stream": True}


@pytest.mark.full
def test_errors_have_the_types_of_the_openai_client(running_server: Running, served: Served) -> None:
    create = running_server.client.completions.create
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        create(model="gpt", prompt="a")
    with pytest.raises(openai.BadRequestError):
        create(model="tiny", prompt="a", extra_body={"structured_outputs": {"regex": "("}})
    with running(served, ServerSettings(api_keys=("first",), max_queued_requests=0), "first") as other:
        with pytest.raises(openai.AuthenticationError):
            other.client.models.list()
        keyed = other.client.with_options(api_key="first")
        assert keyed.models.list().data
        with other.http.stream("POST", "/v1/completions", json=AS_MANY_AS_ROWS) as begun:
            lines = begun.iter_lines()  # held: an iterator that is let go closes the connection
            next(lines)
            with pytest.raises(openai.RateLimitError):
                keyed.completions.create(model="tiny", prompt="a")


def test_a_full_queue_is_told_with_a_time_to_come_again(running_server: Running) -> None:
    with running_server.http.stream("POST", "/v1/completions", json=AS_MANY_AS_ROWS) as begun:
        lines = begun.iter_lines()  # held: an iterator that is let go closes the connection
        next(lines)
        response = running_server.under(max_queued_requests=0).post("/v1/completions", json={"prompt": "a"})
    assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
    assert int(response.headers["retry-after"]) > 0
    assert re.search(r'admission_rejections_total\{model_name="tiny"\} [1-9]', running_server.http.get("/metrics").text)


def test_while_it_loads_and_when_loading_fails() -> None:
    """Everything is 503 meanwhile; an error ends the server."""
    gate = threading.Event()

    def load() -> Any:
        gate.wait(30)
        raise ApiError(500, "this checkpoint is broken")

    server = Server(load, "m", ServerSettings(), port=0, say=lambda _: None)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            server.run_until_end()
        except ApiError as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    with httpx.Client(base_url=server.address, timeout=30) as http:
        for path in ("/health", "/v1/models"):
            response = http.get(path)
            assert (response.status_code, response.json()["error"]["code"]) == (503, "loading")
            assert response.headers["retry-after"]
    gate.set()
    thread.join(30)
    assert [str(failure) for failure in failures] == ["this checkpoint is broken"]


ELSEWHERE: dict[str, tuple[Any, str]] = {
    "grammar": ('root ::= "yes"', "structured_outputs.grammar"),
    "ebnf": ('root ::= "yes"', "structured_outputs.grammar"),
    "regex": ("(yes|no)", "structured_outputs.regex"),
    "json_schema": ({"type": "object"}, "response_format"),
    "format": ("json", "response_format"),
    "guided_json_object": (True, "response_format"),
    "structural_tag": ({}, "structured_outputs"),
    "stop_sequences": (["a"], "use stop"),
    "n_predict": (5, "use max_tokens"),
    "repeat_penalty": (1.1, "use repetition_penalty"),
    "options": ({"temperature": 0}, "top level of the request"),
    "system": ("Be brief.", "messages"),
    "images": (["aGk="], "prompts and responses are text"),
    "lora": ([{"id": 0}], "merge the adapter"),
    "guidance_scale": (3, "classifier-free guidance"),
}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
}


@pytest.mark.sample(11)
@pytest.mark.parametrize(
    ("path", "name"),
    [
        pytest.param(path, name, marks=() if (i + j) % 3 == 0 else pytest.mark.full)
        for i, path in enumerate(ASKED)
        for j, name in enumerate(ELSEWHERE)
    ],
)
def test_fields_of_other_servers_that_change_the_answer_are_refused(
    running_server: Running, path: str, name: str
) -> None:
    """They were ignored: text without its form, its end or its picture, which looks like an answer."""
    value, said = ELSEWHERE[name]
    found = running_server.post(path, **ASKED[path], **{name: value})
    assert found.status_code == 400
    error = found.json()["error"]
    assert (error["param"], error["code"]) == (name, "unsupported_field")
    assert said in error["message"]
    assert running_server.post(path, **ASKED[path], **{name: None}).status_code == 200


def test_fields_of_other_servers_that_ask_for_nothing_are_taken(running_server: Running) -> None:
    body = {"grammar": "", "n_predict": -1, "repeat_penalty": 1.0, "lora": [], "options": {}, "images": []}
    found = running_server.post("/v1/completions", prompt="a", max_tokens=1, **body)
    assert found.status_code == 200
    assert "x-foredraft-warning" not in found.headers


@pytest.mark.parametrize("name", ["tools", "chat_template_kwargs"])
def test_fields_of_chat_are_refused_elsewhere(running_server: Running, name: str) -> None:
    found = running_server.post("/v1/completions", prompt="a", max_tokens=1, **{name: [{"a": 1}]})
    assert "/v1/chat/completions" in found.json()["error"]["message"]


def test_a_message_that_is_to_be_continued_is_refused_by_name(running_server: Running) -> None:
    """DeepSeek and Mistral name it so; the answer would begin anew."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "prefix": True}]
    found = running_server.post("/v1/chat/completions", messages=messages, max_tokens=1)
    assert found.json()["error"]["param"] == "messages[1].prefix"
    assert "continue_final_message" in found.json()["error"]["message"]


@pytest.mark.parametrize("form", [{"type": "text"}, {"type": "text", "json_schema": None, "schema": None}, None])
def test_null_says_nothing_in_a_format_either(running_server: Running, form: Any) -> None:
    sent = ASKED["/v1/chat/completions"]
    assert running_server.post("/v1/chat/completions", **sent, response_format=form).status_code == 200
    text = {"format": {**form, "name": None} if form else None}
    assert running_server.post("/v1/responses", **ASKED["/v1/responses"], text=text).status_code == 200


def test_text_with_a_schema_is_refused(running_server: Running) -> None:
    """The form says free text, and a schema beside it another; the schema went before."""
    form = {"type": "text", "json_schema": {"schema": {"type": "object"}}}
    found = running_server.post("/v1/chat/completions", **ASKED["/v1/chat/completions"], response_format=form)
    assert (found.status_code, found.json()["error"]["param"]) == (400, "response_format")


LOCAL = ["127.0.0.1", "localhost", "LOCALHOST:80", "127.1.2.3:8000", "[::1]:8000", ""]
FOREIGN = ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", "[::2]"]


def test_a_foreign_host_is_refused_on_loopback(running_server: Running) -> None:
    """A page whose name was resolved to this machine (DNS rebinding) could read every answer."""
    for path in ("/v1/models", "/", "/metrics"):
        for host in LOCAL:
            assert running_server.http.get(path, headers={"Host": host}).status_code == 200, host
        for host in FOREIGN:
            found = running_server.http.get(path, headers={"Host": host})
            assert (found.status_code, found.json()["error"]["code"]) == (403, "foreign_host"), host
            assert host.split(":")[0].strip("[]") in found.json()["error"]["message"]
    posted = running_server.http.post(
        "/v1/completions", json=ASKED["/v1/completions"], headers={"Host": "evil.example"}
    )
    assert posted.status_code == 403
    keyed = running_server.under("secret", api_keys=("secret",))
    assert keyed.get("/v1/models", headers={"Host": "my.example"}).status_code == 200


@pytest.mark.parametrize(
    ("listens", "host", "status"),
    [("127.0.0.1", "e.example", 403), ("localhost", "127.0.0.1", 200), ("0.0.0.0", "my.example", 200)],
)
def test_hosts_are_checked_where_the_server_listens_on_loopback(
    served: Served, listens: str, host: str, status: int
) -> None:
    server = Server(lambda: served, served.name, ServerSettings(), host=listens, port=0, say=str)
    server._socket.close()
    transport = httpx.ASGITransport(server.config.app)  # type: ignore[arg-type]

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
            return await client.get("/version")

    assert asyncio.run(ask()).status_code == status


def test_a_name_of_this_machine_is_its_host() -> None:
    """A program that gives no host is let through: browsers always do."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        sent.append(scope)

    async def send(message: Any) -> None:
        sent.append(message)

    for headers in ([(b"host", b"My.Name:80")], [(b"host", b"my.name.")], []):
        asyncio.run(with_local_hosts(app, "my.name")({"type": "http", "headers": headers}, None, send))  # type: ignore[arg-type]
    assert [one["type"] for one in sent] == ["http"] * 3


def test_the_address_of_a_request_goes_before_its_host(running_server: Running) -> None:
    """A whole address as target names the host (RFC 9112, 3.2.2), whatever the header says."""
    for host, status in (("evil.example", b"403"), ("localhost:p@evil.example", b"403"), ("u:p@localhost", b"200")):
        with running_server.connected() as link:
            link.sendall(
                f"GET http://{host}/v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode()
            )
            assert link.recv(100).split()[1] == status


@pytest.mark.full
def test_prompts_may_have_tokens_that_the_model_reads_and_never_returns(llm: LLM) -> None:
    model = toy_model(4096, dtype=torch.float32)
    model.set_input_embeddings(torch.nn.Embedding(4104, 32))
    wide = LLM(model, "ngram", tokenizer=llm.tokenizer)
    with running(Served({"wide": wide})) as server:
        asked = {"prompt": [5, 4100, 6, 5, 4100], "max_tokens": 4, "echo": True, "logprobs": 1}
        answer = server.post("/v1/completions", **asked)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["logprobs"]["token_logprobs"][1] == LOWEST
        assert server.post("/detokenize", tokens=[5, 4100]).status_code == 200
        refused = server.post("/v1/completions", prompt=[5, 4104])
        assert refused.status_code == 400
        assert "between 0 and 4103" in refused.json()["error"]["message"]
