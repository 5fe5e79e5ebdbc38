"""All caches of an engine: the target's, and those that drafters keep. A row has one slot in all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from foredraft.model.cache.ragged import KVCache


class CacheGroup:
    """Adds, moves, copies and removes rows in several caches at once. Their lengths differ.

    Args:
      caches: without rows, or with as many rows as the others; the target's comes first.
    """

    def __init__(self, caches: Sequence[KVCache]) -> None:
        self.caches = tuple(caches)

    def __iter__(self) -> Iterator[KVCache]:
        return iter(self.caches)

    @property
    def num_bytes(self) -> int:
        """Memory that all buffers hold."""
        return sum(cache.num_bytes for cache in self.caches)

    def add(self) -> int:
        """Append an empty row; its slot."""
        slots = [cache.add_rows() for cache in self.caches]
        return slots[0] if slots else -1

    def fork(self, slot: int) -> int:
        """Append a copy of a row; its slot."""
        slots = [cache.fork(slot) for cache in self.caches]
        return slots[0] if slots else -1

    def swap(self, slot: int, other: int) -> None:
        """Exchange two rows."""
        for cache in self.caches:
            cache.swap(slot, other)

    def move(self, slot: int, target: int) -> None:
        """Put a row in the place of another, which leaves; its own is free."""
        for cache in self.caches:
            cache.move(slot, target)

    def remove(self, slot: int) -> None:
        """Drop a row; the last row takes its place."""
        for cache in self.caches:
            cache.remove(slot)

    def erase(self, slot: int | None = None) -> None:
        """Zero all columns of a row, or of all rows, which may hold what is not finite."""
        for cache in self.caches:
            cache.erase(slot)

    def clear(self) -> None:
        """Drop all rows."""
        for cache in self.caches:
            cache.clear()

    def shrink(self) -> bool:
        """Give back what no row has needed since the last call; whether there was anything."""
        return sum(cache.shrink() for cache in self.caches) > 0

    def release(self) -> bool:
        """Give back all memory of caches without rows; whether there was any."""
        return sum(cache.release() for cache in self.caches) > 0
