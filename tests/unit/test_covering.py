"""The tables of cases that stand for whole products."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from covering import pairwise


@pytest.mark.parametrize("sizes", [(3, 4, 5), (8, 2, 2), (7, 3), (4, 1, 3, 2)])
def test_every_two_values_meet_in_what_is_not_full(sizes: tuple[int, ...]) -> None:
    axes = {f"axis{place}": [(place, value) for value in range(size)] for place, size in enumerate(sizes)}
    names, cases = pairwise(**axes)
    assert names == [*axes]
    assert [case.values for case in cases] == list(product(*axes.values()))
    taken = [case.values for case in cases if not case.marks]
    pairs = {pair for case in taken for pair in combinations(case, 2)}
    assert pairs == {pair for one, other in combinations(axes.values(), 2) for pair in product(one, other)}
    two_largest = sorted(sizes)[-2:]
    assert len(taken) == two_largest[0] * two_largest[1]


def test_marks_of_values_are_those_of_their_cases() -> None:
    _, cases = pairwise(name=["a", pytest.param("b", marks=pytest.mark.slow)], number=[1, 2])
    assert [[mark.name for mark in case.marks] for case in cases] == [[], [], ["slow"], ["slow"]]
