"""Choice of a replica: one that has read the prefix of the prompt, unless its load is far above the others'."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from math import ceil, floor

MIN_BALANCE = 1.0
FEW = 4
"""Requests of a replica up to which its share is rounded up: among so few, one more is no hot spot."""


class Affinity:
    """Remembers which replica has read which beginnings of prompts.

    A replica is chosen by the longest beginning that it has read, in whole blocks of ids, while it has at most
    ``balance`` times as many requests as there are for each replica (consistent hashing with bounded loads: Mirrokni,
    Thorup, Zadimoghaddam 2018, arXiv 1608.01350, with the longest prefix in the place of the hash). Everything else
    goes to the replica with the fewest. A session counts as a beginning longer than any.

    Args:
      block: ids of a block.
      balance: 1 is the strictest, for fewest hits.
      max_blocks: number of remembered blocks; the least recently used are forgotten.
    """

    def __init__(self, block: int = 64, balance: float = 1.3, max_blocks: int = 1 << 18) -> None:
        self.num_hits = 0
        self._block, self._balance, self._max_blocks = block, max(balance, MIN_BALANCE), max_blocks
        self._reader_of: OrderedDict[Hashable, str] = OrderedDict()
        self._turn = 0

    def choose(self, ids: Sequence[int], session: str, loads: Mapping[str, int], salt: str = "") -> str:
        """The replica for a prompt; it counts as having read it from now on.

        Args:
          loads: requests of every replica that may be chosen.
          salt: of the prompt, whose beginning only prompts of the same one share.
        """
        keys = list(self._keys(ids, session, salt))
        reader = next((found for key in reversed(keys) if (found := self._reader_of.get(key)) in loads), None)
        share = self._balance * (sum(loads.values()) + 1) / len(loads)
        most = max(floor(share), min(ceil(share), FEW))
        is_hit = reader is not None and loads[reader] < most
        chosen = reader if reader is not None and is_hit else self._idlest(loads)
        self.num_hits += is_hit
        self._remember(keys, chosen)
        return chosen

    def note(self, ids: Sequence[int], session: str, replica: str, salt: str = "") -> None:
        """The prompt has gone to this replica, chosen or not: another was taken because that one was full."""
        keys = list(self._keys(ids, session, salt))
        if any(self._reader_of.get(key) != replica for key in keys[-1:]):
            self._remember(keys, replica)

    def _remember(self, keys: Sequence[Hashable], replica: str) -> None:
        for key in keys:
            self._reader_of[key] = replica
            self._reader_of.move_to_end(key)
        while len(self._reader_of) > self._max_blocks:
            self._reader_of.popitem(last=False)

    def _keys(self, ids: Sequence[int], session: str, salt: str) -> Iterator[Hashable]:
        """Keys of all prefixes in whole blocks, then that of the session."""
        key = hash(salt) if salt else 0
        for end in range(self._block, len(ids) + 1, self._block):
            key = hash((key, *ids[end - self._block : end]))
            yield key
        if session:
            yield session

    def _idlest(self, loads: Mapping[str, int]) -> str:
        """Replica with the lowest load; equal ones in turn."""
        least = min(loads.values())
        idle = [name for name, load in loads.items() if load == least]
        self._turn += 1
        return idle[self._turn % len(idle)]
