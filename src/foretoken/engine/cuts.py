"""What of the drafts is left out before it is verified, and which steps have no draft: by cause, in counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

NOTHING_FOUND = "nothing_found"
"""Why a step has no draft whose drafter was asked and proposed nothing. All other causes keep it from drafting."""

NO_TOKENS: Mapping[str, int] = {}

CAUSES: Mapping[str, str] = {
    "governor": "the governor",
    "bits": "the promise of bits",
    "chains": "a model or rule that verifies chains only",
    "memory": "the limit of memory",
    "budget": "the end of the text's budget",
    "policy": "the length policy",
    "doubt": "a step that gave no token",
    "fault": "a fault of the drafter",
}
"""What keeps tokens from being drafted or verified, and how it is called in messages."""


@dataclass
class Cuts:
    """Counts of one row, or of several together.

    Attributes:
      tokens: drafted tokens that were left out before verifying, by what left them out.
      steps: steps without a draft, by what kept them from having one: a cause, or `NOTHING_FOUND`.
      latest: why the newest step had no draft; empty where it had one.
      latest_tokens: what was left out of the newest draft, like ``tokens``.
    """

    tokens: Counter[str] = field(default_factory=Counter)
    steps: Counter[str] = field(default_factory=Counter)
    latest: str = ""
    latest_tokens: Mapping[str, int] = field(default_factory=lambda: NO_TOKENS)

    def record(self, cause: str, num_proposed: int, stages: Seq[tuple[str, int]] = ()) -> None:
        """Count one step.

        Args:
          cause: why there is no draft where nothing was proposed.
          num_proposed: tokens of the draft.
          stages: in order, what may cut it and how many tokens are then left; the last ones are verified.

        Of eight tokens the promise of bits leaves five, and the governor none. Stages (("bits", 5), ("governor", 0))
        count three tokens for the promise, five for the governor, and a step without a draft for the governor.
        """
        if not num_proposed:
            self.latest, self.latest_tokens = cause, NO_TOKENS
            self.steps[cause] += 1
            return
        left = num_proposed
        cut: dict[str, int] = {}
        for stage, num_left in stages:
            if num_left < left:
                cut[stage] = cut.get(stage, 0) + left - num_left
                cause, left = stage, num_left
        self.latest, self.latest_tokens = "" if left else cause, cut
        self.tokens.update(cut)
        if not left:
            self.steps[cause] += 1

    def add(self, other: Cuts) -> None:
        """Pool the counts of another row."""
        self.tokens.update(other.tokens)
        self.steps.update(other.steps)

    @property
    def num_tokens(self) -> int:
        """Drafted tokens that were left out."""
        return self.tokens.total()

    @property
    def num_held_steps(self) -> int:
        """Steps that were kept from having a draft."""
        return self.steps.total() - self.steps[NOTHING_FOUND]

    @property
    def main_cause(self) -> str:
        """What kept most steps from having a draft; empty where nothing did."""
        held = [(count, cause) for cause, count in self.steps.items() if cause != NOTHING_FOUND]
        return max(held, default=(0, ""))[1]

    def describe(self) -> str:
        """What was cut, for people, the cause of most first; empty where nothing was.

        Example:
            >>> cuts = Cuts()
            >>> cuts.record("nothing_found", 8, [("governor", 0)])
            >>> cuts.record("governor", 0)
            >>> cuts.describe()
            'the governor cut 8 drafted tokens and left 2 steps without a draft'
        """
        causes = sorted(CAUSES, key=lambda cause: (-self.steps[cause], -self.tokens[cause]))
        said = [self._of(cause) for cause in causes if self.steps[cause] or self.tokens[cause]]
        return ", ".join(said)

    def _of(self, cause: str) -> str:
        tokens, steps = self.tokens[cause], self.steps[cause]
        parts = [f"cut {counted(tokens, 'drafted token')}"] if tokens else []
        parts += [f"left {counted(steps, 'step')} without a draft"] if steps else []
        return f"{CAUSES[cause]} {' and '.join(parts)}"


def counted(number: int, noun: str) -> str:
    """``1 step``, ``2 steps``, ``2 guesses``."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"
