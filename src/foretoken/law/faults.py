"""Exceptions that are contained in the row that they came from: which may be, and how they are told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretoken.errors import ForetokenError
from foretoken.lazy import Lazy

if TYPE_CHECKING:
    import torch
else:
    torch = Lazy("torch")


def is_fatal(error: BaseException) -> bool:
    """Whether memory has run out. What has run out for one row has run out for all, so this is never contained.

    On CPUs torch says so with a plain RuntimeError, in which its allocator names itself.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def described(error: BaseException) -> str:
    """Type and message of an error, also of one whose message cannot be made."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def told(error: Exception) -> str:
    """An error as the result of a row tells it: ours speak for themselves, others with their type."""
    return str(error) if isinstance(error, ForetokenError) else described(error)
