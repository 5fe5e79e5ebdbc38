"""`check_drafter` can fail: broken engines, broken distributions and broken drafters are all found out by it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_drafters import DRAFTERS, model_drafter, steps, target

import mutations
from foredraft import LLM, SamplingParams
from foredraft.drafters.lookup.ngram import NGramDrafter
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.drafter import Needs, PromptChunk
from foredraft.engine.row import Row, RowState
from foredraft.errors import ForedraftError
from foredraft.methods.lookup import NGramOptions
from foredraft.model.lm import Nodes
from foredraft.testing import check_drafter, toy_model
from foredraft.tree import DraftSize, DraftTree

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
    ("perfect", mutations.draws_from_the_distribution_before),
    ("perfect-tree", mutations.mixes_up_the_rows),
    ("perfect", mutations.overlooks_the_end_inside_a_draft),
    ("perfect", mutations.ends_one_token_late),
    ("perfect", mutations.forgets_history),
]


@pytest.mark.sample(3)
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


class TouchesTheText(_Around):
    def propose_row(self, row: Row, budget: int) -> DraftTree:
        row.token_ids[0] += 1
        return DraftTree.root(row.pending)


class LosesARow(_Around):
    def propose(self, rows: Sequence[Row], budgets: Sequence[int]) -> list[DraftTree]:
        return super().propose(rows, budgets)[:1]


class AsksTheTarget(_Around):
    def propose(self, rows: Sequence[Row], budgets: Sequence[int]) -> list[DraftTree]:
        lm = target()
        lm.forward(Nodes.from_chains([[1]]), lm.new_cache(1))
        return super().propose(rows, budgets)


class StartsNothing(_Around):
    """Drafts from a state of rows that it never makes."""

    def start(self, rows: Sequence[Row], chunks: Sequence[PromptChunk]) -> None:
        pass


class StartsWithTheFirstChunk(_Around):
    """Wants prompts, and begins with rows at their first chunk, which single tokens do not have."""

    def needs(self, target: Any, cache: Any) -> Needs:
        return Needs(prompts=True)

    def start(self, rows: Sequence[Row], chunks: Sequence[PromptChunk]) -> None:
        pairs = [(row, chunk) for row, chunk in zip(rows, chunks, strict=True) if not chunk.is_last]
        super().start([row for row, _ in pairs], [chunk for _, chunk in pairs])


class ShortensTheTargetsCache(_Around):
    """Takes a column of a row away that counts."""

    def needs(self, target: Any, cache: Any) -> Needs:
        self.cache = cache
        return Needs()

    def propose(self, rows: Sequence[Row], budgets: Sequence[int]) -> list[DraftTree]:
        self.cache.lengths[rows[0].slot] -= 1
        return super().propose(rows, budgets)  # type: ignore[arg-type]


WRONG: dict[str, Callable[[Row, int], DraftTree]] = {
    "DraftsTooDeep": lambda row, budget: DraftTree.chain(row.pending, range(budget + 1)),
    "StartsElsewhere": lambda row, budget: DraftTree.root(row.pending + 1),
    "LeavesTheVocabulary": lambda row, budget: DraftTree.chain(row.pending, [10_000][:budget]),
}


@pytest.mark.parametrize(
    "broken",
    [
        *(
            type(name, (_Around,), {"propose_row": lambda self, row, budget, draft=draft: draft(row, budget)})
            for name, draft in WRONG.items()
        ),
        *(TouchesTheText, LosesARow, AsksTheTarget, StartsNothing, StartsWithTheFirstChunk, ShortensTheTargetsCache),
    ],
)
def test_a_broken_drafter_is_found_out(broken: Any) -> None:
    with pytest.raises((AssertionError, ForedraftError, ValueError, KeyError)):
        check_drafter(broken, target(), depths=(2,))


def test_a_sound_drafter_passes_the_same_short_check(capsys: pytest.CaptureFixture[str]) -> None:
    """The control of the tests above. What was shown is printed, and returned."""
    shown = check_drafter(_Around, target(), depths=(2,))
    assert capsys.readouterr().out == f"{shown}\n"
    assert str(shown).startswith(f"ngram: {shown.num_rows} rows in {shown.num_runs} runs, 40 of them governed. The")
    assert shown.num_chains > 0
    assert shown.num_trees == 0
    assert 0 < shown.num_accepted <= shown.num_drafted
    assert shown.deepest == 2


@pytest.mark.full
def test_a_drafter_that_drafts_nothing_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    check_drafter(lambda _: EmptyDrafter(), target(), depths=(1,))
    assert "It drafted nothing, so its drafts were not tested." in capsys.readouterr().out


@pytest.mark.full
def test_a_tree_of_lists_passes_and_decodes(capsys: pytest.CaptureFixture[str]) -> None:
    class OfLists(_Around):
        def propose_row(self, row: Row, budget: int) -> DraftTree:
            return DraftTree([row.pending, 1, 2], [-1, 0, 0])  # type: ignore[arg-type]

    assert check_drafter(OfLists, target(), depths=(2,)).num_trees > 0
    rows = LLM(toy_model(64), "none")
    with rows.engine(OfLists(2)) as engine:
        (row,) = engine.add_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=5))
        list(engine.run())
    assert row.stats.num_draft_tokens > 0


# -- state that outlives its rows ------------------------------------------------------------------------------------


class Keeping(_Around):
    """Keeps what it knows of rows in a table of its own.

    Args:
      keep: puts a row into the table.
    """

    def __init__(self, depth: int, keep: Callable[[Any, Row], object]) -> None:
        super().__init__(depth)
        self.kept: Any = {}
        self.keep = keep

    def start(self, rows: Sequence[Row], chunks: Sequence[PromptChunk]) -> None:
        super().start(rows, chunks)
        for row in rows:
            self.keep(self.kept, row)

    def propose_row(self, row: Row, budget: int) -> DraftTree:
        if row.id in self.kept:
            self.kept[row.id] += 1
        return super().propose_row(row, budget)


@dataclass(eq=False)
class _Dropping(RowState):
    """Has a drafter drop what it knows of a row when that ends, if it was drafted for so often."""

    kept: dict[int, int]
    least: int

    def ended(self, row: Row, *, is_kept: bool) -> None:
        if self.kept[row.id] >= self.least:
            del self.kept[row.id]


def dropped_after(least: int) -> Callable[[Any, Row], None]:
    def keep(kept: Any, row: Row) -> None:
        kept[row.id] = 0
        row.state["of what it keeps"] = _Dropping(kept, least)

    return keep


KEEPS: dict[str, Callable[[Any, Row], object]] = {
    "numbers": lambda kept, row: kept.update({row.id: 1}),
    "all that were not drafted for": dropped_after(1),
    "rows": lambda kept, row: kept.setdefault("rows", []).append(row),
    "rows deep inside": lambda kept, row: kept.update(later=SimpleNamespace(calls=deque([partial(print, row)]))),
    "pairs": lambda kept, row: kept.update({(row.id, "state"): None}),
    "a number of torch": lambda kept, row: kept.update(ids=torch.tensor([row.id])),
    "a method": lambda kept, row: kept.update(extend=row.extend),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", KEEPS)
def test_state_that_outlives_its_rows_is_found(name: str) -> None:
    with pytest.raises(AssertionError, match=r"state of finished rows is left in Keeping\.kept"):
        check_drafter(partial(Keeping, keep=KEEPS[name]), target(), depths=(2,))


@pytest.mark.full
def test_a_table_that_rows_are_dropped_from_as_they_end_is_no_fault() -> None:
    """However they end: every row that began is told of."""
    assert check_drafter(partial(Keeping, keep=dropped_after(0)), target(), depths=(2,)).num_drafted > 0


def test_a_drafter_that_breaks_only_where_it_is_governed_is_found_out() -> None:
    class Shallow(_Around):
        """Takes a budget that a governor has cut for an error."""

        def propose_row(self, row: Row, budget: DraftSize) -> DraftTree:
            assert budget.least == 0.0, "governed"
            return replace(
                chain := DraftTree.chain(row.pending, [1, 2][:budget]), scores=tuple(0.5**i for i in range(len(chain)))
            )

    with pytest.raises(AssertionError, match="governed"):
        check_drafter(Shallow, target(), depths=(2,))
