"""What is done in steps between two decisions: what was decided of drafts like these."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pytest

from foretoken.engine.budget import Budget
from foretoken.engine.habit import Habit, _standings
from foretoken.tree import DraftTree

FREE = {"worth": lambda sizes, are_chains: 0.0, "trust": 1.0}
WIDE = DraftTree.from_paths(1, [[2, 3, 4], [2, 5], [6, 7], [8]])


def kept(habit: Habit, tree: DraftTree, **known: Any) -> DraftTree:
    """What is left of one draft, where verifying costs nothing unless said otherwise."""
    (found,) = habit.cut([tree], **{**FREE, **known})
    return found


def scored(*scores: float) -> DraftTree:
    """Siblings with these scores."""
    tokens = (1, *range(2, 2 + len(scores)))
    return DraftTree(tokens, (-1, *[0] * len(scores)), scores=(1.0, *scores))


def test_standings_are_ranks_along_the_path() -> None:
    assert _standings(DraftTree((1, 2, 3, 4, 5), (-1, 0, 0, 1, 1))) == [0, 1, 2, 257, 258]


def test_drafts_without_scores_are_cut_where_one_like_them_was() -> None:
    habit = Habit()
    habit.adopt([WIDE], [DraftTree.from_paths(1, [[2, 5], [6]])])
    other = DraftTree.from_paths(9, [[12, 13, 14], [12, 15], [16, 17], [18]])
    assert {kept(habit, other).path_tokens(node) for node in range(4)} == {(), (12,), (12, 15), (16,)}
    habit.adopt([WIDE], [WIDE])
    assert kept(habit, other) is other


def test_chains_are_cut_to_the_length_of_the_last() -> None:
    habit = Habit()
    habit.adopt([DraftTree.chain(1, [2, 3, 4, 5])], [DraftTree.chain(1, [2, 3])])
    assert kept(habit, DraftTree.chain(7, [8, 9, 10])).tokens == (7, 8, 9)
    assert kept(habit, DraftTree.root(7)).tokens == (7,)
    habit.adopt([DraftTree.chain(1, [2, 3])], [DraftTree.root(1)])
    assert kept(habit, DraftTree.chain(7, [8, 9, 10])).tokens == (7,)


def test_drafts_with_scores_are_cut_to_what_is_worth_it() -> None:
    """A node costs a quarter of a token here, but the first two cost nothing."""

    def worth(sizes: Sequence[int], are_chains: bool) -> float:
        return 0.25 * max(sum(sizes) - len(sizes) - 2, 0)

    draft = scored(0.9, 0.2, 0.3, 0.26, 0.1)
    assert kept(Habit(), draft, worth=worth).tokens == (1, 2, 4, 5)
    assert kept(Habit(), draft, worth=worth, trust=0.5).tokens == (1, 2, 4)
    assert kept(Habit(), scored(0.1), worth=lambda sizes, are_chains: 0.2).tokens == (1,)
    whole = scored(0.9, 0.8)
    assert kept(Habit(), whole, worth=worth) is whole


def test_deep_nodes_are_trusted_less() -> None:
    deep = DraftTree((1, 2, 3, 4), (-1, 0, 1, 2), scores=(1.0, 0.8, 0.8, 0.8))
    cost = {"worth": lambda sizes, are_chains: 0.3 * (sizes[0] - 1)}
    assert kept(Habit(), deep, **cost, trust=0.9) is deep
    assert kept(Habit(), deep, **cost, trust=0.7).tokens == (1, 2, 3)


def test_rows_share_what_a_step_is_worth() -> None:
    first, second = scored(0.9, 0.1), scored(0.2, 0.15)
    cut = Habit().cut([first, second, DraftTree.root(7)], lambda sizes, are_chains: 0.3 * (sum(sizes) - 3), 1.0)
    assert [tree.tokens for tree in cut] == [(1, 2), (1,), (7,)]


def test_what_is_worth_drafting_follows_the_scores_that_were_kept() -> None:
    habit = Habit()
    assert habit.least == 0.0
    for _ in range(8):
        habit.adopt([scored(0.9, 0.5, 0.3, 0.1)], [DraftTree((1, 2, 3), (-1, 0, 0), scores=(1.0, 0.9, 0.5))])
    assert 0.15 < habit.least < 0.25  # half of a score between the best that was left out and the last that was kept
    for _ in range(8):
        habit.adopt([scored(0.4, 0.2)], [scored(0.4, 0.2)])
    assert habit.least == pytest.approx(0.1, abs=0.01)
    for _ in range(8):
        habit.adopt([scored(0.4)], [DraftTree.root(1)])
    assert 0.2 < habit.least < 0.4  # what could be drafted after it was not worth it, better ones may be


def test_a_node_whose_score_is_above_its_parents_does_not_stay_alone() -> None:
    odd = DraftTree((1, 2, 3), (-1, 0, 1), scores=(1.0, 0.1, 0.9))
    assert len(kept(Habit(), odd, worth=lambda sizes, are_chains: 0.5 * (sizes[0] - 1))) == 1


def test_what_cannot_be_cut_is_kept_whole_or_dropped() -> None:
    habit = Habit(divisible=False)
    habit.adopt([WIDE], [WIDE])
    assert kept(habit, DraftTree.chain(1, [2])).tokens == (1, 2)
    habit.adopt([WIDE], [DraftTree.root(1)])
    assert kept(habit, DraftTree.chain(1, [2])).tokens == (1,)


def test_budgets_are_those_of_the_decision_and_keep_their_other_limits() -> None:
    habit = Habit()
    habit.depth = 3
    cut, short = habit.budgets([Budget(8, 16, True), Budget(2)])
    assert (cut.depth, cut.nodes, cut.chains_only, short.depth) == (3, 16, True, 2)
    habit.depth = sys.maxsize
    assert habit.budgets([Budget(8)]) == [8]
