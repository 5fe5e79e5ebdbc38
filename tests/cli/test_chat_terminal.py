"""``foredraft chat`` in a real terminal: tmux for what is on the screen, a pseudo-terminal for Ctrl-C and the end."""

from __future__ import annotations

import os
import select
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress

import pytest

from programs import become

CHAT = [sys.executable, "-m", "foredraft", "chat", "--model", "zoo:tiny", "--dtype", "float32", "--max-new-tokens"]
PATIENCE = 90.0  # seconds, on a machine that does other things too

pytestmark = pytest.mark.slow


class Tmux:
    """A terminal of 100 x 40 on a server of its own."""

    def __init__(self, command: list[str]) -> None:
        self._name = f"foredraft-{uuid.uuid4().hex[:8]}"
        self._tmux(
            "-f", "/dev/null", "new-session", "-d", "-x", "100", "-y", "40", f"{shlex.join(command)}; echo code $?; cat"
        )

    def _tmux(self, *arguments: str) -> str:
        run = subprocess.run(["tmux", "-L", self._name, *arguments], capture_output=True, text=True, check=True)
        return run.stdout

    def type(self, text: str) -> None:
        self._tmux("send-keys", "-l", text)
        self._tmux("send-keys", "Enter")

    def press(self, key: str) -> None:
        self._tmux("send-keys", key)

    def screen(self, *, colours: bool = False) -> str:
        return self._tmux("capture-pane", "-p", *(["-e"] if colours else []))

    def wait(self, text: str, count: int = 1) -> str:
        end = time.monotonic() + PATIENCE
        while (screen := self.screen()).count(text) < count:
            assert time.monotonic() < end, f"{text!r} never came:\n{screen}"
            time.sleep(0.1)
        return screen

    def close(self) -> None:
        subprocess.run(["tmux", "-L", self._name, "kill-server"], capture_output=True, check=False)


@pytest.fixture
def tmux() -> Iterator[Tmux]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    terminal = Tmux([*CHAT, "24"])
    yield terminal
    terminal.close()


def test_a_conversation_in_tmux(tmux: Tmux) -> None:
    tmux.wait("/help lists the commands")
    tmux.wait("\n>")
    tmux.type("What is your favorite movie?")
    lines = tmux.wait("\n>", 2).splitlines()
    asked = lines.index("> What is your favorite movie?")
    answer = lines[asked + 1]
    assert answer
    tmux.type("/plain")
    screen = tmux.wait("identical:")
    assert screen.count(answer) == 2
    assert "\x1b[" in tmux.screen(colours=True)  # drafted tokens are coloured
    tmux.type("/stats")
    assert "method                 draft_model" in tmux.wait("max context tokens")
    tmux.type("/sats")
    tmux.wait("did you mean /stats?")
    tmux.type("/method ngram")
    tmux.wait("method ngram, up to 10 tokens ahead")
    tmux.press("C-d")
    tmux.wait("code 0")


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
    terminal = Terminal([*CHAT[3:], "1500", "--method", "none", "--temperature", "3", "--seed", "3"])
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
