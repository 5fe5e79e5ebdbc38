"""The engine of an LLM, for tests that look at its drafter or at what it has learned."""

from __future__ import annotations

from foredraft import LLM
from foredraft.engine.engine import Engine


def engine_of(llm: LLM) -> Engine:
    """The engine that runs the requests of an LLM."""
    return llm._runner.engine
