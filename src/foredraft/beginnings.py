"""Common prefixes of two sequences, and the memory of kept keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foredraft.model.cache.ragged import RowStates


def bytes_of(states: RowStates) -> int:
    """Memory of the keys and values of a row, all layers together, in bytes."""
    return sum(each.nbytes for pair in states if pair is not None for each in pair)


def shared_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Length of the longest common prefix, found by bisection over slices: (1, 2, 3) and (1, 2, 4, 5) share 2.

    Both sequences have the same type: tuples, lists or strings.
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
    """Index of the first difference, None without one: (1, 2, 3) and (1, 2) differ at 2. Both sequences have the same
    type."""
    place = shared_length(one, other)
    return None if place == len(one) == len(other) else place
