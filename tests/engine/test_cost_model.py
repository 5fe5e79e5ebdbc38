"""What steps and drafts are expected to take, after what was seen of them."""

from __future__ import annotations

import pytest

from foredraft.engine.cost_model import CostCurve, CostModel


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


def test_the_context_is_in_the_costs() -> None:
    """Rows of 2,256 tokens cost 20 ms each beside the nodes; what was learned at one number of rows holds at others."""
    costs = CostModel(CostCurve({1: 0.02, 16: 0.035}, context=256, per_token=1e-5))
    assert costs.verify(4, 4) == pytest.approx(0.023)
    costs.set_context(256)
    assert costs.verify(4, 4) == pytest.approx(0.023)
    costs.set_context(2256)
    assert costs.verify(1, 1) == pytest.approx(0.04)
    assert costs.verify(4, 4) == pytest.approx(0.103)
    for _ in range(20):
        costs.verified(4, 4, 2 * 0.103)
    assert costs.verify(4, 4) == pytest.approx(2 * 0.103)
    assert costs.verify(3, 3) == pytest.approx(2 * 0.082)
    costs.set_context(4256)
    assert costs.verify(4, 4) == pytest.approx(2 * 0.183)
    costs.set_context(0)
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
