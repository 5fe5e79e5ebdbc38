"""A step-by-step record of the last call of a classic function."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(frozen=True)
class DraftedToken:
    """One drafted token and its outcome.

    Args:
      position: absolute index in the text.
      token: token id.
      draft_prob: q(token) under the drafter's distribution; None if a storage proposed it.
      target_prob: p(token) under the target's distribution; None if the token was not tested.
      uniform: random number r that was compared with p/q; None if tokens were compared instead.
      accepted: True or False for a tested token; None after a rejection, where tokens are not tested.
    """

    position: int
    token: int
    draft_prob: float | None
    target_prob: float | None
    uniform: float | None
    accepted: bool | None

    @property
    def ratio(self) -> float | None:
        """p/q, not limited to 1; None if either is unknown or q is 0."""
        if self.target_prob is None or not self.draft_prob:
            return None
        return self.target_prob / self.draft_prob


@dataclass(frozen=True)
class Step:
    """One step: a draft, one forward pass of the target, and the emitted tokens.

    Args:
      position: number of tokens before the draft.
      gamma: number of drafted tokens.
      normalised_entropy: entropy of the drafter's distribution of the first drafted token, 0..1; None without EGAG.
      drafts: drafted tokens.
      accepted: number of drafted tokens that were emitted.
      final_token: the target's own token after the accepted ones; None if the output ended before it.
      is_adjusted: True if ``final_token`` was drawn from norm(max(p - q, 0)).
      draft_seconds, verify_seconds, accept_seconds: wall-clock times of the three parts.
    """

    position: int
    gamma: int
    normalised_entropy: float | None
    drafts: tuple[DraftedToken, ...]
    accepted: int
    final_token: int | None
    is_adjusted: bool
    draft_seconds: float
    verify_seconds: float
    accept_seconds: float


@dataclass
class Trace:
    """The steps of one call.

    Args:
      function: name of the function.
      prompt_length: number of prompt tokens.
    """

    function: str
    prompt_length: int
    steps: list[Step] = field(default_factory=list)

    @property
    def num_drafted(self) -> int:
        return sum(step.gamma for step in self.steps)

    @property
    def num_accepted(self) -> int:
        return sum(step.accepted for step in self.steps)

    @property
    def acceptance_rate(self) -> float:
        """Accepted divided by drafted tokens, 0..1; 0 if nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0


_LAST: ContextVar[Trace | None] = ContextVar("foredraft.classic.last_trace", default=None)


def last_trace() -> Trace | None:
    """Return the trace of the latest classic call in this thread or task; None before the first call.

    The trace of a call that raised an error contains the steps before the error.
    """
    return _LAST.get()


def begin_trace(function: str, prompt_length: int) -> Trace:
    """Return a new trace, and make it the result of `last_trace`."""
    trace = Trace(function, prompt_length)
    _LAST.set(trace)
    return trace
