"""Which methods a model can draft with, and why it cannot use the others."""

from __future__ import annotations

from collections.abc import Callable

from foretoken.config.method import Method, methods
from foretoken.config.speculative import SpeculativeConfig
from foretoken.errors import ForetokenError


def applicable(attempt: Callable[[SpeculativeConfig], object]) -> list[tuple[str, str | None]]:
    """Every method with None, or with the reason why the model cannot draft with it at present.

    A method applies when its drafter can be made with its defaults.

    Args:
      attempt: makes the drafter of a config, such as ``partial(drafter_factory, context=...)``.
    """
    return [(name, _refusal(method, attempt)) for name, method in methods().items() if name != "none"]


def _refusal(method: Method, attempt: Callable[[SpeculativeConfig], object]) -> str | None:
    try:
        attempt(SpeculativeConfig(method.name, **method.sample))
    except ForetokenError as error:
        return str(error)
    return None
