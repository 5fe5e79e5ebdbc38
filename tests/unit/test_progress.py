"""How far work has come: nothing at first, then one line, or a bar on a terminal."""

from __future__ import annotations

import logging

import pytest

from foredraft import progress
from foredraft.cli.running import hide_loading, notices, show_loading
from foredraft.progress import counted, counting


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress, "perf_counter", made)
    return made


def test_work_that_is_quick_shows_nothing(
    clock: Clock, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG, "foredraft"), counting("packing weights", 4) as advance:
        for _ in range(4):
            clock.now += 0.2
            advance(1)
    assert not caplog.records
    assert not capsys.readouterr().err


def test_a_program_gets_one_record(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "foredraft"):
        for _ in counted("reading tensors", [2, 3, 5], lambda size: size):
            clock.now += 2.0
    assert [record.getMessage() for record in caplog.records] == ["reading tensors ..."]


def test_the_command_line_shows_one_line_without_a_terminal(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with notices():
        show_loading("zoo:tiny")
        with counting("packing weights", 3) as advance:
            for _ in range(3):
                clock.now += 2.0
                advance(1)
        hide_loading()
    assert capsys.readouterr().err == "foredraft: loading zoo:tiny ...\nforedraft: packing weights ...\n"


def test_the_command_line_shows_a_bar_on_a_terminal(
    clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    found: list[str] = []
    handler = logging.Handler(logging.DEBUG)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    with notices():
        show_loading("zoo:tiny")
        logging.getLogger("foredraft").addHandler(handler)
        with counting("packing weights", 4) as advance:
            for _ in range(4):
                clock.now += 0.6
                advance(1)
        hide_loading()
    logging.getLogger("foredraft").removeHandler(handler)
    assert found == [
        "packing weights ...",
        "packing weights ━━━━━━━━━━━━──────────── 50 %",
        "packing weights ━━━━━━━━━━━━━━━━━━────── 75 %",
        "packing weights ━━━━━━━━━━━━━━━━━━━━━━━━ 100 %",
    ]
    assert "packing weights ..." not in capsys.readouterr().err.replace("\r", "").split("\n")


def test_python_shows_a_bar_on_a_terminal_and_removes_it(
    clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(logging.getLogger("foredraft"), "propagate", False)  # pytest's own handlers
    with counting("packing weights", 2) as advance:
        for _ in range(2):
            clock.now += 2.0
            advance(1)
    shown = capsys.readouterr().err
    assert "packing weights" in shown
    assert "100 %" in shown
    assert shown.endswith("\x1b[2K")
