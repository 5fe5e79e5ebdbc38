"""The command: its options, its one line, its keys, and how signals end it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from foretoken.cli import app
from serving import MODEL

LONG = {"prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "stream": True, "speculative": False}


@contextmanager
def command(*options: str, **variables: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, once it has said where it listens."""
    arguments = [sys.executable, "-m", "foretoken", "serve", MODEL, "--port", "0", *options]
    environment = {**os.environ, **variables}
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        try:
            found = next(
                match for line in process.stderr if (match := re.search(r"serving .* at (http://\S+)/v1", line))
            )
            yield process, found[1]
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_drains_and_a_second_one_does_not_wait(number: signal.Signals) -> None:
    with command() as (process, address):
        with httpx.stream("POST", f"{address}/v1/completions", json={**LONG, "max_tokens": 300}) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(number)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(20) == 0
    with command() as (process, address), httpx.stream("POST", f"{address}/v1/completions", json=LONG) as response:
        next(response.iter_lines())
        process.send_signal(number)
        process.send_signal(number)
        assert process.wait(10) == 0


COMPUTES = """
import sys, torch
import foretoken.cli.serve as command
from foretoken.cli import app
def load(*_, **__):
    print("computing", file=sys.stderr, flush=True)
    while True:
        torch.ones(1500, 1500) @ torch.ones(1500, 1500)
command.load_llm = load
app(["serve", "zoo:tiny", "--port", "0"])
"""


@pytest.mark.parametrize("signals", [1, 2])
def test_an_end_around_compiled_code_is_no_abort(signals: int) -> None:
    """The interpreter's own end throws a thread out of ATen; `terminate called` and status -6 came of it."""
    with subprocess.Popen([sys.executable, "-c", COMPUTES], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            assert "computing" in process.stderr.readline()
            for _ in range(signals):
                process.send_signal(signal.SIGINT)
                time.sleep(0.5)
            assert process.wait(30) == 0
            assert "terminate" not in process.stderr.read()
        finally:
            process.kill()


@pytest.mark.slow
def test_keys_from_a_file_and_the_environment(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\n\ntwo\n")
    with command("--api-key-file", str(tmp_path / "keys"), FORETOKEN_API_KEY="three") as (process, address):
        for key, status in (("one", 200), ("two", 200), ("three", 200), ("four", 401)):
            assert httpx.get(f"{address}/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == status
        assert httpx.get(f"{address}/health").status_code == 200
        process.terminate()
        assert process.wait(20) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--stream-granularity", "word"], "choose one of token, step"),
        (["--api-key", ""], "an API key is empty"),
        (["--api-key-file", "/nothing"], "cannot be read"),
        (["--request-timeout", "0"], "request_timeout is 0"),
        (["--host", "256.0.0.1"], "cannot listen on 256.0.0.1"),
        (["--tool-call-parser", "pythonic"], "choose hermes"),
        (["--drafting", "ngram"], "give NAME=METHOD"),
        (["--model", "other"], "give one"),
    ],
)
def test_options_that_cannot_be(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["serve", MODEL, "--port", "0", *options])
    assert result.exit_code == 2
    assert message in result.output


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("foretoken.serve.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = CliRunner().invoke(app, ["serve", MODEL])
    assert result.exit_code == 2
    assert "pip install 'foretoken[serve]'" in result.output
