"""How far two texts are the same from the beginning on."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any


def shared_length(first: Seq[Any], second: Seq[Any]) -> int:
    """Length of the longest common beginning, by bisection over slices: (1, 2, 3) and (1, 2, 4, 5) share 2.

    Both are of one type: tuples, lists or texts.
    """
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def first_difference(one: Seq[Any], other: Seq[Any]) -> int | None:
    """(1, 2, 3) and (1, 2) differ at 2; equal ones nowhere. Both are of one type."""
    place = shared_length(one, other)
    return None if place == len(one) == len(other) else place
