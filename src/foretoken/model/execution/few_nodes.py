"""Attention of the few nodes of a step, over ragged rows of a cache that are read once: kernels of the library's own.

Torch's own spends more on a few nodes than reading the cache takes, and its sums depend on how many nodes and columns
there are. See ``attention.cpp``, and for bfloat16 with AMX ``tiles.h``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate

import torch

from foretoken.model.execution.memory import scratch_address
from foretoken.model.execution.native import KINDS, Library
from foretoken.model.promise import MOST_NODES

_INTEGERS = "rows heads group size value_size kind query_node query_head key_row key_head value_row value_head mask_row"


class AttentionFields(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in (*_INTEGERS.split(), "mask_node")),
        *((name, ctypes.c_void_p) for name in ("counts", "firsts", "columns")),
        ("scale", ctypes.c_float),
    )


class FewNodes:
    """Attention of one group of rows.

    Args:
      counts: nodes of every row.
      columns: that each of these rows sees at most.

    Attributes:
      is_few: whether every row has `MOST_NODES` at most.

    Exactness: the result of a node has the same bits whatever nodes, rows and columns run beside it, and wherever the
      last `MOST_NODES` columns that it sees lie, in one order; in float32, wherever any of them lie. Sums are in
      float32.
    """

    def __init__(self, kernels: Library, counts: Sequence[int], columns: Sequence[int]) -> None:
        self.kernels = kernels
        self._count = len(counts)
        self.is_few = max(counts) <= MOST_NODES
        array = ctypes.c_int64 * len(counts)
        self._arrays = array(*counts), array(*list(accumulate(counts, initial=0))[:-1]), array(*columns)
        self._calls: dict[object, tuple[AttentionFields, int] | None] = {}

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
        threads = torch.get_num_threads()
        known = self.call(query, key, value, mask, scaling, threads) if self.is_few else None
        if known is None:
            return None
        call, scratch = known
        out = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
        self.kernels.attention(
            ctypes.addressof(call),
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            None if mask is None else mask.data_ptr(),
            out.data_ptr(),
            scratch_address(scratch),
            threads,
        )
        return out

    def call(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float | None,
        threads: int,
    ) -> tuple[AttentionFields, int] | None:
        """What the kernel is told of tensors like these, kept for all layers that have such, and the scratch it needs.

        Returns: a structure and a number of floats, or None where this is not for these kernels.
        """
        if query.dtype not in KINDS or key.dtype != query.dtype or value.dtype != query.dtype:
            return None
        strides = query.stride(), key.stride(), value.stride(), None if mask is None else mask.stride()
        form = query.shape[1], query.shape[3], key.shape[1], value.shape[3], strides, query.dtype, scaling, threads
        if form not in self._calls:
            self._calls[form] = self._new_call(query, key, value, mask, scaling, threads)
        return self._calls[form]

    def _new_call(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float | None,
        threads: int,
    ) -> tuple[AttentionFields, int] | None:
        size, value_size = query.shape[3], value.shape[3]
        lie_together = (
            query.stride(3) == 1
            and key.stride()[2:] == (size, 1)
            and value.stride()[2:] == (value_size, 1)
            and (mask is None or (mask.dtype == query.dtype and mask.stride(3) == 1 and mask.shape[1] == 1))
        )
        if not lie_together or query.device.type != "cpu":
            return None
        shares_mask = mask is None or mask.shape[0] == 1
        counts, firsts, columns = map(ctypes.addressof, self._arrays)
        call = AttentionFields(
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
        return call, self.kernels.attention_scratch(ctypes.addressof(call), threads)
