"""Drafters by the name of their method, and whether they conform."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any
from unittest.mock import patch

from foredraft.drafters.iterate.jacobi import JacobiDrafter
from foredraft.drafters.iterate.lookahead import LookaheadDrafter
from foredraft.drafters.lookup.nasd import NasdDrafter
from foredraft.drafters.lookup.ngram import NGramDrafter
from foredraft.drafters.lookup.rest import RestDrafter
from foredraft.drafters.lookup.suffix import SuffixDrafter
from foredraft.drafters.lookup.token_recycling import TokenRecyclingDrafter
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.drafter import Drafter, PromptChunk
from foredraft.engine.row import Row, RowState
from foredraft.methods import methods
from foredraft.model.cache.group import CacheGroup
from foredraft.model.lm import CausalLM
from foredraft.testing import MakeDrafter, check_drafter, conformance, decode
from foredraft.testing.conformance import Trace

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


def begin(drafter: Drafter, rows: Sequence[Row], target: Any = None) -> CacheGroup:
    """Let a drafter begin with rows whose prompts are read, as an engine does: with slots, and with its last chunks.

    Args:
      target: for drafters that need it.

    Returns: its caches, to which further rows may be added.
    """
    caches = CacheGroup([own.cache for own in drafter.needs(target, None).caches])  # type: ignore[arg-type]
    for slot, row in enumerate(rows):
        caches.add()
        row.slot = slot
    drafter.start(rows, [PromptChunk.end_of(row) for row in rows])
    return caches


def end(*rows: Row) -> None:
    """Let rows end, as an engine does."""
    for row in rows:
        for state in row.state.values():
            if isinstance(state, RowState):
                state.ended(row, is_kept=False)
        row.state = {}


def check_conforms(make_drafter: MakeDrafter, target: CausalLM, depths: tuple[int, ...]) -> None:
    """`check_drafter`, where each target is decoded without drafts once for all drafters.

    Not for faults in what plain decoding runs through as well: they would stay in what is kept.
    """

    def decoded(target: CausalLM, drafter: Any, requests: Any, **others: Any) -> Trace:
        if type(drafter) is EmptyDrafter and not others:
            return _plain(target, tuple(requests))
        return decode(target, drafter, requests, **others)

    with patch.object(conformance, "decode", decoded):
        check_drafter(make_drafter, target, depths=depths)


@cache
def _plain(target: CausalLM, requests: Any) -> Trace:
    return decode(target, EmptyDrafter(), requests)
