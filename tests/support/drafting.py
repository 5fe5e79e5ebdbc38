"""Drafters by the name of their method."""

from __future__ import annotations

from typing import Any

from foretoken.config.method import methods
from foretoken.drafters.iterate.jacobi import JacobiDrafter
from foretoken.drafters.iterate.lookahead import LookaheadDrafter
from foretoken.drafters.lookup.nasd import NasdDrafter
from foretoken.drafters.lookup.ngram import NGramDrafter
from foretoken.drafters.lookup.rest import RestDrafter
from foretoken.drafters.lookup.suffix import SuffixDrafter
from foretoken.drafters.lookup.token_recycling import TokenRecyclingDrafter

CLASSES: dict[str, type[Any]] = {
    "ngram": NGramDrafter,
    "nasd": NasdDrafter,
    "suffix": SuffixDrafter,
    "rest": RestDrafter,
    "token_recycling": TokenRecyclingDrafter,
    "jacobi": JacobiDrafter,
    "lookahead": LookaheadDrafter,
}


def made(method: str, length: int | None = None, *given: Any, cls: type[Any] | None = None, **keys: Any) -> Any:
    """A drafter that needs no model.

    Args:
      length: its ``num_speculative_tokens``; None for the default.
      given: what its class takes before the options.
      cls: a class derived from its own, instead of that.
      keys: of the method, and arguments of its class.
    """
    options = methods()[method].options
    known = options.keys()
    own = {name: value for name, value in keys.items() if name not in known or name == "length_policy"}
    chosen = {name: value for name, value in keys.items() if name not in own}
    if length is not None:
        chosen["num_speculative_tokens"] = length
    return (cls or CLASSES[method])(*given, options(**chosen), **own)
