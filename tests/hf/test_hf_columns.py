"""The replay of the plain loop: whatever rows run ahead, criteria and streamers see complete columns, in order."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest
import torch
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

from foredraft.engine.row import Row, RowOutput
from foredraft.errors import ConfigError
from foredraft.hf.rows import Columns, Endings

PROMPT = torch.tensor([[0, 5], [4, 6], [4, 4]])
PAD = 9
VOCAB = 10


class Watching(StoppingCriteria):
    """Ends all rows at once when each of them has said 7, as lm-evaluation-harness does; remembers what it saw."""

    def __init__(self) -> None:
        self.seen: list[list[list[int]]] = []
        self.has_said: set[int] = set()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        self.seen.append(input_ids.tolist())
        self.has_said |= {row for row, ids in enumerate(input_ids.tolist()) if ids[-1] == 7}
        return len(self.has_said) == len(input_ids)


class Rowwise(StoppingCriteria):
    """Ends each row when the sum of its tokens passes a limit."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        return input_ids.sum(-1) > 60


class Recorder:
    def __init__(self) -> None:
        self.values: list[list[int]] = []

    def put(self, value: torch.Tensor) -> None:
        self.values.append(value.tolist())


def plain(texts: list[list[int]], criteria: StoppingCriteriaList) -> tuple[list[list[int]], list[list[int]]]:
    """transformers' loop over what the rows would say: sequences, and what a streamer gets."""
    ids, streamed = PROMPT, []
    unfinished = torch.ones(3, dtype=torch.long)
    pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    for column in range(len(texts[0])):
        tokens = torch.tensor([text[column] for text in texts])
        if pads:
            tokens = tokens * unfinished + PAD * (1 - unfinished)
        ids = torch.cat([ids, tokens[:, None]], dim=-1)
        streamed.append(tokens.tolist())
        unfinished = unfinished & ~criteria(ids, cast("Any", None))
        if unfinished.max() == 0:
            break
    return ids.tolist(), streamed


def output(tokens: list[int]) -> RowOutput:
    return RowOutput(cast("Row", None), tuple(tokens), 0)


def replay(texts: list[list[int]], criteria: StoppingCriteriaList, seed: int, streamer: Any) -> Columns:
    """Rows come in blocks of 1 to 5 tokens, in any order, until nothing more is needed of them."""
    columns = Columns(PROMPT, Endings(criteria), PAD, streamer)
    draw = random.Random(seed)
    running = {0: 0, 1: 0, 2: 0}
    while not columns.is_done:
        row = draw.choice(sorted(running))
        start = running[row]
        block = texts[row][start : start + draw.randint(1, 5)]
        running[row] += len(block)
        columns.take(row, output(block))
        if running[row] == len(texts[row]):
            del running[row]
        for ended in columns.advance():
            running.pop(ended, None)
    return columns


def lists() -> dict[str, list[StoppingCriteria]]:
    length = MaxLengthCriteria(max_length=22)
    return {
        "length": [length],
        "eos": [length, EosTokenCriteria(torch.tensor([1, 2]))],
        "watching": [length, Watching()],
        "watching and eos": [length, EosTokenCriteria(1), Watching()],
        "rowwise": [length, Rowwise()],
        "rowwise and eos": [length, EosTokenCriteria(1), Rowwise()],
    }


@pytest.mark.parametrize("kind", lists())
def test_every_schedule_gives_the_plain_loop(kind: str) -> None:
    for seed in range(20):
        draw = random.Random(100 + seed)
        texts = [[draw.randrange(VOCAB) for _ in range(20)] for _ in range(3)]
        expected, theirs = lists()[kind], lists()[kind]
        sequences, streamed = plain(texts, StoppingCriteriaList(expected))
        streamer = Recorder()
        columns = replay(texts, StoppingCriteriaList(theirs), seed, streamer)
        assert columns.sequences.tolist() == sequences
        assert streamer.values == streamed
        for mine, plains in zip(theirs, expected, strict=True):
            if isinstance(mine, Watching) and isinstance(plains, Watching):
                assert mine.seen == plains.seen


def test_a_row_that_ends_early_needs_a_padding_token() -> None:
    criteria = StoppingCriteriaList([MaxLengthCriteria(max_length=6), EosTokenCriteria(1)])
    columns = Columns(PROMPT, Endings(criteria), None)
    for row, text in enumerate([[1], [3, 3], [3, 3]]):
        columns.take(row, output(text))
    with pytest.raises(ConfigError, match="pad_token_id"):
        columns.advance()
