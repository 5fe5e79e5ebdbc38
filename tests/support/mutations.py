"""Faults of state, positions, masks and distributions, each small enough to be a slip of the pen."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from foredraft import accept
from foredraft.accept import Verdict
from foredraft.drafters.parts.growth import GrowingDraft
from foredraft.engine.row import Row
from foredraft.engine.stopping import StopChecker
from foredraft.model.cache.ragged import KVCache
from foredraft.model.lm import CausalLM, Nodes
from foredraft.model.masks import Masks
from mutants import Call, with_arguments, with_result

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
    with_arguments(KVCache, "commit", lambda call: {"paths": [range(len(path)) for path in call.paths]})(patch)


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
    opened = KVCache.open

    def wrong(self: KVCache, *args: Any, **kwargs: Any) -> int:
        length = opened(self, *args, **kwargs)
        window, flat = self.window, self.window.flat
        if flat is None:
            window.columns = None
        else:
            window.columns = flat.listed(window.offset + torch.arange(flat.shape[1]).expand(flat.shape))
        return length

    patch.setattr(KVCache, "open", wrong)


def shifts_positions(patch: pytest.MonkeyPatch) -> None:
    """Every node one position too far behind the prefix."""
    _patch_depths(patch, lambda nodes: nodes.depths + 1)


def counts_positions_in_columns(patch: pytest.MonkeyPatch) -> None:
    """Node i gets position L + i, whatever its depth."""
    _patch_depths(patch, lambda nodes: torch.arange(nodes.width).expand_as(nodes.depths))


def _patch_depths(patch: pytest.MonkeyPatch, depths: Callable[[Nodes], torch.Tensor]) -> None:
    forward = CausalLM.forward

    def wrong(self: CausalLM, nodes: Nodes, *args: Any, **kwargs: Any) -> torch.Tensor:
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
    visible = Masks.visible

    def wrong(self: Masks, nodes: Nodes, starts: torch.Tensor, columns: int, *counts: Any) -> torch.Tensor:
        return change(visible(self, nodes, starts, columns, *counts), starts + torch.arange(nodes.width))

    patch.setattr(Masks, "visible", wrong)


def counts_the_window_in_columns(patch: pytest.MonkeyPatch) -> None:
    in_window = Masks.in_window

    def wrong(self: Masks, nodes: Nodes, starts: Any, positions: Any, columns: int) -> torch.Tensor:
        return in_window(self, nodes, starts, starts + torch.arange(nodes.width), columns)

    patch.setattr(Masks, "in_window", wrong)


def forgets_the_window(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Masks, "in_window", lambda *_: torch.tensor(True))


def widens_the_window(patch: pytest.MonkeyPatch) -> None:
    _patch_window(patch, 1)


def narrows_the_window(patch: pytest.MonkeyPatch) -> None:
    _patch_window(patch, -1)


def _patch_window(patch: pytest.MonkeyPatch, extra: int) -> None:
    in_window = Masks.in_window

    def wrong(self: Masks, *args: Any) -> torch.Tensor:
        return in_window(dataclasses.replace(self, window=self.window + extra), *args)

    patch.setattr(Masks, "in_window", wrong)


# -- the distribution and the loop -----------------------------------------------------------------------------------


def leaves_the_noise_unkeyed(patch: pytest.MonkeyPatch) -> None:
    """The noise depends on how often somebody asked, as a generator's would."""
    _patch_choice(patch, lambda paths, positions, call: (paths, [10_000 * call + i for i in range(len(positions))]))


def keys_noise_by_the_pending_token(patch: pytest.MonkeyPatch) -> None:
    """All nodes of a draft share the noise of the root."""
    _patch_choice(
        patch,
        lambda paths, positions, _: (
            paths,
            [position - len(path) for path, position in zip(paths, positions, strict=True)],
        ),
    )


def forgets_the_path(patch: pytest.MonkeyPatch) -> None:
    """Processors see the committed text only."""
    _patch_choice(patch, lambda paths, positions, _: ([() for _ in paths], positions))


