"""One line, once, where drafting does not pay: after 64 steps, from the counts of the rows that have ended."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from foredraft.engine.budget import NOTHING_FOUND, Cuts, counted
from foredraft.engine.stats import SequenceStats

logger = logging.getLogger("foredraft")

MIN_STEPS = 64  # of rows that have ended, before anything is said
MIN_ROW_TOKENS = 16  # shorter rows have hardly a step that could draft
NEAR_ONE = 1.1  # tokens per step; a step that drafts costs that much more than a plain one on most machines

REMEDIES = {
    "governor": "By measured costs plain decoding is faster so far; it goes on trying, and length_policy='fixed' "
    "drafts all the same.",
    "bits": "A larger strict_width leaves more room, exactness='default' all of it.",
    "memory": "A larger max_kv_bytes leaves more room.",
    "budget": "A larger max_tokens leaves more room.",
    "context": "Drafting goes on for shorter texts; a draft model with a longer context, or a method without a model, "
    "drafts for all.",
}

_is_quiet: ContextVar[bool] = ContextVar("is_quiet", default=False)


@contextmanager
def unsaid() -> Iterator[None]:
    """Leave out rows that end meanwhile in this thread: those of warming up and of forced drafts say nothing."""
    token = _is_quiet.set(True)
    try:
        yield
    finally:
        _is_quiet.reset(token)


class PayoffWatch:
    """Counts of the rows that have ended, and one line of log where they show no gain.

    Near one token per step there is nothing to gain, and a method that has drafted nothing cannot be faster than none.
    A gain is never claimed: only a race can show one.

    Args:
      method: as one would write it.
      num_draft_tokens: longest draft.
      model: for the command that measures.
    """

    def __init__(self, method: str, num_draft_tokens: int, model: str = "MODEL") -> None:
        self._method, self._num_draft_tokens, self._model = method, num_draft_tokens, model
        self._stats = SequenceStats()
        self._is_done = method == "none" or num_draft_tokens == 0

    def ended(self, stats: SequenceStats) -> None:
        """Count a row that has ended."""
        if self._is_done or _is_quiet.get() or stats.num_emitted_tokens < MIN_ROW_TOKENS:
            return
        self._stats.add(stats)
        total = self._stats
        cause = "" if total.num_draft_tokens else total.cuts.main_cause
        if total.num_steps < MIN_STEPS or (total.num_draft_tokens and total.tokens_per_step >= NEAR_ONE):
            return
        if total.num_draft_tokens:
            why = (
                f"hardly pays so far: {total.tokens_per_step:.2f} tokens per step over {total.num_steps} steps "
                f"({total.num_accepted_draft_tokens} of {total.num_draft_tokens} drafted tokens were accepted)"
            )
        else:
            why = f"has had no draft verified in {total.num_steps} steps: {describe_cuts(total.cuts)}"
        self._is_done = True
        level = logging.INFO if cause == "governor" else logging.WARNING
        logger.log(level, "method %s %s. %s", self._method, why, REMEDIES.get(cause) or self._remedy())

    def _remedy(self) -> str:
        shorter = self._num_draft_tokens // 2
        has_drafted = self._stats.num_draft_tokens > 0 and shorter > 0
        fewer = f"fewer tokens (num_speculative_tokens={shorter}), " if has_drafted else ""
        return (
            f"Try another method, {fewer}or method 'none'; foredraft bench --methods all --model {self._model} "
            "measures what pays."
        )


def describe_cuts(cuts: Cuts) -> str:
    """Why steps had no draft, in counts: tokens that were cut, and steps in which nothing was found."""
    nothing, held = cuts.steps[NOTHING_FOUND], cuts.describe()
    found = f"it has found nothing to draft in {counted(nothing, 'step')}" if nothing else ""
    return ", ".join(part for part in (found, held) if part)
