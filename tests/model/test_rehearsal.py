"""The steps that the probe decodes, the texts that they stand for, and the faults that it makes on purpose."""

from __future__ import annotations

import math

import pytest
import torch

from foredraft.model.nodes import Nodes
from foredraft.model.reference import (
    ProbePlan,
    hide_parents,
    relative_error,
    sampled,
    shift_positions,
    show_everything,
    show_siblings,
)
from foredraft.tree import DraftTree

TREE = DraftTree((7, 8, 9, 4), (-1, 0, 0, 1))
OTHER = DraftTree((1, 2, 3, 5), (-1, 0, 1, 2))


def rows(mask: torch.Tensor) -> list[str]:
    return ["".join("x" if seen else "." for seen in row) for row in mask.tolist()]


def test_faults_are_made_in_one_row() -> None:
    nodes = Nodes.from_trees([TREE, OTHER])
    assert rows(nodes.ancestors[0]) == ["x...", "xx..", "x.x.", "xx.x"]
    want = {
        hide_parents: ["x...", ".x..", "..x.", "x..x"],
        show_siblings: ["x...", "xx..", "xxx.", "xxxx"],
        show_everything: ["xxxx", "xxxx", "xxxx", "xxxx"],
    }
    for fault, masks in want.items():
        wrong = fault(nodes, 0)
        assert rows(wrong.ancestors[0]) == masks
        assert torch.equal(wrong.ancestors[1], nodes.ancestors[1])
        assert torch.equal(wrong.depths, nodes.depths)
    shifted = shift_positions(nodes, 1)
    assert shifted.depths.tolist() == [[0, 1, 1, 2], [1, 2, 3, 4]]
    chains = show_everything(Nodes.from_chains([[1, 2], [3, 4]]), 1).ancestors
    assert chains is not None
    assert [rows(mask) for mask in chains] == [["x.", "xx"], ["xx", "xx"]]


def test_texts_follow_what_is_committed() -> None:
    """Row 0 keeps two of four tokens of a chain, then a branch of a tree; row 1 two tokens, then a branch."""
    rehearsal = ProbePlan.whole(1000, 0, (shift_positions,))
    first, second, copy = rehearsal.prefixes
    assert (len(first), len(second)) == (5, 8)
    assert copy == first
    chains, token, trees, branches = rehearsal.steps
    row = (*first, *chains.trees[0].tokens[:2])
    other = (*second, chains.trees[1].tokens[0], token.trees[0].tokens[0])
    assert rehearsal.texts(trees)[0][6] == (*row, *(trees.trees[0].tokens[node] for node in (0, 1, 4, 6)))
    assert rehearsal.texts(trees)[1][4] == (*other, *(trees.trees[1].tokens[node] for node in (0, 2, 4)))
    assert rehearsal.texts(trees)[2] == rehearsal.texts(trees)[0]
    assert rehearsal.texts(branches)[0][1] == (*rehearsal.texts(trees)[0][6], *branches.trees[0].tokens)
    assert max(len(text) for step in rehearsal.steps for row in rehearsal.texts(step) for text in row) == 14


@pytest.mark.parametrize("vocab_size", [2, 3, 5, 64, 1000])
def test_chains_need_no_other_plain_texts_than_trees(vocab_size: int) -> None:
    trees = ProbePlan.of_trees(vocab_size, 1, (show_everything, shift_positions))
    chains = trees.as_chains()
    known = {text for row in trees.texts(trees.steps[0]) for text in row}
    assert {text for row in chains.texts(chains.steps[0]) for text in row} <= known
    assert all(tree.is_chain for step in chains.steps for tree in step.trees)


def test_errors_are_relative_to_the_spread() -> None:
    want = torch.tensor([1.0, 3.0], dtype=torch.float64)
    assert relative_error(want + 0.5, want) == 0.5
    assert relative_error(want, want) == 0.0
    ruled_out = torch.tensor([1.0, 3.0, -math.inf], dtype=torch.float64)
    assert relative_error(ruled_out, ruled_out) == 0.0
    assert relative_error(torch.tensor([1.0, 3.0, 0.0]).double(), ruled_out) == math.inf
    assert relative_error(torch.full((2,), math.nan).double(), want) == math.inf
    assert sampled(torch.zeros(2, 3, 5000)).shape == (2, 3, 1000)
