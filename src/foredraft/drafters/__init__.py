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
    target = context.target
    first = [(target.num_changes, make_drafter(config, context))]  # raises configuration errors now

    def make() -> Drafter:
        num_changes, drafter = first.pop() if first else (-1, None)
        is_current = drafter is not None and num_changes == target.num_changes
        return drafter if is_current else make_drafter(config, context)  # type: ignore[return-value]

    return make
