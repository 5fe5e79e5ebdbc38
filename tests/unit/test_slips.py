"""What changes the source of a function for a test changes that and nothing else."""

from __future__ import annotations

import pytest

from foretoken.drafters.ngram import continuation
from slips import Slip, changed


def test_a_slip_is_made_and_undone() -> None:
    slip = Slip(continuation, "[:length]", "[: length - 1]", lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        slip.apply(patch)
        assert continuation([1, 2, 3], 1, 5) == (2, 3, 2, 3)
    assert continuation([1, 2, 3], 1, 5) == (2, 3, 2, 3, 2)


def test_a_slip_that_no_longer_fits_says_so() -> None:
    with pytest.raises(AssertionError, match="has 'nonsense' 0 times"):
        changed(continuation, "nonsense", "")
