"""One fault at a time in state, positions and masks: each must show in the node logits of every architecture.

A test suite that stays green with a broken rollback proves nothing. Every fault is made on an architecture that has
windows and full attention; the others are marked full. A cell in which the fault does not show is a failure of the
test model: it would count as untested.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from architectures import ARCHITECTURES
from foredraft.model.lm import layer_types
from harness import PREFIXES, Session, adapter, first_attention, largest_difference, oracle, rounds_of
from mutations import (
    Patch,
    commits_everything,
    commits_one_less,
    commits_one_more,
    counts_positions_in_columns,
    counts_the_window_in_columns,
    forgets_the_window,
    hides_itself,
    hides_the_first_column,
    hides_the_last_committed_column,
    hides_the_parent,
    moves_nothing,
    narrows_the_window,
    shifts_positions,
    shows_siblings,
    shows_the_next_column,
    widens_the_window,
    writes_ragged_rows_at_one_offset,
)

VISIBLE = 1e-3
"""A fault has to move a logit by this much: a hundred times the rounding of the coarsest attention."""


@dataclass(frozen=True)
class Mutation:
    """A fault and where it can show: in chains, in trees, with or without layers of this type."""

    apply: Patch
    in_chains: bool = True
    in_trees: bool = True
    needs_layer: str = ""

    @property
    def name(self) -> str:
        return self.apply.__name__.strip("_").replace("_", "-")

    def cells(self) -> list[Any]:
        shapes = [False] * self.in_chains + [True] * self.in_trees
        return [
            pytest.param(
                self, name, is_tree, id=f"{self.name}-{name}-{'tree' if is_tree else 'chain'}",
                marks=() if name == "gemma3" else pytest.mark.full,
            )
            for name in ARCHITECTURES
            if not self.needs_layer or self.needs_layer in layer_kinds(name)
            for is_tree in shapes
        ]  # fmt: skip


def layer_kinds(name: str) -> tuple[str, ...]:
    """Attention types of the layers; a window that never fills counts as full attention."""
    config = ARCHITECTURES[name].config()
    window = getattr(config, "sliding_window", None)
    is_filled = window is not None and window < min(map(len, PREFIXES))
    return layer_types(config) if is_filled else ("full_attention",)


MUTATIONS = (
    Mutation(commits_everything),
    Mutation(moves_nothing, in_chains=False),  # the path of a chain lies in place
    Mutation(commits_one_more),
    Mutation(commits_one_less),
    Mutation(writes_ragged_rows_at_one_offset),
    Mutation(shifts_positions),
    Mutation(counts_positions_in_columns, in_chains=False),  # of a chain, they are the same
    Mutation(hides_the_parent),
    Mutation(shows_the_next_column),
    Mutation(hides_the_first_column, needs_layer="full_attention"),
    Mutation(hides_the_last_committed_column),
    Mutation(hides_itself),
    Mutation(shows_siblings, in_chains=False),
    Mutation(counts_the_window_in_columns, in_chains=False, needs_layer="sliding_attention"),
    Mutation(forgets_the_window, needs_layer="sliding_attention"),
    Mutation(widens_the_window, needs_layer="sliding_attention"),
    Mutation(narrows_the_window, needs_layer="sliding_attention"),
)


@pytest.mark.parametrize(("mutation", "name", "is_tree"), [cell for mutation in MUTATIONS for cell in mutation.cells()])
def test_a_fault_in_state_positions_or_masks_shows(
    mutation: Mutation, name: str, is_tree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefix is cached faultlessly; then the fault moves some logit of some node, in the rounds that follow."""
    attention = first_attention(name)
    want = oracle(name, attention, is_tree)
    session = Session.start(adapter(name), PREFIXES)
    mutation.apply(monkeypatch)
    assert largest_difference(session.run(rounds_of(is_tree)), want) > VISIBLE
