"""Runs of an engine whose invariants are checked after every step, with drafts that are governed or not."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from foretoken.config.engine import EngineConfig
from foretoken.config.sampling import SamplingParams
from foretoken.engine import governing
from foretoken.engine.drafter import Budget, Drafter, PromptChunk, StepResult, WrappingDrafter
from foretoken.engine.engine import Engine
from foretoken.engine.sequence import Sequence
from foretoken.model.lm import CausalLM
from foretoken.tree import DraftTree


@dataclass(frozen=True)
class Trace:
    """The result of a run: tokens and finish reason per request, the number of steps, and accepted draft tokens."""

    outputs: dict[str, tuple[int, ...]]
    reasons: dict[str, str | None]
    num_steps: int
    num_accepted: int = 0


class _Watched(WrappingDrafter):
    """Passes everything on, and checks the contract between engine and drafter on the way."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__([drafter])
        self.drafter = drafter
        self.name = drafter.name
        self._started: set[int] = set()
        self._num_read: dict[int, int] = {}
        self._proposed: dict[int, DraftTree] = {}

    def recall(self, row: Sequence, memory: object, num_tokens: int) -> int:
        num_recalled = self.drafter.recall(row, memory, num_tokens)
        require(0 <= num_recalled <= num_tokens, f"{self.name} recalls {num_recalled} tokens of {num_tokens}")
        self._num_read[row.id] = num_recalled
        return num_recalled

    def read(self, rows: Seq[Sequence], chunks: Seq[PromptChunk]) -> None:
        require(self.requires.reads_prompts, f"{self.name} reads prompts and wants nothing of them")
        for row, chunk in zip(rows, chunks, strict=True):
            known = self._num_read.get(row.id, 0)
            require(chunk.start == known, f"read: row {row.id} goes on at {chunk.start}, but {known} tokens are read")
            self._num_read[row.id] = known + chunk.num_tokens
        super().read(rows, chunks)

    def start(self, rows: Seq[Sequence]) -> None:
        for row in rows:
            known, wanted = self._num_read.pop(row.id, 0), row.num_prompt_tokens - 1
            require(
                not self.requires.reads_prompts or known == wanted,
                f"start: {known} tokens of the prompt of row {row.id} were read, not {wanted}",
            )
        self._started |= {row.id for row in rows}
        super().start(rows)

    def fork(self, row: Sequence, copies: Seq[Sequence]) -> None:
        require(row.id in self._started, f"fork of row {row.id}, which never started")
        require(all(copy.token_ids == row.token_ids for copy in copies), "fork: the copies have other tokens")
        self._started |= {copy.id for copy in copies}
        super().fork(row, copies)

    def propose(self, rows: Seq[Sequence], budgets: Seq[Budget]) -> list[DraftTree]:
        before = [list(row.token_ids) for row in rows]
        trees = self.drafter.propose(rows, budgets)
        require(len(trees) == len(rows), f"{self.name}: {len(trees)} drafts for {len(rows)} rows")
        for row, tokens, budget, tree in zip(rows, before, budgets, trees, strict=True):
            require(row.id in self._started, f"propose before start for row {row.id}")
            require(row.token_ids == tokens, f"{self.name} changed the tokens of row {row.id}")
            require(
                tree.tokens[0] == tokens[-1],
                f"{self.name}: the draft's root is {tree.tokens[0]}, pending is {tokens[-1]}",
            )
            require(
                tree.depth <= max(budget, 0), f"{self.name} drafted {tree.depth} tokens deep, the budget is {budget}"
            )
            self._proposed[row.id] = tree
        return trees

    def observe(self, rows: Seq[Sequence], results: Seq[StepResult]) -> None:
        for row, result in zip(rows, results, strict=True):
            ends_well = tuple(row.token_ids[-len(result.emitted) :]) == result.emitted
            require(ends_well, f"observe: row {row.id} does not end with what was emitted, {result.emitted}")
            path = [result.tree.tokens[node] for node in result.path[1:]]
            require(path == list(result.emitted[: len(path)]), "observe: the accepted path is not what was emitted")
        self.drafter.observe(rows, results)

    def keep(self, row: Sequence) -> object:
        return self.drafter.keep(row)

    def forget(self, rows: Seq[Sequence]) -> None:
        for row in rows:
            self._num_read.pop(row.id, None)
        self._started -= {row.id for row in rows}
        super().forget(rows)

    def check_empty(self) -> None:
        left = sorted(self._started | self._num_read.keys())
        require(not left, f"rows {left} finished, but were never forgotten")


def require(holds: bool, message: str) -> None:
    """Raises: AssertionError with the message, also under ``python -O``."""
    if not holds:
        raise AssertionError(message)


def decode(
    target: CausalLM,
    drafter: Drafter,
    requests: Seq[tuple[Seq[int], SamplingParams]],
    *,
    eos_token_ids: Seq[int] = (),
    config: EngineConfig | None = None,
    abort: str | None = None,
) -> Trace:
    """Run requests to their end, checking the invariants of engine, cache and drafter after every step.

    Args:
      requests: prompt and parameters each; request i is called ``str(i)``, its sample j ``"i.j"`` in the trace.
      abort: a request to be aborted as soon as it has any output.
    Raises: AssertionError when a step makes more than one target forward, or leaves a cache that does not hold
      exactly the tokens before the pending one.
    """
    watched = _Watched(drafter)
    engine = Engine(target, watched, config, eos_token_ids=eos_token_ids)
    rows = []
    for i, (prompt, params) in enumerate(requests):
        rows += engine.add_request(prompt, params, str(i))
    num_steps = 0
    while engine.has_unfinished:
        before = target.num_forwards
        engine.step()
        num_steps += 1
        require(target.num_forwards - before == 1, f"step {num_steps} made {target.num_forwards - before} forwards")
        check_cache_lengths(engine)
        if any(row.request_id == abort and row.num_output_tokens and not row.is_finished for row in rows):
            engine.abort(str(abort))
            check_cache_lengths(engine)
    watched.check_empty()
    names = {row.id: f"{row.request_id}.{row.index}" for row in rows}
    return Trace(
        {names[row.id]: tuple(row.output_ids) for row in rows},
        {names[row.id]: row.finish_reason for row in rows},
        num_steps,
        sum(row.stats.num_accepted_draft_tokens for row in rows),
    )


def check_cache_lengths(engine: Engine) -> None:
    """Raises: AssertionError unless the cache of every decoding row ends right before its pending token."""
    lengths = {row.id: len(row.token_ids) - 1 for row in engine.decoding_rows}
    cached = {row.id: engine.cache.lengths[slot] for slot, row in enumerate(engine.decoding_rows)}
    require(cached == lengths, f"the cache holds {cached} tokens per row; want {lengths}")
    require(
        engine.cache.num_rows == engine.num_running,
        f"the cache has {engine.cache.num_rows} rows, {engine.num_running} are running",
    )


@contextmanager
def ungoverned() -> Iterator[None]:
    """Let engines that are made meanwhile draft and verify as much as their configs allow.

    For tests, which want drafts whatever the machine; users force drafts of one length by ``length_policy="fixed"``.
    """
    with patch.object(governing, "new_governor", _no_governor):
        yield


@contextmanager
def governed() -> Iterator[None]:
    """The opposite, within `ungoverned`: engines that are made meanwhile are governed, as they are for users."""
    with patch.object(governing, "new_governor", _NEW_GOVERNOR):
        yield


def _no_governor(*args: Any) -> None:
    """Instead of `foretoken.engine.governing.new_governor`."""


_NEW_GOVERNOR = governing.new_governor
