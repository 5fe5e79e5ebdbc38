"""What steps and drafts are expected to take, after what was seen of them."""

from __future__ import annotations

import pytest

from foredraft.engine.cost_model import CostCurve, CostModel


def test_a_step_that_was_slow_for_once_moves_little() -> None:
    costs = CostModel({1: 0.02, 16: 0.03})
    for _ in range(20):
        costs.verified(1, 1, 0.02)
        costs.verified(1, 8, 0.04)
    before = costs.verify(1, 8)
    costs.verified(1, 8, 4.0)
    assert costs.verify(1, 8) == pytest.approx(before, rel=0.1)
    assert before == pytest.approx(0.04, rel=0.05)


def test_the_first_draft_may_be_slow() -> None:
    costs = CostModel({1: 0.02})
    for seconds in (5.0, 0.01, 0.01):
        costs.drafted(1, 2, seconds)
    assert costs.draft(1, 2) == pytest.approx(0.01)
    assert costs.draft(1, 0) == 0.0


def test_a_first_draft_counts_only_as_long_as_there_is_no_other() -> None:
    """A view that is made, a prompt that is read: many times what later drafts take, at whatever depth they are."""
    costs = CostModel({1: 0.02})
    costs.drafted(4, 2, 5.0, is_first=True)
    assert costs.draft(4, 2) == pytest.approx(5.0)
    costs.drafted(4, 1, 0.01)
    assert costs.draft(4, 2) == pytest.approx(0.02)
    costs.drafted(4, 2, 5.0, is_first=True)
    assert costs.draft(4, 2) == pytest.approx(0.02)


def test_what_deep_drafts_took_when_they_were_tried_once_does_not_keep_them_away() -> None:
    """The first draft of a process, or one in which the machine paused, and others were seen more often since."""
    costs = CostModel({1: 0.02})
    costs.drafted(1, 4, 0.05)  # cold
    assert costs.draft(1, 2) == pytest.approx(0.025)
    for _ in range(2):
        costs.drafted(1, 2, 0.004)
    assert costs.draft(1, 4) == pytest.approx(0.05)
    costs.drafted(1, 2, 0.004)
    assert costs.draft(1, 4) == pytest.approx(0.008)
    assert costs.draft(1, 3) == pytest.approx(0.006)
    costs.drafted(1, 4, 0.005)
    assert costs.draft(1, 4) == pytest.approx(0.005)
    assert costs.draft(1, 6) == pytest.approx(0.006)


def test_what_deep_drafts_took_each_time_is_believed_until_it_is_long_ago() -> None:
    costs = CostModel({1: 0.02})
    for _ in range(3):
        costs.drafted(1, 2, 0.05)
    for _ in range(63):
        costs.drafted(1, 1, 0.002)
    assert costs.draft(1, 2) == pytest.approx(0.05)
    costs.drafted(1, 1, 0.002)
    assert costs.draft(1, 2) == pytest.approx(0.004)
    costs.drafted(1, 2, 0.003)
    assert costs.draft(1, 2) == pytest.approx(0.003)
    assert costs.draft(1, 4) == pytest.approx(0.005)


@pytest.mark.parametrize("are_chains", [True, False])
def test_the_first_step_of_a_kind_says_nothing_of_others(are_chains: bool) -> None:
    """Trees that were slow once seemed dear at every size, and were verified no more."""
    costs = CostModel({1: 0.02, 16: 0.03})
    for _ in range(8):
        costs.verified(1, 1, 0.02)
    expected = costs.verify(1, 4, are_chains=are_chains)
    costs.verified(1, 12, 0.09, are_chains=are_chains)
    assert costs.verify(1, 4, are_chains=are_chains) == pytest.approx(expected, rel=0.05)


def test_the_very_first_step_says_nothing_of_later_ones() -> None:
    """It takes what first calls take: a plain step, never seen, is still expected to take what the curve says."""
    costs = CostModel({1: 0.02, 64: 0.04})
    costs.verified(8, 24, 0.16)
    for _ in range(5):
        costs.verified(8, 32, costs.curve(32))
    assert costs.verify(8, 8) == pytest.approx(costs.curve(8), rel=0.05)


def test_the_context_is_in_the_costs() -> None:
    """Rows of 2,256 tokens cost 20 ms each beside the nodes; what was learned at one number of rows holds at others."""
    costs = CostModel(CostCurve({1: 0.02, 16: 0.035}, context=256, per_token=1e-5))
    assert costs.verify(4, 4) == pytest.approx(0.023)
    costs.after(256)
    assert costs.verify(4, 4) == pytest.approx(0.023)
    costs.after(2256)
    assert costs.verify(1, 1) == pytest.approx(0.04)
    assert costs.verify(4, 4) == pytest.approx(0.103)
    for _ in range(20):
        costs.verified(4, 4, 2 * 0.103)
    assert costs.verify(4, 4) == pytest.approx(2 * 0.103)
    assert costs.verify(3, 3) == pytest.approx(2 * 0.082)
    costs.after(4256)
    assert costs.verify(4, 4) == pytest.approx(2 * 0.183)
    costs.after(0)
    assert costs.verify(4, 4) == pytest.approx(2 * 0.023)  # less than was measured is not made up


def test_trees_and_chains_have_costs_of_their_own() -> None:
    costs = CostModel({1: 0.02, 16: 0.03})
    for _ in range(10):
        costs.verified(4, 4, 0.02)
        costs.verified(4, 16, 0.03)
        costs.verified(4, 16, 0.06, are_chains=False)
    assert costs.verify(4, 16) == pytest.approx(0.03, rel=0.1)
    assert costs.verify(4, 16, are_chains=False) == pytest.approx(0.06, rel=0.1)


@pytest.mark.parametrize(("factor", "curve"), [(0.5, 0.02), (3.0, 0.06)])
def test_a_curve_is_bent_where_drafts_are_cheaper_than_it_says(factor: float, curve: float) -> None:
    """Where they are dearer it is not: by a few slow steps of two nodes, large drafts would be out of reach."""
    disproved = []
    costs = CostModel({1: 0.02, 16: 0.04, 32: 0.06}, lambda: disproved.append(True))
    for nodes, seconds in [*[(1, 0.02)] * 4, *[(16, factor * 0.04)] * 4]:
        costs.verified(1, nodes, seconds)
    assert disproved
    assert costs.curve(32) == pytest.approx(curve, abs=0.003)
    assert costs.verify(1, 16) / costs.verify(1, 1) == pytest.approx(factor * 2, rel=0.2)
