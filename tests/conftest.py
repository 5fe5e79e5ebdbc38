"""Settings for the whole suite; its presence also lets tests import the modules beside it."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _few_threads() -> None:
    """Tiny matrices: more threads only wait for each other."""
    torch.set_num_threads(1)
