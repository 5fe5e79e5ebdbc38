"""`check_drafter` can fail: broken engines, broken laws and broken drafters are all found out by it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import pytest
from test_drafters import DRAFTERS, model_drafter, steps, target

import mutations
from foredraft.drafters.lookup.ngram import NGramDrafter, NGramOptions
from foredraft.engine.sequence import Sequence
from foredraft.errors import ForedraftError
from foredraft.model.lm import Nodes
from foredraft.testing import check_drafter
from foredraft.tree import DraftTree

FAULTS = [
    ("perfect-tree", mutations.commits_everything),
    ("perfect-tree", mutations.moves_nothing),
    ("perfect", mutations.commits_one_more),
    ("perfect", mutations.commits_one_less),
    ("perfect-tree", mutations.counts_positions_in_columns),
    ("perfect-tree", mutations.shows_siblings),
    ("perfect", mutations.writes_ragged_rows_at_one_offset),
    ("draft-model", mutations.leaves_the_noise_unkeyed),
    ("perfect", mutations.keys_noise_by_the_pending_token),
    ("perfect", mutations.forgets_the_path),
    ("draft-model", mutations.accepts_whatever_was_drafted),
    ("perfect", mutations.draws_from_the_law_before),
    ("perfect-tree", mutations.mixes_up_the_rows),
    ("perfect", mutations.overlooks_the_end_inside_a_draft),
    ("perfect", mutations.ends_one_token_late),
    ("perfect", mutations.forgets_history),
]


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_a_broken_engine_is_found_out(name: str, fault: mutations.Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = DRAFTERS[name](3)  # the texts it needs come from the sound engine
    del drafter
    fault(monkeypatch)
    with pytest.raises((AssertionError, ForedraftError)):
        check_drafter(DRAFTERS[name], target(), depths=(3,))


@pytest.mark.parametrize(
    ("num_branches", "fault"),
    [
        (1, mutations.keeps_the_next_columns),
        (2, mutations.keeps_the_next_columns),
        (2, mutations.keeps_the_first_columns),
    ],
)
def test_a_broken_cache_of_the_drafter_costs_steps(
    num_branches: int, fault: mutations.Patch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs no tokens, whence only a drafter that ought to be right every time can show it."""
    drafter = model_drafter(0.0, num_branches)
    assert steps(drafter, 3, 24) == 7
    fault(monkeypatch)
    assert steps(drafter, 3, 24) > 7


# -- drafters that break the contract --------------------------------------------------------------------------------


class _Around(NGramDrafter):
    def __init__(self, depth: int) -> None:
        super().__init__(NGramOptions(num_speculative_tokens=depth, prompt_lookup_min=1))
        self.depth = depth


class DraftsTooDeep(_Around):
    def propose_row(self, row: Sequence, budget: int) -> DraftTree:
        return DraftTree.chain(row.pending, range(budget + 1))


class StartsElsewhere(_Around):
    def propose_row(self, row: Sequence, budget: int) -> DraftTree:
        return DraftTree.root(row.pending + 1)


class TouchesTheText(_Around):
    def propose_row(self, row: Sequence, budget: int) -> DraftTree:
        row.token_ids[0] += 1
        return DraftTree.root(row.pending)


class LosesARow(_Around):
    def propose(self, rows: Seq[Sequence], budgets: Seq[int]) -> list[DraftTree]:
        return super().propose(rows, budgets)[:1]


class AsksTheTarget(_Around):
    def propose(self, rows: Seq[Sequence], budgets: Seq[int]) -> list[DraftTree]:
        lm = target()
        lm.forward(Nodes.from_chains([[1]]), lm.new_cache(1))
        return super().propose(rows, budgets)


class LeavesTheVocabulary(_Around):
    def propose_row(self, row: Sequence, budget: int) -> DraftTree:
        return DraftTree.chain(row.pending, [10_000][:budget])


@pytest.mark.parametrize(
    "broken", [DraftsTooDeep, StartsElsewhere, TouchesTheText, LosesARow, AsksTheTarget, LeavesTheVocabulary]
)
def test_a_broken_drafter_is_found_out(broken: Any) -> None:
    with pytest.raises((AssertionError, ForedraftError, ValueError)):
        check_drafter(broken, target(), depths=(2,))


def test_a_sound_drafter_passes_the_same_short_check() -> None:
    """The control of the tests above."""
    check_drafter(_Around, target(), depths=(2,))
