"""Choice of a replica that has the prompt's prefix in its cache, unless its load is far above the average."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from math import ceil, floor

MIN_BALANCE = 1.0
FEW = 4
"""Number of requests up to which the load limit of a replica is rounded up; among so few requests, one more is no
overload."""


class Affinity:
    """Record of the prompt prefixes that each replica has processed.

    The chosen replica is the one that has processed the longest prefix of the prompt, in whole blocks of ids. If that
    replica has more than ``balance`` times the average number of requests, the replica with the fewest requests is
    chosen instead. A session counts as longer than any prefix. Source: consistent hashing with bounded loads (Mirrokni,
    Thorup, Zadimoghaddam 2018, arXiv:1608.01350), with the longest prefix instead of the hash.

    Args:
      block: number of token ids in a block.
      balance: limit on the load of a replica relative to the average; 1 balances most strictly and has the fewest cache
        hits.
      max_blocks: maximum number of recorded blocks; the least recently used are dropped.
    """

    def __init__(self, block: int = 64, balance: float = 1.3, max_blocks: int = 1 << 18) -> None:
        self.num_hits = 0
        self._block, self._balance, self._max_blocks = block, max(balance, MIN_BALANCE), max_blocks
        self._reader_of: OrderedDict[Hashable, str] = OrderedDict()
        self._turn = 0

    def choose(self, ids: Sequence[int], session: str, loads: Mapping[str, int], salt: str = "") -> str:
        """Choose the replica for a prompt, and record that it has processed the prompt.

        Args:
          loads: number of requests of every replica that may be chosen.
          salt: cache salt of the prompt; only prompts with the same salt share prefixes.
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
        """Record the replica that received a prompt. The replica differs from the chosen replica if that one was
        full."""
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
        """Keys of all prefixes in whole blocks, then the key of the session."""
        key = hash(salt) if salt else 0
        for end in range(self._block, len(ids) + 1, self._block):
            key = hash((key, *ids[end - self._block : end]))
            yield key
        if session:
            yield session

    def _idlest(self, loads: Mapping[str, int]) -> str:
        """Replica with the lowest load; replicas with equal load take turns."""
        least = min(loads.values())
        idle = [name for name, load in loads.items() if load == least]
        self._turn += 1
        return idle[self._turn % len(idle)]
