"""Reading prompts: whose turn it is, which are read together, and what their drafter is shown."""

from __future__ import annotations

from itertools import accumulate, takewhile
from typing import TYPE_CHECKING

from foretoken.engine.drafter import Drafter, PromptChunk
from foretoken.engine.features import ForwardFeatures
from foretoken.model.promise import MOST_NODES

if TYPE_CHECKING:
    from foretoken.engine.batch import Batch, Member
    from foretoken.engine.forwards import Forwards
    from foretoken.engine.stats import StepProfile


class Prefill:
    """Reads the prompts of a batch chunk by chunk, all tokens but the last.

    Prompts take turns. While rows decode, they have a step after every forward, and a forward reads one chunk, or
    several short ones that are no longer together: however many prompts come, running rows wait for one chunk at most.
    Where nothing decodes, all prompts that may be read together are.

    Args:
      chunk_size: tokens of a prompt per forward. Where a chunk begins depends on its own prompt alone.
    """

    def __init__(self, batch: Batch, forwards: Forwards, drafter: Drafter, chunk_size: int) -> None:
        self._batch = batch
        self._forwards = forwards
        self._drafter = drafter
        self._chunk_size = chunk_size
        self._due: set[Member] = set()  # that have not had their chunk in this round
        self._has_read = False  # since rows have last had their turn

    @property
    def is_due(self) -> bool:
        """Whether a prompt is to be read now; a no lets the rows that decode have their step."""
        if self._has_read and self._batch.num_decoding:
            self._has_read = False
            return False
        prefilling = self._batch.prefilling
        if not prefilling:
            self._due, self._has_read = set(), False
            return False
        self._due &= set(prefilling)
        self._due = self._due or set(prefilling)
        self._has_read = bool(self._due)
        return self._has_read

    def step(self, profile: StepProfile) -> list[Member]:
        """Read a chunk of prompts that may be read together; those that are read to their end."""
        members = self._together()
        self._due.difference_update(members)
        first_slot = self._batch.slot_of(members[0])
        chunks = [
            member.row.token_ids[member.num_prefilled : member.num_prefilled + self._length(member)]
            for member in members
        ]
        output = self._forwards.read(chunks, first_slot)
        self._batch.cache.commit([range(len(chunk)) for chunk in chunks], first_slot)
        if self._drafter.requires.reads_prompts:
            features = ForwardFeatures(output)
            shown = [
                PromptChunk(member.num_prefilled, len(chunk), features.of(i))
                for i, (member, chunk) in enumerate(zip(members, chunks, strict=True))
            ]
            self._drafter.read([member.row for member in members], shown)
        for member, chunk in zip(members, chunks, strict=True):
            member.num_prefilled += len(chunk)
        profile.num_prefill_tokens += sum(map(len, chunks))
        return [member for member in members if member.is_prefilled]

    def _together(self) -> list[Member]:
        """Neighbours in the cache that are due and may be read in one forward."""
        prefilling = self._batch.prefilling
        first = next(member for member in prefilling if member in self._due)
        if self._forwards.has_one_shape:
            return [first]
        neighbours = prefilling[prefilling.index(first) :]
        together = list(takewhile(self._due.__contains__, neighbours))
        if not self._batch.num_decoding:
            return together
        totals = accumulate(map(self._length, together))
        return together[: max(1, sum(total <= self._chunk_size for total in totals))]

    def _length(self, member: Member) -> int:
        """Tokens of the next chunk. Those that were generated are replayed as chains, by the kernels of steps.

        Of a prompt of 600 tokens, and 90 said after it, chunks of 512: 512, 87, 64, 26; the last token is pending.
        """
        num_left = member.num_prompt_to_read - member.num_prefilled
        if num_left > 0:
            return min(self._chunk_size, num_left)
        return min(MOST_NODES, member.num_to_prefill - member.num_prefilled)
