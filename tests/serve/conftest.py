"""Servers over zoo:tiny for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from foredraft.llm import LLM
from foredraft.serve.served import Served, ServedModels
from foredraft.serve.settings import ServerSettings
from serving import MODEL, SETTINGS, Running, running


@pytest.fixture(scope="session")
def llm() -> LLM:
    return LLM(MODEL, "draft_model", max_num_seqs=8)


@pytest.fixture(scope="session")
def served(llm: LLM) -> Served:
    return ServedModels.of(["tiny", "alias"], SETTINGS).over(llm)


@pytest.fixture(scope="session")
def running_server(served: Served) -> Iterator[Running]:
    """One server for all tests that need no other; `Running.under` gives it other settings."""
    with running(served) as found:
        yield found


@pytest.fixture
def start(served: Served) -> Iterator[Callable[..., Running]]:
    """Starts servers with settings of their own; all of them end with the test."""
    with ExitStack() as stack:

        def begin(key: str = "none", served: Served = served, **settings: Any) -> Running:
            return stack.enter_context(running(served, ServerSettings(**settings), key))

        yield begin
