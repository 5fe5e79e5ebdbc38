"""Whether a drafter is attended to at all: beside short steps being told of them takes more than drafts bring."""

from __future__ import annotations

import math

from foretoken.engine.cost_model import FAR, RATE, SHARE, Average
from foretoken.engine.stats import Totals

TO_LOSE = 16.0
"""Plain steps whose time may be lost by each way of drafting before it is judged: an eighth of an answer, in which a
drafter that loses a tenth of every step is watched for 160 of them."""

TO_RETURN = 0.25
"""Of that, what has to be there again before a drafter that was left is tried anew: other texts may suit it, and with
all of it a session that begins with texts that do not went on without it for 1,600 steps."""

BEARABLE = 0.03
"""Of a step that drafts nothing: what a drafter may take of it without being left (issue 26: never slower by more)."""

WORST = 4.0
"""Plain steps that one step can lose, at most; and no more than steps that draft take of late, but for `FAR`: pauses
of the machine are not the drafter's."""


class Patience:
    """An account, in steps of plain decoding, of what attending to a drafter loses.

    What is drafted is decided by a governor. A drafter works in steps without a draft, too: features are gathered for
    it, and it takes in the text, that of prompts as well, much for heads if answers are short. Beside a step
    of 9 ms that is nothing, beside one of half a millisecond up to half of it. So what every step loses is taken from
    the account and what drafts bring is added, and `SHARE` of each step. When nothing is left, the rows that run go on
    without the drafter for good, and rows that come have none either, until `TO_RETURN` of the account is there again;
    so what is lost over time stays below `SHARE`.

    Args:
      num_arms: ways of drafting that a governor has to try.

    Attributes:
      totals: counts of the steps without the drafter.
    """

    def __init__(self, num_arms: int = 1) -> None:
        self._most = TO_LOSE * max(num_arms, 1)
        self._left = self._most
        self._taken = 0.0  # share of steps without a draft
        self._size = 0  # magnitude of rows of the last step
        self._bare: dict[int, Average] = {}  # logarithms of their seconds without the drafter, by magnitude of rows,
        self._drafting: dict[int, Average] = {}  # and of all of steps that draft, by those
        self.is_attending = True
        self.totals = Totals()

    def welcomes(self) -> bool:
        """Whether a row that comes in now has the drafter."""
        self.is_attending = self.is_attending or self._left >= TO_RETURN * self._most
        return self.is_attending

    def attended(
        self, num_rows: int, num_tokens: float, drafter_seconds: float, seconds: float, *, drafts: bool
    ) -> None:
        """A step has run.

        Args:
          num_tokens: that it brought, of all rows, those that make nothing end sooner left out.
          drafter_seconds: of drafter and governor; ``seconds`` of all the rest.
          drafts: whether a draft was verified.
        """
        size = self._size = num_rows.bit_length()
        bare = self._bare.setdefault(size, Average())
        if drafts:
            usual = self._drafting.setdefault(size, Average())
            taken = math.log(drafter_seconds + seconds) - (bare.value if bare.count else math.log(seconds))
            usual.add(taken)
            lost = math.exp(min(taken, usual.value + FAR)) - num_tokens / num_rows
        else:
            bare.add(math.log(seconds))
            lost = drafter_seconds / seconds
            self._taken += max(RATE, 1.0 / bare.count) * (min(lost, 1.0) - self._taken)
        self._left = min(self._left + SHARE - min(lost, WORST), self._most)

    def read(self, drafter_seconds: float) -> None:
        """The drafter has taken so long to read prompts, which it has to before anything is drafted after them."""
        if (bare := self._bare.get(self._size)) is not None and bare.count:
            lost = min(drafter_seconds / math.exp(bare.value), WORST)
            self._taken += RATE * lost
            self._left -= lost

    def rested(self, num_rows: int, seconds: float) -> None:
        """A step has run without the drafter, and brought a token of every row."""
        self._left = min(self._left + SHARE, self._most)
        self.totals.num_steps += 1
        self.totals.num_tokens += num_rows
        self.totals.seconds += seconds
        self.totals.plain_seconds += seconds

    def describe(self) -> str:
        """Why nothing is drafted."""
        return (
            f"not drafting: rows go on without the drafter, which takes {self._taken:.0%} of a step beside drafts and "
            "brings less"
        )

    def ends(self) -> bool:
        """Whether the rows that run are to go on without the drafter."""
        if self.is_attending and self._left < 0.0 and self._taken > BEARABLE:
            self.is_attending, self._left = False, 0.0
            return True
        self._left = max(self._left, 0.0)
        return False
