"""How rows come into a batch, begin to decode and leave, and their drafter and what is kept of them with them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foretoken.engine.batch import Batch, Member
    from foretoken.engine.drafter import Drafter
    from foretoken.engine.reuse import Reuse
    from foretoken.engine.stats import StepProfile


class Scheduler:
    """Moves the members of a batch from one part of their life to the next.

    Args:
      batch: of all members.
      drafter: is told of every row that begins to decode, and of every one that leaves.
      reuse: fills rows that come, and keeps those that leave.
    """

    def __init__(self, batch: Batch, drafter: Drafter, reuse: Reuse) -> None:
        self._batch = batch
        self._drafter = drafter
        self._reuse = reuse

    def admit(self, profile: StepProfile) -> None:
        """Give waiting requests slots, as far as there is room, and what earlier rows left of their prompts.

        Where rows have grown too long together, the last ones leave first.
        """
        while (member := self._batch.too_many()) is not None:
            self._drafter.forget([member.row])
            self._batch.send_back(member)
            member.row.stats.num_preemptions += 1
            profile.num_preemptions += 1
        admitted = self._batch.admit()
        if not admitted:
            return
        for slot, member in enumerate(admitted, len(self._batch) - len(admitted)):
            profile.num_cached_tokens += self._reuse.recall(member, slot)
        # those of one token, and those that earlier rows have left whole
        self.enter([member for member in admitted if member.is_prefilled])

    def enter(self, members: Seq[Member]) -> None:
        """Let prefilled members decode, with the other samples of their requests."""
        if not members:
            return
        self._drafter.start([member.row for member in members])
        for member in members:
            _, *forks = self._batch.enter(member)
            for fork in forks:
                fork.num_changes = member.num_changes
            if forks:
                self._drafter.fork(member.row, [fork.row for fork in forks])

    def decoding(self) -> list[Member]:
        """All that decode, those without drafts last: drafters that draft in their cache draft for the first ones."""
        return self._batch.put_last(lambda row: row.stats.drafter_error)

    def retire(self, member: Member) -> None:
        """Take a member out of the batch."""
        self._reuse.keep(member, self._batch.slot_of(member))
        self._drafter.forget([member.row])
        self._batch.remove(member, erase=member.row.finish_reason in (None, "error"))

    def end_all(self) -> None:
        """Leave nothing of the rows of a step that broke off; may itself be cut off and called again."""
        self._drafter.forget([member.row for member in self._batch.running])
        for member in self._batch.clear():
            member.row.finish_reason = member.row.finish_reason or "abort"
