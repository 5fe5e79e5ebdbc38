"""Clients take turns by what they have been served, and a full queue refuses whoever fills it."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from foredraft.serve import fair
from foredraft.serve.fair import FairQueue, Turn


class Line:
    """Requests that wait; each ends before the next begins.

    Args:
      costs: of each client's requests.
    """

    def __init__(self, costs: dict[str, float]) -> None:
        self._queue, self._costs = FairQueue(1), costs
        self._turns: list[tuple[Turn, ExitStack]] = []

    def join(self, clients: str) -> None:
        for client in clients:
            end = ExitStack()
            self._turns.append((end.enter_context(self._queue.entered(client)), end))

    def step(self) -> str:
        """The client whose request goes next; nothing where none waits."""
        for turn, end in self._turns:
            if turn.has_gone and not turn.has_begun:
                self._queue.charge(turn, self._costs[turn.client])
                self._queue.begin(turn)
                end.close()
                return turn.client
        return ""


def order(given: str, costs: dict[str, float]) -> str:
    """Clients of requests in the order in which they go."""

    async def run() -> str:
        line = Line(costs)
        line.join(given)
        return "".join(line.step() for _ in given)

    return asyncio.run(run())


def test_requests_of_one_client_keep_their_order_and_clients_take_turns() -> None:
    """The first has gone before anybody else was there."""
    assert order("aaaaab", {"a": 1.0, "b": 1.0}).index("b") <= 2
    assert order("aaaabbb", {"a": 1.0, "b": 1.0}) == "abababa"


def test_turns_are_counted_in_tokens() -> None:
    """One whose requests are three times as long gets a third as many."""
    gone = order("a" * 12 + "b" * 12, {"a": 3.0, "b": 1.0})
    assert gone[:8].count("a") == 2
    assert gone.count("a") == gone.count("b") == 12


def test_who_comes_late_has_saved_nothing_up() -> None:
    """A client that was idle does not go before others until it has been served as much as they."""

    async def run() -> str:
        line = Line({"a": 1.0, "b": 1.0})
        line.join("a" * 20)
        for _ in range(10):
            line.step()
        line.join("b" * 10)
        return "".join(line.step() for _ in range(8))

    assert asyncio.run(run()).count("b") in (3, 4), "one of the others had gone before"


def test_what_has_gone_and_not_begun_is_bounded() -> None:
    """By the rows of a replica, or half of what runs; whoever leaves makes room, whether it had begun or not."""

    async def run() -> None:
        queue = FairQueue(2)
        with ExitStack() as stack:
            turns = [stack.enter_context(queue.entered(client)) for client in "aabbccddeeffgg"]

            def num_gone() -> int:
                return sum(turn.has_gone and not turn.has_begun for turn in turns)

            for num_running in range(1, 9):
                queue.begin(next(turn for turn in turns if turn.has_gone and not turn.has_begun))
                assert num_gone() == min(max(2, num_running // 2), len(turns) - num_running)
            with queue.entered("h") as last:
                assert not last.has_gone
            assert not last.granted.done()
        assert (queue.num_waiting, queue.num_gone, queue.num_running) == (0, 0, 0)

    asyncio.run(run())


def test_no_more_than_so_many_clients_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair, "MAX_CLIENTS", 10)

    async def run() -> int:
        queue = FairQueue(1)
        for place in range(100):
            with queue.entered(f"client {place}") as turn:
                queue.charge(turn, 1.0)
                queue.begin(turn)
        return len(queue._served)

    assert asyncio.run(run()) <= 10
