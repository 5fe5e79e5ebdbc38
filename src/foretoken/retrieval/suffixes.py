"""Suffix arrays of token files, by a compiled library, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from foretoken.errors import DatastoreError

BYTES_PER_TOKEN_BYTE = 5
"""Memory while sorting: a byte of text costs itself and a 32-bit position."""

_PIECE = 1 << 22
_INT32_MAX = 2**31 - 1


def tokens_within(memory_bytes: int, width: int) -> int:
    """How many tokens can be sorted in this much memory; never more than 32-bit positions can name."""
    return min(memory_bytes // (BYTES_PER_TOKEN_BYTE * width), _INT32_MAX // width) - 1


def write_suffix_array(tokens: Path, num_tokens: int, width: int, out: BinaryIO) -> None:
    """Sort the suffixes of a file of big-endian ids; positions go to ``out`` as little-endian 32-bit numbers.

    Bytes are sorted by libdivsufsort (Mori; O(n log n) in the worst case, linear extra work in practice) and the
    positions that lie between tokens are left out: big-endian ids compare like their bytes.

    Memory: 5 bytes per byte of text, which is what `tokens_within` counts.
    Raises: DatastoreError when the library or the memory is missing.
    """
    size = num_tokens * width
    text = np.fromfile(tokens, dtype=np.uint8, count=size)
    try:
        positions = _sorter()(text)
    except MemoryError:
        raise DatastoreError(
            f"sorting {num_tokens} tokens takes {BYTES_PER_TOKEN_BYTE * size >> 20} MiB of memory, which this machine "
            "does not have now; give a smaller --memory"
        ) from None
    del text
    for start in range(0, size, _PIECE):
        piece = positions[start : start + _PIECE]
        if width > 1:
            piece = piece[piece % width == 0] // width
        out.write(piece.astype("<u4").tobytes())


def _sorter() -> Callable[[npt.NDArray[np.uint8]], npt.NDArray[np.int32]]:
    try:
        from pydivsufsort import divsufsort  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise DatastoreError(
            f"building a datastore needs the package pydivsufsort ({error}); run pip install pydivsufsort. Using a "
            "datastore that exists does not"
        ) from None
    sort: Callable[[npt.NDArray[np.uint8]], npt.NDArray[np.int32]] = divsufsort
    return sort
