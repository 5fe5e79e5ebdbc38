"""Settings of the tests of the command line."""

from __future__ import annotations

from typing import Any

import pytest

import foredraft.llm
from foredraft.loading import models


@pytest.fixture(autouse=True)
def _models_are_loaded_once(_loaded_once: None) -> None:
    """Verbs load zoo:tiny again and again; what they do with it is the claim."""


@pytest.fixture
def _nothing_loads(_models_are_loaded_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(foredraft.llm, "load_model", load)
    monkeypatch.setattr(models, "load_model", load)
