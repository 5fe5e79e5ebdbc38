"""The watchdog of a replica: a process that ends it once it has not run for so long that Ray has given it up.

Ray ends a replica that fails its checks by asking it to end, and by a signal only where that is not answered in time.
The connection to a process that is stopped may be broken already, though; then asking fails at once, the signal is not
sent, and the process keeps the processors that its replacement waits for (Ray 2.60).
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from contextlib import suppress

BEAT_SECONDS = 0.5
TICK_SECONDS = 1.0


def start_watchdog(seconds: float) -> None:
    """Have this process ended by a signal when none of its threads has run for so long; the watchdog ends with it."""
    command = [sys.executable, "-I", __file__, str(os.getpid()), str(seconds)]
    watchdog = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0)
    beating = threading.Thread(target=_beat, args=[watchdog], name="foredraft-watchdog", daemon=True)
    beating.start()


def _beat(watchdog: subprocess.Popen[bytes]) -> None:
    assert watchdog.stdin is not None
    pause = threading.Event()
    with suppress(BrokenPipeError):  # somebody has ended the watchdog; the replica goes on without
        while not pause.wait(BEAT_SECONDS):
            watchdog.stdin.write(b".")


def watch(beats: int, pid: int, seconds: float) -> None:
    """Read beats of the parent until it ends, or end it.

    Seconds are counted one by one, so that those in which this process was stopped itself do not count.

    Args:
      beats: a file descriptor.
      pid: of the parent.
    """
    silent = 0.0
    while silent < seconds:
        if select.select([beats], [], [], TICK_SECONDS)[0]:
            if not os.read(beats, 4096):
                return
            silent = 0.0
        else:
            silent += TICK_SECONDS
    if os.getppid() == pid:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    watch(sys.stdin.fileno(), int(sys.argv[1]), float(sys.argv[2]))
