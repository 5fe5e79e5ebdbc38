"""The common beginning of two texts, and the memory of keys and values that are kept for beginnings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foredraft.model.cache.ragged import RowStates


def bytes_of(states: RowStates) -> int:
    """Memory of the keys and values of a row, all layers together."""
    return sum(each.nbytes for pair in states if pair is not None for each in pair)


def shared_length(first: Sequence[Any], second: Sequence[Any]) -> int:
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


def first_difference(one: Sequence[Any], other: Sequence[Any]) -> int | None:
    """(1, 2, 3) and (1, 2) differ at 2; equal ones nowhere. Both are of one type."""
    place = shared_length(one, other)
    return None if place == len(one) == len(other) else place
