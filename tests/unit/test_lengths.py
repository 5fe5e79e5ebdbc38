"""Length policies: literal schedules, rows that do not see each other, and no trace after `forget`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foretoken.drafters.lengths import Fixed, Heuristic, LengthPolicy, make_policy
from foretoken.errors import ConfigError


@dataclass
class Row:
    """As much of a sequence as a policy may use."""

    id: int
    token_ids: list[int] = field(default_factory=list)


def row(id: int) -> Any:
    return Row(id)


class StopsAt(Fixed):
    """A policy that stops by itself, and remembers what it was asked."""

    name = "stops_at"

    def __init__(self, num_tokens: int, stop: int) -> None:
        super().__init__(num_tokens)
        self.stop = stop
        self.asked: list[tuple[int, Tensor | None]] = []

    def keep_drafting(self, row: Any, depth: int, draft_log_probs: Tensor | None) -> bool:
        self.asked.append((depth, draft_log_probs))
        return depth < self.stop


def test_fixed_never_changes() -> None:
    policy = Fixed(4)
    for accepted in (0, 4, 2):
        assert policy.begin(row(1)) == 4
        assert policy.keep_drafting(row(1), 3, None)
        policy.end(row(1), 4, accepted)


def test_heuristic_schedule() -> None:
    """3 -> all of 3 accepted -> 5 -> 2 of 5 -> 4 -> none of 4 -> 3 -> 2 -> 1 -> 1."""
    policy, lengths = Heuristic(3), []
    for accepted in (3, 2, 0, 0, 0, 0, 1):
        lengths.append(policy.begin(row(1)))
        policy.end(row(1), lengths[-1], accepted)
    assert [*lengths, policy.begin(row(1))] == [3, 5, 4, 3, 2, 1, 1, 3]


def test_heuristic_learns_nothing_from_a_draft_that_fell_short_and_was_right() -> None:
    policy = Heuristic(3)
    policy.end(row(1), 2, 2)
    policy.end(row(1), 0, 0)
    assert policy.begin(row(1)) == 3


def test_heuristic_shortens_after_a_short_draft_that_was_wrong() -> None:
    policy = Heuristic(3)
    policy.end(row(1), 2, 1)
    assert policy.begin(row(1)) == 2


def test_heuristic_from_zero_never_drafts() -> None:
    policy = Heuristic(0)
    policy.end(row(1), 0, 0)
    assert policy.begin(row(1)) == 0


def test_rows_do_not_see_each_other_and_are_forgotten() -> None:
    policy = Heuristic(3)
    policy.end(row(1), 3, 3)
    assert (policy.begin(row(1)), policy.begin(row(2))) == (5, 3)
    policy.forget(row(1))
    policy.forget(row(2))
    assert policy.begin(row(1)) == 3
    assert not policy._length_of


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=30), st.integers(1, 8))
def test_heuristic_stays_at_one_or_more(outcomes: list[tuple[int, int]], start: int) -> None:
    policy = Heuristic(start)
    for drafted, accepted in outcomes:
        before = policy.begin(row(1))
        drafted = min(drafted, before)
        policy.end(row(1), drafted, min(drafted, accepted))
        assert policy.begin(row(1)) - before in (-1, 0, 2)
        assert policy.begin(row(1)) >= 1


def test_length_is_cap_budget_or_stop_whichever_comes_first() -> None:
    assert Fixed(4).length(row(1), 9) == 4
    assert Fixed(4).length(row(1), 2) == 2
    assert Fixed(0).length(row(1), 2) == 0
    assert StopsAt(4, stop=1).length(row(1), 9) == 1
    assert StopsAt(4, stop=0).length(row(1), 9) == 0


def test_length_asks_before_every_token_and_shows_no_law() -> None:
    policy = StopsAt(4, stop=2)
    policy.length(row(1), 9)
    assert policy.asked == [(0, None), (1, None), (2, None)]


def test_make_policy() -> None:
    assert isinstance(make_policy("fixed", 3), Fixed)
    assert isinstance(make_policy("heuristic", 3), Heuristic)
    assert make_policy("heuristic", 3).begin(row(1)) == 3
    with pytest.raises(ConfigError, match=r"'entropy'.*fixed, heuristic"):
        make_policy("entropy", 3)


@pytest.mark.parametrize("name", ["fixed", "heuristic"])
def test_negative_lengths_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="-1"):
        make_policy(name, -1)


def test_a_policy_has_to_say_where_it_begins() -> None:
    with pytest.raises(TypeError):
        LengthPolicy()  # type: ignore[abstract]
