"""What comes back: results shaped like vLLM's, and the deltas of a stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foretoken.engine.stats import SequenceStats, StepTrace


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


@dataclass(frozen=True)
class CompletionOutput:
    """One sample of a request.

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
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str
    stop_reason: int | str | None
    seed: int


@dataclass(frozen=True)
class RequestMetrics:
    """Counters and times of one request, its samples pooled.

    Args:
      speculative_decoding: vLLM's fields, see `speculative_metrics`.
      prefill_seconds: from submission to the first decode step; in a batch, waiting for other rows included.
      decode_seconds: from the first decode step to the last.
      tokens_per_second: generated tokens by ``decode_seconds``.
      trace: what every decode step planned, drafted and accepted, sample by sample.
    """

    speculative_decoding: Mapping[str, Any] = field(default_factory=dict)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    tokens_per_second: float = 0.0
    trace: tuple[StepTrace, ...] = ()


@dataclass(frozen=True)
class RequestOutput:
    """The result for one prompt.

    Args:
      prompt: the text, None for a prompt of token ids.
      finished: False when it was aborted before its end.
      lossless: the acceptance rule keeps the law of the target.
      num_cached_tokens: of the prompt, taken over from earlier requests instead of being fed (vLLM's field).
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    metrics: RequestMetrics
    lossless: bool = True
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class StreamOutput:
    """What one step added to one sample of a streamed request.

    Args:
      prompt_index: which of the prompts, 0 for a single one.
      index: which of its ``n`` samples.
      text: new text; tokens that only begin a character, or what may become a stop string, are held back.
      segments: ``text`` in pieces, each with the name of what proposed it: the drafter's, or "target".
      token_ids: new tokens.
      num_accepted: how many of them, counted from the front, were drafted.
      finish_reason, stop_reason: set on the last delta of the sample.
    """

    request_id: str
    prompt_index: int
    index: int
    text: str
    segments: tuple[tuple[str, str], ...]
    token_ids: tuple[int, ...]
    num_accepted: int
    finish_reason: str | None = None
    stop_reason: int | str | None = None


def speculative_metrics(stats: SequenceStats, num_spec_tokens: int) -> dict[str, Any]:
    """vLLM's ``metrics.speculative_decoding``, with tau and the number of steps beside it.

    ``mean_acceptance_length`` counts the bonus and averages over steps that drafted (1.0 when none did);
    ``tokens_per_step`` (tau) averages over all decode steps. The histogram leaves the bonus out and holds
    accepted counts that occurred, as strings of integers.
    """
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
        "tokens_per_step": stats.tokens_per_step,
    }
