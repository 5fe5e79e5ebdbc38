"""The layer between an interface (LLM, command line, server) and the engine: results, streams, and the runner.

The runner shares one engine between many calls.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic, perf_counter, sleep
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, TypeVar, overload

from foredraft.ending import is_running
from foredraft.engine.acceptance_model import OF_REQUESTS, PREDICTION
from foredraft.engine.stats import NOTHING_FOUND, RowStats, StepTrace, counted, describe_cuts
from foredraft.errors import CopyError, EngineBusyError, PromptError, as_exception, error_text, is_fatal

if TYPE_CHECKING:
    from foredraft.config.engine import Guarantee
    from foredraft.config.sampling import SamplingParams
    from foredraft.config.speculative import SpeculativeConfig
    from foredraft.engine.engine import Engine
    from foredraft.engine.logprobs import TokenLogprobs
    from foredraft.engine.row import Row, RowOutput
    from foredraft.engine.stopping import Detokenizer
    from foredraft.prompts.prompts import Prompt
    from foredraft.tree import DraftTree

logger = logging.getLogger("foredraft")

T = TypeVar("T")

Segments = tuple[tuple[str, str], ...]
"""Pieces of text, each with the name of its source."""
TARGET = "target"
"""Source of a token that was not drafted."""

IDLE_SECONDS = 10.0
"""Time without requests after which memory is freed: longer than most pauses between two requests."""

MIN_STEPS = 64  # steps of finished rows before a low gain is logged
MIN_ROW_TOKENS = 16  # shorter rows have hardly a step that could draft
LOW_GAIN = 1.1  # tokens per step; on most machines a step with a draft costs about that much more than a plain one

_SHOWN_CHARACTERS = 100  # of a text in the repr of a result
_SHOWN_SAMPLES = 3  # of a request in the repr of a result

# -- results -------------------------------------------------------------------------------------------------------


class FrozenList(list[T]):
    """An immutable list, since vLLM's results are lists. The list equals the tuple of its items and is hashable.

    Slices and sums are frozen lists as well. A sum that begins with another list is a plain list, and a sum that begins
    with a tuple is a tuple.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return super().__eq__(list(other) if isinstance(other, tuple) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self))

    def __add__(self, other: Any) -> Any:
        return FrozenList((*self, *other)) if isinstance(other, (list, tuple)) else NotImplemented

    def __radd__(self, other: Any) -> Any:  # a plain list on the left handles + and += itself
        return (*other, *self) if isinstance(other, tuple) else NotImplemented

    @overload
    def __getitem__(self, place: SupportsIndex, /) -> T: ...
    @overload
    def __getitem__(self, place: slice, /) -> FrozenList[T]: ...
    def __getitem__(self, place: SupportsIndex | slice, /) -> T | FrozenList[T]:
        return FrozenList(super().__getitem__(place)) if isinstance(place, slice) else super().__getitem__(place)

    def __copy__(self) -> FrozenList[T]:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return FrozenList, (tuple(self),)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("results cannot be changed; make your own list of them, such as list(token_ids)")

    append = extend = insert = pop = remove = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __imul__ = _refuse

    def __iadd__(self, other: Any) -> Any:
        """Bind the name to a new list, as for tuples."""
        return self + other


