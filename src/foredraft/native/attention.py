"""Attention of lists of nodes over ragged rows of a cache, read where they lie, by kernels of the library's own.

Torch's own spends more on the few nodes of a step than reading the cache takes, and its sums depend on how many nodes
and columns there are; for prompts it computes every score that a mask hides. See ``decode_attention.cpp`` and
``prefill_attention.cpp``; for bfloat16 with AMX ``decode_tiles.h`` and ``prefill_tiles.cpp``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch

from foredraft.native import abi
from foredraft.native.library import CACHE_KINDS, KINDS, Library
from foredraft.native.memory import scratch_address


class DecodeAttention:
    """Attention of one group of rows with few nodes each.

    Args:
      counts: nodes of every row.
      columns: that each of these rows sees at most.

    Attributes:
      is_few: whether every row has `abi.MOST_NODES` at most.

    Exactness: the result of a node has the same bits whatever nodes, rows and columns run beside it, and wherever the
      last `abi.MOST_NODES` columns that it sees lie, in one order; in float32, wherever any of them lie. Sums are in
      float32.
    """

    def __init__(self, kernels: Library, counts: Sequence[int], columns: Sequence[int]) -> None:
        self.kernels = kernels
        self.is_few = max(counts) <= abi.MOST_NODES
        self._arrays = abi.array_of(counts), abi.array_of(_firsts(counts)), abi.array_of(columns)
        self._calls: dict[object, tuple[abi.Attention, int] | None] = {}

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
        if not self.is_few:
            return None
        threads = torch.get_num_threads()
        strides = query.stride(), key.stride(), value.stride(), None if mask is None else mask.stride()
        dtypes = query.dtype, key.dtype, value.dtype
        form = query.shape[1], query.shape[3], key.shape[1], value.shape[3], strides, dtypes, scaling, threads
        if form not in self._calls:  # kept for all layers that have such
            self._calls[form] = self.call(query, key, value, mask, scaling, threads)
        if (known := self._calls[form]) is None:
            return None
        call, scratch = known
        out = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
        self.kernels.decode_attention(
            ctypes.addressof(call),
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            None if mask is None else mask.data_ptr(),
            out.data_ptr(),
            scratch_address(4 * scratch),
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
    ) -> tuple[abi.Attention, int] | None:
        """What the kernel is told of tensors like these, and the floats of scratch that it needs."""
        call = _call_of(self._arrays[0], self._arrays[1], query, key, value, scaling)
        if call is None:
            return None
        if mask is not None:
            if mask.dtype != query.dtype or mask.stride(3) != 1 or mask.shape[1] != 1:
                return None
            call.mask_row, call.mask_node = 0 if mask.shape[0] == 1 else mask.stride(0), mask.stride(2)
        call.columns = ctypes.addressof(self._arrays[2])
        return call, self.kernels.decode_attention_scratch(ctypes.addressof(call), threads)


class PrefillAttention:
    """Attention of one group of rows whose nodes are chains of any length.

    Args:
      counts: nodes of every row.
      before: columns of every row before the first of its nodes.
      windows: by kind of attention, the columns that a node sees, its own included; None for all.

    Exactness: a node has the same bits however a prompt is cut into forwards, and whatever rows run beside it. Scores
      and sums are in float32, and so are weights, but for bfloat16 by tiles, where they are rounded as in torch's own.
    """

    def __init__(
        self, kernels: Library, counts: Sequence[int], before: Sequence[int], windows: Mapping[str, int | None]
    ) -> None:
        self._kernels = kernels
        self._windows = windows
        self._arrays = abi.array_of(counts), abi.array_of(_firsts(counts)), abi.array_of(before)

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kind: str, scaling: float | None
    ) -> torch.Tensor | None:
        """Run it.

        Args:
          query, key, value: as of `DecodeAttention`.
          kind: of attention.
        Returns: (S, H_q, D_v), or None where this is not for this kernel.
        """
        call = _call_of(self._arrays[0], self._arrays[1], query, key, value, scaling)
        if call is None or call.scale <= 0 or query.shape[1] % key.shape[1]:
            return None
        call.window, call.before = self._windows[kind] or 0, ctypes.addressof(self._arrays[2])
        threads = torch.get_num_threads()
        scratch = scratch_address(self._kernels.prefill_attention_scratch(ctypes.addressof(call), threads))
        out = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
        addresses = query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr()
        self._kernels.prefill_attention(ctypes.addressof(call), *addresses, scratch, threads)
        return out


def _firsts(counts: Sequence[int]) -> list[int]:
    return list(accumulate(counts, initial=0))[:-1]


def _call_of(
    counts: ctypes.Array[ctypes.c_int64],
    firsts: ctypes.Array[ctypes.c_int64],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
) -> abi.Attention | None:
    """What either kernel is told; None where numbers do not lie as they take them."""
    size, value_size = query.shape[3], value.shape[3]
    is_alike = query.dtype == key.dtype == value.dtype and query.dtype in KINDS and query.device.type == "cpu"
    lie_together = query.stride(3) == 1 and key.stride()[2:] == (size, 1) and value.stride()[2:] == (value_size, 1)
    if not is_alike or not lie_together:
        return None
    return abi.Attention(
        len(counts),
        key.shape[1],
        query.shape[1] // key.shape[1],
        size,
        value_size,
        KINDS[query.dtype],
        CACHE_KINDS[key.dtype],
        query.stride(2),
        query.stride(1),
        *key.stride()[:2],
        *value.stride()[:2],
        counts=ctypes.addressof(counts),
        firsts=ctypes.addressof(firsts),
        scale=size**-0.5 if scaling is None else scaling,
    )
