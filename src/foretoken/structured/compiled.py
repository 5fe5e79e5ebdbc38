"""A grammar that is compiled, and what its matchers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Compiled:
    """A grammar that is compiled. Its matchers share an automaton, which every mask may add states to.

    At the limit of states none of its matchers works any more, however few of the states are one's own.

    Args:
      make: compiles it: a matcher to which no token was given yet.

    Attributes:
      num_masks: that were made by all of its matchers.
      is_full: whether one of them has met the limit.
    """

    def __init__(self, make: Callable[[], LLMatcher]) -> None:
        self.num_masks, self.is_full = 0, False
        self._make, self._matcher = make, make()

    def matcher(self) -> LLMatcher:
        """For an output that begins."""
        return self._matcher.deep_copy()

    def anew(self) -> Compiled:
        """The same grammar with an automaton of its own. Raises: GrammarError."""
        return Compiled(self._make)
