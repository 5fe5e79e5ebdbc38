"""Fair queue of waiting requests, in which a client with many requests cannot starve a client with few."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

PROMPT_COST = 1.0
OUTPUT_COST = 2.0
"""Cost of each prompt token and of each output token; the weights of the paper."""
MAX_CLIENTS = 4096
"""Maximum number of clients with a counter; beyond it the half with the lowest counters is forgotten."""


@dataclass
class Turn:
    """State of one request in the queue, from its arrival to its end."""

    client: str
    has_gone: bool = False
    has_begun: bool = False
    granted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class FairQueue:
    """Queue that grants turns to requests, first to the client that has received the least service.

    Service is counted in tokens, and output tokens count twice. The counter of a client that becomes active is raised
    to the lowest counter of the waiting clients, or to the counter of the client that was last served. No client
    therefore accumulates credit while idle. Source: virtual token counter, Sheng, Cao, Li, Zhu, Li, Zhuo, Gonzalez,
    Stoica 2024, arXiv 2401.00588, algorithm 2. Requests of the same client keep their order.

    The number of requests that were granted a turn but have not begun is limited to ``num_rows`` or half the number of
    running requests, whichever is larger. Beyond this queue, requests wait in the order in which they were granted.

    Args:
      num_rows: number of requests that one replica runs at once.

    Attributes:
      num_gone: number of requests that were granted a turn and have not begun.
      num_running: number of requests that have begun and not ended.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._waiting: dict[str, deque[Turn]] = {}
        self._served: dict[str, float] = {}
        self._least = 0.0
        self.num_gone = self.num_running = 0

    @property
    def num_waiting(self) -> int:
        """Number of requests that were granted no turn so far."""
        return sum(map(len, self._waiting.values()))

    @contextmanager
    def entered(self, client: str) -> Iterator[Turn]:
        """Queue a request for the duration of the context."""
        turn = Turn(client)
        self._join(turn)
        self._let_go()
        try:
            yield turn
        finally:
            self._leave(turn)
            self._let_go()

    def charge(self, turn: Turn, cost: float) -> None:
        """Add a cost to the counter of the client."""
        self._served[turn.client] = self._served.get(turn.client, self._least) + cost

    def begin(self, turn: Turn) -> None:
        """Mark the request as running."""
        if turn.has_gone and not turn.has_begun:
            turn.has_begun = True
            self.num_gone, self.num_running = self.num_gone - 1, self.num_running + 1
            self._let_go()

    def _join(self, turn: Turn) -> None:
        if turn.client not in self._waiting:
            least = min((self._served[client] for client in self._waiting), default=self._least)
            if len(self._served) >= MAX_CLIENTS:
                self._forget()
            self._served[turn.client] = max(self._served.get(turn.client, least), least)
        self._waiting.setdefault(turn.client, deque()).append(turn)

    def _forget(self) -> None:
        """Keep the counters of waiting clients and of the half with the highest counters. Forgetting changes the order
        of the other clients the least."""
        most = sorted(self._served, key=self._served.__getitem__, reverse=True)[: MAX_CLIENTS // 2]
        self._served = {client: self._served[client] for client in {*most, *self._waiting}}

    def _leave(self, turn: Turn) -> None:
        if turn.has_begun:
            self.num_running -= 1
        elif turn.has_gone:
            self.num_gone -= 1
        elif (queue := self._waiting.get(turn.client)) is not None:
            queue.remove(turn)
            if not queue:
                del self._waiting[turn.client]

    def _let_go(self) -> None:
        """Grant turns until a limit is reached."""
        while self._waiting and self.num_gone < max(self._num_rows, self.num_running // 2):
            client = min(self._waiting, key=self._served.__getitem__)
            self._least = self._served[client]
            turn = self._waiting[client].popleft()
            if not self._waiting[client]:
                del self._waiting[client]
            turn.has_gone = True
            self.num_gone += 1
            if not turn.granted.done():
                turn.granted.set_result(None)
