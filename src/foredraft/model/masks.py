"""Attention masks: the cache columns that every node may see."""

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
    """Builds the 4-D attention masks of one model.

    Args:
      layer_types: attention type of every layer.
      window: number of positions that a sliding layer sees, including the node's own.
      dtype: dtype of additive masks.
      device: device of all masks.
      is_additive: True for masks of 0 and the lowest number, False for masks of True and False.
      always: build a mask even for a single token, which sees every column anyway.
    """

    layer_types: tuple[str, ...]
    window: int | None
    dtype: torch.dtype
    device: torch.device
    is_additive: bool = False
    always: bool = False
    _bands: dict[str, torch.Tensor] = field(default_factory=dict)  # chain masks, by attention type
    _before: dict[str, int] = field(default_factory=dict)  # columns of a band before its first node

    @property
    def kinds(self) -> tuple[str, ...]:
        """Attention types of the model, without duplicates."""
        return tuple(dict.fromkeys(self.layer_types))

    @property
    def windows(self) -> dict[str, int | None]:
        """Number of positions that a node sees, by attention type, including its own; None for all."""
        return {kind: None if kind == FULL else self.window for kind in self.kinds}

    def of_chains(self, kind: str, lengths: Sequence[int], width: int, columns: int) -> torch.Tensor:
        """Return the mask (R, 1, N, T) of chains after rows of these lengths. Padding attends to the columns that a
        longer chain would attend to.

        All rows use the same band at different offsets. The mask of one row is a view of a band that is kept for all
        steps.
        """
        masks = [self._cut(kind, length, width, columns) for length in lengths]
        return masks[0][None, None] if len(masks) == 1 else torch.stack(masks)[:, None]

    def _cut(self, kind: str, length: int, width: int, columns: int) -> torch.Tensor:
        """Return the (N, T) view of the band with node i in column ``length + i``; enlarge the band if needed."""
        before, band = self._before.get(kind, 0), self._bands.get(kind)
        height, total = (0, 0) if band is None else band.shape
        after = total - before
        if band is None or length > before or width > height or columns - length > after:
            # doubling makes enlarging rare; only the side that is too short grows
            before = before if length <= before else max(min(2 * length, length + 4096), 256)
            after = after if columns - length <= after else 2 * (columns - length)
            band = self._bands[kind] = self._band(self.windows[kind], before, max(width, height), after)
            self._before[kind] = before
        start = before - length
        return band[:width, start : start + columns]

    def _band(self, window: int | None, before: int, height: int, after: int) -> torch.Tensor:
        """Return (height, before + after): the columns that consecutive nodes attend to, with the first node in column
        ``before``."""
        distance = torch.arange(height, device=self.device)[:, None]
        distance = distance - torch.arange(-before, after, device=self.device)
        sees = distance >= 0
        if window is not None:
            sees &= distance < window
        return self.formatted(sees[None])[0, 0]

    def release(self) -> None:
        """Free the bands that masks of chains are cut from."""
        self._bands.clear()
        self._before.clear()

    def stand_ins(self, flat: FlatNodes) -> Mask:
        """Return placeholder masks, one per attention type, for a model whose rows run attention in groups.

        Each placeholder has its node list as an attribute, because some models pass only the mask to attention.
        """
        masks = {kind: torch.zeros(1, 1, len(flat), 1, device=self.device) for kind in self.kinds}
        for kind, mask in masks.items():
            mask.stands_for = flat, kind  # type: ignore[attr-defined]  # a mask computed from this one lacks it
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def of(
        self,
        nodes: Nodes,
        starts: torch.Tensor,
        positions: torch.Tensor,
        columns: int,
        counts: torch.Tensor | None = None,
    ) -> Mask:
        """Return masks (B, 1, N, T), a dict by attention type if the model has several; None if everything is visible.

        Args:
          starts: (B, 1), number of columns before the root of every row.
          positions: (B, S + N), positions of the fed and the new nodes.
          columns: T.
          counts: (B,), number of real nodes of every row, if already on the device.
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
        """Return bool (B, N, T): committed columns, ancestors and the node itself. Padding sees only itself."""
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
        """Return bool (B, N, T): True where the column's position is less than a window before the node's position."""
        num_rows = len(nodes.counts)
        column_positions = torch.arange(columns, device=self.device).expand(num_rows, columns).clone()
        column_positions.scatter_(1, self._tree_columns(nodes, starts), positions)
        distance = positions[:, nodes.num_fed :, None] - column_positions[:, None, :]
        return distance < (self.window or 0)

    def _tree_columns(self, nodes: Nodes, starts: torch.Tensor) -> torch.Tensor:
        """Return (B, S + N): the cache columns of the fed and the new nodes of every row."""
        return starts + torch.arange(nodes.num_fed + nodes.width, device=self.device)

    def formatted(self, visible: torch.Tensor) -> torch.Tensor:
        """Return a mask (B, 1, N, T) in the form that attention expects."""
        visible = visible[:, None]  # (B, 1, N, T)
        return torch.where(visible, *self._extremes) if self.is_additive else visible

    @cached_property
    def _extremes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Entries of additive masks for visible and for hidden columns."""
        found = torch.tensor([0.0, torch.finfo(self.dtype).min], dtype=self.dtype, device=self.device)
        return found[0], found[1]
