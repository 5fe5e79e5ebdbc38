"""A request that loses its replicas ends with the text that one replica would have written.

Real engines behind a fleet that breaks where it is told to; Ray is in test_ray.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from foredraft import zoo
from foredraft.config.sampling import SamplingParams
from foredraft.errors import ConfigError
from foredraft.llm import LLM
from foredraft.serve.app import Application
from foredraft.serve.errors import ApiError, stopping
from foredraft.serve.metrics import ClusterMetrics
from foredraft.serve.queued_request import QueuedRequest
from foredraft.serve.ray.affinity import Affinity
from foredraft.serve.ray.config import ClusterConfig
from foredraft.serve.ray.failover import CALLER, Caller, ClusterBridge, with_callers
from foredraft.serve.ray.messages import Delta, DistantServed, Failed, Message, ReplicaRequest, Routed, Started
from foredraft.serve.ray.replica import Replica
from foredraft.serve.served import Served
from foredraft.serve.settings import FailoverSettings, ServerSettings

PROMPT = "The capital of France is a city that"
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "penalties": {"temperature": 0.8, "presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "stop strings": {"temperature": 1.0, "stop": ["zq", " and", "ing"], "min_tokens": 20, "ignore_eos": False},
    "grammar": {"structured_outputs": {"regex": "([a-z]{2,7} ){4,8}[a-z]+"}, "ignore_eos": False},
    "samples": {"temperature": 0.9, "n": 3, "logprobs": 2},
    "prompt": {"prompt_logprobs": 1, "logprobs": 0, "temperature": 0.0},
}


class Breaking:
    """Replicas that are lost after so many messages that bring something, in turns; the last one stays.

    Args:
      lives: of each attempt; None for one that is not lost.
    """

    def __init__(self, replicas: Sequence[Replica], lives: Sequence[int | None]) -> None:
        self.served = replicas[0].description
        self.application: Application | None = None
        self.works: list[ReplicaRequest] = []
        self._replicas, self._lives = replicas, lives

    def adopt(self, served: DistantServed) -> None:
        self.served = served
        if self.application is not None:
            self.application.served = served

    async def generate(self, work: ReplicaRequest) -> AsyncGenerator[Message, None]:
        life = self._lives[min(len(self.works), len(self._lives) - 1)]
        replica = self._replicas[len(self.works) % len(self._replicas)]
        self.works.append(work)
        async with aclosing(replica.generate(work)) as messages:
            async for message in messages:
                if life == 0:
                    raise Failed("the replica was lost")
                yield message
                if life is not None and not isinstance(message, (Routed, Started)) and message != Delta():
                    life -= 1


def _served(method: str) -> Served:
    return Served({"tiny": LLM("zoo:tiny", method, max_num_seqs=8)})


@pytest.fixture(scope="module")
def replicas() -> list[Replica]:
    """Two engines with models of their own, that draft differently."""
    methods = ("ngram", "draft_model")
    return [
        Replica(partial(_served, method), "tiny", method, message_seconds=0.0)  # a message for each step
        for method in methods
    ]


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM("zoo:tiny")


class Answered:
    """What a client has got of one request."""

    def __init__(self) -> None:
        self.ids: dict[int, list[int]] = {}
        self.texts: dict[int, str] = {}
        self.logprobs: dict[int, list[Any]] = {}
        self.reasons: dict[int, Any] = {}
        self.outputs: list[Any] = []
        self.prompts: list[Any] = []
        self.notes: dict[str, Any] = {}


def ask(fleet: Any, params: SamplingParams, settings: FailoverSettings | None = None) -> Answered:
    return asyncio.run(_ask(fleet, params, ClusterMetrics("tiny"), settings))


async def _ask(fleet: Any, params: SamplingParams, metrics: ClusterMetrics, settings: Any) -> Answered:
    bridge = ClusterBridge(fleet, metrics, settings or FailoverSettings(retry_seconds=0.0))
    llm: Any = fleet.served.names["tiny"]
    ids = llm.tokenizer(PROMPT)["input_ids"]
    ticket = QueuedRequest(llm, [{"prompt": PROMPT, "prompt_token_ids": ids}], [params])
    bridge.submit(ticket)
    answered = Answered()
    async with asyncio.timeout(600):
        while (news := await ticket.news()) is not None:
            for delta in news:
                answered.prompts += [] if delta.prompt_logprobs is None else [delta.prompt_logprobs]
                answered.ids.setdefault(delta.index, []).extend(delta.token_ids)
                answered.texts[delta.index] = answered.texts.get(delta.index, "") + delta.text
                answered.logprobs.setdefault(delta.index, []).extend(delta.logprobs or ())
                assert answered.reasons.setdefault(delta.index, None) is None, "nothing comes after the end"
                answered.reasons[delta.index] = delta.finish_reason and (delta.finish_reason, delta.stop_reason)
    answered.outputs, answered.notes = ticket.outputs(), ticket.notes
    return answered


LIVES: list[list[int | None]] = [[0, None], [1, None], [7, None], [2, 1, 3, None]]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "lives"),
    [
        pytest.param(
            name, lives, marks=() if name == "sampled" or (i + j) % 4 == 0 else pytest.mark.full, id=f"{name}-{lives}"
        )
        for i, name in enumerate(SETTINGS)
        for j, lives in enumerate(LIVES)
    ],
)
def test_texts_outlive_their_replicas(replicas: list[Replica], plain: LLM, name: str, lives: list[int | None]) -> None:
    """No token twice, none lost, the same ends and the same log-probabilities, wherever the replicas are lost."""
    given = {"max_tokens": 48, "seed": 11, "ignore_eos": True, **SETTINGS[name]}
    (expected,) = plain.generate(PROMPT, SamplingParams(**given))
    fleet = Breaking(replicas, lives)
    answered = ask(fleet, SamplingParams(**given))
    assert len(fleet.works) == len(lives)
    for place, text in enumerate(expected.outputs):
        assert answered.ids[place] == list(text.token_ids)
        assert answered.texts[place] == text.text
        assert answered.reasons[place] == (text.finish_reason, text.stop_reason)
        found = answered.outputs[0].outputs[place]
        assert (found.text, found.token_ids, found.seed) == (text.text, text.token_ids, text.seed)
        if text.logprobs is not None:
            assert found.logprobs == answered.logprobs[place]
            assert _numbers(found.logprobs) == _numbers(text.logprobs)
            assert found.cumulative_logprob == pytest.approx(text.cumulative_logprob, abs=1e-9)
    assert answered.outputs[0].prompt_logprobs == expected.prompt_logprobs
    assert answered.prompts == ([] if expected.prompt_logprobs is None else [expected.prompt_logprobs])
    num_lost = answered.notes.get("failover", {"count": 0})["count"]
    assert num_lost == sum(life is not None for life in lives) - (lives[0] == 0)  # nothing had begun there


def _numbers(tables: Any) -> list[dict[int, tuple[float, int]]]:
    return [{token: (entry.logprob, entry.rank) for token, entry in table.items()} for table in tables]


def test_an_end_that_was_not_heard_is_heard_again(replicas: list[Replica], plain: LLM) -> None:
    """All tokens were delivered, and the replica was lost before it said that this is the end."""
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=6, ignore_eos=True, num_speculative_tokens=0)
    (expected,) = plain.generate(PROMPT, params)
    fleet = Breaking(replicas, [6, None])
    answered = ask(fleet, params)
    assert len(fleet.works[1].output_ids[0][0]) == 6
    assert (answered.ids[0], answered.texts[0]) == (list(expected.outputs[0].token_ids), expected.outputs[0].text)


def test_a_request_loses_so_many_replicas_and_no_more(replicas: list[Replica]) -> None:
    fleet = Breaking(replicas, [1])
    with pytest.raises(ApiError) as raised:
        ask(fleet, SamplingParams(max_tokens=40, ignore_eos=True), FailoverSettings(max_failovers=2, retry_seconds=0))
    assert len(fleet.works) == 3
    assert (raised.value.status, raised.value.code) == (503, "replicas_lost")
    assert raised.value.headers["Retry-After"]


def test_refusals_are_told_and_not_tried_again(replicas: list[Replica]) -> None:
    fleet = Breaking(replicas, [None])
    with pytest.raises(ApiError) as raised:
        ask(fleet, SamplingParams(structured_outputs={"regex": "(["}))
    assert raised.value.status == 400
    assert len(fleet.works) == 1


def test_no_text_goes_on_with_other_weights(replicas: list[Replica]) -> None:
    """A replica of another model is asked, and refuses; the tokens that were delivered stay all that there is."""
    fleet = Breaking(replicas, [2, None])

    class Others(Breaking):
        async def generate(self, work: ReplicaRequest) -> AsyncGenerator[Message, None]:
            changed = replacing_weights(work) if work.output_ids else work
            async with aclosing(fleet.generate(changed)) as messages:
                async for message in messages:
                    yield message

    with pytest.raises(ApiError) as raised:
        ask(Others(replicas, []), SamplingParams(max_tokens=30, ignore_eos=True))
    assert raised.value.status == 503
    assert len(fleet.works) == FailoverSettings().max_failovers + 1


def test_a_request_is_read_anew_when_another_model_is_served(replicas: list[Replica], plain: LLM) -> None:
    """An ingress that has outlived all replicas of its weights answers for those that there are now."""
    replica = replicas[0]
    fleet = Breaking([replica], [None])
    old = DistantServed(replica.description)
    old.weights = "old"
    application = fleet.application = Application(ClusterBridge(fleet, ClusterMetrics("tiny")), ServerSettings())
    fleet.adopt(old)
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}

    async def run() -> list[Any]:
        transport = httpx.ASGITransport(with_callers(application.build(), has_keys=False))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await asyncio.gather(*[client.post("/v1/completions", json=body, timeout=60) for _ in range(3)])

    answers = asyncio.run(run())
    (expected,) = plain.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert [answer.status_code for answer in answers] == [200] * 3, answers[0].text
    assert {answer.json()["choices"][0]["text"] for answer in answers} == {expected.outputs[0].text}


def test_a_replica_without_the_way_of_drafting_takes_its_default(replicas: list[Replica], plain: LLM) -> None:
    """Deployed anew under another name: the texts are the same."""
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
    (expected,) = plain.generate(PROMPT, params)

    class Renamed(Breaking):
        async def generate(self, work: ReplicaRequest) -> AsyncGenerator[Message, None]:
            async with aclosing(super().generate(replace(work, name="gone"))) as messages:
                async for message in messages:
                    yield message

    assert ask(Renamed(replicas, [None]), params).ids[0] == list(expected.outputs[0].token_ids)


def test_a_full_queue_sends_away_the_newest_of_who_fills_it(replicas: list[Replica]) -> None:
    """A client with few requests gets its place; one with as many as anybody is told to come again."""

    class Busy(Breaking):
        async def generate(self, work: ReplicaRequest) -> AsyncGenerator[Message, None]:
            await asyncio.sleep(60)
            yield Delta()

    async def run() -> None:
        fleet = Busy(replicas, [None])
        bridge = ClusterBridge(fleet, ClusterMetrics("tiny"))
        llm: Any = replicas[0].description.names["tiny"]

        def arrive(client: str) -> QueuedRequest:
            CALLER.set(Caller(client=client))
            bridge.check_room(1, 20, None)
            ticket = QueuedRequest(llm, [{"prompt_token_ids": [1]}], [SamplingParams()])
            bridge.submit(ticket)
            return ticket

        many = [arrive("many") for _ in range(20)]
        with pytest.raises(ApiError) as raised:
            arrive("many")
        assert (raised.value.status, raised.value.code) == (429, "queue_full")
        await asyncio.sleep(0)
        few = [arrive("few") for _ in range(5)]
        for ticket in many[-5:]:
            with pytest.raises(ApiError, match="20 requests are waiting"):
                await ticket.news()
        with pytest.raises(ApiError, match="the limit is 20"):
            [arrive("few") for _ in range(20)]
        bridge.abort_all(stopping())
        for ticket in (many[0], few[0]):
            with pytest.raises(ApiError, match="shutting down"):
                await ticket.news()

    asyncio.run(run())


def replacing_weights(work: ReplicaRequest) -> ReplicaRequest:
    return replace(work, weights="others")


def test_the_page_has_every_replica_under_its_name(replicas: list[Replica]) -> None:
    page = ClusterMetrics("tiny", lambda: {one.name: one.page for one in replicas}).page().decode()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert {sample.labels["replica"] for sample in families["foredraft:replica_info"].samples} == {
        "ngram",
        "draft_model",
    }
    running = families["foredraft:num_requests_running"].samples
    assert len(running) == len(replicas)


# -- routing -------------------------------------------------------------------------------------------------------


def test_prompts_go_where_their_beginning_was_read() -> None:
    affinity = Affinity(block=4)
    begin = list(range(16))
    first = affinity.choose(begin, "", {"a": 0, "b": 0})
    other = affinity.choose([9] * 16, "", {"a": 0, "b": 0})
    assert first != other
    assert affinity.choose([*begin, 99, 98], "", {"a": 1, "b": 1}) == first
    assert affinity.choose([9] * 12, "", {"a": 1, "b": 1}) == other
    assert affinity.num_hits == 2


def test_no_replica_is_far_ahead_of_the_others() -> None:
    """All prompts alike: the limit, not the beginning, decides; at every moment, once there are requests enough."""
    affinity = Affinity(block=4)
    loads = dict.fromkeys("abcd", 0)
    for number in range(1, 401):
        loads[affinity.choose(list(range(8)), "", loads)] += 1
        if number >= 16:
            assert max(loads.values()) <= 1.3 * number / len(loads), (number, loads)


def test_a_prompt_that_went_elsewhere_was_read_there() -> None:
    """The replica that was chosen was full, and Ray has taken another."""
    affinity = Affinity(block=4)
    chosen = affinity.choose(list(range(8)), "", {"a": 0, "b": 0})
    (other,) = {"a", "b"} - {chosen}
    affinity.note(list(range(8)), "", other)
    assert affinity.choose(list(range(12)), "", {"a": 1, "b": 1}) == other


def test_sessions_stay_together_and_lost_replicas_are_left() -> None:
    affinity = Affinity(block=4)
    first = affinity.choose([1, 2], "someone", {"a": 0, "b": 0})
    assert affinity.choose([3, 4], "someone", {"a": 0, "b": 0}) == first
    (left,) = {"a", "b"} - {first}
    assert affinity.choose([3, 4], "someone", {left: 5}) == left


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "model"),
        ({"model": "zoo:tiny", "replicas": 2}, "replicas"),
        ({"model": "zoo:tiny", "failover": {"retries": 2}}, "retries"),
        ({"model": "zoo:tiny", "server": {"max_n": 0}}, "max_n"),
        ({"model": "zoo:tiny", "num_replicas": 0}, "num_replicas"),
    ],
)
def test_options_that_are_not_known_are_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ClusterConfig.of(given)


@pytest.mark.parametrize("quantization", [pytest.param(None, marks=pytest.mark.full), "int8"])
def test_models_that_differ_in_one_packed_layer_have_other_digests(tmp_path: Path, quantization: str | None) -> None:
    """Where packing has released the weights, too: a rolling update must not continue another model's text."""
    model, _, tokenizer = zoo.load("tiny")
    model.save_pretrained(tmp_path / "one")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] += 0.25
    model.save_pretrained(tmp_path / "two")
    llms = [LLM(str(tmp_path / name), tokenizer=tokenizer, quantization=quantization) for name in ("one", "two", "one")]
    one, two, again = (Served({"tiny": llm}) for llm in llms)
    assert one.weights == again.weights != two.weights
    assert one.fingerprint == again.fingerprint != two.fingerprint
    if quantization is not None:
        assert Served({"tiny": LLM(str(tmp_path / "one"), tokenizer=tokenizer)}).weights != one.weights
