"""A server in this process: real sockets, a real event loop, the real thread of the engine."""

from __future__ import annotations

import copy
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import openai
from starlette.testclient import TestClient

from foredraft.llm import LLM
from foredraft.serve.app import Application
from foredraft.serve.served import Served
from foredraft.serve.server import Server
from foredraft.serve.settings import ServerSettings

MODEL = "zoo:tiny"
SETTINGS = ["lookup=ngram", "plain=none"]
HERMES = (Path(__file__).parents[2] / "examples" / "serve" / "hermes.jinja").read_text(encoding="utf-8")
"""The template of the examples, which knows tools."""


@dataclass
class Running:
    """A server that runs, and clients of it.

    Args:
      llm: another `LLM` over the same model, for references: it takes turns with the server.
    """

    server: Server
    http: httpx.Client
    llm: LLM

    @cached_property
    def client(self) -> openai.OpenAI:
        """Client of the OpenAI API, for tests of that client alone: they are `full`."""
        return openai.OpenAI(base_url=f"{self.server.address}/v1", api_key="none", max_retries=0, timeout=600)

    def under(self, key: str = "none", **settings: Any) -> TestClient:
        """Client of the same engine under other settings, without sockets."""
        application = Application(self.server.bridge, ServerSettings(**settings))
        application.served = self.server.application.served
        headers = {"Authorization": f"Bearer {key}"}
        return TestClient(application.build("localhost"), "http://localhost", headers=headers)

    @property
    def num_rows(self) -> int:
        served = self.server.application.served
        assert served is not None
        return sum(llm.num_unfinished for llm in served.llms)

    @property
    def num_open(self) -> int:
        """Requests that the bridge has not let go."""
        return self.server.bridge.num_open  # type: ignore[attr-defined]

    def wait_for_rows(self, number: int, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while self.num_rows != number:
            assert time.monotonic() < end, f"there are not {number} rows"
            time.sleep(0.005)

    def connected(self) -> socket.socket:
        """A connection for bytes that no client sends."""
        host, port = self.server.address.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=60)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunks of a stream that comes to its end."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in response.iter_lines() if line.startswith("data: ")]
        if path != "/v1/responses":
            assert lines.pop() == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines]


def with_template(llm: LLM, template: str = HERMES) -> LLM:
    """The same model with another chat template."""
    other = llm.with_speculative_config(None)
    other.tokenizer = copy.deepcopy(llm.tokenizer)
    other.tokenizer.chat_template = template
    return other


def received(client: socket.socket) -> bytes:
    """All that comes until the server closes."""
    return b"".join(iter(lambda: client.recv(65536), b""))


@contextmanager
def running(served: Served, settings: ServerSettings | None = None, key: str = "none") -> Iterator[Running]:
    said = threading.Event()
    server = Server(lambda: served, served.name, settings or ServerSettings(), port=0, say=lambda _: said.set())
    thread = threading.Thread(target=server.run_until_end)
    thread.start()
    assert said.wait(120)
    headers = {"Authorization": f"Bearer {key}"}
    http = httpx.Client(base_url=server.address, headers=headers, timeout=600)
    found = Running(server, http, served.llm.with_speculative_config(None))
    try:
        yield found
    finally:
        if "client" in vars(found):
            found.client.close()
        http.close()
        server.handle_exit(2, None)
        thread.join(30)
        assert not thread.is_alive()
