"""A replica that is stopped is ended by its watchdog, since Ray does not always do so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from foredraft.serve.ray.watchdog import watch

REPLICA = "from foredraft.serve.ray.watchdog import start_watchdog; start_watchdog({seconds}); print('on', flush=True)"


def started(seconds: float, then: str) -> subprocess.Popen[str]:
    code = f"{REPLICA.format(seconds=seconds)}; {then}"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "on\n"
    return process


@pytest.mark.full
def test_a_process_that_is_stopped_is_ended() -> None:
    with started(3, "import time; time.sleep(600)") as process:
        try:
            os.kill(process.pid, signal.SIGSTOP)
            assert process.wait(300) == -signal.SIGKILL
        finally:
            process.kill()


@pytest.mark.full
def test_a_process_that_runs_ends_by_itself_and_its_watchdog_with_it() -> None:
    """The watchdog has the process's standard error, which ends when the last one that has it ends."""
    code = f"{REPLICA.format(seconds=600)}; import time; time.sleep(3)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


def test_only_the_parent_is_ended() -> None:
    """A process that has taken the number of one that is gone is left alone."""
    read, write = os.pipe()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        watch(read, other.pid, 1.0)
        assert other.poll() is None
        other.communicate(b"\n")
    assert other.returncode == 0
    os.close(read)
    os.close(write)
