"""Signals that end a verb: what it has found by then is kept, and a second one does not take that away."""

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
"""Ctrl-C; what schedulers and service managers send; and that of a terminal that is gone."""

PAUSE_SECONDS = 1.0
"""After a signal, in which others are taken for the same one: keys are pressed twice, and groups signalled twice."""

LATER_SECONDS = 0.02
"""Seconds after which code that could not raise has ended."""


def end_as_by_ctrl_c() -> None:
    """Let each of these signals raise KeyboardInterrupt, unless the process was started to ignore it.

    Where it comes in a destructor or a callback of the interpreter, which cannot raise, it is raised a moment later.
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
    """Ignore these signals inside, where what was found is written."""
    if threading.current_thread() is not threading.main_thread():  # signals are not its business
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def ignore_signals() -> None:
    """From here on: the process is ending."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


def is_running(frame: FrameType) -> bool:
    """Whether a frame is on the stack of any thread."""
    for top in sys._current_frames().values():
        current: FrameType | None = top
        while current is not None:
            if current is frame:
                return True
            current = current.f_back
    return False
