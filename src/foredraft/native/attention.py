"""Attention of lists of nodes over ragged rows of a cache, by the library's own kernels, without copying the cache.

Torch's attention spends more time on the few nodes of a step than reading the cache takes, and its sums depend on the
number of nodes and columns. For prompts it computes every score, including the masked ones. See
``decode_attention.cpp`` and ``prefill_attention.cpp``; for bfloat16 with AMX, ``decode_tiles.h`` and
``prefill_tiles.cpp``.
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
      kernels: compiled functions.
      counts: number of nodes of every row.
      columns: largest number of cache columns that a node of each row sees.

    Attributes:
      is_few: whether every row has at most `abi.MOST_NODES` nodes.

    Exactness: the result of a node has the same bits whatever nodes, rows and columns are computed with it, and
      wherever its last `abi.MOST_NODES` visible columns are, as long as their order is the same. In float32 this holds
      for all visible columns. Sums are in float32.
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
        """Compute the attention.

        Args:
          query: (1, H_q, S, D), the nodes of all rows in one list.
          key, value: (R, H_kv, T, D) and (R, H_kv, T, D_v), one row after another.
          mask: (R or 1, 1, N, T) in the dtype of the query, 0 where a column is visible; None if all are.
          scaling: factor of the scores; None for D^-0.5.

        Returns: (S, H_q, D_v), or None if the kernels do not support these tensors.
        """
        if not self.is_few:
            return None
        threads = torch.get_num_threads()
        strides = query.stride(), key.stride(), value.stride(), None if mask is None else mask.stride()
        dtypes = query.dtype, key.dtype, value.dtype
        form = query.shape[1], query.shape[3], key.shape[1], value.shape[3], strides, dtypes, scaling, threads
        if form not in self._calls:  # shared by all layers with the same shapes and strides
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
        """Return the kernel's arguments for such tensors, and the number of scratch floats; None if unsupported."""
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
      kernels: compiled functions.
      counts: number of nodes of every row.
      before: number of columns before the first node of every row.
      windows: number of columns that a node sees, its own included, by kind of attention; None for all columns.

    Exactness: a node has the same bits however a prompt is divided into forward passes, and whatever rows are computed
      with it. Scores, weights and sums are in float32. With tiles for bfloat16, weights are rounded to bfloat16, as
      torch does.
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
        """Compute the attention.

        Args:
          query, key, value: tensors as in `DecodeAttention`.
          kind: kind of attention, a key of ``windows``.
          scaling: factor of the scores; None for D^-0.5.

        Returns: (S, H_q, D_v), or None if the kernel does not support these tensors.
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
    """Return the arguments that both kernels share; None for unsupported dtypes or strides."""
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