def _patch_choice(patch: pytest.MonkeyPatch, change: Callable[[Any, Any, int], tuple[Any, Any]]) -> None:
    choose, choose_at, calls = accept.choose, accept.choose_at, itertools.count(1)

    def wrong(logits: Any, samplers: Any, paths: Any, positions: Any) -> torch.Tensor:
        return choose(logits, samplers, *change(paths, positions, next(calls)))

    def wrong_at(logits: Any, node: int, sampler: Any, path: Any, position: int) -> int:
        (path,), (position,) = change([path], [position], next(calls))
        return choose_at(logits, node, sampler, path, position)

    patch.setattr(accept, "choose", wrong)
    patch.setattr(accept, "choose_at", wrong_at)


def accepts_whatever_was_drafted(patch: pytest.MonkeyPatch) -> None:
    def to_the_end(_: list[Verdict], call: Call) -> list[Verdict]:
        ends = [tree.leaves[0] for tree in call.trees]
        return [
            Verdict(tree.path(end), int(call.logits[row][end].argmax()))
            for row, (tree, end) in enumerate(zip(call.trees, ends, strict=True))
        ]

    with_result(accept, "accept", to_the_end)(patch)


def rectangle(logits: Any) -> torch.Tensor:
    """Logits (B, N, V) of rows that may be of different width; padding holds the last node."""
    rows = [logits[i] for i in range(len(logits))]
    width = max(map(len, rows))
    return torch.stack([torch.cat([row, row[-1:].expand(width - len(row), -1)]) for row in rows])


def draws_from_the_distribution_before(patch: pytest.MonkeyPatch) -> None:
    """Every node answers with the logits of its predecessor in the tensor."""
    with_arguments(accept, "accept", lambda call: {"logits": rectangle(call.logits).roll(1, dims=1)})(patch)


def mixes_up_the_rows(patch: pytest.MonkeyPatch) -> None:
    """Where anything was drafted, the first row answers for the last."""

    def change(call: Call) -> dict[str, Any]:
        return {"logits": rectangle(call.logits).flip(0)} if max(map(len, call.trees)) > 1 else {}

    with_arguments(accept, "accept", change)(patch)


def overlooks_the_end_inside_a_draft(patch: pytest.MonkeyPatch) -> None:
    """Only the last token of a step is looked at."""
    check, num_left = StopChecker.check, dict[int, int]()

    def count(verdicts: list[Verdict], call: Call) -> list[Verdict]:
        num_left.update((id(row.checker), len(verdict.path)) for row, verdict in zip(call.rows, verdicts, strict=True))
        return verdicts

    def wrong(self: StopChecker, token: int) -> Any:
        num_left[id(self)] -= 1
        return None if num_left[id(self)] else check(self, token)

    with_result(accept, "accept", count)(patch)
    patch.setattr(StopChecker, "check", wrong)


def ends_one_token_late(patch: pytest.MonkeyPatch) -> None:
    """The budget counts drafted tokens and forgets the bonus."""
    patch.setattr(Row, "num_remaining_tokens", property(lambda row: row.max_length - len(row.token_ids) + 1))
    with_arguments(StopChecker, "__init__", lambda call: {"max_length": call.max_length + 1})(patch)


def forgets_history(patch: pytest.MonkeyPatch) -> None:
    """Emitted tokens never reach the counts of the sampler when there are several."""
    extend = Row.extend

    def wrong(self: Row, tokens: Any) -> None:
        if len(tokens) == 1:
            extend(self, tokens)
        else:
            self.token_ids.extend(tokens)

    patch.setattr(Row, "extend", wrong)


# -- the drafter's own cache, which costs speed and never tokens -----------------------------------------------------


def keeps_the_next_columns(patch: pytest.MonkeyPatch) -> None:
    """Accepted nodes are looked up one column too far in the drafter's cache."""
    _patch_kept(patch, lambda offsets: [offset + 1 for offset in offsets])


def keeps_the_first_columns(patch: pytest.MonkeyPatch) -> None:
    """The right number of accepted nodes stays in the drafter's cache, but the first ones of the tree."""
    _patch_kept(patch, lambda offsets: list(range(len(offsets))))


def _patch_kept(patch: pytest.MonkeyPatch, change: Callable[[list[int]], list[int]]) -> None:
    columns_along = GrowingDraft.columns_along
    patch.setattr(GrowingDraft, "columns_along", lambda self, tokens: change(columns_along(self, tokens)))
