"""Attention of the few nodes of a step, over ragged rows of a cache that are read once: kernels of the library's own.

Torch's own spends more on a few nodes than reading the cache takes, and its sums depend on how many nodes and columns
there are. See ``attention.cpp``.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from itertools import accumulate

import torch

from foretoken.model.execution.native import KINDS, Library

MOST_NODES = 16
"""Nodes of a row. Torch's kernels, which multiply matrices, take over where there are more: prompts, wide trees."""
MOST_SCRATCH = 2**26
"""Numbers of scratch, 256 MB; beyond, attention runs through torch."""

_INTEGERS = "rows heads group size value_size kind query_node query_head key_row key_head value_row value_head mask_row"


class _Attention(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in (*_INTEGERS.split(), "mask_node")),
        *((name, ctypes.c_void_p) for name in ("counts", "firsts", "columns")),
        ("scale", ctypes.c_float),
    )


class _Scratch(threading.local):
    """Memory of one thread that runs forwards."""

    floats = torch.empty(0)

    def of(self, count: int) -> int:
        """The address of so many floats."""
        if len(self.floats) < count:
            self.floats = torch.empty(count, dtype=torch.float32)
        return self.floats.data_ptr()


_scratch = _Scratch()


class FewNodes:
    """Attention of one group of rows.

    Args:
      counts: nodes of every row.
      columns: that each of these rows sees at most.

    Exactness: the result of a node has the same bits whatever nodes, rows and columns run beside it, and wherever the
      columns that it sees lie, in one order. Sums are in float32.
    """

    def __init__(self, kernels: Library, counts: Sequence[int], columns: Sequence[int]) -> None:
        self._kernels = kernels
        self._count = len(counts)
        self._is_few = max(counts) <= MOST_NODES
        array = ctypes.c_int64 * len(counts)
        self._arrays = array(*counts), array(*list(accumulate(counts, initial=0))[:-1]), array(*columns)
        self._calls: dict[object, tuple[_Attention, int, int]] = {}

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float | None,
    ) -> torch.Tensor | None:
        """Run it.

        Args:
          query: (1, H_q, S, D), the list of nodes of all rows.
          key, value: (R, H_kv, T, D) and (R, H_kv, T, D_v), of one row after another.
          mask: (R or 1, 1, N, T) in the dtype of the query, 0 where a column is seen; None where all are.
        Returns: (S, H_q, D_v), or None where this is not for these kernels.
        """
        if not self._is_few or query.dtype not in KINDS or key.dtype != query.dtype or value.dtype != query.dtype:
            return None
        strides = query.stride(), key.stride(), value.stride(), None if mask is None else mask.stride()
        form = query.shape[1], query.shape[3], key.shape[1], value.shape[3], strides, query.dtype, scaling
        threads = torch.get_num_threads()
        known = self._calls.get(form)
        if known is None or known[2] != threads:
            made = self._call(query, key, value, mask, scaling, threads)
            if made is None:
                return None
            known = self._calls[form] = made
        call, scratch, _ = known
        out = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
        self._kernels.attention(
            ctypes.addressof(call),
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            None if mask is None else mask.data_ptr(),
            out.data_ptr(),
            _scratch.of(scratch),
            threads,
        )
        return out

    def _call(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float | None,
        threads: int,
    ) -> tuple[_Attention, int, int] | None:
        size, value_size, lanes = query.shape[3], value.shape[3], self._kernels.lanes
        lie_together = (
            query.stride(3) == 1
            and key.stride()[2:] == (size, 1)
            and value.stride()[2:] == (value_size, 1)
            and (mask is None or (mask.dtype == query.dtype and mask.stride(3) == 1 and mask.shape[1] == 1))
        )
        if not lie_together or size % lanes or value_size % lanes or query.device.type != "cpu":
            return None
        shares_mask = mask is None or mask.shape[0] == 1
        counts, firsts, columns = map(ctypes.addressof, self._arrays)
        call = _Attention(
            self._count,
            key.shape[1],
            query.shape[1] // key.shape[1],
            size,
            value_size,
            KINDS[query.dtype],
            query.stride(2),
            query.stride(1),
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            0 if shares_mask or mask is None else mask.stride(0),
            0 if mask is None else mask.stride(2),
            counts,
            firsts,
            columns,
            size**-0.5 if scaling is None else scaling,
        )
        scratch = self._kernels.attention_scratch(ctypes.addressof(call), threads)
        return (call, scratch, threads) if scratch <= MOST_SCRATCH else None
