"""Settings for the whole suite; its presence also lets tests import the modules beside it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("FORETOKEN_CACHE", str(Path(__file__).resolve().parents[1] / ".cache"))  # ours, not the user's


@pytest.fixture(autouse=True, scope="session")
def _few_threads() -> None:
    """Tiny matrices: more threads only wait for each other."""
    torch.set_num_threads(1)


ALWAYS = frozenset({"llama", "gemma3", "gpt2"})
"""Architectures whose integration tests belong to the fast part: rotary positions, windows, learned positions."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one architecture are slow ones, but for a covering few; `make test` runs them all."""
    for item in items:
        name = item.callspec.params.get("name") if hasattr(item, "callspec") else None
        if isinstance(name, str) and "integration" in item.path.parts and name not in ALWAYS:
            item.add_marker(pytest.mark.slow)
