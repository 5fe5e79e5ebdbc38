"""Processes that are forked from one that has models: neither its threads nor who held its locks come along."""

from __future__ import annotations

import os
import sys
import threading
from functools import cache
from weakref import WeakSet

_locks: WeakSet[threading.RLock] = WeakSet()


def lock() -> threading.RLock:
    """A reentrant lock that is free in a process that is forked, whichever thread held it before."""
    _first_process()
    made = threading.RLock()
    _locks.add(made)
    return made


def is_forked() -> bool:
    """Whether this process was forked from one that had models, and computes on one thread therefore."""
    return os.getpid() != _first_process()


@cache
def _first_process() -> int:
    """The process that has made the first lock, whose children begin anew."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_begin_anew)
    return os.getpid()


def _begin_anew() -> None:
    """Let a child go on alone: with locks that are free, and on one thread, where it would wait for those of OpenMP."""
    for held in _locks:
        getattr(held, "_at_fork_reinit")()  # noqa: B009 - what the standard library does with its own locks
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
