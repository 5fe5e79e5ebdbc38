"""Watchdog process of a replica. It kills the replica if the replica has not run for longer than Ray waits for it.

When a replica fails its health checks, Ray first requests its shutdown, and sends a signal only if the request gets no
response in time. The connection to a stopped process may already be broken. The request then fails at once, no signal
is sent, and the process keeps the processors that its replacement needs (Ray 2.60).
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
    """Start a watchdog that kills this process if none of its threads has run for this many seconds. The watchdog ends
    together with this process."""
    command = [sys.executable, "-I", __file__, str(os.getpid()), str(seconds)]
    watchdog = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0)
    beating = threading.Thread(target=_beat, args=[watchdog], name="foredraft-watchdog", daemon=True)
    beating.start()


def _beat(watchdog: subprocess.Popen[bytes]) -> None:
    assert watchdog.stdin is not None
    pause = threading.Event()
    with suppress(BrokenPipeError):  # the watchdog was killed; the replica continues without one
        while not pause.wait(BEAT_SECONDS):
            watchdog.stdin.write(b".")


def watch(beats: int, pid: int, seconds: float) -> None:
    """Read heartbeats until the parent process ends, or kill it when they stop.

    Seconds are counted one at a time, so that time in which the watchdog itself was stopped does not count.

    Args:
      beats: file descriptor of the heartbeats.
      pid: process id of the parent.
      seconds: time without heartbeats after which the parent is killed.
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
