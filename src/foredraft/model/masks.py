"""Which cache columns every node may look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import torch

from foredraft.model.nodes import FlatNodes, Nodes

Mask: TypeAlias = torch.Tensor | dict[str, torch.Tensor] | None
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass
class Masks:
    """Makes the 4-D masks of one model.

    Args:
      layer_types: kind of attention of every layer.
      window: positions that a sliding layer looks back, its own included.
      dtype: of additive masks.
      device: of all masks.
      is_additive: 0 and the lowest number instead of True and False.
      always: make one also for a single token, which sees every column anyway.
    """

    layer_types: tuple[str, ...]
    window: int | None
    dtype: torch.dtype
    device: torch.device
    is_additive: bool = False
    always: bool = False
    _bands: dict[str, torch.Tensor] = field(default_factory=dict)  # that a chain sees, by kind of attention
    _before: dict[str, int] = field(default_factory=dict)  # columns of a band before the place of the first node

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of attention that the model has."""
        return tuple(dict.fromkeys(self.layer_types))

    @property
    def windows(self) -> dict[str, int | None]:
        """Positions that a node looks back by kind of attention, its own included; None for all."""
        return {kind: None if kind == FULL else self.window for kind in self.kinds}

    def of_chains(self, kind: str, lengths: Sequence[int], width: int, columns: int) -> torch.Tensor:
        """Mask (R, 1, N, T) of chains behind rows of these lengths; padding sees what a longer chain would.

        All rows see the same band, each at its own place: the mask of one is a view of one band, kept for all steps.
        """
        masks = [self._cut(kind, length, width, columns) for length in lengths]
        return masks[0][None, None] if len(masks) == 1 else torch.stack(masks)[:, None]

    def _cut(self, kind: str, length: int, width: int, columns: int) -> torch.Tensor:
        """(N, T): node i is in column ``length + i``. The band is made wider where it does not reach."""
        before, band = self._before.get(kind, 0), self._bands.get(kind)
        height, total = (0, 0) if band is None else band.shape
        after = total - before
        if band is None or length > before or width > height or columns - length > after:
            # twice as far, so that it seldom happens, but only where it does not reach
            before = before if length <= before else max(min(2 * length, length + 4096), 256)
            after = after if columns - length <= after else 2 * (columns - length)
            band = self._bands[kind] = self._band(self.windows[kind], before, max(width, height), after)
            self._before[kind] = before
        start = before - length
        return band[:width, start : start + columns]

    def _band(self, window: int | None, before: int, height: int, after: int) -> torch.Tensor:
        """(height, before + after): columns that consecutive nodes see, the first of which is in column ``before``."""
        distance = torch.arange(height, device=self.device)[:, None]
        distance = distance - torch.arange(-before, after, device=self.device)
        sees = distance >= 0
        if window is not None:
            sees &= distance < window
        return self.formatted(sees[None])[0, 0]

    def release(self) -> None:
        """Drop the bands that masks of chains are cut from."""
        self._bands.clear()
        self._before.clear()

    def stand_ins(self, flat: FlatNodes) -> Mask:
        """What a model is given in place of masks where its rows run attention in groups: one for every kind.

        Each knows the list that it stands for, since not every model lets its attention know.
        """
        masks = {kind: torch.zeros(1, 1, len(flat), 1, device=self.device) for kind in self.kinds}
        for kind, mask in masks.items():
            mask.stands_for = flat, kind  # type: ignore[attr-defined]  # a mask that is computed of it has it no more
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def of(
        self,
        nodes: Nodes,
        starts: torch.Tensor,
        positions: torch.Tensor,
        columns: int,
        counts: torch.Tensor | None = None,
    ) -> Mask:
        """Masks (B, 1, N, T), one per layer type where the model has several; None where everything is visible.

        Args:
          starts: (B, 1), columns before the root of every row.
          positions: (B, S + N) of the fed and the new nodes.
          columns: T.
          counts: (B,), real nodes of every row, where they are on the device already.
        """
        slides = SLIDING in self.layer_types
        if nodes.is_one_token and nodes.are_chains and not (slides or self.always):
            return None
        full = self.visible(nodes, starts, columns, counts)
        masks = {FULL: full}
        if slides:
            masks[SLIDING] = full & self.in_window(nodes, starts, positions, columns)
        used = {kind: self.formatted(masks[kind]) for kind in dict.fromkeys(self.layer_types)}
        return used if len(used) > 1 else next(iter(used.values()))

    def visible(
        self, nodes: Nodes, starts: torch.Tensor, columns: int, counts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Bool (B, N, T): committed columns, ancestors and the node itself. Padding sees itself only."""
        num_rows, width = nodes.tokens.shape
        column = torch.arange(columns, device=self.device)
        is_padded = min(nodes.counts) < width
        if nodes.ancestors is None or is_padded:
            own = starts + nodes.num_fed + torch.arange(width, device=self.device)  # (B, N) column of every node
        if nodes.ancestors is None:
            visible = column <= own[:, :, None]
        else:
            visible = (column < starts[:, :, None]).expand(num_rows, width, columns).clone()
            places = self._tree_columns(nodes, starts)[:, None, :].expand_as(nodes.ancestors)
            visible.scatter_(2, places, nodes.ancestors.to(self.device))
        if is_padded:
            counts = torch.tensor(nodes.counts, device=self.device) if counts is None else counts
            is_real = torch.arange(width, device=self.device)[None, :, None] < counts[:, None, None]
            visible = torch.where(is_real, visible, column == own[:, :, None])
        return visible

    def in_window(self, nodes: Nodes, starts: torch.Tensor, positions: torch.Tensor, columns: int) -> torch.Tensor:
        """Bool (B, N, T): the position of the column lies less than a window behind that of the node."""
        num_rows = len(nodes.counts)
        column_positions = torch.arange(columns, device=self.device).expand(num_rows, columns).clone()
        column_positions.scatter_(1, self._tree_columns(nodes, starts), positions)
        distance = positions[:, nodes.num_fed :, None] - column_positions[:, None, :]
        return distance < (self.window or 0)

    def _tree_columns(self, nodes: Nodes, starts: torch.Tensor) -> torch.Tensor:
        """(B, S + N): the columns of the fed and the new nodes of every row."""
        return starts + torch.arange(nodes.num_fed + nodes.width, device=self.device)

    def formatted(self, visible: torch.Tensor) -> torch.Tensor:
        """A mask (B, 1, N, T) as attention takes it."""
        visible = visible[:, None]  # (B, 1, N, T)
        return torch.where(visible, *self._extremes) if self.is_additive else visible

    @cached_property
    def _extremes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Entries of additive masks for what is seen, and for what is not."""
        found = torch.tensor([0.0, torch.finfo(self.dtype).min], dtype=self.dtype, device=self.device)
        return found[0], found[1]
