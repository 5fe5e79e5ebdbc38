"""A server in this process: real sockets, a real event loop, the real thread of the engine."""

from __future__ import annotations

import copy
import json
import threading
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
