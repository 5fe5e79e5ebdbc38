"""One line of log, once, where drafting does not pay: after 64 steps, from the counts of the rows that have ended."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from foredraft.engine.budget import NOTHING_FOUND, counted, describe_cuts
from foredraft.engine.stats import RowStats

logger = logging.getLogger("foredraft")

MIN_STEPS = 64  # of rows that have ended, before anything is said
MIN_ROW_TOKENS = 16  # shorter rows have hardly a step that could draft
NEAR_ONE = 1.1  # tokens per step; a step that drafts costs that much more than a plain one on most machines

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
    """Counts of the rows that have ended, and one line of log where they show no gain; a gain is never claimed.

    Args:
      method: as one would write it.
      num_draft_tokens: longest draft.
      model: for the command that measures.
    """

    def __init__(self, method: str, num_draft_tokens: int, model: str = "MODEL") -> None:
        self._method, self._model = method, model
        self._total = RowStats()
        self._is_done = method == "none" or num_draft_tokens == 0

    def ended(self, stats: RowStats) -> None:
        """Count a row that has ended."""
        if self._is_done or _is_quiet.get() or stats.num_emitted_tokens < MIN_ROW_TOKENS:
            return
        self._total.add(stats)
        total, undrafted = self._total, self._total.num_undrafted_steps
        if total.num_steps < MIN_STEPS or total.tokens_per_step >= NEAR_ONE:
            return
        self._is_done = True
        parts = [f"{total.num_accepted_draft_tokens} of {total.num_draft_tokens} verified draft tokens accepted"]
        if nothing := undrafted[NOTHING_FOUND]:
            parts.append(f"nothing was found to draft in {counted(nothing, 'step')}")
        if cut := describe_cuts(total.num_cut_tokens, undrafted):
            parts.append(cut)
        is_governed = not total.num_draft_tokens and undrafted["governor"] == max(undrafted.values())
        logger.log(
            logging.INFO if is_governed else logging.WARNING,
            "method %s hardly pays so far: %.2f tokens per step over %d steps (%s). foredraft bench --methods all "
            "--model %s measures what pays.",
            self._method,
            total.tokens_per_step,
            total.num_steps,
            ", ".join(parts),
            self._model,
        )
