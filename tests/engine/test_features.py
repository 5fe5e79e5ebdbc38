"""What drafters are handed: the largest logits of every node."""

from __future__ import annotations

import pytest
import torch

from foredraft.engine.drafter import PromptChunk
from foredraft.engine.features import RowFeatures, largest_ids
from foredraft.errors import ConfigError
from foredraft.model.nodes import Output


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [3, 127, 4096, 4097])
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
    generator = torch.Generator().manual_seed(1)
    logits, hidden = torch.randn(2, 5, 5000, generator=generator), torch.randn(2, 5, 8, generator=generator)
    choices = [(1, 2, 3, 4, 5), (6, 7, 8, 9, 10)]
    output = Output(logits, hidden, {3: hidden + 1})
    for row in (0, 1):
        features, expected = RowFeatures(output, row, choices), logits[row].topk(4).indices
        for nodes in ([0, 1, 2, 3, 4], [0, 2], [4, 1, 0, 2, 3], [3], [0, 1]):
            assert torch.equal(features.top_ids(4, nodes), expected[nodes])
            assert torch.equal(features.last_hidden(nodes), hidden[row, nodes])
            assert torch.equal(features.layer_input(3, nodes), hidden[row, nodes] + 1)
            places = features.at([4, 2, 0])
            assert torch.equal(places.last_hidden([0, 2]), hidden[row, [4, 0]])
            assert torch.equal(places.top_ids(4, [1]), expected[[2]])
        assert features.choices == choices[row]
        assert features.at([4, 2]).choices == (choices[row][4], choices[row][2])


def test_what_was_not_wanted_is_refused_by_its_name() -> None:
    of_prompt = RowFeatures(Output(torch.zeros(1, 0, 9)), 0)
    for ask, name in (
        (lambda: of_prompt.last_hidden([0]), "last_hidden"),
        (lambda: of_prompt.layer_input(1, [0]), "layer 1 in layer_inputs"),
        (lambda: of_prompt.top_ids(2, [0]), "prompt_logits"),
        (lambda: of_prompt.choices, "choices"),
        (lambda: PromptChunk(0, 0, is_last=True).features.top_ids(2, [0]), "the empty last chunk of a prompt"),
    ):
        with pytest.raises(ConfigError, match=name):
            ask()
