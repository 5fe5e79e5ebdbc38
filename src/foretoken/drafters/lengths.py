"""How long a draft should be. A policy is asked before every drafted token, never after."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

from foretoken.engine.errors import ConfigError
from foretoken.engine.sequence import Sequence


class LengthPolicy(ABC):
    """Decides per row and step how many tokens to draft; usable by every drafter that can stop early.

    A drafter calls ``begin``, then ``keep_drafting`` before each token, and ``end`` with the outcome. State
    belongs to a row (by ``row.id``) and lives until ``forget``.

    Exactness: a stopping time. ``keep_drafting`` may look at the law of the token that would be drawn next
    and at everything before it, not at that token; a token that was drawn stays.
    """

    name: str

    @abstractmethod
    def begin(self, row: Sequence) -> int:
        """The most tokens to draft in this step, 0 or more."""

    def keep_drafting(self, row: Sequence, depth: int, draft_log_probs: Tensor | None) -> bool:
        """Whether to draw one more token after ``depth`` of them; asked each time below the cap of ``begin``.

        Args:
          draft_log_probs: (V,) log-law of the token about to be drawn, None where the drafter has no law.
        """
        return True

    def end(self, row: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Take in the outcome: depth of the draft, and how many tokens of one path were accepted."""

    def forget(self, row: Sequence) -> None:
        """Drop the state of a row that has finished."""

    def length(self, row: Sequence, budget: int) -> int:
        """The draft length for a drafter that has no law: the policy's cap and stops within ``budget``."""
        cap = min(self.begin(row), budget)
        depth = 0
        while depth < cap and self.keep_drafting(row, depth, None):
            depth += 1
        return depth


class Fixed(LengthPolicy):
    """The same number of tokens in every step.

    Args:
      num_tokens: 0 or more.
    """

    name = "fixed"

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = _checked(num_tokens)

    def begin(self, row: Sequence) -> int:
        return self.num_tokens


MAX_LENGTH = 32
"""Longest draft that the heuristic grows to: a row that loops accepts everything, and logits are (B, N, V)."""


class Heuristic(LengthPolicy):
    """Two tokens more after a step in which all were accepted, one fewer (but one) after any other.

    Source: the "heuristic" schedule of transformers' assisted generation. Deviations: the length belongs to
    one row and ends with it, nothing is written to anyone's generation_config; a draft that fell short of the
    length (end of budget, no match in the context) and was accepted as far as it went says nothing, and
    changes nothing.

    Args:
      num_tokens: the length a row starts with, 0 (stays 0) or more.
    """

    name = "heuristic"

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = _checked(num_tokens)
        self._length_of: dict[int, int] = {}

    def begin(self, row: Sequence) -> int:
        return self._length_of.get(row.id, self.num_tokens)

    def end(self, row: Sequence, num_drafted: int, num_accepted: int) -> None:
        length = self.begin(row)
        if num_accepted < num_drafted:
            self._length_of[row.id] = max(1, length - 1)
        elif num_drafted >= length > 0:
            self._length_of[row.id] = min(length + 2, max(self.num_tokens, MAX_LENGTH))

    def forget(self, row: Sequence) -> None:
        self._length_of.pop(row.id, None)


_POLICIES: dict[str, Callable[[int], LengthPolicy]] = {policy.name: policy for policy in (Fixed, Heuristic)}


def make_policy(name: str, num_tokens: int) -> LengthPolicy:
    """The policy called ``name`` around ``num_tokens`` draft tokens.

    Raises: ConfigError for an unknown name or a negative number.
    """
    if name not in _POLICIES:
        raise ConfigError(f"unknown length policy {name!r}; known: {', '.join(sorted(_POLICIES))}")
    return _POLICIES[name](num_tokens)


def _checked(num_tokens: int) -> int:
    if num_tokens < 0:
        raise ConfigError(f"num_speculative_tokens is {num_tokens}; want 0 (no draft) or more")
    return num_tokens
