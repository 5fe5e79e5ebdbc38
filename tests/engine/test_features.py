"""What drafters are handed: the largest logits of every node."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from foredraft.engine.features import Features, RowFeatures, largest_ids, top_ids_of
from foredraft.errors import ConfigError
from foredraft.model.capture import Output
from foredraft.model.nodes import NodeLogits


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


class _Fixed(Features):
    """Features that stand in no forward."""

    def top_ids(self, k: int, nodes: Sequence[int]) -> torch.Tensor:
        return torch.tensor([[node] * k for node in nodes])


@pytest.mark.parametrize("vocab_size", [300, 5000])
def test_the_best_ids_of_several_rows_are_those_of_each(vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(9, vocab_size, generator=torch.Generator().manual_seed(2))
    counts, nodes = [4, 1, 3, 1], [[3, 1, 0], [0], [], [0]]
    listed = Output(NodeLogits(values, counts))
    table = Output(values[:8].view(4, 2, -1))
    rows = [RowFeatures(listed, row) for row in range(4)]
    renamed = [rows[0].at([1, 2, 3, 0]), *rows[1:]]
    apart = [
        RowFeatures(Output(NodeLogits(values[start:], [size])), 0) for start, size in ((0, 4), (4, 1), (5, 3), (8, 1))
    ]
    in_table, of_two = [RowFeatures(table, row) for row in range(4)], [[1, 0], [0], [], [1]]
    cases = [(rows, nodes), (renamed, nodes), (apart, nodes), (in_table, of_two), ([*rows[:3], _Fixed()], nodes)]
    expected = [
        torch.cat([each.top_ids(6, some) for each, some in zip(features, of_rows, strict=True)])
        for features, of_rows in cases
    ]
    for (features, of_rows), want in zip(cases, expected, strict=True):
        assert torch.equal(top_ids_of(features, 6, of_rows), want)
    monkeypatch.setattr(RowFeatures, "top_ids", None)  # rows of one forward are not asked one by one
    assert torch.equal(top_ids_of(rows, 6, nodes), expected[0])
    assert torch.equal(top_ids_of(renamed, 6, nodes), expected[1])


def test_what_was_not_wanted_is_refused_by_its_name() -> None:
    of_prompt = RowFeatures(Output(torch.zeros(1, 0, 9)), 0)
    for ask, name in (
        (lambda: of_prompt.last_hidden([0]), "last_hidden"),
        (lambda: of_prompt.layer_input(1, [0]), "layer_inputs"),
        (lambda: of_prompt.top_ids(2, [0]), "prompt_logits"),
        (lambda: of_prompt.choices, "choices"),
    ):
        with pytest.raises(ConfigError, match=name):
            ask()
