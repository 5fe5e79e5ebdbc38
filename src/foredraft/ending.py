"""Signals that end a command. Finished results are kept, and a second signal does not interrupt saving them."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Signals that end a command: Ctrl-C, the signal of schedulers and service managers, and that of a closed terminal."""

PAUSE_SECONDS = 1.0
"""Time after a signal in which further signals are ignored, because keys are pressed twice and groups are signalled
twice.
"""

LATER_SECONDS = 0.02
"""Delay after which code that could not raise an exception has ended, in seconds."""


def end_as_by_ctrl_c() -> None:
    """Make each of these signals raise KeyboardInterrupt, unless the process was started to ignore it.

    If the signal arrives in a destructor or a callback of the interpreter, which cannot raise, it is raised a moment
    later.
    """
    latest = float("-inf")

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal latest
        if time.monotonic() - latest >= PAUSE_SECONDS:
            latest = time.monotonic()
            raise KeyboardInterrupt

    for number in ENDING:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, end)
    tell = sys.unraisablehook

    def raise_later(unraisable: sys.UnraisableHookArgs) -> None:
        nonlocal latest
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            tell(unraisable)
            return
        latest = float("-inf")
        again = threading.Timer(LATER_SECONDS, os.kill, [os.getpid(), signal.SIGINT])
        again.daemon = True
        again.start()

    sys.unraisablehook = raise_later


@contextmanager
def finishing() -> Iterator[None]:
    """Context manager that ignores these signals, for the time in which results are written."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def ignore_signals() -> None:
    """Ignore these signals from now on, because the process is ending."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


def is_running(frame: FrameType) -> bool:
    """Return whether a frame is on the stack of any thread."""
    for top in sys._current_frames().values():
        current: FrameType | None = top
        while current is not None:
            if current is frame:
                return True
            current = current.f_back
    return False
