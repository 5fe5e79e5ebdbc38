"""Settings for the whole suite; its presence also lets tests import the modules beside it."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from foretoken.engine.errors import ConfigError
from foretoken.engine.packing import can_pack

os.environ.setdefault("FORETOKEN_CACHE", str(Path(__file__).resolve().parents[1] / ".cache"))  # ours, not the user's


@pytest.fixture(autouse=True, scope="session")
def _few_threads() -> None:
    """Tiny matrices: more threads only wait for each other."""
    torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """Where oneDNN packs nothing (Arm, for instance), tests that ask for packed weights are skipped."""
    try:
        return (yield)
    except ConfigError as error:
        if can_pack() or "execution='packed' needs" not in str(error):
            raise
        pytest.skip(str(error))


ALWAYS = frozenset({"llama", "gemma3", "gpt2"})
"""Architectures whose integration tests belong to the fast part: rotary positions, windows, learned positions."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one architecture are slow ones, but for a covering few; `make test` runs them all."""
    for item in items:
        name = item.callspec.params.get("name") if hasattr(item, "callspec") else None
        if isinstance(name, str) and "integration" in item.path.parts and name not in ALWAYS:
            item.add_marker(pytest.mark.slow)
