"""Attention of the many nodes of prompts, in bfloat16 on CPUs that multiply by tiles: a kernel of the library's own.

Torch's own computes every score that a mask hides, and spends more on the weights of a softmax than on products. See
``many_nodes.cpp``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch

from foretoken.model.execution.memory import scratch_address
from foretoken.model.execution.native import Library

TILE = 32
"""Numbers of bfloat16 in a row of a tile; heads are as wide or a multiple of it."""
MOST_SCRATCH = 2**28
"""Bytes of scratch; beyond, attention runs through torch."""

_INTEGERS = "rows heads group size value_size query_node query_head key_row key_head value_row value_head window"


class _Chains(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in _INTEGERS.split()),
        *((name, ctypes.c_void_p) for name in ("counts", "firsts", "before")),
        ("scale", ctypes.c_float),
    )


class ManyNodes:
    """Attention of one group of rows whose nodes are chains.

    Args:
      kernels: compiled for tiles.
      counts: nodes of every row.
      before: columns of every row before the first of its nodes.
      windows: by kind of attention, the columns that a node sees, its own included; None for all.

    Exactness: a node has the same bits however a prompt is cut into forwards, and whatever rows run beside it. Scores
      and sums are in float32, weights in bfloat16, as in torch's own.
    """

    def __init__(
        self, kernels: Library, counts: Sequence[int], before: Sequence[int], windows: Mapping[str, int | None]
    ) -> None:
        self._kernels = kernels
        self._windows = windows
        array = ctypes.c_int64 * len(counts)
        self._arrays = array(*counts), array(*list(accumulate(counts, initial=0))[:-1]), array(*before)

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kind: str, scaling: float | None
    ) -> torch.Tensor | None:
        """Run it.

        Args:
          query: (1, H_q, S, D), the list of nodes of all rows.
          key, value: (R, H_kv, T, D) and (R, H_kv, T, D_v), of one row after another.
          kind: of attention.
        Returns: (S, H_q, D_v), or None where this is not for this kernel.
        """
        run, scratch_of = self._kernels.chains, self._kernels.chains_scratch
        size, value_size = query.shape[3], value.shape[3]
        is_bfloat16 = query.dtype == key.dtype == value.dtype == torch.bfloat16 and query.device.type == "cpu"
        lie_together = query.stride(3) == 1 and key.stride()[2:] == (size, 1) and value.stride()[2:] == (value_size, 1)
        scale = size**-0.5 if scaling is None else scaling
        if run is None or scratch_of is None or not is_bfloat16 or not lie_together or scale <= 0:
            return None
        if size % TILE or value_size % TILE or query.shape[1] % key.shape[1]:
            return None
        counts, firsts, before = map(ctypes.addressof, self._arrays)
        call = _Chains(
            len(self._arrays[0]),
            key.shape[1],
            query.shape[1] // key.shape[1],
            size,
            value_size,
            query.stride(2),
            query.stride(1),
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            self._windows[kind] or 0,
            counts,
            firsts,
            before,
            scale,
        )
        threads = torch.get_num_threads()
        scratch = scratch_of(ctypes.addressof(call), threads)
        if scratch > MOST_SCRATCH:
            return None
        out = query.new_empty(query.shape[2], query.shape[1], value_size)
        addresses = query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr()
        run(ctypes.addressof(call), *addresses, scratch_address(-(-scratch // 4)), threads)
        return out
