"""The requests of one call: what they have produced so far, and what is still to be delivered."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from foretoken.config.sampling import SamplingParams
from foretoken.engine.engine import RowOutput, TokenLogprobs
from foretoken.engine.sequence import Sequence
from foretoken.engine.stats import SequenceStats
from foretoken.law.faults import is_fatal, told
from foretoken.sessions.outputs import (
    CompletionOutput,
    FrozenList,
    Governed,
    Logprob,
    RequestMetrics,
    RequestOutput,
    StreamOutput,
    speculative_metrics,
)
from foretoken.sessions.prompts import Prompt
from foretoken.sessions.textstream import TextStream

if TYPE_CHECKING:
    from foretoken.engine.governing import AnyGovernor
    from foretoken.model.promise import Promise

TARGET = "target"


@dataclass(eq=False)
class Sample:
    """One row of the engine, as the faces see it: the i-th of n texts of a request."""

    row: Sequence
    text: TextStream
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    started: float | None = None
    ended: float = 0.0
    error: Exception | None = None


@dataclass(eq=False)
class Request:
    """One prompt of a call, with its samples."""

    id: str
    prompt: Prompt
    params: SamplingParams
    arrived: float
    samples: list[Sample]

    @property
    def is_finished(self) -> bool:
        return all(sample.finish_reason is not None for sample in self.samples)


class Session:
    """Collects what the engine says about the requests of one call.

    Args:
      requests: in the order of the prompts.
      drafter_name: who proposed accepted tokens.
      num_spec_tokens: K, for the metrics.
      is_lossless: whether the acceptance rule keeps the law of the target.
      governor: of the engine, where one decides how much is drafted.
      promise: what holds of the tokens, compared with plain decoding.
    """

    def __init__(
        self,
        requests: Seq[Request],
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        drafter_name: str,
        num_spec_tokens: int,
        is_lossless: bool,
        governor: AnyGovernor | None = None,
        promise: Promise | None = None,
    ) -> None:
        self.requests = list(requests)
        self.news: deque[StreamOutput] = deque()
        self.failure: BaseException | None = None
        self.is_closed = False
        self._tokenizer = tokenizer
        self._drafter_name = drafter_name
        self._num_spec_tokens = num_spec_tokens
        self._is_lossless = is_lossless
        self._promise = promise
        self._governed = None if governor is None else Governed(governor)
        self._place_of = {
            sample.row.id: (place, request, sample)
            for place, request in enumerate(self.requests)
            for sample in request.samples
        }

    @property
    def row_ids(self) -> list[int]:
        return list(self._place_of)

    @property
    def is_finished(self) -> bool:
        return all(request.is_finished for request in self.requests)

    @property
    def num_finished(self) -> int:
        return sum(request.is_finished for request in self.requests)

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.token_ids) for request in self.requests for sample in request.samples)

    @property
    def error(self) -> Exception | None:
        """The error of the first sample, when every sample ended in one."""
        errors = [sample.error for request in self.requests for sample in request.samples]
        return errors[0] if errors and all(error is not None for error in errors) else None

    def take(self, output: RowOutput, started: float, ended: float) -> bool:
        """Take in what a step, between these times, added to one of the rows.

        Returns: whether all of it could be read; a sample ends with the reason "error" before a token that cannot.
        """
        place, request, sample = self._place_of[output.row.id]
        if sample.started is None:
            sample.started = started
        sample.ended = ended
        sample.error = output.error
        num_known = len(sample.token_ids)
        sample.token_ids += output.token_ids
        sample.logprobs += output.logprobs
        num_others = len(output.token_ids) - output.num_accepted
        sample.finish_reason, sample.stop_reason = output.row.finish_reason, output.row.stop_reason
        fault = self._read(sample, [self._drafter_name] * output.num_accepted + [TARGET] * num_others)
        segments = sample.text.release() if sample.finish_reason is None else sample.text.finish()
        tokens = sample.token_ids[num_known:]
        self.news.append(
            StreamOutput(
                request_id=request.id,
                prompt_index=place,
                index=sample.row.index,
                text="".join(text for text, _ in segments),
                segments=segments,
                token_ids=FrozenList(tokens),
                num_accepted=min(output.num_accepted, len(tokens)),
                finish_reason=sample.finish_reason,
                stop_reason=sample.stop_reason,
            )
        )
        return fault is None

    def _read(self, sample: Sample, sources: list[str]) -> Exception | None:
        """Read the new tokens of a sample; what its tokenizer has raised, which ends it before that token."""
        try:
            sample.text.read(sample.token_ids, sources)
        except Exception as fault:
            if is_fatal(fault):
                raise
            del sample.token_ids[sample.text.num_read :], sample.logprobs[sample.text.num_read :]
            sample.error, sample.finish_reason, sample.stop_reason = fault, "error", told(fault)
            return fault
        return None

    def abort(self) -> None:
        """Mark what has not ended as aborted."""
        for request in self.requests:
            for sample in request.samples:
                sample.finish_reason = sample.finish_reason or "abort"

    # -- results -----------------------------------------------------------------------------------------------

    def outputs(self) -> list[RequestOutput]:
        """Results in the order of the prompts; samples that still run count as aborted."""
        return [self._output(request) for request in self.requests]

    def output(self, place: int) -> RequestOutput:
        """The result for one prompt."""
        return self._output(self.requests[place])

    def _output(self, request: Request) -> RequestOutput:
        return RequestOutput(
            request_id=request.id,
            prompt=request.prompt.text,
            prompt_token_ids=FrozenList(request.prompt.token_ids),
            outputs=FrozenList(self._completion(request, sample) for sample in request.samples),
            finished=all(sample.finish_reason not in (None, "abort") for sample in request.samples),
            metrics=self._metrics(request),
            num_cached_tokens=request.samples[0].row.num_cached_tokens,
            lossless=self._is_lossless,
        )

    def _completion(self, request: Request, sample: Sample) -> CompletionOutput:
        wants_logprobs = request.params.logprobs is not None
        return CompletionOutput(
            index=sample.row.index,
            text=self._text(request.params, sample),
            token_ids=FrozenList(sample.token_ids),
            cumulative_logprob=sum(entry.logprob for entry in sample.logprobs) if wants_logprobs else None,
            logprobs=[self._logprobs(entry) for entry in sample.logprobs] if wants_logprobs else None,
            finish_reason=sample.finish_reason or "abort",
            stop_reason=sample.stop_reason,
            seed=int(request.params.seed or 0),
        )

    def _text(self, params: SamplingParams, sample: Sample) -> str:
        """The tokenizer's own decoding, unless a stop string cuts it."""
        text = sample.row.text
        if self._tokenizer is None or text is None:
            return ""
        if sample.error is not None or (text.stop is not None and sample.finish_reason == "stop"):
            return sample.text.released
        return str(self._tokenizer.decode(sample.token_ids, skip_special_tokens=params.skip_special_tokens))

    def _logprobs(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """Log-probabilities at one token: its own first, then the most likely ones."""
        table = {entry.token: (entry.logprob, entry.rank)}
        for rank, (token, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1):
            table.setdefault(token, (logprob, rank))
        return {token: Logprob(logprob, rank, self._decoded(token)) for token, (logprob, rank) in table.items()}

    def _decoded(self, token: int) -> str | None:
        """The text of a token; None without a tokenizer, and for a token that it cannot read."""
        try:
            return None if self._tokenizer is None else str(self._tokenizer.decode([token]))
        except Exception as fault:
            if is_fatal(fault):
                raise
            return None

    def _metrics(self, request: Request) -> RequestMetrics:
        stats = SequenceStats()
        for sample in request.samples:
            stats.add(sample.row.stats)
        starts = [sample.started for sample in request.samples if sample.started is not None]
        if not starts:
            return RequestMetrics(
                speculative_metrics(stats, self._num_spec_tokens, self._is_lossless), promise=self._promise
            )
        decode_seconds = max(sample.ended for sample in request.samples) - min(starts)
        num_tokens = sum(len(sample.token_ids) for sample in request.samples)
        return RequestMetrics(
            speculative_metrics(stats, self._num_spec_tokens, self._is_lossless),
            prefill_seconds=min(starts) - request.arrived,
            decode_seconds=decode_seconds,
            tokens_per_second=num_tokens / decode_seconds if decode_seconds > 0 else 0.0,
            governor=None if self._governed is None else self._governed.as_dict(),
            promise=self._promise,
            trace=tuple(step for sample in request.samples for step in sample.row.trace),
        )
