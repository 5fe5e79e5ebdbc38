"""Replicas that hang: nothing of them comes, and nobody says that they are dead.

Replicas here are scripts that write numbers, on an event loop whose clock goes as fast as there is nothing to do, so
that no second is waited for and none is measured.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from foredraft.config.sampling import SamplingParams
from foredraft.engine.frontend import CompletionOutput, FrozenList, RequestMetrics, RequestOutput, StreamOutput
from foredraft.engine.stats import RowStats
from foredraft.errors import ConfigError
from foredraft.llm import LLM
from foredraft.serve.errors import ApiError
from foredraft.serve.metrics import ClusterMetrics
from foredraft.serve.queued_request import QueuedRequest
from foredraft.serve.ray.failover import CALLER, SILENT_SECONDS, Caller, ClusterBridge
from foredraft.serve.ray.messages import Delta, Finished, Message, ReplicaRequest, Routed, Started
from foredraft.serve.ray.replica import Replica
from foredraft.serve.served import Served
from foredraft.serve.settings import FailoverSettings

LENGTH, STEP_SECONDS = 6, 0.5
WHOLE = list(range(LENGTH))
SETTINGS = FailoverSettings(stall_timeout=10.0, absence_timeout=60.0, retry_seconds=0.0)


class Timeless(selectors.SelectSelector):
    """Ends every wait at once, and sets the clock to its end."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0)
        if not found and timeout is not None:
            self.now += timeout
        return found if found or timeout is not None else super().select(None)


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Run on a loop without waits; everything must happen in its thread."""
    selector = Timeless()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main)


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class Script:
    """What a replica does.

    Args:
      rows: requests that it takes at once.
      hangs_after: messages of one request, from when on it says nothing any more to anybody.
    """

    name: str
    rows: int = 100
    hangs_after: int | None = None
    works: list[ReplicaRequest] = field(default_factory=list)
    is_hung: bool = False
    num_open: int = 0

    async def messages(self, work: ReplicaRequest) -> AsyncGenerator[Message, None]:
        self.works.append(work)
        self.num_open += 1
        try:
            for number, message in enumerate(_said(self.name, work)):
                if number == self.hangs_after:
                    self.is_hung = True
                if self.is_hung:
                    await asyncio.Event().wait()
                yield message
                await asyncio.sleep(STEP_SECONDS)
        finally:
            self.num_open -= 1


def _said(name: str, work: ReplicaRequest) -> list[Message]:
    """Numbers up to LENGTH, from where others have stopped.

    A whole result follows, of which the ingress hands on what it has not written down itself.
    """
    done = len(work.output_ids[0][0]) if work.output_ids else 0
    deltas = [
        StreamOutput("", 0, 0, f"{n} ", (), FrozenList([n]), 0, "length" if n == LENGTH - 1 else None, None, (f"{n} ",))
        for n in range(done, LENGTH)
    ]
    news = [Delta((delta,), RowStats(), 0) for delta in deltas]
    ended = Finished((_result(),), RowStats(), 0)
    return [Routed(name, has_accepted=True), Started(work.fingerprint), *news, ended]


def _result() -> RequestOutput:
    text = "".join(f"{n} " for n in WHOLE)
    sample = CompletionOutput(0, text, FrozenList(WHOLE), None, None, "length", None, 0)
    return RequestOutput("", None, FrozenList([1]), FrozenList([sample]), True, RequestMetrics())


class Scripted:
    """Sends requests as the router of Ray Serve does: to the first replica that is not avoided and has room."""

    def __init__(self, served: Any, scripts: Sequence[Script]) -> None:
        self.served, self.scripts = served, scripts

    async def generate(self, work: ReplicaRequest) -> AsyncGenerator[Message, None]:
        while True:
            if self.scripts:
                yield Routed("")
            fitting = [one for one in self.scripts if one.name not in work.avoided] or list(self.scripts)
            free = [one for one in fitting if one.num_open < one.rows]
            if free:
                break
            await asyncio.sleep(0.5)
        yield Routed(free[0].name)
        async for message in free[0].messages(work):
            yield message


@dataclass
class Got:
    """What a client has got, and when."""

    ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)


class House:
    """An ingress before scripts."""

    def __init__(self, llm: Any, scripts: Sequence[Script], settings: FailoverSettings = SETTINGS) -> None:
        self.fleet = Scripted(SimpleNamespace(names={"tiny": llm}, weights="w", fingerprint="f", num_rows=2), scripts)
        self.bridge = ClusterBridge(self.fleet, ClusterMetrics("tiny"), settings)  # type: ignore[arg-type]
        self.llm = llm

    def submit(self, client: str = "") -> QueuedRequest:
        CALLER.set(Caller(client=client))
        ticket = QueuedRequest(self.llm, [{"prompt_token_ids": [1]}], [SamplingParams(max_tokens=LENGTH)])
        self.bridge.submit(ticket)
        return ticket

    async def hear(self, ticket: QueuedRequest) -> Got:
        got = Got()
        while (news := await ticket.news()) is not None:
            for delta in news:
                got.ids += delta.token_ids
                got.times.append(now())
        got.notes = ticket.notes
        return got

    def left(self) -> tuple[int, ...]:
        """Requests, and turns of the queue: those that wait, that have gone and that run."""
        queue = self.bridge.queue
        assert queue is not None
        return self.bridge.num_open, queue.num_waiting, queue.num_gone, queue.num_running

    async def ask(self) -> Got:
        return await self.hear(self.submit())


@pytest.mark.parametrize("said", range(LENGTH + 3))
def test_a_stream_leaves_a_hung_replica_in_time(said: int) -> None:
    """Wherever it hangs: before it has taken the request, before the first token, after the last one."""

    async def main() -> None:
        hung, other = Script("hung", hangs_after=said), Script("other")
        house = House(object(), [hung, other])
        got = await house.ask()
        assert got.ids == WHOLE
        pauses = [after - before for before, after in zip([0.0, *got.times], got.times, strict=False)]
        assert max(pauses) <= SETTINGS.stall_timeout + 3 * STEP_SECONDS, pauses
        if said < LENGTH + 2:
            assert [len(hung.works), len(other.works)] == [1, 1]
            assert "hung" in other.works[0].avoided
        assert (hung.num_open, other.num_open) == (0, 0)
        assert ("failover" in got.notes) == (said >= 2)

    run(main())


def test_requests_are_not_sent_to_a_replica_that_was_silent() -> None:
    """One request has waited for it; those after it do not, until it speaks again."""

    async def main() -> None:
        hung, other = Script("hung", hangs_after=0), Script("other")
        house = House(object(), [hung, other])
        await house.ask()
        for _ in range(3):
            began = now()
            assert (await house.ask()).ids == WHOLE
            assert now() - began < SETTINGS.stall_timeout
        assert len(hung.works) == 1
        hung.hangs_after, hung.is_hung, other.rows = None, False, 0
        house.fleet.scripts = [hung]
        assert (await house.ask()).ids == WHOLE, "where there is no other, it is asked"
        house.fleet.scripts = [hung, other]
        await house.ask()
        assert len(hung.works) == 3

    run(main())


def test_a_replica_that_runs_again_is_asked_again() -> None:
    """A minute after it was silent, if Ray has not replaced it."""

    async def main() -> None:
        hung, other = Script("hung", hangs_after=0), Script("other")
        house = House(object(), [hung, other])
        await house.ask()
        hung.hangs_after, hung.is_hung = None, False
        await house.ask()
        assert (len(hung.works), len(other.works)) == (1, 2)
        await asyncio.sleep(SILENT_SECONDS)
        await house.ask()
        assert (len(hung.works), len(other.works)) == (2, 2)

    run(main())


def test_what_waits_behind_a_hung_replica_goes_on_elsewhere() -> None:
    """Sixteen requests, of which the hung one holds two rows, and the other serves two at a time."""

    async def main() -> None:
        hung, other = Script("hung", rows=2, hangs_after=3), Script("other", rows=2)
        house = House(object(), [hung, other])
        answers = await asyncio.gather(*[house.ask() for _ in range(16)])
        assert [got.ids for got in answers] == [WHOLE] * 16
        rounds = 8 * (LENGTH + 3) * STEP_SECONDS
        assert now() <= SETTINGS.stall_timeout + rounds + 16 * 0.5
        assert house.left() == (0, 0, 0, 0)

    run(main())


def test_a_request_that_waits_for_room_is_not_lost() -> None:
    """All rows are taken for longer than a replica may be silent: the router says that it tries."""

    async def main() -> None:
        only = Script("only", rows=0)
        house = House(object(), [only])
        asked = asyncio.ensure_future(house.ask())
        await asyncio.sleep(20 * SETTINGS.stall_timeout)
        assert not asked.done()
        only.rows = 1
        got = await asked
        assert (got.ids, got.notes) == (WHOLE, {})

    run(main())


def test_without_any_replica_requests_are_refused() -> None:
    """After so many seconds, with an error that says when to come again; one that has begun ends in it too."""

    async def main() -> None:
        house = House(object(), [])
        with pytest.raises(ApiError) as raised:
            await house.ask()
        assert (raised.value.status, raised.value.code) == (503, "no_replicas")
        assert raised.value.headers == {"Retry-After": "1"}
        assert SETTINGS.absence_timeout <= now() <= SETTINGS.absence_timeout + SETTINGS.stall_timeout

    run(main())


def test_what_a_replica_says_when_it_wakes_is_not_heard() -> None:
    """It goes on where it stood, after another has taken its request: no token comes twice."""

    async def main() -> None:
        waking, heard = asyncio.Event(), []

        class Waking(Script):
            async def messages(self, work: ReplicaRequest) -> AsyncGenerator[Message, None]:
                said = _said(self.name, work)
                for message in said[:4]:
                    yield message
                try:
                    await waking.wait()
                except asyncio.CancelledError:
                    heard.append("left")
                    raise
                for message in said[4:]:
                    yield message

        slow = Script("other")
        house = House(object(), [Waking("hung"), slow])
        asked = asyncio.ensure_future(house.ask())
        while not slow.works:
            await asyncio.sleep(0.1)
        waking.set()
        got = await asked
        assert (got.ids, heard) == (WHOLE, ["left"])
        assert got.notes["failover"] == {"count": 1, "is_same_fingerprint": True, "at_tokens": [2]}

    run(main())


def test_a_process_that_was_stopped_itself_blames_nobody() -> None:
    """The clock has jumped: what replicas have said meanwhile is still on its way."""

    async def main() -> None:
        only, other = Script("only"), Script("other")
        house = House(object(), [only, other])
        asked = asyncio.ensure_future(house.ask())
        await asyncio.sleep(1.2)
        loop: Any = asyncio.get_running_loop()
        loop._selector.now += 100.0
        got = await asked
        assert (got.ids, got.notes, len(other.works)) == (WHOLE, {}, 0)

    run(main())


@pytest.mark.parametrize("when", ["in the queue", "before it was taken", "in the middle", "after it was lost"])
def test_a_client_that_leaves_leaves_nothing(when: str) -> None:
    """Wherever its request is: no turn, no row and no task is kept."""

    async def main() -> None:
        settings = FailoverSettings(stall_timeout=10.0, retry_seconds=1000.0)
        hangs = {"in the queue": None, "before it was taken": 0, "in the middle": None, "after it was lost": 3}[when]
        only = Script("only", rows=0 if when == "in the queue" else 9, hangs_after=hangs)
        house = House(object(), [only], settings)
        tickets = [house.submit() for _ in range(5)]
        await asyncio.sleep(15.0 if when == "after it was lost" else 1.8)
        for ticket in tickets:
            house.bridge.abandon(ticket)
        await asyncio.sleep(0.1)
        assert house.left() == (0, 0, 0, 0)
        assert only.num_open == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())


# -- the replica's own end -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("zoo:tiny", max_num_seqs=8)


def _work(replica: Replica, **changes: Any) -> ReplicaRequest:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, seed=1)
    served = replica.description
    given = {"prompts": ({"prompt_token_ids": [1, 2, 3]},), "params": (params,), **changes}
    return ReplicaRequest("", "tiny", weights=served.weights, fingerprint=served.fingerprint, **given)


async def _all(replica: Replica, work: ReplicaRequest) -> list[Message]:
    return [message async for message in replica.generate(work)]


def test_steps_travel_together(llm: LLM) -> None:
    """A message of Ray costs more than a step of a small model, and whoever waits for the end needs few."""
    ids, counts = [], []
    for seconds, wants_news in ((0.0, True), (1e9, True), (1e9, False)):
        replica = Replica(lambda: Served({"tiny": llm}), "tiny", "name", message_seconds=seconds)
        said = asyncio.run(_all(replica, _work(replica, wants_news=wants_news)))
        news = [message for message in said if isinstance(message, Delta) and message.deltas]
        ids.append([token for message in news for delta in message.deltas for token in delta.token_ids])
        counts.append(len(news))
    assert ids[0] == ids[1] == ids[2]
    assert len(ids[0]) == 40
    assert counts[0] > 30
    assert counts[1] <= 2 >= counts[2]


def test_a_step_that_does_not_end_is_told(llm: LLM) -> None:
    """The process lives, and its engine does not: requests go on elsewhere, and Ray is told to replace it."""
    go = threading.Event()
    replica = Replica(lambda: Served({"tiny": llm}), "tiny", "name", step_timeout=0.01)
    step = llm.step

    def hang() -> Any:
        go.wait(30)
        return step()

    llm.step = hang  # type: ignore[method-assign]
    try:
        said = asyncio.run(_all(replica, _work(replica)))
        assert not replica.is_alive
    finally:
        go.set()
        del llm.step
    assert said[0] == Routed("name", has_accepted=True)
    assert isinstance(said[-1], ApiError)
    assert said[-1].status == 503


def test_a_full_replica_is_not_waited_for_as_if_it_had_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router tells where it sends a request, and that it waits again once the replica has declined."""
    pytest.importorskip("ray", reason="Ray is not installed")
    from foredraft.serve.ray import router

    class Replica(router.ReportingReplica):
        replica_id = SimpleNamespace(unique_id="full")

        def __init__(self) -> None:
            """Without an actor."""

    async def main(accepted: bool) -> list[str]:
        async def respond() -> Any:
            return SimpleNamespace(accepted=accepted)

        result = SimpleNamespace(get_rejection_response=respond)
        monkeypatch.setattr(router.RunningReplica, "try_send_request", lambda *args: result)
        names: list[str] = []
        work = ReplicaRequest("", "tiny", ({"prompt_token_ids": [1]},), (), "w", "f", route=names.append)
        request: Any = SimpleNamespace(args=[work])
        told = Replica().try_send_request(request, True)
        assert (await told.get_rejection_response()).accepted is accepted
        return names

    assert asyncio.run(main(True)) == ["full"]
    assert asyncio.run(main(False)) == ["full", ""]


