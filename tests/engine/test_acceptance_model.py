"""How likely nodes are to be accepted: what is learned of kinds of nodes, of rows and of scores."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from foredraft.engine.acceptance_model import NUM_COMPARED, AcceptanceModel
from foredraft.tree import DraftTree

ROWS: Any = [SimpleNamespace(state={}) for _ in range(2)]


def test_a_row_that_fares_badly_expects_less_than_another() -> None:
    model = AcceptanceModel()
    for number in range(40):
        model.proposed(ROWS[number % 2], DraftTree.chain(1, [2], source="x"), "x")
        model.came(ROWS[number % 2], [2 if number % 2 else 3])
    bad, good = model.by_depth(ROWS[0], 1, "x")[0], model.by_depth(ROWS[1], 1, "x")[0]
    assert bad < 0.35 < 0.6 < good
    ROWS[0].state.clear()
    assert model.by_depth(ROWS[0], 1, "x")[0] > bad


def test_a_row_that_fares_well_is_not_believed_level_by_level() -> None:
    """Scores say how sure one can be further on; multiplied at every level, luck made the deepest nodes certain."""
    model = AcceptanceModel()
    chain = DraftTree(tuple(range(1, 8)), tuple(range(-1, 6)), scores=tuple(0.5**depth for depth in range(7)))
    for place in range(120):
        model.proposed(ROWS[place % 2], chain, "x")
        model.came(ROWS[place % 2], (9,) if place % 2 else (2, 3, 9))
    lucky, unlucky = ([chance for chance, _ in model.best_nodes(row, chain, 0.0)] for row in ROWS)
    assert model.factor(ROWS[0]) > 1.1 > 0.9 > model.factor(ROWS[1])
    assert lucky[0] > unlucky[0]
    assert lucky[3] / lucky[0] == pytest.approx(unlucky[3] / unlucky[0])


# -- heads beside their validation -------------------------------------------------------------------------------------


def warnings_of(caplog: pytest.LogCaptureFixture, hit_rate: float, num_drafts: int, source: str = "eagle3") -> int:
    """Warnings of a model that is told 0.5 for eagle3, after drafts behind different tokens."""
    caplog.clear()
    model = AcceptanceModel()
    model.compare_with({"eagle3": 0.5})
    for number in range(num_drafts):
        model.proposed(ROWS[1], DraftTree.chain(number, [1], source=source), source)
        model.came(ROWS[1], [1 if number % 100 < 100 * hit_rate else 2])
    return len(caplog.records)


def test_a_head_far_below_its_validation_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(caplog, 0.05, NUM_COMPARED - 1) == 0
    assert warnings_of(caplog, 0.05, 3 * NUM_COMPARED) == 1
    assert warnings_of(caplog, 0.2, 3 * NUM_COMPARED) == 0  # worse than in validation, as texts are
    assert warnings_of(caplog, 0.0, 3 * NUM_COMPARED, "ngram") == 0


def test_only_first_drafts_after_different_tokens_count(caplog: pytest.LogCaptureFixture) -> None:
    model = AcceptanceModel()
    model.compare_with({"eagle3": 0.5})
    for _ in range(10 * NUM_COMPARED):  # one rejection, again and again
        model.proposed(ROWS[1], DraftTree.chain(7, [1], source="eagle3"), "eagle3")
        model.came(ROWS[1], [2])
    for number in range(2 * NUM_COMPARED):  # another drafter has a part in these
        model.proposed(ROWS[1], DraftTree((number, 1, 3), (-1, 0, 0), sources=("", "ngram", "eagle3")), "eagle3")
        model.came(ROWS[1], [2])
    assert not caplog.records
