"""Router for Ray Serve that chooses replicas by prompt prefix, session and load."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from foredraft.serve.ray.affinity import Affinity
from foredraft.serve.ray.messages import ReplicaRequest


class ReportingReplica(RunningReplica):  # type: ignore[misc]
    """Replica wrapper that reports to each request where it was sent. A replica that hangs cannot report this
    itself."""

    def try_send_request(self, pr: PendingRequest, with_rejection: bool) -> ReplicaResult:
        """Send a request to the replica; called by Ray Serve."""
        _tell(pr, _name(self))
        result = super().try_send_request(pr, with_rejection)
        ask = result.get_rejection_response

        async def answer() -> Any:
            reply = await ask()
            if reply is not None and not reply.accepted:  # the request waits again for a replica with a free row
                _tell(pr, "")
            return reply

        result.get_rejection_response = answer
        return result


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Router that follows `Affinity`, and continues begun requests on replicas with the same fingerprint if
    possible."""

    def initialize_state(self, **options: Any) -> None:
        """Create the `Affinity` from its options; called by Ray Serve."""
        self._affinity = Affinity(**options)

    def create_replica_wrapper(self, replica_info: Any) -> RunningReplica:
        """Wrap a started replica; called by Ray Serve."""
        return ReportingReplica(replica_info)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the chosen replica, followed by the others as fallback if it is full."""
        work = _work(pending_request)
        if not candidate_replicas or pending_request is None or work is None:
            return [list(candidate_replicas)]
        _tell(pending_request, "")
        pending_request.routing_context.should_backoff = True  # otherwise Ray retries full replicas without a pause
        fitting = suitable(work, candidate_replicas)
        loads = {_name(each): self.replica_queue_len_cache.get(each.replica_id) or 0 for each in fitting}
        chosen = self._affinity.choose(work.ids, work.session, loads, work.salt)
        first = [each for each in fitting if _name(each) == chosen]
        rest = [each for each in fitting if _name(each) != chosen]
        return [first, rest] if rest else [first]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """Record the replica that received the prompt."""
        if (work := _work(pending_request)) is not None:
            self._affinity.note(work.ids, work.session, str(replica_id.unique_id), work.salt)


def _work(request: PendingRequest | None) -> ReplicaRequest | None:
    """Return the argument of a generation request; None for other requests."""
    work = request.args[0] if request is not None and request.args else None
    return work if isinstance(work, ReplicaRequest) else None


def _tell(request: PendingRequest, replica: str) -> None:
    if (work := _work(request)) is not None and work.route is not None:
        work.route(replica)


def suitable(work: ReplicaRequest, candidates: list[RunningReplica]) -> list[RunningReplica]:
    """Return the best replicas. Replicas with the right weights come first, then replicas that have not failed the
    request, then replicas with the same fingerprint. Replicas that are equal in all three are returned together."""

    def rank(replica: RunningReplica) -> tuple[bool, bool, bool]:
        metadata = replica.replica_metadata
        return (
            metadata.get("weights", work.weights) != work.weights,
            _name(replica) in work.avoided,
            metadata.get("fingerprint", work.fingerprint) != work.fingerprint,
        )

    best = min(map(rank, candidates))
    return [replica for replica in candidates if rank(replica) == best]


def _name(replica: RunningReplica) -> str:
    return str(replica.replica_id.unique_id)
