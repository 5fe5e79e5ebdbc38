"""A server in this process: real sockets, a real event loop, the real thread of the engine."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

from foredraft.llm import LLM
from foredraft.serve.served import Served
from foredraft.serve.server import Server
from foredraft.serve.settings import ServerSettings

MODEL = "zoo:tiny"
SETTINGS = ["lookup=ngram", "plain=none"]
HERMES = (Path(__file__).parents[2] / "examples" / "serve" / "hermes.jinja").read_text(encoding="utf-8")
"""The template of the examples, which knows tools."""


@dataclass(frozen=True)
class Running:
    """A server that runs, and clients of it."""

    server: Server
    http: httpx.Client
    client: openai.OpenAI
    llm: LLM
    """Another face of the same model, for references: it takes turns with the server."""

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunks of a stream that comes to its end."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in response.iter_lines() if line and not line.startswith(":")]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


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
    client = openai.OpenAI(base_url=f"{server.address}/v1", api_key=key, max_retries=0, timeout=600)
    try:
        yield Running(server, http, client, served.llm.with_speculative_config(None))
    finally:
        client.close()
        http.close()
        server.handle_exit(2, None)
        thread.join(30)
        assert not thread.is_alive()
