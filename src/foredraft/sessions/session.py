"""The requests of one call: their texts, what they have produced so far, and what is still to be delivered."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from foredraft.config.sampling import SamplingParams
from foredraft.engine.drafts import GRAMMAR, GUESSED
from foredraft.engine.engine import Engine, RowOutput, TokenLogprobs
from foredraft.engine.prediction import PREDICTION
from foredraft.engine.stats import RowStats
from foredraft.errors import as_exception, is_fatal, told
from foredraft.sessions.outputs import (
    TARGET,
    CompletionOutput,
    FrozenList,
    Logprob,
    RequestMetrics,
    RequestOutput,
    Segments,
    StreamOutput,
    speculative_metrics,
)
from foredraft.sessions.prompts import Prompt

if TYPE_CHECKING:
    from foredraft.engine.row import Row


OF_REQUESTS = (PREDICTION, GRAMMAR, GUESSED)
"""Names of what requests draft by themselves."""


class TextStream:
    """Output of a row as whoever waits for it sees it: the i-th of the n texts of a request.

    Text is released once it is certain: characters are complete, and no stop string has begun.

    Args:
      row: of the engine, whose text this is; no text where the row has none.

    Attributes:
      token_ids, logprobs: so far; fewer than the row has where the tokenizer could not read one.
      finish_reason, stop_reason: why it has ended; None while it has not.
      error: that ended it.
      started, ended: when its first decode step began and its newest one ended.
    """

    def __init__(self, row: Row) -> None:
        self.row = row
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: Exception | None = None
        self.started: float | None = None
        self.ended = 0.0
        self._text = row.text
        self._keeps_stop = row.params.include_stop_str_in_output
        self._held_back = () if self._keeps_stop else tuple(row.params.stop_strings)
        self._ends: list[tuple[int, str]] = []  # where the text of a source ends
        self._source = ""
        self._released = 0
        if row.num_output_tokens:  # it goes on from what was said before, and delivered as far as that was certain
            self.token_ids += row.output_ids
            if self._text is not None:
                self._text.read(self.token_ids)
                self._released = self._certain(self._text.text)

    def take(self, output: RowOutput, drafter_name: str, started: float, ended: float) -> bool:
        """Take in what a step, between these times, has added to the row.

        Returns: whether all of it could be read; the text ends with the reason "error" before a token that cannot.
        """
        self.started = started if self.started is None else self.started
        self.ended = ended
        self.error = output.error
        self.logprobs += output.logprobs
        self.finish_reason, self.stop_reason = output.row.finish_reason, output.row.stop_reason
        num_others = len(output.token_ids) - output.num_accepted
        try:
            drafters = [source if source in OF_REQUESTS else drafter_name for source in output.sources]
            drafters += [drafter_name] * (output.num_accepted - len(drafters))
            self.read(output.token_ids, drafters + [TARGET] * num_others)
        except BaseException as fault:
            if is_fatal(fault):
                raise
            num_read = 0 if self._text is None else len(self._text.ends)
            del self.token_ids[num_read:], self.logprobs[num_read:]
            self.error, self.finish_reason, self.stop_reason = as_exception(fault), "error", told(fault)
            return False
        return True

    def read(self, tokens: Sequence[int], sources: Sequence[str]) -> None:
        """Append tokens and take in their text, of each that which its source has proposed.

        Raises: what the tokenizer raises; the text of the tokens before the one that it cannot read is taken in then.
        """
        self.token_ids += tokens
        if self._text is None or not sources:
            return
        try:
            self._text.read(self.token_ids)
        finally:
            new = self._text.ends[len(self.token_ids) - len(sources) : len(self.token_ids)]
            self._ends += zip(new, sources, strict=False)
            self._source = sources[len(new) - 1] if new else self._source

    def release(self) -> Segments:
        """The new text that no later token can take back, all of it once the row has ended.

        A stop string that ended the row is left out unless it is to be kept.
        """
        if self._text is None:
            return ()
        text = self._text
        if self.finish_reason is None:
            return self._release(self._certain(text.text))
        if text.stop is not None:
            start, end = text.stop
            return self._release(end if self._keeps_stop else start)
        if text.finish():
            self._ends.append((len(text.text), self._source))
        return self._release(len(text.text))

    @property
    def num_released(self) -> int:
        """Characters that were released."""
        return self._released

    def _certain(self, text: str) -> int:
        """Length of the text that no later token can take back, of a row that goes on."""
        return len(text) - _overlap(text, self._held_back)

    @property
    def released(self) -> str:
        """All text that was released."""
        return "" if self._text is None else self._text.text[: self._released]

    @property
    def whole(self) -> str:
        """All text that was released; of a row that was aborted or still runs, the text of all its tokens."""
        if self._text is None or self.finish_reason not in (None, "abort"):
            return self.released
        return self._text.text + self._text.rest()

    def pieces(self, num_tokens: int, num_released: int) -> tuple[str, ...]:
        """Text released beyond so many characters, by the newest tokens that made it certain.

        What is not yet certain goes with the token after which it is; all that is left, with the last one.
        """
        text = self.released
        ends = [] if self._text is None else self._text.ends[len(self.token_ids) - num_tokens : len(self.token_ids)]
        places = [num_released, *(min(max(end, num_released), len(text)) for end in ends)]
        places += [len(text)] * (num_tokens + 1 - len(places))
        places[-1] = len(text)
        return tuple(text[start:end] for start, end in pairwise(places))

    def _release(self, end: int) -> Segments:
        assert self._text is not None
        segments: list[tuple[str, str]] = []
        for stop, source in self._ends:
            piece = self._text.text[self._released : min(stop, end)]
            if piece:
                segments.append((piece, source))
                self._released += len(piece)
        self._ends = [(stop, source) for stop, source in self._ends if stop > self._released]
        return tuple(segments)


def _overlap(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that begins a stop string: "ab" overlaps "bc" by 1."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest


@dataclass(eq=False)
class Request:
    """One prompt of a call, with its n texts."""

    id: str
    prompt: Prompt
    params: SamplingParams
    arrived: float
    texts: list[TextStream]

    @property
    def is_finished(self) -> bool:
        return all(text.finish_reason is not None for text in self.texts)


class Session:
    """Collects what the engine says about the requests of one call.

    Args:
      requests: in the order of the prompts.
      engine: that runs them; its acceptance rule, promise and governor go into the results.
      num_spec_tokens: K, for the metrics.
    """

    def __init__(self, requests: Sequence[Request], engine: Engine, num_spec_tokens: int) -> None:
        self.requests = list(requests)
        self.news: deque[StreamOutput] = deque()
        self.failure: BaseException | None = None
        self.is_closed = False
        rule = engine.config.rule
        self._tokenizer = engine.tokenizer
        self._drafter_name = engine.drafter.name
        self._num_spec_tokens = num_spec_tokens
        self._is_lossless = rule.is_lossless
        self._promise = engine.target.promise(engine.config.exactness) if rule.keeps_tokens else None
        self._governor = engine.governor
        self._before = None if self._governor is None else replace(self._governor.totals)
        self._place_of = {
            text.row: (place, request, text) for place, request in enumerate(self.requests) for text in request.texts
        }

    @property
    def rows(self) -> list[Row]:
        return list(self._place_of)

    @property
    def is_finished(self) -> bool:
        return all(request.is_finished for request in self.requests)

    @property
    def is_waiting(self) -> bool:
        """Whether no step has touched any of the rows."""
        rows = [text.row for request in self.requests for text in request.texts]
        return not any(row.num_prefilled or row.num_steps or row.is_finished for row in rows)

    @property
    def num_finished(self) -> int:
        return sum(request.is_finished for request in self.requests)

    @property
    def num_tokens(self) -> int:
        return sum(len(text.token_ids) for request in self.requests for text in request.texts)

    @property
    def error(self) -> Exception | None:
        """The error of the first text, when every one ended in an error."""
        errors = [text.error for request in self.requests for text in request.texts]
        return errors[0] if errors and all(error is not None for error in errors) else None

    @property
    def fault(self) -> Exception | None:
        """The error of the first text that ended in one."""
        texts = (text for request in self.requests for text in request.texts)
        return next((text.error for text in texts if text.error is not None), None)

    @property
    def stats(self) -> RowStats:
        """Counters of all texts together."""
        return _pooled(self.requests)

    def take(self, output: RowOutput, started: float, ended: float) -> bool:
        """Take in what a step, between these times, added to one of the rows.

        Returns: whether all of it could be read, see `TextStream.take`.
        """
        place, request, text = self._place_of[output.row]
        num_known, num_released = len(text.token_ids), text.num_released
        num_logprobs = len(text.logprobs)  # of tokens that were said before there are none
        is_first = text.started is None and not num_known
        is_read = text.take(output, self._drafter_name, started, ended)
        segments = text.release()
        tokens = text.token_ids[num_known:]
        self.news.append(
            StreamOutput(
                request_id=request.id,
                prompt_index=place,
                index=text.row.index,
                text="".join(piece for piece, _ in segments),
                segments=segments,
                token_ids=FrozenList(tokens),
                num_accepted=min(output.num_accepted, len(tokens)),
                finish_reason=text.finish_reason,
                stop_reason=text.stop_reason,
                texts=text.pieces(len(tokens), num_released),
                logprobs=self._table(request, text.logprobs[num_logprobs:]),
                tree=output.tree,
                prompt_logprobs=self._prompt_logprobs(request) if is_first else None,
                seed=int(request.params.seed or 0),
            )
        )
        return is_read

    def abort(self) -> None:
        """Mark what has not ended as aborted."""
        for request in self.requests:
            for text in request.texts:
                text.finish_reason = text.finish_reason or "abort"

    # -- results -----------------------------------------------------------------------------------------------

    def outputs(self) -> list[RequestOutput]:
        """Results in the order of the prompts; texts that still run count as aborted."""
        return [self._output(request) for request in self.requests]

    def output(self, place: int) -> RequestOutput:
        """The result for one prompt."""
        return self._output(self.requests[place])

    def _output(self, request: Request) -> RequestOutput:
        return RequestOutput(
            request_id=request.id,
            prompt=request.prompt.text,
            prompt_token_ids=FrozenList(request.prompt.token_ids),
            outputs=FrozenList(self._completion(request, text) for text in request.texts),
            finished=all(text.finish_reason not in (None, "abort") for text in request.texts),
            metrics=self._metrics(request),
            num_cached_tokens=request.texts[0].row.num_cached_tokens,
            lossless=self._is_lossless,
            prompt_logprobs=self._prompt_logprobs(request),
        )

    def _prompt_logprobs(self, request: Request) -> list[dict[int, Logprob] | None] | None:
        """Those of the tokens that were read so far; the first one has none."""
        if request.params.prompt_logprobs is None:
            return None
        return [None, *(self._logprobs(entry) for entry in request.texts[0].row.prompt_logprobs)]

    def _completion(self, request: Request, text: TextStream) -> CompletionOutput:
        logprobs = self._table(request, text.logprobs)
        return CompletionOutput(
            index=text.row.index,
            text=text.whole,
            token_ids=FrozenList(text.token_ids),
            cumulative_logprob=None if logprobs is None else sum(entry.logprob for entry in text.logprobs),
            logprobs=logprobs,
            finish_reason=text.finish_reason or "abort",
            stop_reason=text.stop_reason,
            seed=int(request.params.seed or 0),
        )

    def _table(self, request: Request, entries: Sequence[TokenLogprobs]) -> list[dict[int, Logprob]] | None:
        """Log-probabilities of tokens; None where the request asks for none."""
        return None if request.params.logprobs is None else [self._logprobs(entry) for entry in entries]

    def _logprobs(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """Log-probabilities at one token: its own first, then the most likely ones."""
        table = {entry.token: (entry.logprob, entry.rank)}
        for token, logprob, rank in zip(entry.top_ids, entry.top_logprobs, entry.top_ranks, strict=True):
            table.setdefault(token, (logprob, rank))
        return {token: Logprob(logprob, rank, self._decoded(token)) for token, (logprob, rank) in table.items()}

    def _decoded(self, token: int) -> str | None:
        """The text of a token; None without a tokenizer, and for a token that it cannot read."""
        try:
            return None if self._tokenizer is None else str(self._tokenizer.decode([token]))
        except BaseException as fault:
            if is_fatal(fault):
                raise
            return None

    def _metrics(self, request: Request) -> RequestMetrics:
        counts = speculative_metrics(_pooled([request]), self._num_spec_tokens, self._is_lossless)
        starts = [text.started for text in request.texts if text.started is not None]
        if not starts:
            return RequestMetrics(counts, promise=self._promise)
        decode_seconds = max(text.ended for text in request.texts) - min(starts)
        num_tokens = sum(len(text.token_ids) for text in request.texts)
        return RequestMetrics(
            counts,
            prefill_seconds=min(starts) - request.arrived,
            decode_seconds=decode_seconds,
            tokens_per_second=num_tokens / decode_seconds if decode_seconds > 0 else 0.0,
            governor=self._governed(),
            promise=self._promise,
            trace=tuple(step for text in request.texts for step in text.row.trace),
        )

    def _governed(self) -> dict[str, Any] | None:
        """Estimated speed by that of plain decoding, None where no step verified a draft, and the decision of late."""
        if self._governor is None or self._before is None:
            return None
        totals, before = self._governor.totals, self._before
        seconds = totals.seconds - before.seconds
        has_drafts = totals.num_drafted > before.num_drafted
        speed = (totals.plain_seconds - before.plain_seconds) / seconds if has_drafts and seconds > 0.0 else None
        return {"estimated_speedup": speed, "decision": self._governor.describe()}


def _pooled(requests: Sequence[Request]) -> RowStats:
    """Counters of all texts of some requests."""
    stats = RowStats()
    for request in requests:
        for text in request.texts:
            stats.add(text.row.stats)
    return stats
