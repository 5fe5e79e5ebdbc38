"""The command: its options, its one line, its keys, and how signals end it."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from typer.testing import CliRunner

from foredraft.cli import app
from foredraft.cli.serve import read_keys
from programs import started
from serving import MODEL

LONG = {"prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "stream": True, "speculative": False}


@contextmanager
def command(*options: str, **variables: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, once it has said where it listens."""
    arguments = ["serve", MODEL, "--port", "0", *options]
    with started(arguments, stderr=subprocess.PIPE, text=True, env=variables) as process:
        assert process.stderr is not None
        try:
            found = next(
                match for line in process.stderr if (match := re.search(r"serving .* at (http://\S+)/v1", line))
            )
            yield process, found[1]
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_a_signal_drains_and_a_second_one_does_not_wait(number: signal.Signals) -> None:
    with command() as (process, address):
        with httpx.stream("POST", f"{address}/v1/completions", json={**LONG, "max_tokens": 300}) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(number)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(120) == 0
    long = {**LONG, "n": 8}
    with command() as (process, address), httpx.stream("POST", f"{address}/v1/completions", json=long) as response:
        lines, rest = response.iter_lines(), ""
        next(lines)
        process.send_signal(number)
        with suppress(httpx.TransportError):  # until it listens no more: two signals at once would be one
            while True:
                httpx.get(f"{address}/health")
        process.send_signal(number)
        with suppress(httpx.RemoteProtocolError):
            rest = "".join(lines)
        assert '"length"' not in rest  # the text did not come to its end
        assert process.wait(120) == 0


@pytest.mark.full
@pytest.mark.slow
def test_connections_beyond_the_limit_of_files_and_requests_of_a_terminal_that_is_gone_come_to_their_end() -> None:
    """The event loop wrote a traceback for each of 2,000 tries, every second: 50 MB in 20 seconds. SIGHUP broke off."""
    with command("--method", "none") as (process, address), ExitStack() as opened_last, ExitStack() as opened:
        num_open = len(os.listdir(f"/proc/{process.pid}/fd"))
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (num_open + 4, num_open + 4))
        parts = urlsplit(address)
        for _ in range(12):
            opened.enter_context(socket.create_connection((parts.hostname, parts.port)))
        waiting = opened_last.enter_context(socket.create_connection((parts.hostname, parts.port), timeout=60))
        waiting.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert process.stderr is not None
        assert "no further connection can be accepted (Too many open files)" in process.stderr.readline()
        opened.close()
        assert waiting.recv(1000).startswith(b"HTTP/1.1 200")
        waiting.close()
        with httpx.stream("POST", f"{address}/v1/completions", json={**LONG, "max_tokens": 300}) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGHUP)
            process.send_signal(signal.SIGHUP)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(120) == 0
        assert process.stderr.read() == ""


COMPUTES = """
import sys, torch
import foredraft.cli.serve as command
from foredraft.cli import app
def load(*_, **__):
    print("computing", file=sys.stderr, flush=True)
    while True:
        torch.ones(1500, 1500) @ torch.ones(1500, 1500)
command.load_llm = load
app(["serve", "zoo:tiny", "--port", "0"])
"""


