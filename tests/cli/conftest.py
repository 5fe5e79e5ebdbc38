"""Settings of the tests of the command line."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _models_are_loaded_once(_loaded_once: None) -> None:
    """Verbs load zoo:tiny again and again; what they do with it is the claim."""
