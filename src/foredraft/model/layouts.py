"""Layout of the nodes of a forward pass: their positions and masks, and whether they run as a flat list.

Rows of a list run attention in groups. The rows of a group are neighbours of similar length and draft size, so that no
row is padded to a much longer one.
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
"""Cost of another attention call, in columns of one row and node: about 20 microseconds on a CPU."""

NODES_PER_READING = 8
"""Number of nodes whose arithmetic costs as much as reading the keys and values of a row."""


@dataclass(frozen=True)
class Layout:
    """The nodes of one forward pass.

    Args:
      tokens, positions: (B, N).
      mask: mask argument of the model. For a list of nodes, it is a placeholder for the masks of the groups.
      flat: layout as a list, or None for a rectangle of rows.
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
    """Reserve cache columns for the nodes of a forward pass, and lay them out.

    Args:
      masks: builder of the model's masks.
      kernels: kernels for attention over few nodes; None without.
      takes_lists: run rows with different numbers of nodes as a list.
      lists_all: run all other rows as a list too.
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
    """Return the groups of a forward pass, in the order of its rows.

    Args:
      counts: number of nodes of every row.
      starts, positions: arguments of `Masks.of`.
      trunks: number of columns before the root of the draft, by row.
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
    """Place nodes after their rows, with everything moved to the device in one transfer.

    Args:
      trunks: number of columns before the root of the draft, by row.
      offsets: distance between positions and columns, by row; None if all are 0.
    Returns: nodes with tokens and ancestors on the device; starts (B, 1), equal to ``trunks``; positions (B, S + N) in
      columns; the model's positions (B, N) of the new nodes; counts (B,) of real nodes.
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
    """Yield groups of neighbouring rows that use the same kernels, and whose padding costs less than separate calls.

    Lengths 100 100 900 of one node each give two groups: three rows of 900 columns would cost 1,600 extra columns, and
    another call costs 256.
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
