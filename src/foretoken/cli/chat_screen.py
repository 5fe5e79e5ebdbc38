"""Where a chat reads its lines and writes its answers: a terminal, a pipe, or a pipe of JSON."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text

from foretoken.cli.running import EXIT_INTERRUPTED, put_json
from foretoken.cli.writers import as_record, write_segments
from foretoken.errors import ForetokenError

if TYPE_CHECKING:
    from foretoken.cli.conversation import ChatTurn
    from foretoken.sessions.outputs import StreamOutput


class Screen:
    """Standard input and output, on a terminal or not; in a pipe, everything but answers goes to standard error."""

    def __init__(self) -> None:
        self.is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._console = Console(highlight=False, soft_wrap=True)
        self._notices = Console(stderr=not self.is_interactive, highlight=False, soft_wrap=not self.is_interactive)

    def greet(self) -> None:
        if self.is_interactive:
            with suppress(ImportError):
                import readline  # noqa: F401  line editing and history for input()
            self.say("/help lists the commands")

    def lines(self) -> Iterator[str]:
        """Lines with something in them, to the end of input."""
        while True:
            try:
                line = input("> ") if self.is_interactive else sys.stdin.readline()
            except EOFError:
                self._console.file.write("\n")
                return
            except KeyboardInterrupt:
                if not self.is_interactive:
                    raise typer.Exit(EXIT_INTERRUPTED) from None
                self.say("\n(Ctrl-D or /quit ends the chat)")
                continue
            if not line and not self.is_interactive:
                return
            if line.strip():
                yield line.strip()

    @contextmanager
    def answering(self) -> Iterator[Callable[[], bool]]:
        """While an answer is given: whether the user wants it to end. A second Ctrl-C breaks off a step that hangs."""
        if not self.is_interactive:
            yield lambda: False
            return
        pressed: list[int] = []

        def press(number: int, frame: FrameType | None) -> None:
            pressed.append(number)
            if len(pressed) > 1:
                raise KeyboardInterrupt

        previous = signal.signal(signal.SIGINT, press)
        try:
            yield lambda: bool(pressed)
        finally:
            signal.signal(signal.SIGINT, previous)

    def put(self, delta: StreamOutput) -> None:
        """Write a piece of an answer."""
        write_segments(self._console, delta.segments)

    def finish(self, turn: ChatTurn, **facts: Any) -> None:
        """End the answer."""
        self._console.file.write("\n")
        self._console.file.flush()

    def say(self, text: str) -> None:
        """Write something that is not an answer."""
        if text:
            self._notices.print(Text(text, "dim"))

    def table(self, values: dict[str, Any]) -> None:
        """Write named values."""
        self.say("\n".join(f"{name.replace('_', ' '):<22} {_shown(value)}" for name, value in values.items()))

    def complain(self, error: ForetokenError) -> None:
        """Write what was refused."""
        self._notices.print(Text(f"{type(error).__name__}: {error}", "red"))


class JsonScreen(Screen):
    """One JSON object per answer, and per /stats; everything else goes to standard error."""

    def __init__(self) -> None:
        super().__init__()
        self._notices = Console(stderr=True, highlight=False, soft_wrap=True)

    def put(self, delta: StreamOutput) -> None:
        """Answers are written whole."""

    def finish(self, turn: ChatTurn, **facts: Any) -> None:
        record = as_record(turn.output, turn.message)
        put_json({**record, "num_cached_tokens": turn.output.num_cached_tokens, "method": turn.method, **facts})

    def table(self, values: dict[str, Any]) -> None:
        put_json({"stats": values})


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {count}" for name, count in value.items()).replace("_", " ") or "none"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
