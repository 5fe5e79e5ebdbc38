"""Scheduler: decides which rows wait, read their prompts, or decode, and which cache slot each row has."""

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
"""Number of tokens that every row must be able to add when another row is admitted, so that none must leave at once."""


class Scheduler:
    """Selects the rows of a step, and keeps caches, drafter and prefix store consistent with the running rows.

    Running row i has slot i of the caches. Rows that decode come first, then rows that read their prompts. A row joins
    at the end of its group (decoding or reading) and leaves by swapping with the last row of the group. Both groups of
    rows stay contiguous in the cache. A forward pass over the rows of either group therefore reads a plain view of the
    cache.

    Prompts are read in chunks, all tokens but the last, and take turns. While rows decode, every prefill pass is
    followed by a decode step. Such a pass reads a single chunk, or several short ones of the same total size. Running
    rows therefore wait for at most one chunk, however many prompts arrive. If no row decodes, all prompts that may be
    read together are read together. The start of a chunk depends only on its own prompt.

    Args:
      target: the model. If its weights change, prefixes of rows that started earlier are not kept.
      caches: caches of the rows, the target's first.
      drafts: drafts of the engine, notified of rows that start to decode or leave.
      plan: memory plan of the caches; None for no limit.
      prefixes: store of prefixes of finished rows. Other engines that read prompts in chunks of the same size may share
        it.
      owner: identity of the drafter. Other drafters cannot use its state in the store.
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
        self.ended: list[Row] = []  # ended before decoding, and not reported yet
        self.num_decoding = 0
        self._rows: list[Row] = []
        self._due: set[Row] = set()  # rows whose turn in this round is still to come
        self._has_read = False  # whether a chunk was read since the last decode step
        self._has_resting = False  # whether rows in the cache may get the drafter again

    @property
    def running(self) -> list[Row]:
        """Rows that are in the cache."""
        return list(self._rows)

    @property
    def decoding(self) -> list[Row]:
        return self._rows[: self.num_decoding]

    @property
    def is_closed(self) -> bool:
        """True if no row waits for a slot or is about to start decoding."""
        return not self.waiting and self.num_decoding == len(self._rows)

    @property
    def prefilling(self) -> list[Row]:
        return self._rows[self.num_decoding :]

    def holds(self, request_id: str) -> bool:
        """Return whether a row of this request is waiting or in the cache."""
        return any(row.request_id == request_id for row in [*self.waiting, *self._rows])

    @property
    def max_nodes(self) -> int:
        """Largest number of nodes of a draft that the plan allows; at least 1."""
        return sys.maxsize if self._plan is None else max(1, self._plan.max_nodes(self._cache.lengths))

    def queue(self, rows: list[Row], *, are_alike: bool) -> None:
        """Queue the samples of a request. Samples that are alike share one reading of the prompt."""
        if are_alike:
            rows[0].forks = rows[1:]
            rows = rows[:1]
        self.ended += [row for row in rows if row.is_finished]
        self.waiting += [row for row in rows if not row.is_finished]

    def take_ended(self) -> list[Row]:
        """Return rows that ended without a decode step, on arrival or after prefill; each only once."""
        ended, self.ended = self.ended, []
        return ended

    # -- admission ---------------------------------------------------------------------------------------------

    def admit(self, profile: StepProfile, attends: Callable[[int], bool]) -> None:
        """Give slots to waiting rows as far as memory allows, and load cached prefixes of their prompts.

        If the rows have grown too long together, the newest ones leave first. Short prompts are placed before longer
        ones.

        Args:
          attends: function that returns whether the drafter serves a batch of this many rows.
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
        if admitted:  # reserve space for whole prompts at once, so that nothing moves while they are read
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
        # rows with one-token prompts, and rows whose prompts were cached as a whole
        self.start([row for row in admitted if row.is_prefilled])

    def _fits(self, rows: list[Row], room: int) -> bool:
        """Return whether rows fit into the cache together.

        A single row always does, since larger requests were refused.
        """
        return self._plan is None or len(rows) == 1 or self._plan.fits(rows, room)

    def _too_many(self) -> Row | None:
        """Return the newest row if the rows have grown too long together; else None."""
        if not self._rows or self._fits(self._rows, 0):
            return None
        return max(self._rows, key=lambda row: row.id)

    def _send_back(self, row: Row) -> None:
        """Remove a row from its slot and let it wait before all others.

        The prompt of the row is read again and its output replayed.
        """
        self._remove(row, erase=row.is_in_doubt)
        row.num_prefilled, row.num_replayed = 0, row.num_output_tokens
        row.stats.num_preemptions += 1
        self.waiting.appendleft(row)

    def _recall(self, row: Row) -> int:
        """Load the cached prefix of a prompt, as far as the drafter can continue from it; return its length."""
        row.num_changes = self._target.num_changes
        grain, remembered = self._grain, partial(self._drafts.known, row)
        if row.beginning is not None:
            row.num_prefilled = row.beginning.load(self._cache, row.slot, remembered, grain)
            row.beginning = None
            return 0  # not counted, as for samples that had a slot at once
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
        """Number of columns of which the length of a reusable prefix must be a multiple, under bitwise exactness.

        The values in the cache depend on the tokens and on the chunk boundaries, because long chunks are read by other
        kernels than short chunks and steps. Therefore only columns of whole chunks have the bits that another prompt
        would compute.
        """
        size = self._config.prefill_chunk_size
        return size if size > MOST_NODES and self._target.guarantee(self._config.exactness).keeps_bits else 1

    # -- prefill -----------------------------------------------------------------------------------------------

    def to_read(self) -> list[Row]:
        """Return the rows, neighbours in the cache, that read a chunk in this step; empty if it is a decode step."""
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
        if self.num_decoding or prefilling[first].learns_logprobs:  # limits the memory of the logits, too
            totals = accumulate(map(self._chunk_length, together))
            together = together[: max(1, sum(total <= self._config.prefill_chunk_size for total in totals))]
        self._due.difference_update(together)
        return together

    def _kind_of_chunk(self, row: Row) -> tuple[bool, bool]:
        """Return whether the next chunk is short, and whether its logits are needed.

        Short chunks are read by other kernels than long ones, and the bits of a chunk must not depend on its batch.
        """
        return self._chunk_length(row) <= MOST_NODES, row.learns_logprobs

    def next_chunk(self, row: Row) -> list[int]:
        """Return the tokens that a row reads next."""
        return row.token_ids[row.num_prefilled : row.num_prefilled + self._chunk_length(row)]

    def _chunk_length(self, row: Row) -> int:
        """Number of tokens of the next chunk. Generated tokens are replayed as chains, by the kernels of steps.

        A prompt of 600 tokens with 90 generated ones and chunks of 512 gives 512, 87, 64, 26; the last token is
        pending.
        """
        num_left = row.num_prompt_to_read - row.num_prefilled
        if num_left > 0:
            return min(self._config.prefill_chunk_size, num_left)
        return min(MOST_NODES, row.num_to_prefill - row.num_prefilled)

    # -- decoding ----------------------------------------------------------------------------------------------

    def start(self, rows: Sequence[Row]) -> None:
        """Start to decode rows whose prompts are in the cache, together with the other samples of their requests.

        Rows with ``max_tokens`` 0 end immediately.
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
        """End rows that only had to read their prompts, and the other samples of their requests."""
        for row in rows:
            for each in (row, *row.forks):
                each.finish_reason = "length"
                self.ended.append(each)
            row.forks = []
        self.retire(*rows)

    def _enter(self, row: Row) -> list[Row]:
        """Move a row to the decoding rows together with its forks, and return the forks. Forks without a slot wait."""
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
        """Give the samples without a slot a shared copy of the prompt's columns, so that none of them reads it again.

        The copy comes on top of the memory plan, like cached prefixes, until the last of them has a slot.
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
        """Return rows that went on without the drafter to it. The drafter must draft from tokens alone."""
        if not self._has_resting:
            return
        self._has_resting = self.num_decoding < len(self._rows)  # rows that read their prompts get it later
        rows = [row for row in self.decoding if row.is_plain and not self._is_barred(row)]
        for row in rows:
            row.is_plain = False
        if rows:
            self._drafts.start(rows, [PromptChunk.end_of(row) for row in rows])

    def _is_barred(self, row: Row) -> bool:
        """Return whether a row may not use the drafter, because the drafter has failed or could reveal tokens of other
        requests."""
        return bool(row.stats.drafter_error) or (row.cache_salt is not None and self._drafts.facts.is_shared)

    # -- removal -----------------------------------------------------------------------------------------------

    def retire(self, *rows: Row) -> None:
        """Remove rows from the caches, and keep their columns as prefixes for later rows."""
        for row in rows:
            is_kept = self._may_keep(row)
            self._drafts.end([row], is_kept=is_kept)
            if is_kept:
                self._keep(row)
        for row in sorted(rows, key=lambda row: row.slot, reverse=True):  # so that no row to be removed is moved
            self._remove(row, erase=row.finish_reason in (None, "error"))

    def withdraw(self, request_id: str) -> list[Row]:
        """Remove the rows of a request, waiting or running, and return them."""
        waiting = [row for row in self.waiting if row.request_id == request_id]
        for row in waiting:
            self.waiting.remove(row)
        running = [row for row in self._rows if row.request_id == request_id]
        withdrawn = [each for row in [*waiting, *running] for each in (row, *row.forks)]
        self.retire(*running)
        return withdrawn

    def end_all(self) -> None:
        """Remove all rows after a step that broke off. `end_all` may itself be interrupted and called again."""
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
        """Drop all prefixes that earlier rows have left."""
        for row in self.waiting:
            row.beginning = None
        if self._prefixes is not None:
            self._prefixes.clear()

    def _may_keep(self, row: Row) -> bool:
        """Return whether the columns of a row may be kept. They may not be kept if they can be wrong or come from other
        weights."""
        is_doubtful = row.is_in_doubt or row.finish_reason == "error"
        return self._prefixes is not None and not is_doubtful and row.num_changes == self._target.num_changes

    def _keep(self, row: Row) -> None:
        """Store the columns of a row as a prefix."""
        assert self._prefixes is not None
        slot, grain = row.slot, self._grain
        length = self._cache.lengths[slot]
        num_columns = length if grain == 1 else min(length, row.num_prompt_to_read) // grain * grain
        remember, owner = partial(self._drafts.kept, row), None if row.is_plain else self._owner
        tokens = row.token_ids[:length]
        self._prefixes.keep(tokens, self._cache, slot, num_columns, remember, owner, _salt_of(row))

    def _remove(self, row: Row, *, erase: bool) -> None:
        """Remove a row from the caches; ``erase`` its columns if they may not be finite."""
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
    """Key of rows that may share prefixes: the salt, and the offset of positions."""
    return (row.cache_salt, row.offset) if row.offset else row.cache_salt
