"""Work that waits until nothing has run for a while."""

from __future__ import annotations

import threading
import weakref
from time import monotonic, sleep
from typing import Protocol

from foredraft import forking

IDLE_SECONDS = 10.0
"""Time without requests after which memory is given back: longer than most pauses between two requests."""


class Idling(Protocol):
    """An object that has something to do once it has been idle."""

    def rest(self) -> None:
        """Called in a thread of its own after the pause."""


class IdleWatch:
    """Calls `rest` of its owner once nothing has run for a while.

    A thread exists from the end of work to the call alone, and does not keep its owner alive.

    Args:
      owner: the object that rests.
      seconds: length of the pause; by default `IDLE_SECONDS`.
    """

    def __init__(self, owner: Idling, seconds: float | None = None) -> None:
        self._owner = weakref.ref(owner)
        self._seconds = IDLE_SECONDS if seconds is None else seconds
        self._lock = forking.lock()
        self._since: float | None = None
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Note that nothing runs from now on."""
        with self._lock:
            self._since = monotonic()
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._wait, name="foredraft-idle", daemon=True)
                self._thread.start()

    def end(self) -> None:
        """Note that something runs from now on."""
        self._since = None

    def _wait(self) -> None:
        left = self._seconds
        while left > 0:
            sleep(left)
            if self._owner() is None:
                return
            with self._lock:
                left = self._seconds if self._since is None else self._since + self._seconds - monotonic()
                if left <= 0:
                    self._thread = None  # what ends from now on starts another one
        owner = self._owner()
        if owner is not None:
            owner.rest()