@pytest.mark.full
@pytest.mark.parametrize("signals", [pytest.param(1, marks=pytest.mark.full), 2])
def test_an_end_around_compiled_code_is_no_abort(signals: int) -> None:
    """The interpreter's own end throws a thread out of ATen; `terminate called` and status -6 came of it."""
    with subprocess.Popen([sys.executable, "-c", COMPUTES], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            assert process.stderr.readline() == "foredraft: loading zoo:tiny ...\n"
            assert "computing" in process.stderr.readline()
            for _ in range(signals):
                process.send_signal(signal.SIGINT)
                time.sleep(0.5)
            assert process.wait(30) == 0
            assert "terminate" not in process.stderr.read()
        finally:
            process.kill()


def test_keys_of_a_file_of_windows(tmp_path: Path) -> None:
    """Editors there put a mark before the text, which no client sends: every request was refused."""
    (tmp_path / "keys").write_bytes("one\r\ntwo é\r\n".encode("utf-8-sig"))
    assert read_keys(None, str(tmp_path / "keys")) == ("one", "two é")


@pytest.mark.full
@pytest.mark.slow
def test_keys_from_a_file_and_the_environment_and_a_log_that_nobody_reads_any_more(tmp_path: Path) -> None:
    """Every request was an error inside the server once the reader of its log had gone."""
    (tmp_path / "keys").write_text("one\n\ntwo\n")
    options = ("--api-key-file", str(tmp_path / "keys"), "--enable-log-requests", "--method", "ngram")
    with command(*options, FOREDRAFT_API_KEY="three") as (process, address):
        assert process.stderr is not None
        process.stderr.close()
        for key, status in (("one", 200), ("two", 200), ("three", 200), ("four", 401)):
            keyed = {"Authorization": f"Bearer {key}"}
            assert httpx.get(f"{address}/v1/models", headers=keyed).status_code == status
            asked = httpx.post(f"{address}/v1/completions", json={"prompt": "a", "max_tokens": 2}, headers=keyed)
            assert asked.status_code == status
        assert httpx.get(f"{address}/health").status_code == 200
        process.terminate()
        assert process.wait(120) == 0


@pytest.mark.sample(21)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--stream-granularity", "word"], "choose one of token, step"),
        (["--api-key", ""], "an API key is empty"),
        (["--api-key", "secret "], "an API key begins or ends with white space"),
        (["--api-key-file", "/nothing"], "cannot be read"),
        (["--api-key-file", "/dev/null"], "has no keys"),
        (["--request-timeout", "0"], "request_timeout is 0"),
        (["--request-timeout", "nan"], "request_timeout is nan; it must be finite"),
        (["--shutdown-timeout", "inf"], "shutdown_timeout is inf; it must be finite"),
        (["--host", "256.0.0.1"], "cannot listen on 256.0.0.1"),
        (["--port", "70000"], "Invalid value for '--port'"),
        (["--tool-call-parser", "pythonic"], "choose hermes"),
        (["--cors-origins", "a.example"], "cors_origins is 'a.example'; give *, or an origin"),
        (["--cors-origins", "https://a.example/"], "an origin without a path"),
        (["--chat-template", "/nothing"], "cannot be read"),
        (["--chat-template", "BROKEN"], "chat_template cannot be read: unexpected '}', line 2"),
        (["--served-model-name", ""], "served_model_name '' is empty"),
        (["--served-model-name", "a", "--served-model-name", "a"], "served_model_name 'a' is given twice"),
        (["--served-model-name", "a", "--drafting", "a=ngram"], "the name 'a' is already served"),
        (["--drafting", "ngram"], "give NAME=METHOD"),
        (["--drafting", "a=ngrm"], "drafting 'a': method 'ngrm' is not known; did you mean 'ngram'?"),
        (["--drafting", "a={"], "drafting 'a': speculative config is not valid JSON"),
        (["--drafting", 'a={"method": "ngram", "window": 3}'], "drafting 'a': "),
        (["--drafting", 'a={"method": "draft_model", "model": "/nothing"}'], "/nothing does not exist"),
        (["--drafting", 'a={"method": "rest", "datastore": "/nothing"}'], "/nothing"),
        (["--drafting", "a=ngram", "--drafting", "a=suffix"], "the name 'a' is already served"),
        (["--method", "ngrm"], "did you mean 'ngram'?"),
        (["--max-kv-bytes", "lots"], "max_kv_bytes is 'lots'"),
        (["--model", "other"], "given twice"),
    ],
)
def test_options_that_cannot_be(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They are told before the model is loaded; of a malformed way of drafting that took a whole load."""
    monkeypatch.setattr("foredraft.llm.load_model", lambda *_, **__: pytest.fail("the model is loaded"))
    (tmp_path / "broken").write_text("{% for message in messages %}\n{{ message.content }")
    options = [str(tmp_path / "broken") if option == "BROKEN" else option for option in options]
    result = CliRunner().invoke(app, ["serve", MODEL, "--port", "0", *options], terminal_width=200)
    assert result.exit_code == 2
    assert message in result.output
    assert "secret" not in result.output


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("foredraft.serve.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = CliRunner().invoke(app, ["serve", MODEL])
    assert result.exit_code == 2
    assert "foredraft serve needs uvicorn; install it with: python -m pip install" in result.output
