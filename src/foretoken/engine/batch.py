"""The rows that run: who waits, who prefills, who decodes, and which row of the cache is whose."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice

from foretoken.engine.sequence import Sequence
from foretoken.engine.stopping import StopChecker
from foretoken.model.cache.ragged import KVCache


@dataclass(eq=False)
class Run:
    """An admitted row and what only the engine knows about it.

    ``forks`` are the other samples of its request, which copy its cache once its prompt is in. A run ``is_in_doubt``
    when its last step gave no token, and a draft may be to blame: the next one runs without. ``num_changes`` is that of
    the target when the row came into the cache.
    """

    row: Sequence
    checker: StopChecker
    forks: list[Run] = field(default_factory=list)
    num_prefilled: int = 0
    is_in_doubt: bool = False
    num_changes: int = 0

    @property
    def num_to_prefill(self) -> int:
        """All tokens of the prompt but the pending one."""
        return self.row.num_prompt_tokens - 1

    @property
    def is_prefilled(self) -> bool:
        return self.num_prefilled == self.num_to_prefill


class Batch:
    """Runs in the order of the cache: those that decode, then those that prefill. Row i of the cache is run i.

    Rows join at the end and leave by exchange with the last one of their part, so both parts stay contiguous and a
    forward over either is a plain view of the cache.
    """

    def __init__(self, cache: KVCache, max_num_rows: int) -> None:
        self.cache = cache
        self.waiting: deque[Run] = deque()
        self._max_num_rows = max_num_rows
        self._runs: list[Run] = []
        self.num_decoding = 0

    def __len__(self) -> int:
        """Number of rows in the cache."""
        return len(self._runs)

    @property
    def running(self) -> list[Run]:
        """All that are in the cache."""
        return list(self._runs)

    @property
    def decoding(self) -> list[Run]:
        return self._runs[: self.num_decoding]

    @property
    def prefilling(self) -> list[Run]:
        return self._runs[self.num_decoding :]

    def slot_of(self, run: Run) -> int:
        """The row of the cache that holds a run."""
        return self._runs.index(run)

    def admit(self) -> list[Run]:
        """Give waiting runs a row while there is room; those that just got one, short prompts first."""
        room = self._max_num_rows - len(self._runs)
        admitted = sorted(islice(self.waiting, room), key=lambda run: run.num_to_prefill)
        for run in admitted:
            self.cache.add_rows()
            self.waiting.remove(run)
            self._runs.append(run)
        return admitted

    def enter(self, run: Run) -> list[Run]:
        """Move a prefilled run to those that decode, and its forks with it; samples without a row wait for one."""
        slot = self.num_decoding
        self._swap(self._runs.index(run), slot)
        self.num_decoding += 1
        room = self._max_num_rows - len(self._runs)
        entered, left = run.forks[:room], run.forks[room:]
        for fork in entered:
            self._runs.append(fork)
            self._swap(self.cache.fork(slot), self.num_decoding)
            self.num_decoding += 1
        self.waiting.extendleft(reversed(left))
        run.forks = []
        return [run, *entered]

    def remove(self, run: Run, *, erase: bool) -> None:
        """Take a run out of the cache; ``erase`` what it wrote where that may not be finite."""
        index = self._runs.index(run)
        if erase:
            self.cache.erase(index)
        if index < self.num_decoding:
            self.num_decoding -= 1
            self._swap(index, self.num_decoding)
            index = self.num_decoding
        self.cache.remove(index)
        last = self._runs.pop()
        if last is not run:
            self._runs[index] = last

    def clear(self) -> list[Run]:
        """Take everything out of the cache, in whatever state it is; the runs that were in, with their forks."""
        members = dict.fromkeys(member for run in self._runs for member in (run, *run.forks))
        for run in self._runs:
            run.forks = []
        self._runs, self.num_decoding = [], 0
        self.cache.clear()
        self.cache.erase()
        return [run for run in members if run not in self.waiting]

    def holds(self, request_id: str) -> bool:
        """Whether a run of this request is waiting or in the cache."""
        return any(run.row.request_id == request_id for run in [*self.waiting, *self._runs])

    def withdraw(self, request_id: str) -> list[Run]:
        """Drop the waiting runs of a request, forks included; those that were dropped."""
        withdrawn = [run for run in list(self.waiting) if run.row.request_id == request_id]
        for run in withdrawn:
            self.waiting.remove(run)
        return [member for run in withdrawn for member in (run, *run.forks)]

    def _swap(self, index: int, other: int) -> None:
        self.cache.swap(index, other)
        self._runs[index], self._runs[other] = self._runs[other], self._runs[index]
