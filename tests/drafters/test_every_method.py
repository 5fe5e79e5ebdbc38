"""Every method keeps the promise of its model, uncut, over stock kernels that round by the shape of their call.

A cell of ``benchmarks/guarantee.py``: five prompts, drafted for in a batch or alone, against plain decoding of each
alone. Where the library's own kernels run, log-probabilities have the same bits, and steps give as many tokens as under
"relaxed"; elsewhere drafts are as long, and what differs is a near-tie. Drafts were accepted in every cell.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from guarantee import METHODS, Cell, Study

from architectures import target_model
from foredraft import SamplingParams
from foredraft.native import library as native
from foredraft.testing import hostile_kernels
from harness import random_ids

GREEDY = SamplingParams(temperature=0.0, seed=7, max_tokens=16, ignore_eos=True)
MODES = {"greedy": GREEDY, "sampled": replace(GREEDY, temperature=1.0, top_p=0.4)}
"""A nucleus so narrow that lookups find, whose edge moves with the last bit."""

BATCHES = (1, 5)

QUICK = {("suffix+eagle3", "sampled", 5), ("ngram", "greedy", 5)}
"""Cells that always run."""
ALIKE = {"nasd", "suffix", "rest", "ngram>token_recycling", "draft_model", "hydra", "eagle2"}
"""Drafts of other methods are as these: chains and trees of tokens looked up, of a model, and of heads."""
ALONE = {"ngram", "eagle3"}
"""Of which `make test` sees more than a batch."""
ELSEWHERE = {("eager", "eagle3"), ("float64", "ngram")}
"""What `make test` runs over stock kernels besides a quick one: chains and trees, of lookups, a model and a head."""


SHAPE = {"max_model_len": 192, "prefill_chunk_size": 64}
"""Prompts are read in pieces."""

has_kernels = native.library() is not None


@pytest.fixture(scope="module", autouse=True)
def _hostile() -> Iterator[None]:
    with hostile_kernels():
        yield


@cache
def study(dtype: str = "auto", execution: str = "auto") -> Study:
    return Study("zoo:tiny", dtype=dtype, execution=execution, max_num_seqs=max(BATCHES), **SHAPE)


def is_covering(method: str, mode: str, batch_size: int) -> bool:
    """What `make test` runs: every kind of method in a batch, greedy or sampled in turn; some of them alone."""
    if method in ALIKE:
        return False
    if batch_size == max(BATCHES):
        return mode == list(MODES)[list(METHODS).index(method) % 2]
    return method in ALONE and mode == "greedy"


def marked(*cell: object) -> object:
    slow = pytest.mark.slow if is_covering(*cell) else pytest.mark.full
    return pytest.param(*cell, marks=[] if cell in QUICK else slow)


CELLS = list(product(METHODS, MODES, BATCHES))


@pytest.mark.sample(3)
@pytest.mark.skipif(not has_kernels, reason="no kernels here")
@pytest.mark.parametrize(("method", "mode", "batch_size"), [marked(*cell) for cell in CELLS])
def test_the_promise_is_native(method: str, mode: str, batch_size: int) -> None:
    check(study().cell(method, MODES[mode], batch_size), "bit-identical")


def check(cell: Cell, promise: str) -> None:
    assert cell.guarantee == promise
    assert cell.is_kept, cell.line()
    assert cell.is_whole, cell.line()
    assert cell.num_accepted > 0, cell.line()


# -- elsewhere ------------------------------------------------------------------------------------------------------

WAYS = {"eager": ("auto", "eager"), "float64": ("float64", "auto")}
"""Dtype and execution."""


def elsewhere(way: str) -> Study:
    """zoo:tiny by stock kernels."""
    return study(*WAYS[way])


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("way", "method", "mode"),
    [
        pytest.param(
            way,
            method,
            mode,
            marks=[]
            if (way, method, mode) == ("eager", "token_recycling", "greedy")
            else pytest.mark.slow
            if (way, method) in ELSEWHERE and mode == "greedy"
            else pytest.mark.full,
        )
        for way, method, mode in product(WAYS, METHODS, MODES)
    ],
)
def test_the_promise_is_that_of_near_ties(way: str, method: str, mode: str) -> None:
    check(elsewhere(way).cell(method, MODES[mode], max(BATCHES)), "up to rounding")


@pytest.mark.full
def test_experts_are_promised_near_ties() -> None:
    model = target_model("qwen3-moe", dtype=torch.float32)
    prompts = [random_ids(length, length) for length in (70, 5, 20)] + [[5, 6, 7] * 4]
    check(Study(model, prompts=prompts).cell("token_recycling", replace(GREEDY, max_tokens=48), 4), "up to rounding")
