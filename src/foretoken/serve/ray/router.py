"""The choice of a replica by beginnings of prompts, sessions and loads, and the router of Ray Serve that asks it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from math import ceil, floor
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from foretoken.serve.ray.messages import Work

MIN_BALANCE = 1.0
FEW = 4
"""Requests of a replica up to which its share is rounded up: among so few, one more is no hot spot."""


class Telling(RunningReplica):  # type: ignore[misc]
    """A replica whose requests are told where they were sent, since one that hangs does not say so itself."""

    def try_send_request(self, pr: PendingRequest, with_rejection: bool) -> ReplicaResult:
        """Called by Ray Serve."""
        _tell(pr, _name(self))
        result = super().try_send_request(pr, with_rejection)
        ask = result.get_rejection_response

        async def answer() -> Any:
            told = await ask()
            if told is not None and not told.accepted:  # it waits again for one with room
                _tell(pr, "")
            return told

        result.get_rejection_response = answer
        return result


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Sends requests where `Affinity` says, and what a replica has begun to one of the same fingerprint."""

    def initialize_state(self, **options: Any) -> None:
        """Take the options of `Affinity`; called by Ray Serve."""
        self._affinity = Affinity(**options)

    def create_replica_wrapper(self, replica_info: Any) -> RunningReplica:
        """Called by Ray Serve for every replica that it has started."""
        return Telling(replica_info)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The chosen replica, then the others, for when it is full."""
        work = _work(pending_request)
        if not candidate_replicas or pending_request is None or work is None:
            return [list(candidate_replicas)]
        _tell(pending_request, "")
        pending_request.routing_context.should_backoff = True  # else Ray asks full replicas again without a pause
        fitting = suitable(work, candidate_replicas)
        loads = {_name(each): self.replica_queue_len_cache.get(each.replica_id) or 0 for each in fitting}
        chosen = self._affinity.choose(work.ids, work.session, loads, work.salt)
        first = [each for each in fitting if _name(each) == chosen]
        rest = [each for each in fitting if _name(each) != chosen]
        return [first, rest] if rest else [first]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """Remember where a prompt was read that went elsewhere because its replica was full."""
        if (work := _work(pending_request)) is not None:
            self._affinity.note(work.ids, work.session, str(replica_id.unique_id), work.salt)


def _work(request: PendingRequest | None) -> Work | None:
    """What it asks for; nothing where it is no request for tokens."""
    work = request.args[0] if request is not None and request.args else None
    return work if isinstance(work, Work) else None


def _tell(request: PendingRequest, replica: str) -> None:
    if (work := _work(request)) is not None and work.route is not None:
        work.route.tell(replica)


def suitable(work: Work, candidates: list[RunningReplica]) -> list[RunningReplica]:
    """Replicas of the best kind that there is: with the right weights, not lost by the request before, alike."""

    def rank(replica: RunningReplica) -> tuple[bool, bool, bool]:
        told = replica.replica_metadata
        return (
            told.get("weights", work.weights) != work.weights,
            _name(replica) in work.avoided,
            told.get("fingerprint", work.fingerprint) != work.fingerprint,
        )

    best = min(map(rank, candidates))
    return [replica for replica in candidates if rank(replica) == best]


def _name(replica: RunningReplica) -> str:
    return str(replica.replica_id.unique_id)


class Affinity:
    """Remembers which replica has read which beginnings of prompts.

    A replica is chosen by the longest beginning that it has read, in whole blocks of ids, while it has at most
    ``balance`` times as many requests as there are for each replica (consistent hashing with bounded loads: Mirrokni,
    Thorup, Zadimoghaddam 2018, arXiv 1608.01350, with the longest prefix in the place of the hash). Everything else
    goes to the replica with the fewest. A session counts as a beginning longer than any.

    Args:
      block: ids of a block.
      balance: 1 is the strictest, for fewest hits.
      max_blocks: that are remembered; the ones that were used longest ago are forgotten.
    """

    def __init__(self, block: int = 64, balance: float = 1.3, max_blocks: int = 1 << 18) -> None:
        self.num_hits = self.num_chosen = 0
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
        self.num_chosen += 1
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
        """One for each whole block, which names all ids up to its end; the session's last."""
        key = hash(salt) if salt else 0
        for end in range(self._block, len(ids) + 1, self._block):
            key = hash((key, *ids[end - self._block : end]))
            yield key
        if session:
            yield session

    def _idlest(self, loads: Mapping[str, int]) -> str:
        """Of several, each in its turn."""
        least = min(loads.values())
        idle = [name for name, load in loads.items() if load == least]
        self._turn += 1
        return idle[self._turn % len(idle)]
