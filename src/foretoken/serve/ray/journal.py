"""What was delivered of a request, from which another replica goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from foretoken.engine.stats import SequenceStats
from foretoken.serve.ray.messages import Ended, News, OutputIds
from foretoken.sessions.outputs import FrozenList

if TYPE_CHECKING:
    from foretoken.config.sampling import SamplingParams
    from foretoken.sessions.outputs import CompletionOutput, Logprob, RequestOutput, StreamOutput


@dataclass
class Text:
    """What was delivered of one sample."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None


class Journal:
    """What was delivered of a request: `foretoken.sessions.stream.Stream`, as far as answers read it.

    Args:
      params: of each prompt, with a seed.
    """

    def __init__(self, params: Sequence[SamplingParams]) -> None:
        self.texts = [[Text() for _ in range(one.n)] for one in params]
        self.is_waiting = True
        self._before = SequenceStats()
        self._now = SequenceStats()
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
    def stats(self) -> SequenceStats:
        """Counters of all replicas together."""
        pooled = SequenceStats()
        pooled.add(self._before)
        pooled.add(self._now)
        return pooled

    def take(self, news: News) -> list[StreamOutput]:
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
        self._now = SequenceStats()

    def end(self, ended: Ended) -> None:
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
