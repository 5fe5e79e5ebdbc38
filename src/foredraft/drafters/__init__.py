"""Drafters, and the functions that make one from a `SpeculativeConfig`."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name

from foredraft.config.speculative import SpeculativeConfig
from foredraft.drafters.context import DrafterContext
from foredraft.engine.drafter import Drafter

DrafterFactory = Callable[[], Drafter]
"""Function that makes a new drafter without state on every call."""


def make_drafter(config: SpeculativeConfig, context: DrafterContext) -> Drafter:
    """Make a drafter without state.

    Raises: ConfigError if the config needs something that the context does not have.
    """
    build = config.definition.build
    drafter: Drafter = (resolve_name(build) if isinstance(build, str) else build)(config.options, context)
    return drafter


def drafter_factory(config: SpeculativeConfig, context: DrafterContext) -> DrafterFactory:
    """Return a function that makes a new drafter on every call.

    Raises: ConfigError if the config needs something that the context does not have.
    """

    def num_changes() -> int:
        return getattr(context.target, "num_changes", 0)  # drafters of text alone need no target

    first = [(num_changes(), make_drafter(config, context))]  # raises configuration errors now

    def make() -> Drafter:
        then, drafter = first.pop() if first else (-1, None)
        return drafter if drafter is not None and then == num_changes() else make_drafter(config, context)

    return make
