"""One fault at a time in state, positions and masks: each must show in the node logits of every architecture.

A test suite that stays green with a broken rollback proves nothing. A cell in which the fault does not show is a
failure of the test model: it would count as untested.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from architectures import ARCHITECTURES
from foretoken.engine.cache import KVCache
from foretoken.engine.model import CausalLM, Nodes, layer_types
from harness import PREFIXES, Session, adapter, first_attention, largest_difference, oracle, rounds_of

VISIBLE = 1e-3
"""A fault has to move a logit by this much: a hundred times the rounding of the coarsest attention."""

Patch = Callable[[pytest.MonkeyPatch], None]


def commits_everything(patch: pytest.MonkeyPatch) -> None:
    """Rollback deleted: rejected nodes stay in the cache."""

    def commit(self: KVCache, paths: Any, first_row: int = 0) -> None:
        width = self.window.view_length - self.window.offset
        for row in range(first_row, first_row + len(paths)):
            self.lengths[row] += width

    patch.setattr(KVCache, "commit", commit)


def moves_nothing(patch: pytest.MonkeyPatch) -> None:
    """Stale columns committed: the right number of them, with the wrong nodes in them."""
    patch.setattr(KVCache, "_move", lambda *_: None)


def commits_one_more(patch: pytest.MonkeyPatch) -> None:
    _patch_lengths(patch, 1)


def commits_one_less(patch: pytest.MonkeyPatch) -> None:
    _patch_lengths(patch, -1)


def _patch_lengths(patch: pytest.MonkeyPatch, extra: int) -> None:
    commit = KVCache.commit

    def wrong(self: KVCache, paths: Any, first_row: int = 0) -> None:
        commit(self, paths, first_row)
        for row in range(first_row, first_row + len(paths)):
            self.lengths[row] += extra

    patch.setattr(KVCache, "commit", wrong)


def writes_ragged_rows_at_one_offset(patch: pytest.MonkeyPatch) -> None:
    def write(self: Any, buffer: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        window = self._cache.window
        rows = buffer[window.first_row : window.first_row + states.shape[0]]
        rows[:, :, window.offset : window.offset + states.shape[2]] = states
        return rows[:, :, : window.view_length]

    from foretoken.engine.cache import RaggedLayer

    patch.setattr(RaggedLayer, "_write", write)


def shifts_positions(patch: pytest.MonkeyPatch) -> None:
    """Every node one position too far behind the prefix."""
    _patch_depths(patch, lambda nodes: nodes.depths + 1)


def counts_positions_in_columns(patch: pytest.MonkeyPatch) -> None:
    """Node i gets position L + i, whatever its depth."""
    _patch_depths(patch, lambda nodes: torch.arange(nodes.width).expand_as(nodes.depths))


def _patch_depths(patch: pytest.MonkeyPatch, depths: Callable[[Nodes], torch.Tensor]) -> None:
    forward = CausalLM.forward

    def wrong(self: CausalLM, nodes: Nodes, *args: Any, **kwargs: Any) -> torch.Tensor:
        import dataclasses

        return forward(self, dataclasses.replace(nodes, depths=depths(nodes)), *args, **kwargs)

    patch.setattr(CausalLM, "forward", wrong)


def hides_the_parent(patch: pytest.MonkeyPatch) -> None:
    """Mask off by one: a node does not see the one before it."""
    _patch_visible(patch, lambda mask, own: mask & ~_at(mask, own - 1))


def shows_the_next_column(patch: pytest.MonkeyPatch) -> None:
    """Mask off by one: a node sees the column after its own."""
    _patch_visible(patch, lambda mask, own: mask | _at(mask, own + 1))


def hides_the_first_column(patch: pytest.MonkeyPatch) -> None:
    """The oldest committed column is lost. Behind a filled window nobody misses it, hence full attention only."""
    _patch_visible(patch, lambda mask, own: mask & (torch.arange(mask.shape[2]) > 0))


def hides_the_last_committed_column(patch: pytest.MonkeyPatch) -> None:
    _patch_visible(patch, lambda mask, own: mask & ~_at(mask, own[:, :1] - 1))


def shows_siblings(patch: pytest.MonkeyPatch) -> None:
    """A node sees every node before it, related or not."""
    _patch_visible(patch, lambda mask, own: torch.arange(mask.shape[2]) <= own[:, :, None])


def hides_itself(patch: pytest.MonkeyPatch) -> None:
    _patch_visible(patch, lambda mask, own: mask & ~_at(mask, own))


def _at(mask: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    return torch.arange(mask.shape[2]) == columns[:, :, None]


def _patch_visible(patch: pytest.MonkeyPatch, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Change the mask (B, N, T); the second argument holds every node's own column (B, N)."""
    visible = CausalLM._visible

    def wrong(self: CausalLM, nodes: Nodes, starts: torch.Tensor, columns: int) -> torch.Tensor:
        return change(visible(self, nodes, starts, columns), starts + torch.arange(nodes.width))

    patch.setattr(CausalLM, "_visible", wrong)


def counts_the_window_in_columns(patch: pytest.MonkeyPatch) -> None:
    in_window = CausalLM._in_window

    def wrong(self: CausalLM, nodes: Nodes, starts: Any, positions: Any, columns: int) -> torch.Tensor:
        return in_window(self, nodes, starts, starts + torch.arange(nodes.width), columns)

    patch.setattr(CausalLM, "_in_window", wrong)


def forgets_the_window(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CausalLM, "_in_window", lambda *_: torch.tensor(True))


def widens_the_window(patch: pytest.MonkeyPatch) -> None:
    _patch_window(patch, 1)


def narrows_the_window(patch: pytest.MonkeyPatch) -> None:
    _patch_window(patch, -1)


def _patch_window(patch: pytest.MonkeyPatch, extra: int) -> None:
    in_window = CausalLM._in_window

    def wrong(self: CausalLM, *args: Any) -> torch.Tensor:
        right, self._window = self._window, self._window + extra  # type: ignore[operator]
        try:
            return in_window(self, *args)
        finally:
            self._window = right

    patch.setattr(CausalLM, "_in_window", wrong)


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
            pytest.param(self, name, is_tree, id=f"{self.name}-{name}-{'tree' if is_tree else 'chain'}")
            for name in ARCHITECTURES
            if not self.needs_layer or self.needs_layer in layer_kinds(name)
            for is_tree in shapes
        ]


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
