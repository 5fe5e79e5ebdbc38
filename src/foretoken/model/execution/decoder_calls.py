"""What ``decoder.cpp`` is given: sizes and addresses of a model, nodes, and drafts that are wanted."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

MOST_NODES, MOST_IN_CALL = 32, 64
"""Of a row and of all rows in one call. Beyond, calling modules is little beside the arithmetic, which is theirs."""

Integer, Address, _Float = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float


class LayerFields(ctypes.Structure):
    """Addresses of what a layer multiplies by."""

    _fields_ = tuple(
        (name, Address) for name in ("input_norm", "post_norm", "heads_in", "heads_out", "gate_up", "down")
    )


class DecoderFields(ctypes.Structure):
    """Sizes of a model, and addresses of its weights."""

    _fields_ = (
        *((name, Integer) for name in ("kind", "layers", "size", "heads", "kv_heads", "head_dim", "inner", "tokens")),
        *((name, Address) for name in ("table", "cosines", "sines", "of_layers", "norm", "output")),
        ("eps", _Float),
        ("scale", _Float),
    )


class FedFields(ctypes.Structure):
    """Nodes, and where their keys and values are written."""

    _fields_ = (
        *((name, Integer) for name in ("nodes", "rows")),
        *((name, Address) for name in ("tokens", "positions", "columns", "prefix", "above")),
        ("most_above", Integer),
        *((name, Address) for name in ("counts", "firsts", "view", "keys", "values")),
        *((name, Integer) for name in ("row", "head")),
    )


class DraftsFields(ctypes.Structure):
    """Chains that are wanted, and where they are written."""

    _fields_ = (
        ("depths", Address),
        ("most", Integer),
        ("columns", Integer),
        ("names", Address),
        ("tokens", Address),
    )


def are_few(counts: Sequence[int]) -> bool:
    """Whether so many nodes of every row are for these kernels."""
    return 0 < max(counts) <= MOST_NODES and sum(counts) <= MOST_IN_CALL
