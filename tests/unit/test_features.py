"""What drafters are handed: the largest logits of every node."""

from __future__ import annotations

import pytest
import torch

from foretoken.engine.drafter import Requirements
from foretoken.engine.features import gather, largest_ids


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [3, 127, 4096, 4097, 49_152])
def test_the_largest_are_found_block_by_block(vocab_size: int, dtype: torch.dtype) -> None:
    """The scores that torch's search through whole rows finds, in its order; in half precision many are equal."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(6, vocab_size, generator=generator, dtype=torch.float64).to(dtype)
    scores[1] = -torch.inf
    scores[1, vocab_size // 2] = 1.0
    scores[2] = torch.arange(vocab_size, dtype=torch.float64).to(dtype)  # all the largest in the last blocks
    for k in (1, 8, 20):
        ids = largest_ids(scores, k)
        assert torch.equal(scores.gather(1, ids), scores.topk(min(k, vocab_size)).values)
        assert all(len(set(row)) == len(row) for row in ids.tolist())


def test_features_are_those_of_the_nodes_that_are_asked_for() -> None:
    logits = torch.randn(1, 5, 5000, generator=torch.Generator().manual_seed(1))
    requires = Requirements(top_k=4)
    expected = logits[0].topk(4).indices
    for nodes in ([0, 1, 2, 3, 4], [0, 2], [4, 1, 0, 2, 3], [3]):
        found = gather(requires, None, logits, 0, nodes).top_ids
        assert found is not None
        assert torch.equal(found, expected[nodes])
