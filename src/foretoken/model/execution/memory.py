"""Working memory of kernels, which every thread that runs forwards has for itself."""

from __future__ import annotations

import threading

import torch

LINE = 64
"""Bytes. Memory begins at a multiple."""


class Memory(threading.local):
    """Memory that grows with what is asked for."""

    _bytes = torch.empty(0, dtype=torch.uint8)

    def address(self, num_bytes: int) -> int:
        """Of so many bytes, which belong to this thread until it asks for more."""
        if len(self._bytes) < num_bytes + LINE:
            self._bytes = torch.empty(num_bytes + LINE, dtype=torch.uint8)
        return -(-self._bytes.data_ptr() // LINE) * LINE


_scratch = Memory()


def scratch_address(num_floats: int) -> int:
    """The address of memory in which attention works, for so many numbers in single precision."""
    return _scratch.address(4 * num_floats)
