"""Support for processes forked from one with loaded models: locks are free again, and threads are not inherited."""

from __future__ import annotations

import os
import sys
import threading
from functools import cache
from weakref import WeakSet

_locks: WeakSet[threading.RLock] = WeakSet()


def lock() -> threading.RLock:
    """Return a reentrant lock that is free in a forked process, whichever thread held it before."""
    _first_process()
    made = threading.RLock()
    _locks.add(made)
    return made


def is_forked() -> bool:
    """Return whether this process was forked from one that had loaded models. A forked process then computes on one
    thread."""
    return os.getpid() != _first_process()


@cache
def _first_process() -> int:
    """Return the id of the process that made the first lock. Child processes of that process reset their state."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_begin_anew)
    return os.getpid()


def _begin_anew() -> None:
    """Reset the state of a forked child: free locks, and one thread, since OpenMP's other threads do not exist."""
    for held in _locks:
        getattr(held, "_at_fork_reinit")()  # noqa: B009 - as the standard library does with its own locks
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
