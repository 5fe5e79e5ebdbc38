"""Reading prompts: whose turn it is, which are read together, and what their drafter is shown."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

from foretoken.engine.drafter import Drafter, PromptChunk
from foretoken.engine.features import ForwardFeatures

if TYPE_CHECKING:
    from foretoken.engine.batch import Batch, Run
    from foretoken.engine.forwards import Forwards
    from foretoken.engine.stats import StepProfile


class Prefill:
    """Reads the prompts of a batch chunk by chunk, all tokens but the last.

    Every prompt gets a chunk; then rows that decode have a step.

    Args:
      chunk_size: tokens of a prompt per forward.
    """

    def __init__(self, batch: Batch, forwards: Forwards, drafter: Drafter, chunk_size: int) -> None:
        self._batch = batch
        self._forwards = forwards
        self._drafter = drafter
        self._chunk_size = chunk_size
        self._due: set[Run] = set()  # that have not had their chunk in this round
        self._has_read = False  # since rows have last decoded

    @property
    def is_due(self) -> bool:
        """Whether a prompt is to be read now; a no lets the rows that decode have their step."""
        prefilling = self._batch.prefilling
        self._due &= set(prefilling)
        if not self._due and not (self._has_read and self._batch.num_decoding):
            self._due = set(prefilling)
        self._has_read = bool(self._due)
        return self._has_read

    def step(self, profile: StepProfile) -> list[Run]:
        """Read a chunk of prompts that may be read together; those that are read to their end."""
        runs = self._together()
        self._due.difference_update(runs)
        first_row = self._batch.slot_of(runs[0])
        chunks = [run.row.token_ids[run.num_prefilled : run.num_prefilled + self._length(run)] for run in runs]
        output = self._forwards.read(chunks, first_row)
        self._batch.cache.commit([range(len(chunk)) for chunk in chunks], first_row)
        if self._drafter.requires.reads_prompts:
            features = ForwardFeatures(output)
            shown = [
                PromptChunk(run.num_prefilled, len(chunk), features.of(i))
                for i, (run, chunk) in enumerate(zip(runs, chunks, strict=True))
            ]
            self._drafter.read([run.row for run in runs], shown)
        for run, chunk in zip(runs, chunks, strict=True):
            run.num_prefilled += len(chunk)
        profile.num_prefill_tokens += sum(map(len, chunks))
        return [run for run in runs if run.is_prefilled]

    def _together(self) -> list[Run]:
        """Neighbours in the cache that are due and of one shape."""
        prefilling = self._batch.prefilling
        first = next(run for run in prefilling if run in self._due)
        shape = self._shape(first)
        if shape is None:
            return [first]
        neighbours = prefilling[prefilling.index(first) :]
        return list(takewhile(lambda run: run in self._due and self._shape(run) == shape, neighbours))

    def _shape(self, run: Run) -> tuple[int, ...] | None:
        return self._forwards.prompt_shape(run.num_prefilled, self._length(run))

    def _length(self, run: Run) -> int:
        """Tokens of the next chunk."""
        return min(self._chunk_size, run.num_to_prefill - run.num_prefilled)
