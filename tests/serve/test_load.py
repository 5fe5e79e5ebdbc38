"""Many clients at once, and hostile bodies: every answer is what it is alone, nothing is left, and figures add up."""

from __future__ import annotations

import ctypes
import gc
import json
import random
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines import engine_of
from foredraft.llm import LLM
from foredraft.serve.completions import KNOWN
from foredraft.serve.fields import IGNORED, REFUSED, WITHOUT_EFFECT
from foredraft.serve.responses import KNOWN as OF_RESPONSES
from foredraft.serve.served import Served, ServedModels
from serving import MODEL, SETTINGS, Running

NUM_CLIENTS = 32
COUNTED = (
    "generation_tokens_total",
    "request_success_total",
    "e2e_request_latency_seconds_count",
    "time_to_first_token_seconds_count",
    "num_requests_running",
)
WORDS = ["the", "one two three", "Once upon", "fox", "a a a a", "日本", "def f(x):", "I am"]
BAD = [b"{", b'{"prompt": []}', b'{"prompt": "a", "temperature": -1}', b'{"prompt": "a", "model": "none"}', b"[1]"]


def body_of(number: int) -> dict[str, Any]:
    """Request ``number``: drawn, and the same whenever it is asked for."""
    draw = random.Random(number)
    body: dict[str, Any] = {
        "model": draw.choice(["tiny", "lookup", "plain"]),
        "prompt": " ".join(draw.choices(WORDS, k=draw.randint(1, 12))),
        "max_tokens": draw.randint(1, 24),
        "temperature": draw.choice([0, 0, 0.7, 1.0]),
        "seed": number,
        "n": draw.choice([1, 1, 1, 2]),
        "return_token_ids": True,
    }
    extras: list[dict[str, Any]] = [
        {},
        {"logprobs": 2},
        {"stop": ["the", "."]},
        {"repetition_penalty": 1.2},
        {"speculative": False},
        {"speculative": {"num_speculative_tokens": 2}},
        {"top_p": 0.8, "top_k": 30},
        {"prediction": "the one two three"},
        {"structured_outputs": {"regex": "( [a-z]{1,6}){2,9}"}},
        {"prompt_logprobs": 1},
    ]
    return body | draw.choice(extras)


class Client(threading.local):
    """A connection for each thread."""

    def __init__(self, address: str, connections: ExitStack) -> None:
        self.http = connections.enter_context(httpx.Client(base_url=address, timeout=None))


@dataclass(frozen=True)
class Told:
    """What a client has got: texts with ids and ends, None where it left or was refused; and how many tokens."""

    texts: list[Any] | None
    num_tokens: int


@dataclass(frozen=True)
class Manner:
    """How a request is sent: with a bad body, as a stream that is left, whole, or as a stream to its end."""

    is_bad: bool
    leaves: bool
    streams: bool


def manner_of(number: int) -> Manner:
    drawn = random.Random(-number).randrange(6)
    return Manner(is_bad=drawn == 0, leaves=drawn == 1, streams=drawn not in (0, 2))


def told(choices: list[dict[str, Any]]) -> list[Any]:
    return [(choice["text"], choice["token_ids"], choice["finish_reason"]) for choice in choices]


def ask(client: httpx.Client, number: int) -> Told:
    """What request ``number`` is told, and how many tokens it got."""
    found = client.post("/v1/completions", json=body_of(number)).json()
    return Told(told(found["choices"]), found["usage"]["completion_tokens"])


def act(client: httpx.Client, number: int) -> Told:
    """Send request ``number`` in its manner."""
    manner = manner_of(number)
    if manner.is_bad:
        assert client.post("/v1/completions", content=BAD[number % len(BAD)]).status_code in (400, 404)
        return Told(None, 0)
    if not manner.streams:
        return ask(client, number)
    whole: dict[int, Any] = {}
    body = {**body_of(number), "stream": True, "stream_granularity": random.Random(number).choice(["token", "step"])}
    with client.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if manner.leaves:
                return Told(None, 0)
            if not line or line.startswith(":") or line == "data: [DONE]":
                continue
            (choice,) = httpx.Response(200, content=line.removeprefix("data: ")).json()["choices"]
            before = whole.setdefault(choice["index"], {"text": "", "token_ids": []})
            before["text"] += choice["text"]
            before["token_ids"] += choice.get("token_ids", [])  # none where a prompt is told of
            before["finish_reason"] = choice["finish_reason"]
    choices = [choice for _, choice in sorted(whole.items())]
    return Told(told(choices), sum(len(choice["token_ids"]) for choice in choices))


