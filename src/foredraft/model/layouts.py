"""How the nodes of one forward lie: their positions, what they may look at, and whether they run as a list.

Rows of a list run attention in groups: neighbours of like length and draft, so that none pays for a much longer one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from foredraft.devices import upload
from foredraft.model.cache.ragged import KVCache
from foredraft.model.masks import FULL, Mask, Masks
from foredraft.model.nodes import FlatNodes, Nodes, RowGroup
from foredraft.native.abi import MOST_NODES
from foredraft.native.attention import DecodeAttention, PrefillAttention
from foredraft.native.library import Library

CALL_COLUMNS = 256
"""What one more call of attention costs, in columns of one row and node: some 20 microseconds on a CPU."""

NODES_PER_READING = 8
"""How many nodes cost as much arithmetic as reading the keys and values of a row costs."""


@dataclass(frozen=True)
class Layout:
    """The nodes of one forward.

    Args:
      tokens, positions: (B, N).
      mask: what the model is given as its mask; of a list of nodes it only stands for the masks of its groups.
      flat: the list, or None for a rectangle of rows.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    mask: Mask
    flat: FlatNodes | None


def lay_out(
    nodes: Nodes,
    cache: KVCache,
    first_row: int,
    masks: Masks,
    kernels: Library | None = None,
    *,
    takes_lists: bool,
    lists_all: bool,
) -> Layout:
    """Open a cache for the nodes of a forward, and lay them out.

    Args:
      masks: makes the masks of the model.
      kernels: by which few nodes run attention, if there are any.
      takes_lists: rows of different numbers of nodes are to run as a list.
      lists_all: others, too.
    """
    num_rows, width = nodes.tokens.shape
    trunks = [length - nodes.num_fed for length in cache.row_lengths(first_row, num_rows)]
    offsets = cache.row_offsets(first_row, num_rows)
    nodes, starts, positions, shown, counts = placed(nodes, trunks, offsets, cache.device)
    is_padded = num_rows > 1 and nodes.num_real < num_rows * width
    flat = None
    if takes_lists and (is_padded or lists_all):
        flat = FlatNodes(nodes.counts, width, cache.device)
    columns = cache.open(first_row, num_rows, width, flat, starts + nodes.num_fed)
    if flat is None and cache.device.type != "cpu" and nodes.are_chains and not nodes.is_one_token:
        bands = {kind: masks.of_chains(kind, trunks, width, columns) for kind in masks.kinds}
        mask: Mask = bands if len(bands) > 1 else next(iter(bands.values()))
    elif flat is None:
        mask = masks.of(nodes, starts, positions, columns, counts)
    else:
        flat.groups = _groups(nodes, flat.counts, starts, positions, trunks, masks, kernels)
        mask = masks.stand_ins(flat)
    return Layout(nodes.tokens, shown, mask, flat)


def _groups(
    nodes: Nodes,
    counts: Sequence[int],
    starts: torch.Tensor,
    positions: torch.Tensor,
    trunks: Sequence[int],
    masks: Masks,
    kernels: Library | None,
) -> tuple[RowGroup, ...]:
    """The groups of a forward, in the order of its rows.

    Args:
      counts: nodes of every row.
      starts, positions: as for `Masks.of`.
      trunks: columns of every row before the root of its draft.
    """
    found, first = [], 0
    heads = [trunk + nodes.num_fed for trunk in trunks]
    for rows in _alike(heads, counts):
        wide = max(counts[row] for row in rows)
        length = max(heads[row] for row in rows) + wide
        size = sum(counts[row] for row in rows)
        flat = FlatNodes([counts[row] for row in rows], wide, starts.device)
        before = [heads[row] for row in rows]
        of_rows = _masks_of(masks, nodes, rows, wide, before, starts, positions, length)
        head = before[0] if nodes.are_chains and len(rows) == 1 else None
        seen = [min(heads[row] + counts[row], length) for row in rows]
        decode = None if kernels is None else DecodeAttention(kernels, flat.counts, seen)
        prefill = None
        if decode is not None and not decode.is_few and nodes.are_chains:
            prefill = PrefillAttention(decode.kernels, flat.counts, before, masks.windows)
        found.append(RowGroup(rows, range(first, first + size), flat, length, of_rows, head, decode, prefill))
        first += size
    return tuple(found)


def _masks_of(
    masks: Masks,
    nodes: Nodes,
    rows: range,
    width: int,
    heads: Sequence[int],
    starts: torch.Tensor,
    positions: torch.Tensor,
    columns: int,
) -> dict[str, torch.Tensor | None]:
    kinds = masks.kinds
    if nodes.are_chains:
        sees_all = width == 1 and all(head + 1 == columns for head in heads)
        return {
            kind: None if kind == FULL and sees_all else masks.of_chains(kind, heads, width, columns) for kind in kinds
        }
    span = slice(rows.start, rows.stop)
    ancestors = None if nodes.ancestors is None else nodes.ancestors[span, :width, : nodes.num_fed + width]
    part = Nodes(
        nodes.tokens[span, :width],
        nodes.depths[span, : nodes.num_fed + width],
        tuple(nodes.counts[row] for row in rows),
        ancestors,
        nodes.num_fed,
    )
    made = masks.of(part, starts[span], positions[span, : nodes.num_fed + width], columns)
    return dict(made) if isinstance(made, dict) else dict.fromkeys(kinds, made)


def placed(
    nodes: Nodes, trunks: Sequence[int], offsets: Sequence[int] | None, device: torch.device
) -> tuple[Nodes, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Nodes behind their rows, all of it on the device by one transfer.

    Args:
      trunks: columns of every row before the root of its draft.
      offsets: how far the positions of every row are ahead of its columns; None for nowhere.
    Returns: nodes with tokens and ancestors on the device; starts (B, 1), the trunks; positions (B, S + N) in columns;
      positions (B, N) of the new nodes as the model counts them; counts (B,) of real nodes.
    """
    starts = torch.tensor(trunks, device="cpu")[:, None]
    positions = starts + nodes.depths
    given = [nodes.tokens, starts, positions, torch.tensor(nodes.counts, device="cpu")]
    given += [] if nodes.ancestors is None else [nodes.ancestors]
    given += [] if offsets is None else [positions[:, nodes.num_fed :] + torch.tensor(offsets, device="cpu")[:, None]]
    tokens, starts, positions, counts, *others = upload(given, device)
    ancestors = None if nodes.ancestors is None else others[0]
    shown = positions[:, nodes.num_fed :] if offsets is None else others[-1]
    return replace(nodes, tokens=tokens, ancestors=ancestors), starts, positions, shown, counts


def _alike(lengths: Sequence[int], counts: Sequence[int]) -> Iterator[range]:
    """Neighbours whose padding costs less than calls of their own would, and that are for the same kernels.

    Lengths 100 100 900 of one node each make two groups: two rows of 900 columns would cost 1,600 columns more than
    they need, and another call costs 256.
    """
    first, longest, widest = 0, lengths[0], counts[0]
    for row in range(1, len(lengths)):
        longer, wider = max(longest, lengths[row]), max(widest, counts[row])
        together = (row - first + 1) * _cost(longer, wider)
        apart = (row - first) * _cost(longest, widest) + _cost(lengths[row], counts[row]) + CALL_COLUMNS
        if together > apart or (widest <= MOST_NODES) != (counts[row] <= MOST_NODES):
            yield range(first, row)
            first, longer, wider = row, lengths[row], counts[row]
        longest, widest = longer, wider
    yield range(first, len(lengths))


def _cost(length: int, count: int) -> float:
    return length * (1 + count / NODES_PER_READING)
