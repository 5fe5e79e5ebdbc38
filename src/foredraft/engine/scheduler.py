"""The rows of an engine from arrival to end: who waits, who reads its prompt, who decodes, and in which slot."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, islice, takewhile
from typing import TYPE_CHECKING

from foredraft.engine.drafter import PromptChunk
from foredraft.model.cache.prefixes import Prefix
from foredraft.native.abi import MOST_NODES

if TYPE_CHECKING:
    from foredraft.config.engine import EngineConfig
    from foredraft.engine.drafts import Drafts
    from foredraft.engine.memory import MemoryPlan
    from foredraft.engine.row import Row
    from foredraft.engine.stats import StepProfile
    from foredraft.model.cache.prefixes import PrefixStore
    from foredraft.model.cache.ragged import CacheGroup
    from foredraft.model.lm import CausalLM

HEADROOM = 64
"""Tokens that every row is to be able to add when another one comes in, so that it need not leave at once."""


class Scheduler:
    """Says which rows run in a step, and keeps cache, drafter and store of prefixes in step with who is there.

    Row i of those that run has slot i of the cache: first come those that decode, then those that read their prompts.
    Rows join at the end and leave by exchange with the last one of their part, so both parts stay contiguous and a
    forward over either is a plain view of the cache.

    Prompts are read chunk by chunk, all tokens but the last, and take turns. While rows decode, they have a step after
    every forward, and a forward reads one chunk, or several short ones that are no longer together: however many
    prompts come, running rows wait for one chunk at most. Where nothing decodes, all prompts that may be read together
    are. Where a chunk begins depends on its own prompt alone.

    Args:
      target: whose weights may change, after which rows that began before are not kept.
      caches: of the rows, the target's first.
      drafts: begin with every row that begins to decode, and end with every one that leaves.
      plan: how much of the cache may be used; None for as much as the rows need.
      prefixes: keeps rows that have ended for prompts that begin like them, perhaps for other engines, too, which read
        prompts in chunks of the same size.
      owner: of what the drafter leaves there, from which other drafters cannot go on; the drafter, in engines.
    """

    def __init__(
        self,
        target: CausalLM,
        caches: CacheGroup,
        drafts: Drafts,
        config: EngineConfig,
        *,
        plan: MemoryPlan | None = None,
        prefixes: PrefixStore | None = None,
        owner: object = None,
    ) -> None:
        self._target = target
        self._caches = caches
        self._cache = caches.caches[0]
        self._drafts = drafts
        self._config = config
        self._plan = plan
        self._prefixes = prefixes
        self._owner = owner
        self.waiting: deque[Row] = deque()
        self.ended: list[Row] = []  # before they decoded, which nobody was told yet
        self.num_decoding = 0
        self._rows: list[Row] = []
        self._due: set[Row] = set()  # that have not had their chunk in this round
        self._has_read = False  # since rows have last had their turn
        self._has_resting = False  # rows in the cache that may have the drafter again

    @property
    def running(self) -> list[Row]:
        """Rows that are in the cache."""
        return list(self._rows)

    @property
    def decoding(self) -> list[Row]:
        return self._rows[: self.num_decoding]

    @property
    def is_closed(self) -> bool:
        """Whether no row waits for the place of one that decodes, or is about to join them."""
        return not self.waiting and self.num_decoding == len(self._rows)

    @property
    def prefilling(self) -> list[Row]:
        return self._rows[self.num_decoding :]

    def holds(self, request_id: str) -> bool:
        """Whether a row of this request is waiting or in the cache."""
        return any(row.request_id == request_id for row in [*self.waiting, *self._rows])

    @property
    def max_nodes(self) -> int:
        """Largest number of nodes of a draft: what the plan leaves behind the longest row, a step of it at least."""
        return sys.maxsize if self._plan is None else max(1, self._plan.max_nodes(self._cache.lengths))

    def queue(self, rows: list[Row], *, are_alike: bool) -> None:
        """Let the samples of a request wait: together for one reading of their prompt where all they have is alike."""
        if are_alike:
            rows[0].forks = rows[1:]
            rows = rows[:1]
        self.ended += [row for row in rows if row.is_finished]
        self.waiting += [row for row in rows if not row.is_finished]

    def take_ended(self) -> list[Row]:
        """Rows that have ended without a step, when they came or when they were read; each once."""
        ended, self.ended = self.ended, []
        return ended

    # -- coming in ---------------------------------------------------------------------------------------------

    def admit(self, profile: StepProfile, attends: Callable[[int], bool]) -> None:
        """Give waiting rows slots, as far as there is room, and what earlier rows left of their prompts.

        Where rows have grown too long together, the last ones leave first. Short prompts come before longer ones.

        Args:
          attends: whether rows have the drafter where so many run.
        """
        while self._plan is not None and (row := self._too_many()) is not None:
            self._send_back(row)
            profile.num_preemptions += 1
        if not self.waiting:
            return
        admitted: list[Row] = []
        for row in islice(self.waiting, self._config.max_num_seqs - len(self._rows)):
            if not self._fits([*self._rows, *admitted, row], HEADROOM):
                break
            admitted.append(row)
        admitted.sort(key=lambda row: row.num_to_prefill)
        if admitted:  # room for whole prompts at once, so that nothing moves while they are read
            self._cache.reserve(admitted[-1].num_to_prefill, len(self._rows) + len(admitted))
        has_drafter = attends(len(self._rows) + len(admitted))
        self._has_resting = self._has_resting or not has_drafter
        for row in admitted:
            self.waiting.remove(row)
            row.is_plain = not has_drafter or self._is_barred(row)
            self._append(row, self._caches.add())
            self._cache.offsets[row.slot] = row.offset
        for row in admitted:
            profile.num_cached_tokens += self._recall(row)
        # those of one token, and those that earlier rows have left whole
        self.start([row for row in admitted if row.is_prefilled])

    def _fits(self, rows: list[Row], room: int) -> bool:
        """Whether they may be in the cache together; one alone always may, since others have been refused."""
        return self._plan is None or len(rows) == 1 or self._plan.fits(rows, room)

    def _too_many(self) -> Row | None:
        """The row that came last, where all of them together have grown too long."""
        if not self._rows or self._fits(self._rows, 0):
            return None
        return max(self._rows, key=lambda row: row.id)

    def _send_back(self, row: Row) -> None:
        """Let a row leave its slot and wait before all others, until its prompt is read and its output replayed."""
        self._remove(row, erase=row.is_in_doubt)
        row.num_prefilled, row.num_replayed = 0, row.num_output_tokens
        row.stats.num_preemptions += 1
        self.waiting.appendleft(row)

    def _recall(self, row: Row) -> int:
        """Take over what is known of the prompt's beginning, as far as the drafter can go on: so many tokens."""
        row.num_changes = self._target.num_changes
        grain, remembered = self._grain, partial(self._drafts.known, row)
        if row.beginning is not None:
            row.num_prefilled = row.beginning.load(self._cache, row.slot, remembered, grain)
            row.beginning = None
            return 0  # as for samples that had a slot at once
        if self._prefixes is None or row.params.prompt_logprobs is not None:
            return 0
        prompt = row.token_ids[: row.num_to_prefill if grain == 1 else row.num_prompt_to_read]
        owner = None if row.is_plain else self._owner
        slot, salt = row.slot, _salt_of(row)
        row.num_prefilled = self._prefixes.load(prompt, self._cache, slot, remembered, grain, owner, salt)
        row.num_cached_tokens = row.num_prefilled
        return row.num_prefilled

    @property
    def _grain(self) -> int:
        """Of how many columns those are a multiple that earlier rows leave, where bits are promised.

        What a prompt leaves in the cache depends on its tokens and on where its chunks begin; long chunks are read by
        other kernels than short ones and steps. So columns of whole chunks are what another prompt would read, too.
        """
        size = self._config.prefill_chunk_size
        return size if size > MOST_NODES and self._target.promise(self._config.exactness).keeps_bits else 1

    # -- reading prompts ---------------------------------------------------------------------------------------

    def to_read(self) -> list[Row]:
        """Neighbours in the cache that read a chunk in this step; none where the rows that decode have it."""
        if self.num_decoding == len(self._rows):
            self._due.clear()
            self._has_read = False
            return []
        prefilling = self.prefilling
        self._due.intersection_update(prefilling)
        if self._has_read and self.num_decoding:
            self._has_read = False
            return []
        self._has_read = True
        self._due = self._due or set(prefilling)
        first = next(place for place, row in enumerate(prefilling) if row in self._due)
        due = takewhile(self._due.__contains__, prefilling[first:])
        kind = self._kind_of_chunk(prefilling[first])
        together = list(takewhile(lambda row: self._kind_of_chunk(row) == kind, due))
        if self.num_decoding or prefilling[first].learns_logprobs:  # whose logits are kept meanwhile
            totals = accumulate(map(self._chunk_length, together))
            together = together[: max(1, sum(total <= self._config.prefill_chunk_size for total in totals))]
        self._due.difference_update(together)
        return together

    def _kind_of_chunk(self, row: Row) -> tuple[bool, bool]:
        """Whether the next chunk is one of few nodes, which other kernels read than long ones: its bits may not depend
        on what is read beside it. And whether logits of it are wanted."""
        return self._chunk_length(row) <= MOST_NODES, row.learns_logprobs

    def next_chunk(self, row: Row) -> list[int]:
        """The tokens that a row reads next."""
        return row.token_ids[row.num_prefilled : row.num_prefilled + self._chunk_length(row)]

    def _chunk_length(self, row: Row) -> int:
        """Tokens of the next chunk. Those that were generated are replayed as chains, by the kernels of steps.

        Of a prompt of 600 tokens, and 90 said after it, chunks of 512: 512, 87, 64, 26; the last token is pending.
        """
        num_left = row.num_prompt_to_read - row.num_prefilled
        if num_left > 0:
            return min(self._config.prefill_chunk_size, num_left)
        return min(MOST_NODES, row.num_to_prefill - row.num_prefilled)

    # -- decoding ----------------------------------------------------------------------------------------------

    def start(self, rows: Sequence[Row]) -> None:
        """Let rows whose prompts are in the cache decode, with the other samples of their requests.

        Those that are to generate nothing end here.
        """
        self._end_read([row for row in rows if row.params.max_tokens == 0])
        rows = [row for row in rows if not row.is_finished]
        if not rows:
            return
        self._drafts.start(rows, [PromptChunk.end_of(row) for row in rows])
        for row in rows:
            forks = self._enter(row)
            if forks:
                self._drafts.fork(row, forks)

    def _end_read(self, rows: Sequence[Row]) -> None:
        """End rows that only had to be read, with the other samples of their requests."""
        for row in rows:
            for each in (row, *row.forks):
                each.finish_reason = "length"
                self.ended.append(each)
            row.forks = []
        self.retire(*rows)

    def _enter(self, row: Row) -> list[Row]:
        """Move a row to those that decode, with its forks, which are returned; those without a slot wait for one."""
        slot = self.num_decoding
        self._swap(row.slot, slot)
        self.num_decoding += 1
        room = self._config.max_num_seqs - len(self._rows)
        while room > 0 and not self._fits([*self._rows, *row.forks[:room]], HEADROOM):
            room -= 1
        entered, left = row.forks[:room], row.forks[room:]
        for fork in entered:
            fork.num_changes = row.num_changes
            self._append(fork, self._caches.fork(slot))
            self._swap(fork.slot, self.num_decoding)
            self.num_decoding += 1
        if left:
            self._hand_down(row, slot, left)
        self.waiting.extendleft(reversed(left))
        row.forks = []
        return entered

    def _hand_down(self, row: Row, slot: int, waiting: Sequence[Row]) -> None:
        """Leave one copy of a prompt that was read to the samples without a slot, so that none reads it again.

        It comes besides the plan for memory, as kept prefixes do, until the last of them has a slot.
        """
        length = row.num_prompt_to_read
        if length and row.num_changes == self._target.num_changes:
            states, memory = self._cache.export(slot, length), self._drafts.kept(row)
            beginning = Prefix(tuple(row.token_ids[: row.num_prompt_tokens]), length, states, memory)
            for each in waiting:
                each.beginning = beginning

    def rest(self) -> None:
        """Let all rows in the cache go on without the drafter."""
        resting = [row for row in self._rows if not row.is_plain]
        if not resting:
            return
        self._has_resting = True
        self._drafts.end(resting)
        self._drafts.drop(resting)
        for row in resting:
            row.is_plain = True

    def resume(self) -> None:
        """Let rows that went on without the drafter have it again, where it drafts from their text alone."""
        if not self._has_resting:
            return
        self._has_resting = self.num_decoding < len(self._rows)  # those that read their prompts get it later
        rows = [row for row in self.decoding if row.is_plain and not self._is_barred(row)]
        for row in rows:
            row.is_plain = False
        if rows:
            self._drafts.start(rows, [PromptChunk.end_of(row) for row in rows])

    def _is_barred(self, row: Row) -> bool:
        """Whether a row may not have the drafter: it has failed, or drafts by what others have said."""
        return bool(row.stats.drafter_error) or (row.cache_salt is not None and self._drafts.facts.is_shared)

    # -- leaving -----------------------------------------------------------------------------------------------

    def retire(self, *rows: Row) -> None:
        """Take rows out of the caches, and leave what they have there to later ones."""
        for row in rows:
            is_kept = self._may_keep(row)
            self._drafts.end([row], is_kept=is_kept)
            if is_kept:
                self._keep(row)
        for row in sorted(rows, key=lambda row: row.slot, reverse=True):  # so that no row moves that leaves as well
            self._remove(row, erase=row.finish_reason in (None, "error"))

    def withdraw(self, request_id: str) -> list[Row]:
        """Take out the rows of a request, wherever they are; all that were taken out."""
        waiting = [row for row in self.waiting if row.request_id == request_id]
        for row in waiting:
            self.waiting.remove(row)
        running = [row for row in self._rows if row.request_id == request_id]
        withdrawn = [each for row in [*waiting, *running] for each in (row, *row.forks)]
        self.retire(*running)
        return withdrawn

    def end_all(self) -> None:
        """Leave nothing of the rows of a step that broke off; may itself be cut off and called again."""
        self._drafts.end(self._rows)
        found = dict.fromkeys(each for row in self._rows for each in (row, *row.forks))
        for row in self._rows:
            row.forks, row.state = [], {}
        self._rows, self.num_decoding = [], 0
        self._caches.clear()
        self._caches.erase()
        for row in found:
            if row not in self.waiting:
                row.finish_reason = row.finish_reason or "abort"

    def forget_prefixes(self) -> None:
        """Drop all that earlier rows have left."""
        for row in self.waiting:
            row.beginning = None
        if self._prefixes is not None:
            self._prefixes.clear()

    def _may_keep(self, row: Row) -> bool:
        """Whether what a row has in the caches is for others: unless it may be wrong or is of other weights."""
        is_doubtful = row.is_in_doubt or row.finish_reason == "error"
        return self._prefixes is not None and not is_doubtful and row.num_changes == self._target.num_changes

    def _keep(self, row: Row) -> None:
        """Leave what a row has in the caches."""
        assert self._prefixes is not None
        slot, grain = row.slot, self._grain
        length = self._cache.lengths[slot]
        num_columns = length if grain == 1 else min(length, row.num_prompt_to_read) // grain * grain
        remember, owner = partial(self._drafts.kept, row), None if row.is_plain else self._owner
        tokens = row.token_ids[:length]
        self._prefixes.keep(tokens, self._cache, slot, num_columns, remember, owner, _salt_of(row))

    def _remove(self, row: Row, *, erase: bool) -> None:
        """Take a row out of the caches; ``erase`` what it wrote where that may not be finite."""
        row.state = {}
        if erase:
            self._caches.erase(row.slot)
        slot = row.slot
        if slot < self.num_decoding:
            self.num_decoding -= 1
            if slot != self.num_decoding:
                self._caches.move(self.num_decoding, slot)
                self._place(self._rows[self.num_decoding], slot)
            slot = self.num_decoding
        self._caches.remove(slot)
        last = self._rows.pop()
        if slot < len(self._rows):
            self._place(last, slot)
        row.slot = -1

    def _append(self, row: Row, slot: int) -> None:
        self._rows.append(row)
        row.slot = slot

    def _swap(self, slot: int, other: int) -> None:
        self._caches.swap(slot, other)
        row, moved = self._rows[slot], self._rows[other]
        self._place(row, other)
        self._place(moved, slot)

    def _place(self, row: Row, slot: int) -> None:
        self._rows[slot], row.slot = row, slot


def _salt_of(row: Row) -> object:
    """Key of rows that may reuse each other's prefixes: the salt, and where positions begin."""
    return (row.cache_salt, row.offset) if row.offset else row.cache_salt
