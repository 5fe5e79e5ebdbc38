"""What kernels of heads are given, as ``drafting.h`` describes it."""

from __future__ import annotations

import ctypes

from foretoken.heads.bytes import Bytes

Address = ctypes.c_void_p
Integer = ctypes.c_int64


class Head(ctypes.Structure):
    """A head: sizes, addresses of tables and norms, and its matrices."""

    _fields_ = (
        *((name, Integer) for name in ["generation", "size", "width", "heads", "kv_heads", "head_dim", "inner"]),
        *((name, Integer) for name in ("is_residual_normed", "norms_output", "is_float")),
        *((name, Address) for name in ("table", "frequencies")),
        *((name, Address) for name in ("embed", "streams", "input", "hidden", "post", "norm")),
        *((name, Bytes) for name in ("fuse", "heads_in", "heads_out", "gate_up", "down", "output")),
        ("eps", ctypes.c_float),
        ("rope_factor", ctypes.c_float),
    )


class Level(ctypes.Structure):
    """The nodes of a level, and where they are written."""

    _fields_ = (
        *((name, Integer) for name in ("nodes", "rows")),
        *(
            (name, Address)
            for name in ["tokens", "positions", "columns", "prefix", "above", "counts", "firsts", "view"]
        ),
        *((name, Address) for name in ("keys", "values")),
        *((name, Integer) for name in ("row", "head")),
        *((name, Address) for name in ("features", "streams", "outputs")),
    )


class Growing(ctypes.Structure):
    """A draft that is to be grown, and where it is written."""

    _fields_ = (
        *((name, Integer) for name in ["pending", "trunk", "depth", "branches", "beam", "most"]),
        *((name, Address) for name in ("keys", "values")),
        *((name, Integer) for name in ("row", "head")),
        ("owed", Integer),
        *((name, Address) for name in ("tokens_of", "streams", "last")),
        *((name, Address) for name in ("names", "tokens", "parents", "scores")),
        ("least_mass", ctypes.c_double),
        ("least", ctypes.c_double),
        ("power", ctypes.c_float),
    )
