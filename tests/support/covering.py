"""Tables of cases in which every two values of different axes meet, where the whole product would say little more."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(**axes: Iterable[Any]) -> tuple[list[str], list[Any]]:
    """Names and cases for `pytest.mark.parametrize`: the whole product, all but a covering part of it marked full.

    The part is chosen greedily, always the same: each case is the first of those that bring the most pairs of values
    that have not met. An axis may have `pytest.param` for values; their marks go to all of its cases.

    Two axes have one pair each, so that their product is the table; three of 3, 4 and 5 values have 60 cases, of which
    20 are enough.
    """
    values = [list(axis) for axis in axes.values()]
    cases = list(product(*(range(len(axis)) for axis in values)))
    pairs = {case: {*combinations(enumerate(case), 2)} for case in cases}
    missing = set().union(*pairs.values())
    taken = set()
    while missing:
        case = max(cases, key=lambda case: len(pairs[case] & missing))
        taken.add(case)
        missing -= pairs[case]
    made = []
    for case in cases:
        chosen = [axis[place] for axis, place in zip(values, case, strict=True)]
        parts = [each if hasattr(each, "marks") else pytest.param(each) for each in chosen]
        marks = [mark for part in parts for mark in part.marks] + [pytest.mark.full] * (case not in taken)
        made.append(pytest.param(*(value for part in parts for value in part.values), marks=marks))
    return [*axes], made
