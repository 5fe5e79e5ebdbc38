"""Which methods a model can draft with, and why it cannot use the others."""

from __future__ import annotations

from collections.abc import Callable

from foretoken.engine.errors import ForetokenError
from foretoken.methods import METHODS
from foretoken.speculative import SpeculativeConfig

_SAMPLES = {"union": "token_recycling+ngram", "first": "ngram>nasd"}
"""What stands for the methods that combine others."""


def applicable(attempt: Callable[[SpeculativeConfig], object]) -> list[tuple[str, str | None]]:
    """Every method with None, or with the reason why the model cannot draft by it as it stands.

    A method applies when its drafter can be made with its defaults.

    Args:
      attempt: makes the drafter of a config, such as ``partial(drafter_factory, materials=...)``.
    """
    return [(name, _refusal(name, attempt)) for name in METHODS if name != "none"]


def _refusal(name: str, attempt: Callable[[SpeculativeConfig], object]) -> str | None:
    try:
        attempt(SpeculativeConfig(method=_SAMPLES.get(name, name)))
    except ForetokenError as error:
        return str(error)
    return None
