"""How the nodes of one forward lie: their positions, what they may look at, and whether they run as a list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from foretoken.model.groups import Grouping
from foretoken.model.masks import Mask, Masks
from foretoken.model.nodes import FlatNodes, Nodes

if TYPE_CHECKING:
    from foretoken.model.cache.ragged import KVCache
    from foretoken.native.library import Library


@dataclass(frozen=True)
class Layout:
    """The nodes of one forward.

    Args:
      positions: (B, N).
      mask: what the model is given as its mask; of a list of nodes it only stands for the masks of its groups.
      flat: the list, or None for a rectangle of rows.
    """

    positions: torch.Tensor
    mask: Mask
    flat: FlatNodes | None


class Layouts:
    """Lays out the nodes of forwards of one model.

    Args:
      masks: makes its masks.
      kernels: by which few nodes run attention, if there are any.

    Attributes:
      masks: as given.
    """

    def __init__(self, masks: Masks, kernels: Library | None = None) -> None:
        self.masks = masks
        self._grouping = Grouping(masks, kernels)

    def of(
        self,
        nodes: Nodes,
        cache: KVCache,
        first_row: int,
        view_length: int | None,
        *,
        takes_lists: bool,
        lists_all: bool,
    ) -> Layout:
        """Open the cache for these nodes.

        Args:
          view_length: cache columns that attention runs over, if shapes are to be fixed.
          takes_lists: rows of different numbers of nodes are to run as a list.
          lists_all: others, too.
        """
        num_rows, width = nodes.tokens.shape
        is_fixed = view_length is not None
        trunks = [length - nodes.num_fed for length in cache.row_lengths(first_row, num_rows)]
        starts = torch.tensor(trunks, device=cache.device)[:, None]
        positions = starts + nodes.depths.to(cache.device)  # (B, S + N)
        is_padded = num_rows > 1 and nodes.num_real < num_rows * width and not is_fixed
        flat = None
        if takes_lists and (is_padded or lists_all):
            flat = FlatNodes((width,) * num_rows if is_fixed else nodes.counts, width, cache.device)
        columns = cache.open(first_row, num_rows, width, view_length, flat)
        if flat is None:
            mask = self.masks.of(nodes, starts, positions, columns, is_fixed)
        else:
            place = nodes, flat.counts, starts, positions, trunks
            flat.groups = self._grouping.of(*place, width if is_fixed else None, columns if is_fixed else None)
            mask = self.masks.stand_ins(flat)
        shown = positions[:, nodes.num_fed :]
        offsets = cache.row_offsets(first_row, num_rows)
        if offsets is not None:  # masks count in columns, the model in positions
            shown = shown + torch.tensor(offsets, device=cache.device)[:, None]
        return Layout(shown, mask, flat)
