"""What drafting costs, from steps that were timed: a mean that pauses of the machine do not make dearer."""

from __future__ import annotations

import pytest

from foredraft.config.sampling import SamplingParams
from foredraft.tune.counting import TIMED_TEXTS, spread, undisturbed
from foredraft.tune.walk import RecordedText

PARAMS = SamplingParams(max_tokens=4)


def test_both_kinds_of_steps_of_a_union_count():
    """Its head was asked in every second step: half of the time went by in steps that the median passes over."""
    mostly = [0.3, 2.4] * 11 + [0.3] * 2
    assert undisturbed(mostly) == pytest.approx((13 * 0.3 + 8 * 2.4) / 21)
    assert undisturbed([2.4] * 10 + [0.3] * 14) > 0.9


def test_pauses_of_the_machine_do_not_count():
    assert undisturbed([1.0] * 21 + [900.0] * 3) == 1.0
    assert undisturbed([1.0]) == 1.0


@pytest.mark.parametrize(("number", "places"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (12, [0, 4, 8])])
def test_texts_are_taken_evenly(number: int, places: list[int]):
    texts = [RecordedText("", (place,), (), PARAMS) for place in range(number)]
    assert [text.prompt[0] for text in spread(texts, TIMED_TEXTS)] == places
