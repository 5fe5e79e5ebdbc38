"""A request on its way over replicas: how far it has come, who has it, and what its client is told of the way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

from foretoken.serve.fair import OUTPUT_COST, FairQueue, Turn
from foretoken.serve.ray.journal import Journal
from foretoken.serve.ray.messages import Begun, News, Taken, Work

if TYPE_CHECKING:
    from foretoken.serve.bridge import Ticket
    from foretoken.serve.ray.figures import ClusterMetrics


class Course:
    """A request on its way over replicas."""

    def __init__(
        self, ticket: Ticket, journal: Journal, work: Work, metrics: ClusterMetrics, queue: FairQueue, turn: Turn
    ) -> None:
        self.ticket, self.journal, self.work = ticket, journal, work
        self._metrics, self._queue, self._turn = metrics, queue, turn
        self.replica = ""
        """That it was sent to; empty while it waits for one."""
        self._has_begun = False
        self._is_paused = False
        self._last = perf_counter()

    def avoid(self, silent: Iterable[str]) -> None:
        """Not to be sent to these, if there are others."""
        self.replica = ""
        if not self.work.avoided.issuperset(silent):
            self.work = replace(self.work, avoided=self.work.avoided.union(silent))

    def take(self, taken: Taken) -> None:
        """A replica has it."""
        self.replica = taken.replica
        self.ticket.is_queued = False
        self._queue.begin(self._turn)

    def begin(self, begun: Begun) -> None:
        """An engine has it."""
        if self._has_begun:
            is_same = begun.fingerprint == self.work.fingerprint
            self.ticket.notes["failover"]["is_same_fingerprint"] &= is_same
            return
        if begun.fingerprint != self.work.fingerprint:
            self.ticket.notes["replica_fingerprint"] = begun.fingerprint
            self.work = replace(self.work, fingerprint=begun.fingerprint)
        self._has_begun = True
        self.ticket.deliver([])

    def deliver(self, news: News) -> None:
        """Hand on what is new of it."""
        deltas = self.journal.take(news)
        if not deltas:
            return
        if self._is_paused:
            self._metrics.pause.observe(perf_counter() - self._last)
        self._is_paused, self._last = False, perf_counter()
        self._queue.charge(self._turn, OUTPUT_COST * sum(len(delta.token_ids) for delta in deltas))
        self.journal.is_waiting = False
        self.ticket.deliver(deltas)

    def lose(self) -> None:
        """From now on the request is another replica's."""
        self.journal.turn()
        avoided = self.work.avoided | ({self.replica} if self.replica else set())
        self.work = replace(self.work, output_ids=self.journal.output_ids, avoided=avoided)
        if self._has_begun:
            told = self.ticket.notes.setdefault("failover", {"count": 0, "is_same_fingerprint": True, "at_tokens": []})
            told["count"] += 1
            told["at_tokens"].append(self.journal.num_tokens)
            self._is_paused = True
            self._metrics.failovers.inc()
