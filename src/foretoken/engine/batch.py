"""The rows in progress: who waits, who prefills, who decodes, and whose slot of the cache is which."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from foretoken.engine.sequence import Sequence
from foretoken.engine.stopping import StopChecker
from foretoken.model.cache.ragged import KVCache

if TYPE_CHECKING:
    from foretoken.engine.memory import MemoryPlan

HEADROOM = 64
"""Tokens that every row is to be able to add when another one comes in, so that it need not leave at once."""


@dataclass(eq=False)
class Member:
    """A row that waits, prefills or decodes, and what only the engine knows about it.

    ``forks`` are the other samples of its request, which copy its cache once its prompt is in. A member ``is_in_doubt``
    when its last step gave no token, and a draft may be to blame: the next one goes without. ``num_changes`` is that of
    the target when the row came into the cache, ``num_replayed`` the length of its output when it last had to leave.
    """

    row: Sequence
    checker: StopChecker
    forks: list[Member] = field(default_factory=list)
    num_prefilled: int = 0
    is_in_doubt: bool = False
    num_changes: int = 0
    num_replayed: int = 0

    @property
    def num_prompt_to_read(self) -> int:
        """All tokens of the prompt but the last one, which a step verifies."""
        return self.row.num_prompt_tokens - 1

    @property
    def num_to_prefill(self) -> int:
        """What is read of the prompt, and replayed of the output."""
        return self.num_prompt_to_read + self.num_replayed

    @property
    def is_prefilled(self) -> bool:
        return self.num_prefilled == self.num_to_prefill


class Batch:
    """Members in the order of the cache: those that decode, then those that prefill. Member i has slot i of the cache.

    Rows join at the end and leave by exchange with the last one of their part, so both parts stay contiguous and a
    forward over either is a plain view of the cache.

    Args:
      plan: how much of the cache may be used; None for as much as the rows need.
    """

    def __init__(self, cache: KVCache, max_num_rows: int, plan: MemoryPlan | None = None) -> None:
        self.cache = cache
        self._plan = plan
        self.waiting: deque[Member] = deque()
        self._max_num_rows = max_num_rows
        self._members: list[Member] = []
        self.num_decoding = 0

    def __len__(self) -> int:
        """Number of rows in the cache."""
        return len(self._members)

    @property
    def running(self) -> list[Member]:
        """All that are in the cache."""
        return list(self._members)

    @property
    def decoding(self) -> list[Member]:
        return self._members[: self.num_decoding]

    @property
    def prefilling(self) -> list[Member]:
        return self._members[self.num_decoding :]

    def slot_of(self, member: Member) -> int:
        """The place of a member in the cache."""
        return self._members.index(member)

    def admit(self) -> list[Member]:
        """Give waiting members a slot while there is room; those that just got one, short prompts first."""
        admitted: list[Member] = []
        if not self.waiting:
            return admitted
        for member in islice(self.waiting, self._max_num_rows - len(self._members)):
            if not self._fits([*self._members, *admitted, member], HEADROOM):
                break
            admitted.append(member)
        admitted.sort(key=lambda member: member.num_to_prefill)
        for member in admitted:
            self.cache.add_rows()
            self.waiting.remove(member)
            self._members.append(member)
        return admitted

    def enter(self, member: Member) -> list[Member]:
        """Move a prefilled member to those that decode, and its forks with it; samples without a slot wait for one."""
        slot = self.num_decoding
        self._swap(self._members.index(member), slot)
        self.num_decoding += 1
        room = self._max_num_rows - len(self._members)
        while room > 0 and not self._fits([*self._members, *member.forks[:room]], HEADROOM):
            room -= 1
        entered, left = member.forks[:room], member.forks[room:]
        for fork in entered:
            self._members.append(fork)
            self._swap(self.cache.fork(slot), self.num_decoding)
            self.num_decoding += 1
        self.waiting.extendleft(reversed(left))
        member.forks = []
        return [member, *entered]

    def put_last(self, is_last: Callable[[Sequence], object]) -> list[Member]:
        """Bring members that decode and whose rows are such behind the others; all that decode, in their new order."""
        last = [member for member in self._members[: self.num_decoding] if is_last(member.row)]
        if len(last) == self.num_decoding:
            return self.decoding
        for place, member in enumerate(reversed(last), 1):
            self._swap(self._members.index(member), self.num_decoding - place)
        return self.decoding

    def _fits(self, members: list[Member], room: int) -> bool:
        """Whether they may be in the cache together; one alone always may, since others have been refused."""
        return self._plan is None or len(members) == 1 or self._plan.fits(members, room)

    @property
    def max_nodes(self) -> int:
        """How many nodes a draft may have: what the plan leaves behind the longest row, a step of it at least."""
        return sys.maxsize if self._plan is None else max(1, self._plan.max_nodes(self.cache.lengths))

    def too_many(self) -> Member | None:
        """The member that came last, where all of them together have grown too long."""
        if self._plan is None or self._fits(self._members, 0) or not self._members:
            return None
        return max(self._members, key=lambda member: member.row.id)

    def send_back(self, member: Member) -> None:
        """Let a member leave its slot and wait before all others, until its prompt is read and its output replayed."""
        self.remove(member, erase=member.is_in_doubt)
        member.num_prefilled, member.num_replayed = 0, member.row.num_output_tokens
        self.waiting.appendleft(member)

    def remove(self, member: Member, *, erase: bool) -> None:
        """Take a member out of the cache; ``erase`` what it wrote where that may not be finite."""
        index = self._members.index(member)
        if erase:
            self.cache.erase(index)
        if index < self.num_decoding:
            self.num_decoding -= 1
            self._swap(index, self.num_decoding)
            index = self.num_decoding
        self.cache.remove(index)
        last = self._members.pop()
        if last is not member:
            self._members[index] = last

    def clear(self) -> list[Member]:
        """Take everything out of the cache, in whatever state it is; the members that were in, with their forks."""
        found = dict.fromkeys(each for member in self._members for each in (member, *member.forks))
        for member in self._members:
            member.forks = []
        self._members, self.num_decoding = [], 0
        self.cache.clear()
        self.cache.erase()
        return [member for member in found if member not in self.waiting]

    def holds(self, request_id: str) -> bool:
        """Whether a member of this request is waiting or in the cache."""
        return any(member.row.request_id == request_id for member in [*self.waiting, *self._members])

    def withdraw(self, request_id: str) -> list[Member]:
        """Drop the waiting members of a request, forks included; those that were dropped."""
        withdrawn = [member for member in list(self.waiting) if member.row.request_id == request_id]
        for member in withdrawn:
            self.waiting.remove(member)
        return [each for member in withdrawn for each in (member, *member.forks)]

    def _swap(self, index: int, other: int) -> None:
        self.cache.swap(index, other)
        self._members[index], self._members[other] = self._members[other], self._members[index]
