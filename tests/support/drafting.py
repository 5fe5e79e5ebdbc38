"""Drafters by the name of their method, and whether they conform."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from foredraft.drafters.iterate.jacobi import JacobiDrafter
from foredraft.drafters.iterate.lookahead import LookaheadDrafter
from foredraft.drafters.lm.draft_model import DraftModelDrafter
from foredraft.drafters.lookup.nasd import NasdDrafter
from foredraft.drafters.lookup.ngram import NGramDrafter
from foredraft.drafters.lookup.rest import RestDrafter
from foredraft.drafters.lookup.suffix import SuffixDrafter
from foredraft.drafters.lookup.token_recycling import TokenRecyclingDrafter
from foredraft.drafters.none import EmptyDrafter
from foredraft.drafters.parts.layer_set import LayerSet
from foredraft.drafters.parts.self_draft import SelfDrafter
from foredraft.drafters.parts.sparse_view import SparseView
from foredraft.drafters.selfdraft.layer_skip import SwiftDrafter
from foredraft.drafters.selfdraft.sparse_kv import USUAL_ACCEPTANCE
from foredraft.engine.drafter import ContextDrafter, Drafter, DrafterFacts, DraftSize, PromptChunk
from foredraft.engine.row import Row, RowState
from foredraft.methods import methods
from foredraft.methods.lengths import LengthPolicy
from foredraft.model.cache.ragged import CacheGroup
from foredraft.model.lm import CausalLM
from foredraft.testing import MakeDrafter, check_drafter, conformance, decode
from foredraft.testing.conformance import Shown, Trace
from foredraft.tree import DraftTree
from toys import VOCAB_SIZE

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


# -- the target or a small model, in cheaper forms --------------------------------------------------------------------

SKIPPED = LayerSet((1,), (0,))


def layer_skip(depth: int = 3, vocab_size: int = VOCAB_SIZE, **options: Any) -> SelfDrafter:
    """Drafts without one attention and one MLP, or without another set."""
    given = {"layer_set": SKIPPED, "target_vocab_size": vocab_size, "policy": LengthPolicy(depth), **options}
    return SelfDrafter("layer_skip", **given)


def quantized_self(depth: int = 3, vocab_size: int = VOCAB_SIZE, **options: Any) -> SelfDrafter:
    """Drafts over 4-bit weights."""
    given = {"group_size": 32, "target_vocab_size": vocab_size, "policy": LengthPolicy(depth), **options}
    return SelfDrafter("quantized_self", **given)


def swift(depth: int = 3, num_scored: int = 4, **options: Any) -> SwiftDrafter:
    """Drafts without layers that it looks for meanwhile; for `toys.deep`."""
    return SwiftDrafter(num_scored=num_scored, target_vocab_size=VOCAB_SIZE, policy=LengthPolicy(depth), **options)


def view(selector: str = "streaming", budget: int = 8, refresh: int = 3, sinks: int = 1) -> SparseView:
    """Eight columns of a cache."""
    window = budget - sinks if selector == "streaming" else 3
    return SparseView(budget=budget, selector=selector, sinks=sinks, window=window, refresh=refresh)


def sparse_kv(
    selector: str = "streaming", depth: int = 4, vocab_size: int = VOCAB_SIZE, budget: int = 8, **options: Any
) -> SelfDrafter:
    """Drafts with the target over a part of its cache."""
    own = {"view": view(selector, budget), "target_vocab_size": vocab_size, "policy": LengthPolicy(depth)}
    return SelfDrafter("sparse_kv", usual_acceptance=USUAL_ACCEPTANCE, **{**own, **options})


def sparse_model(
    model: CausalLM, selector: str = "streaming", depth: int = 4, cls: type[Any] = DraftModelDrafter, **options: Any
) -> Any:
    """Drafts with a small model over a part of its cache."""
    given = {"view": view(selector), "target_vocab_size": model.vocab_size, "policy": LengthPolicy(depth), **options}
    return cls(model, **given)


class Says(ContextDrafter):
    """Proposes the same tokens always, and states how likely they are where it is told to."""

    def __init__(self, name: str, *tokens: int, scores: tuple[float, ...] | None = None) -> None:
        self.facts = DrafterFacts(name)
        self.tokens, self.scores = tokens, scores
        self.num_asked = 0

    def propose_row(self, row: Row, budget: DraftSize) -> DraftTree:
        self.num_asked += 1
        return replace(DraftTree.chain(row.token_ids[-1], self.tokens[:budget], source=self.name), scores=self.scores)


# -- rows ----------------------------------------------------------------------------------------------------------


@dataclass
class StubRow:
    """As much of a row as drafters from text and length policies use."""

    id: int = 1
    token_ids: list[int] = field(default_factory=lambda: [1, 2])
    seed: int = 3
    num_output_tokens: int = 0
    is_greedy: bool = True
    state: dict[Any, Any] = field(default_factory=dict)
    slot: int = -1

    @property
    def pending(self) -> int:
        return self.token_ids[-1]

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.token_ids) - self.num_output_tokens

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def sampler(self) -> Any:
        return SimpleNamespace(is_greedy=self.is_greedy)


def started(drafter: Drafter, *tokens: int, **of_row: Any) -> Any:
    """A row that a drafter has begun with."""
    row: Any = StubRow(token_ids=list(tokens), **of_row)
    begin(drafter, [row])
    return row


# -- as an engine does ------------------------------------------------------------------------------------------------


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


def check_conforms(make_drafter: MakeDrafter, target: CausalLM, depths: tuple[int, ...]) -> Shown:
    """`check_drafter`, where each target is decoded without drafts once for all drafters.

    Not for faults in what plain decoding runs through as well: they would stay in what is kept.
    """

    def decoded(target: CausalLM, drafter: Any, requests: Any, **others: Any) -> Trace:
        if type(drafter) is EmptyDrafter and not others:
            return _plain(target, tuple(requests))
        return decode(target, drafter, requests, **others)

    with patch.object(conformance, "decode", decoded):
        return check_drafter(make_drafter, target, depths=depths)


@cache
def _plain(target: CausalLM, requests: Any) -> Trace:
    return decode(target, EmptyDrafter(), requests)
