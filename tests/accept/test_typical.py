"""Typical acceptance: the distribution as published, by enumeration, and how far it is from the target's."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from foredraft.accept import BY_DRAFT, match, threshold, typical
from foredraft.config.acceptance import POSTERIOR_ALPHA, POSTERIOR_THRESHOLD, RULES, TypicalLimits
from foredraft.tree import DraftTree

LIMITS = TypicalLimits()


def published(tree: DraftTree, distributions: torch.Tensor, limits: TypicalLimits) -> tuple[list[int], int]:
    """The rule row by row, one row per leaf, as its authors describe it; the tokens that stay, and the one after them.

    A token is acceptable if its probability exceeds min(threshold, alpha exp(-H)) at its parent; a row keeps the tokens
    before its first unacceptable one; the longest row wins, of equally long ones that with the largest likelihood.
    """
    rows = []
    for leaf in tree.leaves:
        nodes = tree.path(leaf)
        kept, likelihood = [], 0.0
        for parent, node in itertools.pairwise(nodes):
            distribution = distributions[parent]
            entropy = -float((distribution * (distribution + 1e-5).log()).sum())
            probability = float(distribution[tree.tokens[node]])
            if not probability > min(limits.threshold, limits.alpha * math.exp(-entropy)):
                break
            kept.append(node)
            likelihood += math.log(probability)
        rows.append((len(kept), likelihood, kept))
    longest = max(length for length, _, _ in rows)
    _, _, kept = max((row for row in rows if row[0] == longest), key=lambda row: row[1])
    last = kept[-1] if kept else 0
    return kept, int(distributions[last].argmax())


def random_tree(rng: random.Random, vocab_size: int, num_nodes: int) -> DraftTree:
    tokens, parents = [0], [-1]
    while len(tokens) < num_nodes:
        parent = rng.randrange(len(tokens))
        taken = {tokens[i] for i, p in enumerate(parents) if p == parent}
        free = [token for token in range(vocab_size) if token not in taken]
        if free:
            tokens.append(rng.choice(free))
            parents.append(parent)
    return DraftTree(tuple(tokens), tuple(parents))


@pytest.mark.parametrize(
    "limits", [LIMITS, TypicalLimits(0.3, 0.09), TypicalLimits(0.02, 0.5), TypicalLimits(1.0, 9.0)]
)
def test_the_rule_is_the_published_one(limits: TypicalLimits) -> None:
    """Over random trees and distributions, flat and peaked."""
    rng = random.Random(1)
    generator = torch.Generator().manual_seed(1)
    lengths = set()
    for number in range(400):
        tree = random_tree(rng, 5, rng.randrange(1, 12))
        distributions = (
            torch.randn(len(tree), 5, generator=generator, dtype=torch.float64).mul_(1 + number % 4).softmax(-1)
        )
        kept, after = published(tree, distributions, limits)
        verdict = typical(tree, distributions.__getitem__, limits)
        assert list(verdict.path[1:]) == kept
        assert verdict.next_token == after
        lengths.add(len(kept))
    assert lengths > {0, 1, 2} or limits.threshold == 1.0


def test_published_numbers_are_not_swapped() -> None:
    """A flat distribution over 50 tokens: the entropy decides, not the threshold."""
    assert (POSTERIOR_THRESHOLD, POSTERIOR_ALPHA) == (0.09, 0.3)
    flat, peaked = torch.full((50,), 0.02, dtype=torch.float64), torch.tensor([0.98, 0.02], dtype=torch.float64)
    assert threshold(flat, LIMITS) == pytest.approx(0.3 / 50, rel=1e-2)
    assert threshold(peaked, LIMITS) == 0.09


def test_its_bias_is_as_large_as_what_it_makes_certain() -> None:
    """Of three likely children the likeliest becomes certain: total variation 1 - p of it, where other rules have 0."""
    generator = torch.Generator().manual_seed(3)
    distances = []
    for _ in range(50):
        distribution = torch.randn(6, generator=generator, dtype=torch.float64).mul_(1.5).softmax(-1)
        tree = DraftTree((0, *distribution.topk(3).indices.tolist()), (-1, 0, 0, 0))
        verdict = typical(tree, distribution.expand(4, -1).__getitem__)
        said = tree.tokens[verdict.path[1]] if verdict.num_accepted else verdict.next_token
        distances.append(1 - float(distribution[said]))
        assert distances[-1] == pytest.approx(1 - float(distribution.max()))
    assert sum(distances) / len(distances) > 0.3


def test_every_rule_is_carried_out_as_itself() -> None:
    """One without a place of its own once ran as rejection, or as block."""
    assert {**BY_DRAFT, "match": match, "typical": typical}.keys() == RULES.keys()
    assert {name: rule.__name__ for name, rule in BY_DRAFT.items()} == {"standard": "rejection", "block": "block"}