def soak(start: Callable[..., Running], num_requests: int, llm: LLM) -> None:
    """From all clients at once, with prefixes that are reused and a drafter that fails now and then.

    In four parts, after each of which nothing is left and memory is read; of the last one, which nobody leaves early,
    figures are what clients have counted.
    """
    served = ServedModels.of(["tiny"], SETTINGS).over(llm)
    lookup: Any = engine_of(served.names["lookup"]).drafter
    sound, draw = lookup.propose_row, random.Random(0)

    def failing(*given: Any) -> Any:
        if draw.random() < 0.02:
            raise RuntimeError("a drafter has failed")
        return sound(*given)

    lookup.propose_row = failing
    server = start(served=served)
    connections = ExitStack()
    local = Client(server.server.address, connections)
    parts = [range(num_requests * part // 4, num_requests * (part + 1) // 4) for part in range(4)]
    stay = [number for number in parts[3] if not manner_of(number).leaves]
    answers: dict[int, Told] = {}
    megabytes = []
    with connections, ThreadPoolExecutor(NUM_CLIENTS) as pool:
        for part in (*parts[:3], stay):
            before = figures_of(server)
            found = dict(zip(part, pool.map(lambda number: act(local.http, number), part), strict=True))
            answers |= found
            counted = {name: value - before[name] for name, value in figures_of(server).items()}
            megabytes.append(resident_megabytes())
            assert counted["generation_tokens_total"] >= sum(each.num_tokens for each in found.values())
            assert server.num_open == 0
            assert server.num_rows == 0
    assert counted == {
        "generation_tokens_total": sum(each.num_tokens for each in found.values()),
        "request_success_total": sum(len(each.texts or ()) for each in found.values()),
        "e2e_request_latency_seconds_count": sum(each.texts is not None for each in found.values()),
        "time_to_first_token_seconds_count": sum(len(each.texts or ()) for each in found.values()),
        "num_requests_running": 0,
    }
    assert megabytes[3] < 1.03 * megabytes[1] + 8, megabytes
    with httpx.Client(base_url=server.server.address, timeout=None) as alone:
        for number, answer in answers.items():
            assert answer.texts is None or answer == ask(alone, number), body_of(number)
    assert served.llm.profile.num_cached_tokens
    assert served.names["lookup"].profile.ended.drafter_error
    print(f"{len(answers)} requests, {sum(each.texts is not None for each in answers.values())} compared, {megabytes}")


def figures_of(server: Running) -> dict[str, float]:
    """Figures that clients can count, too, once no request is open and no row runs: gauges are told after a step."""
    deadline = monotonic() + 20
    while monotonic() < deadline and (
        server.num_open or sum(figures(server.http.get("/metrics").text, "num_requests_running"))
    ):
        sleep(0.02)
    page = server.http.get("/metrics").text
    for name in COUNTED:
        assert sum(figures(page, name)) == sum(figures(page, name, "vllm"))
    return {name: sum(figures(page, name)) for name in COUNTED}


def resident_megabytes() -> float:
    """Of this process, without what the allocator only keeps; 0 where the system does not tell."""
    gc.collect()
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * 4096 / 2**20 if pages.exists() else 0.0


def figure(page: str, name: str, prefix: str = "foredraft") -> float:
    (found,) = figures(page, name, prefix)
    return found


def figures(page: str, name: str, prefix: str = "foredraft") -> list[float]:
    """Of all labels."""
    return [float(value) for value in re.findall(rf"^{prefix}:{name}\{{.*\}} (\S+)$", page, flags=re.MULTILINE)]


def tiny() -> LLM:
    return LLM(MODEL, "draft_model", max_num_seqs=8, num_cached_prefixes=8, prefill_chunk_size=8)


@pytest.mark.full
@pytest.mark.slow
def test_answers_under_load_are_those_of_single_requests(start: Callable[..., Running]) -> None:
    soak(start, 64, tiny())


@pytest.mark.full
def test_two_thousand_requests(start: Callable[..., Running]) -> None:
    soak(start, 2000, tiny())


@pytest.mark.full
@pytest.mark.smollm2
def test_three_hundred_requests_on_a_real_model(start: Callable[..., Running]) -> None:
    """In its own dtype, where bits are promised."""
    made = LLM("zoo:smollm2", "suffix+eagle3", max_num_seqs=8, num_cached_prefixes=8, prefill_chunk_size=8)
    if not made.guarantee.keeps_bits:
        pytest.skip(f"no bits are promised on this processor: {made.guarantee.kind}")
    soak(start, 300, made)


@pytest.mark.full
def test_figures_equal_what_clients_count(start: Callable[..., Running]) -> None:
    """At once: one saw that a row ran after it had all of its answer."""
    server = start()
    usages = [server.post("/v1/completions", **body_of(number)).json() for number in range(8)]
    page = server.http.get("/metrics").text
    assert figure(page, "num_requests_running") == figure(page, "num_requests_waiting") == 0
    completion = sum(found["usage"]["completion_tokens"] for found in usages)
    num_texts = sum(len(found["choices"]) for found in usages)
    for prefix in ("foredraft", "vllm"):
        assert figure(page, "generation_tokens_total", prefix) == completion
        assert figure(page, "prompt_tokens_total", prefix) == sum(found["usage"]["prompt_tokens"] for found in usages)
        assert figure(page, "e2e_request_latency_seconds_count", prefix) == len(usages)
        assert figure(page, "time_to_first_token_seconds_count", prefix) == num_texts
        assert figure(page, "request_queue_time_seconds_count", prefix) == len(usages)
    assert sum(figures(page, "request_success_total")) == num_texts
    accepted = figure(page, "spec_decode_num_accepted_tokens_total")
    assert sum(figures(page, "spec_decode_num_accepted_tokens_per_pos_total")) == accepted > 0
    assert sum(figures(page, "spec_decode_drafter_accepted_tokens_total")) == accepted


@pytest.mark.full
@pytest.mark.usefixtures("_governed")
def test_the_page_tells_what_governors_estimate_and_what_memory_holds(start: Callable[..., Running]) -> None:
    """By method; under vLLM's prefix too what vLLM has, and nothing else. They include all that the dashboard shows."""
    llm = LLM(MODEL, "ngram", max_num_seqs=2, max_kv_bytes="2MB", num_cached_prefixes=2, prefill_chunk_size=2)
    server = start(served=Served({"tiny": llm}))

    def told(name: str) -> float:
        page = server.http.get("/metrics").text
        if name in ("kv_cache_usage_perc", "num_preemptions_total"):
            assert figure(page, name) == figure(page, name, "vllm")
        else:
            assert f"vllm:{name}" not in page
        return figure(page, name)

    before = {name: told(name) for name in ("governor_steps_total", "governor_seconds_total")}
    server.post("/v1/completions", prompt="one two three", max_tokens=20, temperature=0)
    assert all(told(name) > value for name, value in before.items())
    assert told("governor_estimated_speedup") == pytest.approx(
        told("governor_plain_seconds_total") / told("governor_seconds_total")
    )
    assert told("governor_steps_total") >= told("governor_drafted_steps_total")
    assert 0 <= told("kv_cache_bytes") <= told("kv_cache_planned_bytes") == 2e6
    assert told("prefix_cache_bytes") > 0
    assert told("num_preemptions_total") == told("kv_cache_usage_perc") == 0
    labels = re.findall(r"^foredraft:kv_cache_bytes\{(.*)\}", server.http.get("/metrics").text, flags=re.MULTILINE)
    assert labels == ['method="ngram",model_name="tiny"']
    families = set(re.findall(r"^# TYPE (\S+)", server.http.get("/metrics").text, flags=re.MULTILINE))
    dashboard = (Path(__file__).parents[2] / "examples" / "serve" / "grafana.json").read_text(encoding="utf-8")
    assert {name.removesuffix("_bucket") for name in re.findall(r"foredraft:\w+", dashboard)} <= families


# -- hostile bodies ------------------------------------------------------------------------------------------------

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-3, 30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12)
    | st.sampled_from(["content", "function", "json_object", "auto", "\ud800", "token", "<|end|>", ""])
)
KEYS = st.sampled_from(["type", "content", "role", "text", "name", "function", "method", "0", "17"]) | st.text(
    max_size=6
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=8
)
FIELDS = sorted(
    KNOWN | OF_RESPONSES | IGNORED | REFUSED.keys() | WITHOUT_EFFECT.keys()
    | {"messages", "tools", "tool_choice", "top_logprobs"}
)  # fmt: skip
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool", "x"])}, optional={"content": VALUES}),
    max_size=3,
)


@pytest.mark.full
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    path=st.sampled_from(["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"]),
    fields=st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=8), VALUES, max_size=3),
    prompt=st.just("a b") | VALUES,
    messages=st.just([{"role": "user", "content": "a"}]) | MESSAGES,
)
def test_no_body_breaks_the_server(
    running_server: Running, path: str, fields: dict[str, Any], prompt: Any, messages: Any
) -> None:
    body = {"prompt": prompt, "messages": messages, "max_tokens": 2, "timeout": 20, "tokens": prompt, **fields}
    if path == "/v1/responses":
        shared = {name: value for name, value in fields.items() if name not in ("prompt", "messages")}
        body = {"input": prompt if messages is None else messages, "max_output_tokens": 2, "timeout": 20, **shared}
    response = running_server.http.post(path, content=json.dumps(body).encode())
    assert response.status_code < 500, (body, response.text)
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