def test_full_replicas_are_asked_again_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one, a request that waited for a row took most of a processor."""
    pytest.importorskip("ray", reason="Ray is not installed")
    from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
    from ray.serve.request_router import PendingRequest

    from foredraft.serve.ray.router import PrefixRouter

    pauses: list[int] = []

    async def pause(self: PrefixRouter, attempt: int) -> None:
        pauses.append(attempt)

    async def main() -> None:
        router = PrefixRouter(DeploymentID("engine"), DeploymentHandleSource.REPLICA)
        router.initialize_state()
        names = [ReplicaID(name, DeploymentID("engine")) for name in ("one", "two")]
        replicas = [SimpleNamespace(replica_id=name, replica_metadata={}) for name in names]
        router._replicas, router._replicas_list = dict(zip(names, replicas, strict=True)), replicas
        work = ReplicaRequest("", "tiny", ({"prompt_token_ids": [1]},), (), "w", "f")
        waiting = PendingRequest(
            args=[work], kwargs={}, metadata=RequestMetadata(request_id="", internal_request_id="")
        )
        async with aclosing(router._choose_replicas_with_backoff(waiting)) as tries:
            told = [[each.replica_id.unique_id for each in await anext(tries)] for _ in range(8)]
        assert sorted(told[0] + told[1]) == ["one", "two"]

    monkeypatch.setattr(PrefixRouter, "_backoff", pause)
    asyncio.run(main())
    assert pauses == [0, 1], "after the first retry of both, one before each further one"


@pytest.mark.parametrize("name", ["stall_timeout", "step_timeout", "absence_timeout", "max_failovers"])
def test_limits_out_of_range_are_named(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        FailoverSettings(**{name: -1})
