"""Results shaped like vLLM's, and the deltas of a stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, TypeVar, overload

from foredraft.engine.prediction import PREDICTION
from foredraft.engine.stats import RowStats, StepTrace

if TYPE_CHECKING:
    from foredraft.config.engine import Promise
    from foredraft.tree import DraftTree

T = TypeVar("T")

Segments = tuple[tuple[str, str], ...]
"""Pieces of text, each with the name of what proposed it."""
TARGET = "target"
"""Name of what proposes a token that was not drafted."""

_SHOWN_CHARACTERS = 100  # of a text, and
_SHOWN_SAMPLES = 3  # of the samples of a request, in the repr of a result


class FrozenList(list[T]):
    """A list that cannot be changed, as vLLM's results are lists; it equals the tuple of its items, and can be hashed.

    Its slices and sums are such lists as well. A sum that begins with another list is a plain list, and one that begins
    with a tuple a tuple.
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

    def __radd__(self, other: Any) -> Any:  # of a list, ``list`` does it, in place for +=
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
        raise TypeError("results cannot be changed; make a list of your own of them: list(token_ids)")

    append = extend = insert = pop = remove = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __imul__ = _refuse

    def __iadd__(self, other: Any) -> Any:
        """A new one in the place of this name, as for tuples."""
        return self + other


@dataclass(frozen=True)
class Logprob:
    """Log-probability of one token under the processed target distribution.

    Args:
      logprob: natural logarithm.
      rank: 1 is the most likely token.
      decoded_token: its text, None where no tokenizer is known.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True, repr=False)
class CompletionOutput:
    """One sample of a request. Its repr is short; the fields have everything.

    Args:
      index: which of the ``n`` samples.
      text: of ``token_ids``, cut before the stop string unless the parameters keep it; empty without a tokenizer.
      token_ids: generated tokens, the EOS or stop token that ended them included, the prompt excluded.
      cumulative_logprob: sum over ``token_ids``; None unless log-probabilities were asked for.
      logprobs: per token, its own and the most likely ones; None unless asked for.
      finish_reason: "stop", "length", "abort" or "error".
      stop_reason: the stop token or stop string that ended it, the message of an error, None for EOS.
      seed: of the request; sample i draws with ``mix(seed, i)``. Giving it again gives the same tokens again.
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
    """Counters and times of one request, its samples pooled.

    None of them compares with plain decoding: ``tokens_per_step`` is not a speed-up, since a step that drafts costs
    more than a plain one. Whether drafting pays is measured by ``foredraft bench``.

    Args:
      speculative_decoding: vLLM's fields, see `speculative_metrics`.
      prefill_seconds: from submission to the first decode step; in a batch, waiting for other rows included.
      decode_seconds: from the first decode step to the last.
      tokens_per_second: generated tokens by ``decode_seconds``.
      governor: where measured costs decide how much is drafted: ``estimated_speedup`` by plain decoding during the
        call, None where no step verified a draft, and the ``decision`` of late with its reasons.
      promise: what holds of the tokens, compared with plain decoding; None under rules that keep the distribution
        alone.
      trace: what every decode step planned, drafted and accepted, sample by sample.
    """

    speculative_decoding: Mapping[str, Any] = field(default_factory=dict)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    tokens_per_second: float = 0.0
    governor: Mapping[str, Any] | None = None
    promise: Promise | None = None
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
    """The result for one prompt. Its repr is short; the fields have everything.

    Args:
      prompt: the text, None for a prompt of token ids.
      finished: False when it was aborted before its end.
      lossless: the acceptance rule keeps the distribution of the target.
      num_cached_tokens: of the prompt, taken over from earlier requests instead of being fed (vLLM's field).
      prompt_logprobs: per token of the prompt, None for the first, its own log-probability and the most likely ones by
        the model alone; None unless asked for.
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
      prompt_index: which of the prompts, 0 for a single one.
      index: which of its ``n`` samples.
      text: new text; tokens that only begin a character, or what may become a stop string, are held back.
      segments: ``text`` in pieces, each with the name of what proposed it: the drafter's, or "target".
      token_ids: new tokens.
      num_accepted: how many of them, counted from the front, were drafted.
      finish_reason, stop_reason: set on the last delta of the sample.
      seed: of the request, as in `CompletionOutput`.
      texts: ``text`` in pieces, one for each of the tokens: what it has made certain, possibly nothing.
      logprobs: for each of the tokens; None unless asked for.
      tree: the draft that the step verified.
      prompt_logprobs: of the prompt, with the first delta of each sample; None with later ones and unless asked for.
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
    """The repr of a text, cut where it is long."""
    if not isinstance(value, str) or len(value) <= _SHOWN_CHARACTERS:
        return repr(value)
    return f"{value[: _SHOWN_CHARACTERS - 3]!r}..."


def speculative_metrics(stats: RowStats, num_spec_tokens: int, is_lossless: bool = True) -> dict[str, Any]:
    """vLLM's ``metrics.speculative_decoding``, with tau, the number of steps and ``lossless`` beside it.

    ``mean_acceptance_length`` counts the bonus and averages over steps that drafted (1.0 when none did);
    ``tokens_per_step`` (tau) averages over all decode steps. The histogram leaves the bonus out and holds
    accepted counts that occurred, as strings of integers. ``num_proposed_tokens`` were drafted, ``num_draft_tokens`` of
    them verified, and the others cut, by cause in ``num_cut_tokens``; ``num_undrafted_steps`` has the steps without a
    draft by what kept them from having one (`foredraft.engine.budget`). Where several drafters had a part,
    ``by_drafter`` says what each has proposed. ``accepted_prediction_tokens`` and ``rejected_prediction_tokens`` are
    there where a prediction of the request's own was drafted; ``drafter_error`` where an exception has ended the
    drafting of a row, and says which.
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
