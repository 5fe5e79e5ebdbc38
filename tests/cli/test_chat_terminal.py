"""``foredraft chat`` in a pseudo-terminal: Ctrl-C and the end."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from programs import become

PATIENCE = 90.0  # seconds, on a machine that does other things too

pytestmark = pytest.mark.slow


class Terminal:
    """A pseudo-terminal, read as a person would."""

    def __init__(self, arguments: list[str]) -> None:
        import pty

        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            become(arguments, env={"TERM": "xterm"})
        self.text = ""

    def _read(self) -> None:
        if select.select([self._fd], [], [], 0.2)[0]:
            self.text += os.read(self._fd, 65536).decode(errors="replace")

    def insist(self, keys: str, text: str) -> None:
        """Send keys again until this text comes: one that falls between prompt and input is lost."""
        end = time.monotonic() + PATIENCE
        while text not in self.text:
            assert time.monotonic() < end, f"{text!r} never came:\n{self.text}"
            self.send(keys)
            pause = time.monotonic() + 3.0
            while text not in self.text and time.monotonic() < pause:
                self._read()
        self.wait(text)

    def wait(self, text: str) -> str:
        """What came, up to and with this text; it is not looked at again."""
        end = time.monotonic() + PATIENCE
        while text not in self.text:
            assert time.monotonic() < end, f"{text!r} never came:\n{self.text}"
            self._read()
        found, _, self.text = self.text.partition(text)
        return found + text

    def send(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def code(self) -> int:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if select.select([self._fd], [], [], 0.1)[0]:
                with suppress(OSError):  # the other end is closed
                    os.read(self._fd, 65536)
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
        raise AssertionError("the chat did not end")


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    pytest.importorskip("pty")
    options = "--model zoo:tiny --max-new-tokens 1500 --method none --temperature 3 --seed 3"
    terminal = Terminal(["chat", *options.split()])
    yield terminal
    os.close(terminal._fd)


def test_ctrl_c_ends_the_answer_and_not_the_chat(terminal: Terminal) -> None:
    terminal.wait("/help lists the commands")
    terminal.wait("> ")
    terminal.send("/seed 3\n")
    terminal.wait("seed 3")
    terminal.wait("> ")
    terminal.insist("\x03", "(Ctrl-D or /quit ends the chat)")  # at the prompt
    terminal.wait("> ")
    terminal.send("Tell me a long story about a lion, a mouse, a dog and a cat.\n")
    terminal.wait("cat.")
    terminal.wait(" ")  # of the answer
    terminal.insist("\x03", "(stopped")
    terminal.wait("> ")
    terminal.send("/stats\n")
    terminal.wait("num turns              1")
    terminal.wait("> ")
    terminal.send("\x04")
    assert terminal.code() == 0
