"""Keyed noise of the acceptance rules, and tokens drawn with it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from foretoken.law.noise import Purpose, stream_key, uniform

_STRETCH = 256  # tokens summed at once when a law is inverted; about the square root of a vocabulary


class RejectionNoise:
    """Keyed noise for one step of one row: a pure function of (seed, step, position, purpose).

    Position alone is not enough: after a rejection the same position is drafted again.

    Args:
      seed: of the row.
      step: number of the step in its row.
      first_position: absolute position of the token after the pending one.
    """

    def __init__(self, seed: int, step: int, first_position: int) -> None:
        self._seed = seed
        self._step = step
        self._first_position = first_position

    def uniform(self, depth: int, sibling: int) -> float:
        return self._uniform(depth, Purpose.ACCEPT, sibling)

    def draw(self, depth: int, probs: Tensor) -> int:
        return inverse(probs, self._uniform(depth, Purpose.RESIDUAL))

    def _uniform(self, depth: int, purpose: Purpose, index: int = 0) -> float:
        return uniform(stream_key(self._seed, self._step, self._first_position + depth, purpose), index)


def inverse(probs: Tensor, uniform: float) -> int:
    """The token at the fraction ``uniform``, 0..1, of the mass of ``probs`` (V,); -1 where they hold NaN or no mass.

    Sums whole stretches of the vocabulary first, then looks inside one. (1, 0, 3) at 0.2 is 0, at 0.25 and above 2.
    """
    stretches = pad(probs.double(), (0, -len(probs) % _STRETCH)).view(-1, _STRETCH)
    ends = stretches.sum(1).cumsum(0)
    if not float(ends[-1]) > 0.0:
        return -1
    mark = uniform * float(ends[-1])
    stretch = _first_beyond(ends, mark)
    start = float(ends[stretch - 1]) if stretch else 0.0
    return stretch * _STRETCH + _first_beyond(stretches[stretch].cumsum(0), mark - start)


def _first_beyond(ends: Tensor, mark: float) -> int:
    """Index of the first running total above ``mark``; of the last that grew, where rounding left none above it."""
    index = int(torch.searchsorted(ends, mark, right=True))
    return index if index < len(ends) else int(torch.searchsorted(ends, float(ends[-1])))
