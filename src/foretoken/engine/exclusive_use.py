"""Exclusive use of an object: at most one call is inside, and none that has been cut off."""

from __future__ import annotations

import sys
import threading
from types import FrameType


class ExclusiveUse:
    """A lock that is taken without waiting, and that Ctrl-C cannot leave taken.

    It belongs to the frame of whoever took it. A frame that nothing runs any more has lost it, wherever it was cut off:
    between taking it and the block that gives it back, or within that block.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._frame: FrameType | None = None

    @property
    def is_taken(self) -> bool:
        """Whether a call is inside."""
        frame = self._frame
        return frame is not None and is_running(frame)

    def take(self, frame: FrameType) -> bool:
        """Take it for a frame that runs; False where another one has it."""
        with self._lock:
            if self.is_taken:
                return False
            self._frame = frame
            return True

    def give_back(self) -> None:
        """Let others in."""
        self._frame = None


def is_running(frame: FrameType) -> bool:
    """Whether a frame is on the stack of any thread."""
    for top in sys._current_frames().values():
        current: FrameType | None = top
        while current is not None:
            if current is frame:
                return True
            current = current.f_back
    return False