@dataclass(frozen=True)
class Logprob:
    """Log-probability of one token under the processed target distribution.

    Args:
      logprob: natural logarithm.
      rank: rank by probability; 1 is the most likely token.
      decoded_token: text of the token; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True, repr=False)
class CompletionOutput:
    """One sample of a request. The repr is short; the fields contain everything.

    Args:
      index: number of the sample, from 0 to ``n`` - 1.
      text: text of ``token_ids``, cut before the stop string unless the parameters keep it; empty without a tokenizer.
      token_ids: generated tokens, including the EOS or stop token at the end, without the prompt.
      cumulative_logprob: sum over ``token_ids``; None unless log-probabilities were requested.
      logprobs: log-probabilities of each token and of the most likely ones; None unless requested.
      finish_reason: "stop", "length", "abort" or "error".
      stop_reason: the stop token or stop string that ended the sample, or the message of an error; None for EOS.
      seed: seed of the request; sample i draws with ``mix(seed, i)``. The same seed gives the same tokens again.
    """

    index: int
    text: str
    token_ids: FrozenList[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str
    stop_reason: int | str | None
    seed: int

    def __repr__(self) -> str:
        stop = "" if self.stop_reason is None else f", stop_reason={_shortened(self.stop_reason)}"
        return (
            f"CompletionOutput(index={self.index}, text={_shortened(self.text)}, {len(self.token_ids)} token_ids, "
            f"finish_reason={self.finish_reason!r}{stop}, seed={self.seed})"
        )


@dataclass(frozen=True, repr=False)
class RequestMetrics:
    """Counters and times of one request, with its samples pooled.

    None of these metrics compares with plain decoding. ``tokens_per_step`` is not a speed-up, since a step with a draft
    costs more than a plain one. ``foredraft bench`` measures whether drafting is worth it.

    Args:
      speculative_decoding: vLLM's fields, see `speculative_metrics`.
      prefill_seconds: time from submission to the first decode step; in a batch, it includes waiting for other rows.
      decode_seconds: time from the first decode step to the last.
      tokens_per_second: generated tokens divided by ``decode_seconds``.
      governor: decisions of the governor, or None if there is none. ``estimated_speedup`` is the speed during the call
        relative to plain decoding, None if no step verified a draft. ``decision`` is the latest decision with its
        reasons.
      guarantee: the guarantee for the tokens, compared with plain decoding; None under rules that only preserve the
        distribution.
      trace: plan, draft and acceptance of every decode step, sample by sample.
    """

    speculative_decoding: Mapping[str, Any] = field(default_factory=dict)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    tokens_per_second: float = 0.0
    governor: Mapping[str, Any] | None = None
    guarantee: Guarantee | None = None
    trace: tuple[StepTrace, ...] = ()

    def __repr__(self) -> str:
        counts = self.speculative_decoding
        return (
            f"RequestMetrics(tokens_per_step={counts.get('tokens_per_step', 0.0):.2f}, "
            f"draft_acceptance_rate={counts.get('draft_acceptance_rate', 0.0):.2f}, "
            f"prefill_seconds={self.prefill_seconds:.3f}, decode_seconds={self.decode_seconds:.3f}, "
            f"tokens_per_second={self.tokens_per_second:.1f}, trace of {len(self.trace)} steps)"
        )


@dataclass(frozen=True, repr=False)
class RequestOutput:
    """The result for one prompt. The repr is short; the fields contain everything.

    Args:
      prompt: text of the prompt; None for a prompt of token ids.
      finished: False if the request was aborted before its end.
      lossless: True if the acceptance rule preserves the target's distribution.
      num_cached_tokens: number of prompt tokens reused from earlier requests instead of being read (vLLM's field).
      prompt_logprobs: for each prompt token, log-probabilities of it and of the most likely ones under the model alone;
        None for the first token. None as a whole unless requested.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: FrozenList[int]
    outputs: FrozenList[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    lossless: bool = True
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    def __repr__(self) -> str:
        shown = [repr(sample) for sample in self.outputs[:_SHOWN_SAMPLES]]
        if len(self.outputs) > _SHOWN_SAMPLES:
            shown.append(f"and {len(self.outputs) - _SHOWN_SAMPLES} more")
        return (
            f"RequestOutput(request_id={self.request_id!r}, prompt={_shortened(self.prompt)}, "
            f"{len(self.prompt_token_ids)} prompt_token_ids, outputs=[{', '.join(shown)}], finished={self.finished}, "
            f"metrics={self.metrics!r})"
        )


@dataclass(frozen=True)
class StreamOutput:
    """The tokens and text that one step added to one sample of a streamed request.

    Args:
      prompt_index: number of the prompt, 0 for a single one.
      index: number of the sample, from 0 to ``n`` - 1.
      text: new text, without incomplete characters and without a possible beginning of a stop string.
      segments: ``text`` in pieces, each with its source: the name of the drafter, or "target".
      token_ids: new tokens.
      num_accepted: number of drafted tokens at the start of ``token_ids``.
      finish_reason, stop_reason: reasons for the end of the sample, set on its last delta.
      seed: seed of the request, as in `CompletionOutput`.
      texts: the pieces of ``text``, one for each token and possibly empty. A piece is the text that became certain with
        the token.
      logprobs: log-probabilities for each token; None unless requested.
      tree: the draft that the step verified.
      prompt_logprobs: log-probabilities of the prompt, in the first delta of each sample; None in later ones and unless
        requested.
    """

    request_id: str
    prompt_index: int
    index: int
    text: str
    segments: Segments
    token_ids: FrozenList[int]
    num_accepted: int
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    texts: tuple[str, ...] = ()
    logprobs: list[dict[int, Logprob]] | None = None
    tree: DraftTree | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    seed: int = 0


def _shortened(value: object) -> str:
    """Return the repr of a string, cut if it is long."""
    if not isinstance(value, str) or len(value) <= _SHOWN_CHARACTERS:
        return repr(value)
    return f"{value[: _SHOWN_CHARACTERS - 3]!r}..."


def decode_seconds(outputs: Sequence[RequestOutput]) -> float:
    """Return the time from the first decoding step to the last, over all prompts, in seconds."""
    starts = [output.metrics.prefill_seconds for output in outputs]
    return max(output.metrics.prefill_seconds + output.metrics.decode_seconds for output in outputs) - min(starts)


def speculative_metrics(stats: RowStats, num_spec_tokens: int, is_lossless: bool = True) -> dict[str, Any]:
    """Return vLLM's ``metrics.speculative_decoding``, extended by tau, the number of steps and ``lossless``.

    ``mean_acceptance_length`` counts the bonus and averages over steps with a draft (1.0 if there was none).
    ``tokens_per_step`` (tau) averages over all decode steps. ``acceptance_histogram`` does not count the bonus; its
    keys are the accepted counts that occurred, as strings. ``num_proposed_tokens`` were drafted. Of these,
    ``num_draft_tokens`` were verified and the others cut, by cause in ``num_cut_tokens``. ``num_undrafted_steps``
    counts the steps without a draft by cause (`foredraft.engine.stats`). ``by_drafter`` is present if several drafters
    contributed, and has the counts of each. ``accepted_prediction_tokens`` and ``rejected_prediction_tokens`` are
    present if the request's own prediction was drafted. ``drafter_error`` is present if an exception ended the drafting
    of a row, and contains its message.
    """
    drafters: dict[str, Any] = {} if len(stats.drafted_by) < 2 else {"by_drafter": _by_drafter(stats)}
    if stats.drafted_by[PREDICTION]:
        drafters["accepted_prediction_tokens"] = stats.accepted_prediction_tokens
        drafters["rejected_prediction_tokens"] = stats.rejected_prediction_tokens
    if stats.drafter_error:
        drafters["drafter_error"] = stats.drafter_error
    histogram = {str(count): stats.acceptance_histogram[count] for count in sorted(stats.acceptance_histogram)}
    return {
        "mean_acceptance_length": stats.mean_acceptance_length,
        "draft_acceptance_rate": stats.draft_acceptance_rate,
        "acceptance_histogram": histogram,
        "num_accepted_draft_tokens": stats.num_accepted_draft_tokens,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_spec_steps": stats.num_spec_steps,
        "num_spec_tokens": num_spec_tokens,
        "num_steps": stats.num_steps,
        "num_proposed_tokens": stats.num_proposed_tokens,
        "num_cut_tokens": dict(stats.num_cut_tokens),
        "num_undrafted_steps": dict(stats.num_undrafted_steps) if num_spec_tokens else {},
        "tokens_per_step": stats.tokens_per_step,
        "lossless": is_lossless,
        **drafters,
    }


def _by_drafter(stats: RowStats) -> dict[str, dict[str, int]]:
    """Draft tokens proposed by each of several drafters, and how many of them were accepted."""
    return {
        name: {"num_draft_tokens": count, "num_accepted_draft_tokens": stats.accepted_by[name]}
        for name, count in sorted(stats.drafted_by.items())
    }


# -- streams -------------------------------------------------------------------------------------------------------


class Completion:
    """One sample of a request, as far as its output has been delivered.

    Text is delivered once it is certain: its characters are complete, and no stop string may have begun in it.

    Args:
      row: the row of the engine. A sample whose row has no text delivers only tokens.
      prompt_index: index of the sample's prompt in the call.

    Attributes:
      num_tokens: number of delivered tokens. It is smaller than that of the row if the tokenizer could not decode a
        token.
      logprobs: log-probabilities of these tokens; None unless requested.
      finish_reason, stop_reason: reasons for the end of the sample; None while it runs.
      error: the exception that ended the sample.
      started, ended: times at which the sample's first decode step began and its newest one ended.
    """

    def __init__(self, row: Row, prompt_index: int) -> None:
        self.row, self.prompt_index = row, prompt_index
        self.num_tokens = row.num_output_tokens  # a continued output counts as delivered
        self.logprobs: list[dict[int, Logprob]] | None = None if row.params.logprobs is None else []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: Exception | None = None
        self.started: float | None = None
        self.ended = 0.0
        self._text = row.text
        self._stops = (
            () if row.params.include_stop_str_in_output else row.params.stop_strings
        )  # their possible beginnings are held back
        self._ends: deque[tuple[int, str]] = deque()  # end and source of each piece not yet delivered
        self._source = ""  # source of the newest token
        self._num_delivered = 0  # number of characters delivered
        if self._text is not None and self.num_tokens:
            self._text.read(row.token_ids, row.num_prompt_tokens)
            self._num_delivered = self._num_certain(self._text)

    def take(self, output: RowOutput, sources: Sequence[str]) -> tuple[Segments, tuple[str, ...]]:
        """Append the tokens of a step.

        The sample ends with the reason "error" before a token that the tokenizer cannot decode.

        Args:
          sources: source of each token.

        Returns: the text that became certain, in pieces by source, and in one piece per token. A piece that was held
        back belongs to the token that made it certain. The rest belongs to the last token.
        """
        row, text, first = self.row, self._text, self.num_tokens
        self.num_tokens += len(output.token_ids)
        self.error, self.finish_reason, self.stop_reason = output.error, row.finish_reason, row.stop_reason
        if text is None:
            return (), ("",) * len(output.token_ids)
        try:
            text.read(row.token_ids, row.num_prompt_tokens)
        except BaseException as fault:
            if is_fatal(fault):
                raise
            self.num_tokens = len(text.ends)
            self.error, self.finish_reason, self.stop_reason = as_exception(fault), "error", error_text(fault)
        ends = text.ends[first : self.num_tokens]
        self._ends.extend(zip(ends, sources, strict=False))
        if ends:
            self._source = sources[len(ends) - 1]
        certain = self._num_certain(text)
        first = place = self._num_delivered
        segments = []
        while self._ends:
            end, source = self._ends[0]
            if piece := text.text[place : min(end, certain)]:
                segments.append((piece, source))
                place += len(piece)
            if end > place:
                break
            self._ends.popleft()
        self._num_delivered = last = place
        pieces = []
        for end in ends:
            pieces.append(text.text[first : min(max(end, first), last)])
            first += len(pieces[-1])
        if pieces:
            pieces[-1] += text.text[first:last]
        return tuple(segments), tuple(pieces)

    def _num_certain(self, text: Detokenizer) -> int:
        """Length of the text that later tokens cannot change.

        At the end of the output this is the whole text, with the stop string only if it is kept.
        """
        if self.finish_reason is None:
            if not self._stops:
                return len(text.text)
            begun = [size for stop in self._stops for size in range(1, len(stop)) if text.text.endswith(stop[:size])]
            return len(text.text) - max(begun, default=0)
        if text.stop is not None:
            start, end = text.stop
            return start if self._stops else end
        if text.finish():
            self._ends.append((len(text.text), self._source))
        return len(text.text)

    def output(self) -> CompletionOutput:
        """Return the current result. A running sample counts as aborted, with the text of all its tokens."""
        row, text = self.row, ""
        if self._text is not None:
            is_whole = self.finish_reason not in (None, "abort")
            text = self._text.text[: self._num_delivered] if is_whole else self._text.text + self._text.rest()
        own = [next(iter(table.values())).logprob for table in self.logprobs or ()]
        return CompletionOutput(
            index=row.index,
            text=text,
            token_ids=FrozenList(row.output_ids[: self.num_tokens]),
            cumulative_logprob=None if self.logprobs is None else sum(own),
            logprobs=None if self.logprobs is None else list(self.logprobs),
            finish_reason=self.finish_reason or "abort",
            stop_reason=self.stop_reason,
            seed=int(row.params.seed or 0),
        )


class Stream(Iterator[StreamOutput]):
    """The stream of the requests of one call, step by step.

    Iterate over a stream to get the deltas. `outputs` returns the results collected up to now, at any time. To end a
    stream early, use it as a context manager or close it.
    """

    _is_closed = True  # until `__init__` has finished

    def __init__(self, runner: Runner, is_counted: bool) -> None:
        engine = runner.engine
        rule, governor = engine.config.rule, engine.governor
        self._runner = runner
        self._is_counted = is_counted
        self._prompts: list[Prompt] = []
        self._samples: list[list[Completion]] = []  # by prompt
        self._running: dict[Row, Completion] = {}
        self._news: deque[StreamOutput] = deque()
        self._failure: BaseException | None = None
        self._arrived = perf_counter()
        self._tokenizer = engine.tokenizer
        self._drafter_name = engine.drafter.name
        self._is_lossless = rule.is_lossless
        self._guarantee = engine.target.guarantee(engine.config.exactness) if rule.keeps_tokens else None
        self._governed = None if governor is None else (governor, replace(governor.totals))
        self._is_closed = False

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise CopyError(
            "a stream belongs to the LLM that generates it, so it can neither be copied nor pickled; copy the results "
            "so far, outputs(), instead"
        )

    @property
    def _completions(self) -> list[Completion]:
        return [completion for samples in self._samples for completion in samples]

    @property
    def num_prompts(self) -> int:
        return len(self._prompts)

    @property
    def num_finished(self) -> int:
        """Number of prompts for which all samples have ended."""
        return len(self._prompts) - len({each.prompt_index for each in self._completions if each.finish_reason is None})

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens, in all samples."""
        return sum(completion.num_tokens for completion in self._completions)

    @property
    def finish_reasons(self) -> list[str | None]:
        """Finish reasons of all samples; None for running ones."""
        return [completion.finish_reason for completion in self._completions]

    @property
    def num_cached_tokens(self) -> int:
        """Number of prompt tokens that were reused from earlier requests instead of being read."""
        return sum(samples[0].row.num_cached_tokens for samples in self._samples)

    @property
    def stats(self) -> RowStats:
        """Sum of the counters of all samples."""
        return RowStats.pooled(completion.row.stats for completion in self._completions)

    @property
    def fault(self) -> BaseException | None:
        """The exception that ended a step early, or the first error that ended a sample; None if there was none."""
        return self._failure or next((each.error for each in self._completions if each.error is not None), None)

    @property
    def is_waiting(self) -> bool:
        """True if no row of the request has been part of a step yet."""
        rows = [completion.row for completion in self._completions]
        return not any(row.num_prefilled or row.num_steps or row.is_finished for row in rows)

    @property
    def is_finished(self) -> bool:
        """True if no more deltas will come."""
        return not self._news and (self._is_closed or self._failure is not None or not self._running)

    def __next__(self) -> StreamOutput:
        self._runner.advance(self)
        if self._is_closed:
            raise StopIteration
        if self._news:
            return self._news.popleft()
        errors = [completion.error for completion in self._completions]
        if errors and errors[0] is not None and None not in errors:
            raise errors[0]
        raise StopIteration

    def take(self) -> list[StreamOutput]:
        """Return the new deltas without running a step, while another thread calls `LLM.step`.

        Check `fault` afterwards.
        """
        news = list(self._news)
        self._news.clear()
        return news

    def close(self) -> None:
        """End the requests that have not finished. Closing twice is harmless."""
        if not self._is_closed:
            self._runner.end(self)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._is_closed:
            self._runner.abandon(self._running)

    def _take(self, output: RowOutput, started: float, ended: float) -> None:
        """Deliver the tokens that a step added to a row. The arguments are the times at which the step began and
        ended."""
        row, tokens = output.row, output.token_ids
        completion = self._running[row]
        is_first = completion.started is None and not completion.num_tokens
        completion.started = started if completion.started is None else completion.started
        completion.ended = ended
        name = self._drafter_name
        sources = [source if source in OF_REQUESTS else name for source in output.sources]
        segments, texts = completion.take(output, sources + [TARGET] * (len(tokens) - output.num_accepted))
        logprobs = None
        if completion.logprobs is not None:
            logprobs = [self._logprobs(entry) for entry in output.logprobs[: len(texts)]]
            completion.logprobs += logprobs
        self._news.append(
            StreamOutput(
                request_id=row.request_id,
                prompt_index=completion.prompt_index,
                index=row.index,
                text="".join([piece for piece, _ in segments]),
                segments=segments,
                token_ids=FrozenList(tokens[: len(texts)]),
                num_accepted=min(output.num_accepted, len(texts)),
                finish_reason=completion.finish_reason,
                stop_reason=completion.stop_reason,
                texts=texts,
                logprobs=logprobs,
                tree=output.tree,
                prompt_logprobs=self._prompt_logprobs(completion.prompt_index) if is_first else None,
                seed=int(row.params.seed or 0),
            )
        )
        if completion.finish_reason is not None:
            del self._running[row]

    # -- results -----------------------------------------------------------------------------------------------

    def outputs(self) -> list[RequestOutput]:
        """Return the results in the order of the prompts; unfinished ones count as aborted."""
        return [self.output(place) for place in range(self.num_prompts)]

    def output(self, prompt_index: int) -> RequestOutput:
        """Return the result for one prompt."""
        prompt, samples = self._prompts[prompt_index], self._samples[prompt_index]
        return RequestOutput(
            request_id=samples[0].row.request_id,
            prompt=prompt.text,
            prompt_token_ids=FrozenList(prompt.token_ids),
            outputs=FrozenList(completion.output() for completion in samples),
            finished=all(completion.finish_reason not in (None, "abort") for completion in samples),
            metrics=self._metrics(samples),
            num_cached_tokens=samples[0].row.num_cached_tokens,
            lossless=self._is_lossless,
            prompt_logprobs=self._prompt_logprobs(prompt_index),
        )

    def _prompt_logprobs(self, place: int) -> list[dict[int, Logprob] | None] | None:
        """Return log-probabilities of the prompt tokens that have been read; None for the first token, and if they were
        not requested."""
        row = self._samples[place][0].row
        if row.params.prompt_logprobs is None:
            return None
        return [None, *(self._logprobs(entry) for entry in row.prompt_logprobs)]

    def _logprobs(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """Return the log-probabilities at one token: those of the token itself first, then those of the most likely
        tokens."""
        table = {entry.token: (entry.logprob, entry.rank)}
        for token, logprob, rank in zip(entry.top_ids, entry.top_logprobs, entry.top_ranks, strict=True):
            table.setdefault(token, (logprob, rank))
        return {token: Logprob(logprob, rank, self._decoded(token)) for token, (logprob, rank) in table.items()}

    def _decoded(self, token: int) -> str | None:
        """Return the text of a token; None without a tokenizer, and for a token that the tokenizer cannot decode."""
        try:
            return None if self._tokenizer is None else str(self._tokenizer.decode([token]))
        except BaseException as fault:
            if is_fatal(fault):
                raise
            return None

    def _metrics(self, samples: Sequence[Completion]) -> RequestMetrics:
        stats = RowStats.pooled(completion.row.stats for completion in samples)
        counts = speculative_metrics(stats, self._runner.num_spec_tokens, self._is_lossless)
        starts = [completion.started for completion in samples if completion.started is not None]
        if not starts:
            return RequestMetrics(counts, guarantee=self._guarantee)
        seconds = max(completion.ended for completion in samples) - min(starts)
        num_tokens = sum(completion.num_tokens for completion in samples)
        return RequestMetrics(
            counts,
            prefill_seconds=min(starts) - self._arrived,
            decode_seconds=seconds,
            tokens_per_second=num_tokens / seconds if seconds > 0 else 0.0,
            governor=None if self._governed is None else self._governed[0].report(self._governed[1]),
            guarantee=self._guarantee,
            trace=tuple([step for completion in samples for step in completion.row.trace]),
        )


# -- the runner ----------------------------------------------------------------------------------------------------


class Runner:
    """Runs the requests of several calls over one engine.

    The caller that waits for a stream runs steps until that stream has new output. Output of other streams is kept for
    their callers. Calls from several threads, and calls made while a stream is open, therefore share batches and are
    all correct. A stream without any reference is ended before the next step.

    Args:
      new_engine: function that makes the engine, and makes it again when the execution of the target changes.
      config: drafting configuration of the engine.
      lock: lock that is held while the target runs, shared by the runners of one target.
      model: name of the model as the command line accepts it, for the log.

    Attributes:
      engine: the current engine; it is replaced when the execution of the target changes.
    """

    def __init__(
        self, new_engine: Callable[[], Engine], config: SpeculativeConfig, lock: threading.RLock, model: str
    ) -> None:
        self.engine = new_engine()
        self.num_spec_tokens = config.num_speculative_tokens
        self._new_engine = new_engine
        self._method, self._model = config.title, model
        self._execution = self.engine.target.execution
        self._num_changes = self.engine.target.num_changes
        self._lock = lock
        self._frame: FrameType | None = None  # frame of the running step, in the thread that has the lock
        self._num_requests = 0
        self._streams: dict[Row, weakref.ref[Stream]] = {}  # stream of each row that is queued or running
        self._abandoned: deque[dict[Row, Completion]] = deque()
        self._ended = None if config.method == "none" or not self.num_spec_tokens else RowStats()
        self._idle_since = 0.0
        self._idle_thread: threading.Thread | None = None

    @property
    def num_unfinished(self) -> int:
        """Number of rows that are queued or running."""
        return len(self._streams)

    @property
    def _is_stepping(self) -> bool:
        """True if this call comes from inside a step. An interrupted step does not count."""
        return self._frame is not None and is_running(self._frame)

    def open(
        self, prompts: Sequence[Prompt], params: Sequence[Callable[[int], SamplingParams]], *, is_counted: bool = True
    ) -> Stream:
        """Queue the prompts of one call; if one of them is refused, none is queued.

        Args:
          params: for each prompt, a function from the number of the request to its parameters.
          is_counted: True if the rows of the request count for the log line about a low gain.

        Raises: PromptError with the index of the prompt; UnsupportedModelError if the caller has changed the model so
        that it cannot be decoded exactly.
        """
        with self._lock:
            if self._is_stepping:
                raise EngineBusyError("a logits processor called the LLM that is running it; call another LLM instead")
            self._follow_target()
            stream = Stream(self, is_counted)
            try:
                for prompt, params_of in zip(prompts, params, strict=True):
                    self._add(stream, prompt, params_of(self._num_requests))
            except BaseException:
                stream.close()
                raise
            return stream

    def _follow_target(self) -> None:
        """Adapt to changes of the model since the last call. Running rows go on with their cached columns."""
        target = self.engine.target
        target.refresh()
        if target.num_changes != self._num_changes:
            self.engine.forget_prefixes()
            self._num_changes = target.num_changes
        self._end_abandoned()
        if target.execution is not self._execution and not self._streams:
            profile = self.engine.profile  # the drafter and the cache were made for the model as it was
            self.engine = self._new_engine()
            self.engine.profile = profile
            self._execution = target.execution

    def _add(self, stream: Stream, prompt: Prompt, params: SamplingParams) -> None:
        place, request_id = stream.num_prompts, str(self._num_requests)
        self._num_requests += 1
        try:
            rows = self.engine.add_request(prompt.token_ids, params, request_id, output_ids=prompt.output_ids)
        except PromptError as error:
            raise type(error)(f"prompt {place}: {error}") from None
        for row in rows:  # before any step
            row.cache_salt = prompt.cache_salt
        self._streams.update(dict.fromkeys(rows, weakref.ref(stream)))
        stream._prompts.append(prompt)
        stream._samples.append([Completion(row, place) for row in rows])
        stream._running.update(zip(rows, stream._samples[-1], strict=True))

    def advance(self, stream: Stream) -> None:
        """Run steps until a stream has news or has ended.

        Raises: the exception that broke off a step, in every stream with rows in that step; streams whose rows only
        waited go on. Ctrl-C also ends the call in which it was raised.
        """
        while not (stream._news or stream._is_closed):
            with self._lock:
                if stream._failure is not None:
                    raise stream._failure
                if stream._news or stream._is_closed or not stream._running:
                    return
                self._end_abandoned()
                self._step(stream)

    def step(self) -> bool:
        """Run one step for all streams, for a thread that does nothing else; return False if there was nothing to do.

        Streams store the results of the step, or the exception that ends it early.
        """
        with self._lock:
            self._end_abandoned()
            has_rows = bool(self._streams)
            if has_rows:
                self._step(None)
            return has_rows

    def _step(self, waiting: Stream | None) -> None:
        """Run a step on behalf of a stream, or of all streams if None."""
        started = perf_counter()
        self._frame = sys._getframe()
        try:
            outputs = self.engine.step()
            ended = perf_counter()
            for output in outputs:
                row, reference = output.row, self._streams.get(output.row)
                stream = None if reference is None else reference()
                if stream is None:  # dropped, or interrupted before it was complete
                    self.engine.abort(row.request_id)
                    continue
                stream._take(output, started, ended)
                if row not in stream._running:
                    if not row.is_finished:  # the tokenizer cannot decode its output
                        self.engine.abort_row(row, "error")
                    del self._streams[row]
                    if stream._is_counted:
                        self._count(row.stats)
        except BaseException as error:
            failed = self._fail(error)
            if not failed or waiting in failed or not isinstance(error, Exception):
                raise
        finally:
            self._frame = None
            if not self._streams:
                self._note_idle()

    def _fail(self, error: BaseException) -> set[Stream]:
        """End the streams that had rows in a step that broke off. The engine has already ended these rows."""
        untouched = set(self.engine.waiting_rows)
        touched = {reference() for row, reference in self._streams.items() if row not in untouched}
        failed = {stream for stream in touched if stream is not None}
        for stream in failed:
            stream._failure = error
        for stream in failed:
            self._withdraw(stream._running)
        return failed

    def _withdraw(self, running: dict[Row, Completion]) -> None:
        """Remove the unfinished rows of a stream from the engine, and mark them as aborted."""
        for request_id in {row.request_id for row in running}:
            self.engine.abort(request_id)
        for row, completion in running.items():
            completion.finish_reason = completion.finish_reason or "abort"
            self._streams.pop(row, None)
        running.clear()
        if not self._streams:
            self._note_idle()

    def end(self, stream: Stream) -> None:
        """Remove the unfinished rows of a stream from the engine: now, or before the next step if one is running."""
        with self._lock:
            self.abandon(stream._running)
            if not self._is_stepping:
                stream._is_closed = True
                self._end_abandoned()

    def _end_abandoned(self) -> None:
        while self._abandoned:
            try:
                self._withdraw(self._abandoned[0])
            except BaseException as error:  # interrupted inside the engine, which then ends all running rows
                self._fail(error)
                raise
            self._abandoned.popleft()

    def abandon(self, running: dict[Row, Completion]) -> None:
        """End rows before the next step. May be called from anywhere, even during garbage collection."""
        self._abandoned.append(running)

    # -- memory of an idle engine ------------------------------------------------------------------------------

    def rest(self) -> None:
        """Free the memory of keys and values, unless a request has arrived."""
        with self._lock:
            self._end_abandoned()
            if not self._streams:
                self.engine.release_memory()

    def _note_idle(self) -> None:
        """Start a thread that frees memory after a pause. The thread does not keep the runner alive."""
        self._idle_since = monotonic()
        if self._idle_thread is None or not self._idle_thread.is_alive():
            self._idle_thread = threading.Thread(
                target=_rest_when_idle, args=(weakref.ref(self),), name="foredraft-idle", daemon=True
            )
            self._idle_thread.start()

    # -- the log line about a low gain -------------------------------------------------------------------------

    def _count(self, stats: RowStats) -> None:
        """Count a finished row; log one line, once, if drafting has gained little over many steps."""
        if self._ended is not None and stats.num_emitted_tokens >= MIN_ROW_TOKENS:
            self._ended.add(stats)
            if log_low_gain(self._ended, self._method, self._model):
                self._ended = None


def _rest_when_idle(runner_of: weakref.ref[Runner]) -> None:
    """Free the memory of a runner once it has had no rows for `IDLE_SECONDS`."""
    left = IDLE_SECONDS
    while left > 0:
        sleep(left)
        runner = runner_of()
        if runner is None:
            return
        left = IDLE_SECONDS
        if not runner._streams:
            with runner._lock:
                left += runner._idle_since - monotonic()
                if left <= 0:
                    runner._idle_thread = None  # rows that end from now on start another thread
        if left <= 0:
            runner.rest()
        del runner


def log_low_gain(counts: RowStats, method: str, model: str) -> bool:
    """Log a line if drafting gained little over many steps, with counters that show why; return whether it was logged.

    The log line never claims a gain.
    """
    if counts.num_steps < MIN_STEPS or counts.tokens_per_step >= LOW_GAIN:
        return False
    undrafted = counts.num_undrafted_steps
    parts = [f"{counts.num_accepted_draft_tokens} of {counts.num_draft_tokens} verified draft tokens accepted"]
    if nothing := undrafted[NOTHING_FOUND]:
        parts.append(f"nothing was found to draft in {counted(nothing, 'step')}")
    if cut := describe_cuts(counts.num_cut_tokens, undrafted):
        parts.append(cut)
    is_governed = not counts.num_draft_tokens and undrafted["governor"] == max(undrafted.values())
    logger.log(
        logging.INFO if is_governed else logging.WARNING,
        "method %s gains little so far: %.2f tokens per step over %d steps (%s). foredraft bench --methods all "
        "--model %s shows which method is fastest.",
        method,
        counts.tokens_per_step,
        counts.num_steps,
        ", ".join(parts),
        model,
    )
    return True
