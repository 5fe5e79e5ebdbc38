"""Each kind of stock kernel by itself: perturbed, it shows in models that run by it, and not in those that need none.

The toy and the prompts are such that at commit 9aaaa21, where small products and attention of a toy ran by stock
kernels, the first test is red with every kind and green with none.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from guarantee import Cell, Study

from foredraft import SamplingParams
from foredraft.native import library as native
from foredraft.testing import hostile_kernels, toy_model
from foredraft.testing.hostile import KINDS
from friendly import friendly_kernels

VOCAB_SIZE = 512  # a tall product
PROMPTS = [[5, 6, 7] * 25, [9, 10, 11, 12] * 3, [3], [8, 300, 40] * 30, [500, 400]]
GREEDY = SamplingParams(temperature=0.0, seed=7, max_tokens=24)


def cell(kind: str, execution: str) -> Cell:
    """Trees for five rows, beside plain rows alone. Nothing but the perturbation makes bits depend on a shape."""
    with friendly_kernels(), nullcontext() if kind == "none" else hostile_kernels(kind):
        model = toy_model(VOCAB_SIZE, dtype=torch.float32)
        study = Study(model, prompts=PROMPTS, execution=execution, max_num_seqs=len(PROMPTS))
        return study.cell("token_recycling", GREEDY, len(PROMPTS))


@pytest.mark.sample(1)
@pytest.mark.skipif(native.library() is None, reason="no kernels here")
@pytest.mark.parametrize("kind", ["none", *KINDS])
def test_the_librarys_own_kernels_stand_for_each_kind(kind: str) -> None:
    found = cell(kind, "auto")
    assert found.guarantee == "bit-identical"
    assert found.is_good, found.line()


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["none", *KINDS])
def test_each_kind_shows_where_stock_kernels_run(kind: str) -> None:
    """The control: with friendly kernels bits are kept, with one kind perturbed they are not, and texts are."""
    found = cell(kind, "eager")
    assert found.guarantee == "up to rounding"
    assert found.is_good, found.line()
    assert (found.num_equal == found.num_texts) == (kind == "none"), found.line()
