"""Prompts are read in chunks: running rows wait for one at most, however many come, and no token depends on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from contained import VOCAB_SIZE, small, target
from drafting import made
from foredraft import SamplingParams
from foredraft.drafters.lm.draft_model import DraftModelDrafter
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.drafter import Drafter
from foredraft.engine.engine import Engine, EngineConfig
from foredraft.engine.row import Row
from foredraft.testing import GREEDY, SAMPLED, check_cache_lengths
from harness import random_ids

LENGTHS = (70, 5, 100, 3, 41, 6)
"""Of prompts that come while two rows run."""


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "none": EmptyDrafter,
    "ngram": lambda: made("ngram", 3, prompt_lookup_min=1),
    "draft_model": lambda: DraftModelDrafter(small(), target_vocab_size=VOCAB_SIZE, num_speculative_tokens=3),
}


def params(number: int, max_tokens: int) -> SamplingParams:
    return replace(SAMPLED if number % 2 else GREEDY, n=1, max_tokens=max_tokens, ignore_eos=True)


@cache
def alone(number: int, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    """What plain decoding says after one prompt that is read at once."""
    engine = Engine(target(), EmptyDrafter(), EngineConfig(prefill_chunk_size=512))
    (row,) = engine.add_request(prompt, params(number, max_tokens))
    list(engine.run())
    return row.output_ids


def traced(drafter: Drafter, chunk: int) -> tuple[list[Row], list[tuple[int, int]], list[int]]:
    """Rows, what every step has read of prompts and said for the two rows that ran before, and drafters' forwards."""
    engine = Engine(target(), drafter, EngineConfig(max_num_seqs=16, prefill_chunk_size=chunk))
    rows = [engine.add_request(random_ids(4, n, VOCAB_SIZE), params(n, 60))[0] for n in range(2)]
    while len(engine.decoding_rows) < 2:
        engine.step()
    first = tuple(rows)
    for number, length in enumerate(LENGTHS, 2):
        rows += engine.add_request(random_ids(length, number, VOCAB_SIZE), params(number, 12))
    steps: list[tuple[int, int]] = []
    drafted: list[int] = []
    while engine.has_unfinished:
        before, said = engine.profile.num_prefill_tokens, sum(row.num_output_tokens for row in first)
        num_forwards = small().num_forwards
        engine.step()
        check_cache_lengths(engine)
        read = engine.profile.num_prefill_tokens - before
        steps.append((read, sum(row.num_output_tokens for row in first) - said))
        drafted += [small().num_forwards - num_forwards] * (read > 0)
    return rows, steps, drafted


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("method", "chunk"),
    [
        pytest.param(method, chunk, marks=() if (row + place) % 3 == 0 else pytest.mark.full)
        for row, method in enumerate(DRAFTERS)
        for place, chunk in enumerate((8, 16, 32))
    ],
)
def test_running_rows_get_a_token_between_any_two_chunks(method: str, chunk: int) -> None:
    """Six prompts come at once, 225 tokens; short ones are read together as far as they fit into one chunk."""
    rows, steps, drafted = traced(DRAFTERS[method](), chunk)
    reading = [read for read, _ in steps if read]
    assert max(reading) <= chunk
    assert sum(reading) == sum(LENGTHS) - len(LENGTHS)
    last = max(number for number, (read, _) in enumerate(steps) if read)
    for (read, _), (read_next, said_next) in pairwise(steps[: last + 1]):
        assert not (read and read_next)
        assert read_next or said_next >= 2  # of two rows
    assert all(count <= 1 for count in drafted)  # a drafter's model reads what the target has just read
    for number, row in enumerate(rows):
        prompt = tuple(row.token_ids[: row.num_prompt_tokens])
        assert row.output_ids == alone(number, prompt, 60 if number < 2 else 12)


def test_prompts_take_turns() -> None:
    """A short prompt that came last is read long before a long one that came first."""
    engine = Engine(target(), EmptyDrafter(), EngineConfig(prefill_chunk_size=16))
    (running,) = engine.add_request(random_ids(4, 0, VOCAB_SIZE), params(0, 60))
    engine.step()
    long, short = (engine.add_request(random_ids(length, 1, VOCAB_SIZE), params(0, 4))[0] for length in (180, 20))
    while not short.num_output_tokens:
        engine.step()
    assert not long.num_output_tokens
    assert not running.is_finished


def test_prompts_are_read_together_where_nothing_runs() -> None:
    """Four prompts of 40 tokens in chunks of 16 are three forwards."""
    engine = Engine(target(), EmptyDrafter(), EngineConfig(prefill_chunk_size=16))
    for number in range(4):
        engine.add_request(random_ids(40, number, VOCAB_SIZE), params(0, 4))
    num_steps = 0
    while not engine.decoding_rows:
        engine.step()
        num_steps += 1
    assert num_steps == 3
    assert engine.num_running == len(engine.decoding_rows) == 4
