"""The interface of length policies: they are asked before every drafted token, never after."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

from foretoken.drafters.lengths.options import CONFIDENCE, LAW, NOTHING
from foretoken.errors import ConfigError
from foretoken.tree import DraftPlan

if TYPE_CHECKING:
    from torch import Tensor

    from foretoken.engine.sequence import Sequence

__all__ = ["CONFIDENCE", "LAW", "NOTHING", "LengthPolicy", "checked_length", "required", "within"]


class LengthPolicy(ABC):
    """Decides per row and step how many tokens to draft; usable by every drafter that can stop early.

    A drafter calls ``begin``; then for every token ``go_on`` before the forward that would tell its law (not for the
    first one, which is always looked at) and ``keep_drafting`` before it is drawn; and ``end`` with the outcome. State
    belongs to a row (by ``row.id``) and lives until ``forget``.

    A policy notes what it plans; the drafter puts the plan into its draft, and the engine makes the trace of it.

    Exactness: a stopping time. ``go_on`` may look at everything before the forward, ``keep_drafting`` at the law of the
    token that would be drawn next too, neither at that token; a token that was drawn stays.
    """

    name: str
    looks_at: str = NOTHING
    """The input that ``keep_drafting`` needs: nothing, the confidence (largest probability), or the whole law."""

    @cached_property
    def _plans(self) -> dict[int, DraftPlan]:
        """By row, of the step that is being drafted."""
        return {}

    def plan(self, row: Sequence, gamma: int) -> int:
        """Note the longest draft of a step that begins, and return it."""
        self._plans[row.id] = DraftPlan(gamma)
        return gamma

    def note(self, row: Sequence, gamma: int, entropy: float | None = None) -> None:
        """Note what is planned so far; the first entropy of a step stays."""
        plan = self._plans.setdefault(row.id, DraftPlan(gamma))
        plan.gamma = gamma
        if plan.entropy is None:
            plan.entropy = entropy

    def take_plan(self, row: Sequence) -> DraftPlan | None:
        """The plan of the draft that has just been made; handed out once."""
        return self._plans.pop(row.id, None)

    @abstractmethod
    def begin(self, row: Sequence) -> int:
        """The most tokens to draft in this step, 0 or more."""

    def wants_log_probs(self, depth: int) -> bool:
        """Whether ``keep_drafting`` looks at its ``draft_log_probs`` at this depth."""
        return self.looks_at != NOTHING

    def go_on(self, row: Sequence, depth: int) -> bool:
        """Whether to look for a token after ``depth`` (1 or more) of them; a no saves the drafter a forward."""
        return True

    def keep_drafting(self, row: Sequence, depth: int, draft_log_probs: Tensor | None) -> bool:
        """Whether to draw one more token after ``depth`` of them; asked each time below the cap of ``begin``.

        Args:
          draft_log_probs: (V,) log-law of the token about to be drawn, where it is wanted; of a tree, at the best node
            that is about to be expanded. Drafters that know only the share of their best token give that, (1,),
            to policies that look at the confidence.
        """
        return True

    def end(self, row: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Take in the outcome: depth of the draft, and how many tokens of one path were accepted."""

    def forget(self, row: Sequence) -> None:
        """Drop the state of a row that has finished."""
        self._plans.pop(row.id, None)

    def length(
        self, row: Sequence, budget: int, log_shares: Callable[[int], Tensor | None] = lambda depth: None
    ) -> int:
        """The draft length for a drafter that knows its draft beforehand: cap and stops within ``budget``.

        Args:
          log_shares: for policies that look at the confidence: logarithm of the share of the best token after so many
            of them, (1,); None where the draft ends.
        """
        cap = min(self.begin(row), budget)
        depth = 0
        while depth < cap and (depth == 0 or self.go_on(row, depth)):
            wants = self.wants_log_probs(depth)
            shares = log_shares(depth) if wants else None
            if (wants and shares is None) or not self.keep_drafting(row, depth, shares):
                break
            depth += 1
        return depth


def required(policy: LengthPolicy, draft_log_probs: Tensor | None) -> Tensor:
    """The law that a policy looks at.

    Raises: ConfigError when the drafter has none.
    """
    if draft_log_probs is None:
        raise ConfigError(
            f"length_policy {policy.name!r} looks at the {policy.looks_at} of the drafter, and this drafter has none; "
            "use 'fixed' or 'heuristic'"
        )
    return draft_log_probs


def checked_length(num_tokens: int) -> int:
    """A draft length of 0 or more."""
    if num_tokens < 0:
        raise ConfigError(f"num_speculative_tokens is {num_tokens}; want 0 (no draft) or more")
    return num_tokens


def within(name: str, value: float, low: float, high: float, *, open_end: bool = False) -> float:
    """A number within limits, the upper one excluded on request."""
    if not low <= value <= high or (open_end and value == high):
        end = f"{high:g}, excluded" if open_end else f"{high:g}"
        raise ConfigError(f"{name} is {value}; it must lie between {low:g} and {end}")
    return value
