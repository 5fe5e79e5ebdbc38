"""Comparison of tokens before speed: where two arms differ, and how close the two tokens are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from foredraft.beginnings import first_difference
from foredraft.bench.trial import Sampling, Trial, rows_of
from foredraft.model.lm import CausalLM
from foredraft.testing.divergence import token_gap

Gap = Callable[[Sequence[int], Sequence[int], int, int], float]
"""Function that returns the difference between the logits of two tokens. The arguments are a prompt, the output up to
the difference, and the two tokens."""


@dataclass(frozen=True)
class Departure:
    """The first token at which an arm's output differs from the reference's.

    Args:
      position: index in the output.
      expected, found: token of the reference, and token of the arm; -1 if the output has ended.
      gap: difference of the two tokens' logits, with the noise of the draw if sampled.
    """

    arm: str
    prompt: str
    position: int
    expected: int
    found: int
    gap: float


@dataclass(frozen=True)
class Equality:
    """The result of comparing one arm's outputs with the reference's.

    Args:
      num_prompts: number of compared prompts; for groups, number of compared rows.
      same_share: share of the reference's tokens that come before the first difference of their row.
      is_repeatable: True if all runs of the arm on a prompt gave the same tokens.
    """

    arm: str
    reference: str
    num_prompts: int
    num_identical: int
    divergences: tuple[Departure, ...]
    same_share: float = field(default=1.0, repr=False)
    is_repeatable: bool = field(default=True, repr=False)

    @property
    def largest_gap(self) -> float:
        return max((divergence.gap for divergence in self.divergences), default=0.0)

    def passes(self, near_tie: float) -> bool:
        """Return whether every difference has a gap below ``near_tie``; 0 allows no difference."""
        return not self.divergences or self.largest_gap < near_tie


def check(trial: Trial, gap: Gap, reference: str, arms: Sequence[str]) -> list[Equality]:
    """Compare the arms' first outputs with the reference's, row by row.

    The output of a one-row arm may end at EOS while the reference's batch continues. A shorter output is compared up to
    its end.
    """
    return [_compared(trial, gap, reference, arm) for arm in arms]


def gap_of(target: CausalLM, sampling: Sampling) -> Gap:
    """Return a function that measures gaps by a plain forward pass, with the noise of the draw; see
    `foredraft.testing.divergence`."""
    params = sampling.params(1)
    return lambda prompt, output, one, other: token_gap(target, prompt, output, params, 0, (one, other))


def _compared(trial: Trial, gap: Gap, reference: str, arm: str) -> Equality:
    divergences, num_rows, num_tokens, num_same = [], 0, 0, 0
    for place, prompt in enumerate(trial.prompts):
        expected, found = (trial.runs[name][place][0].texts for name in (reference, arm))
        for row, (ids, wanted, got) in enumerate(zip(rows_of(prompt.token_ids), expected, found, strict=False)):
            if len(found) != len(expected):
                wanted = wanted[: len(got)]
            position = first_difference(wanted, got)
            num_rows, num_tokens = num_rows + 1, num_tokens + len(wanted)
            num_same += len(wanted) if position is None else min(position, len(wanted))
            if position is None:
                continue
            name = prompt.name if len(expected) == 1 else f"{prompt.name}, row {row}"
            one, other = (tokens[position] if position < len(tokens) else -1 for tokens in (wanted, got))
            has_ended = -1 in (one, other)  # one output ended and the other did not: rounding cannot explain that
            distance = float("inf") if has_ended else gap(ids, wanted[:position], one, other)
            divergences.append(Departure(arm, name, position, one, other, distance))
    share = num_same / num_tokens if num_tokens else 1.0
    num_identical = num_rows - len(divergences)
    return Equality(arm, reference, num_rows, num_identical, tuple(divergences), share, trial.is_repeatable(arm))
