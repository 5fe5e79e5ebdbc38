"""A request on its way over replicas, and what was delivered of it, from which another replica goes on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

from foredraft.config.sampling import SamplingParams
from foredraft.engine.frontend import CompletionOutput, FrozenList, Logprob, RequestOutput, StreamOutput
from foredraft.engine.stats import RowStats
from foredraft.serve.backend import QueuedRequest
from foredraft.serve.fair import OUTPUT_COST, FairQueue, Turn
from foredraft.serve.metrics import ClusterMetrics
from foredraft.serve.ray.messages import Accepted, Delta, Finished, OutputIds, ReplicaRequest, Started


@dataclass
class Text:
    """What was delivered of one sample."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None


class Journal:
    """What was delivered of a request: `foredraft.engine.frontend.Stream`, as far as answers read it.

    Args:
      params: of each prompt, with a seed.
    """

    def __init__(self, params: Sequence[SamplingParams]) -> None:
        self.texts = [[Text() for _ in range(one.n)] for one in params]
        self.is_waiting = True
        self._before = RowStats()
        self._now = RowStats()
        self._cached = 0
        self._outputs: list[RequestOutput] = []

    @property
    def output_ids(self) -> tuple[OutputIds, ...]:
        """What a replica is to go on from; nothing where nothing has been delivered."""
        if not any(text.token_ids for texts in self.texts for text in texts):
            return ()
        return tuple(tuple(tuple(text.token_ids) for text in texts) for texts in self.texts)

    @property
    def num_tokens(self) -> int:
        return sum(len(text.token_ids) for texts in self.texts for text in texts)

    @property
    def num_cached_tokens(self) -> int:
        return self._cached

    @property
    def finish_reasons(self) -> list[str | None]:
        return [text.finish_reason for texts in self.texts for text in texts]

    @property
    def stats(self) -> RowStats:
        """Counters of all replicas together."""
        pooled = RowStats()
        pooled.add(self._before)
        pooled.add(self._now)
        return pooled

    def take(self, news: Delta) -> list[StreamOutput]:
        """Write down what a replica has brought; returns what is new of it."""
        self._now, self._cached = news.stats or self._now, news.num_cached_tokens
        return [delta for delta in news.deltas if self._append(delta)]

    def _append(self, delta: StreamOutput) -> bool:
        text = self.texts[delta.prompt_index][delta.index]
        if text.finish_reason is not None:  # on another replica, which this one repeats
            return False
        text.token_ids += delta.token_ids
        text.logprobs += delta.logprobs or ()
        text.finish_reason = delta.finish_reason
        return True

    def turn(self) -> None:
        """The replica is lost; what it has counted stays."""
        self._before.add(self._now)
        self._now = RowStats()

    def end(self, ended: Finished) -> None:
        self._now, self._cached = ended.stats, ended.num_cached_tokens
        pairs = zip(ended.outputs, self.texts, strict=True)
        self._outputs = [replace(output, outputs=_whole(output.outputs, texts)) for output, texts in pairs]

    def outputs(self) -> list[RequestOutput]:
        """Results, once the request has ended, as if one replica had written them."""
        return self._outputs


def _whole(outputs: Sequence[CompletionOutput], texts: Sequence[Text]) -> FrozenList[CompletionOutput]:
    """Samples with the log-probabilities of all their tokens."""
    return FrozenList(
        output if output.logprobs is None else _with_logprobs(output, text.logprobs)
        for output, text in zip(outputs, texts, strict=True)
    )


def _with_logprobs(output: CompletionOutput, logprobs: list[dict[int, Logprob]]) -> CompletionOutput:
    total = sum(table[token].logprob for token, table in zip(output.token_ids, logprobs, strict=True))
    return replace(output, logprobs=logprobs, cumulative_logprob=total)


class FailoverState:
    """A request on its way over replicas."""

    def __init__(
        self,
        ticket: QueuedRequest,
        journal: Journal,
        work: ReplicaRequest,
        metrics: ClusterMetrics,
        queue: FairQueue,
        turn: Turn,
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

    def take(self, taken: Accepted) -> None:
        """A replica has it."""
        self.replica = taken.replica
        self.ticket.is_queued = False
        self._queue.begin(self._turn)

    def begin(self, begun: Started) -> None:
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

    def deliver(self, news: Delta) -> None:
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
