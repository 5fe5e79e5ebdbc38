"""Exclusive use of an object: at most one call is inside, and none that has been cut off."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

from foredraft import forking
from foredraft.ending import is_running
from foredraft.model.default_device import cpu_by_default


class ExclusiveUse:
    """A lock that is taken without waiting, and that Ctrl-C cannot leave taken.

    It belongs to the frame of whoever took it. A frame that nothing runs any more has lost it, wherever it was cut off:
    between taking it and the block that gives it back, or within that block.
    """

    def __init__(self) -> None:
        self._lock = forking.lock()
        self._frame: FrameType | None = None

    def take(self, frame: FrameType) -> bool:
        """Take it for a frame that runs; False where another one has it."""
        with self._lock:
            if self._frame is not None and is_running(self._frame):
                return False
            self._frame = frame
            return True

    def give_back(self) -> None:
        """Let others in."""
        self._frame = None


class ExclusiveCall:
    """A block that has an engine to itself, and makes tensors on the CPU where no device is named.

    A class, since a generator that Ctrl-C leaves suspended runs its ending when it is collected, which may be in the
    middle of a later step.

    Args:
      enter: is given the frame of the with statement.
      leave: is told whether the block came to its end.
    """

    def __init__(self, enter: Callable[[FrameType], None], leave: Callable[[bool], None]) -> None:
        self._enter = enter
        self._leave = leave
        self._device = cpu_by_default()

    def __enter__(self) -> None:
        self._enter(sys._getframe(1))
        self._device.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self._device.__exit__(None, None, None)
        self._leave(kind is None)
