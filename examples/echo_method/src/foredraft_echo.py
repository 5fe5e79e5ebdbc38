"""Draft the tokens at a fixed distance back, which suits sequences with a fixed period."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from foredraft.drafting import (
    ContextDrafter,
    DrafterContext,
    DrafterFacts,
    DraftOptions,
    DraftSize,
    DraftTree,
    Method,
    Row,
    draft_length,
    option,
    whole,
)


@dataclass(frozen=True, kw_only=True)
class EchoOptions(DraftOptions):
    """Keys of the echo."""

    method: ClassVar[str] = "echo"
    num_speculative_tokens: int = draft_length(4)
    echo_distance: int = option(whole(1), 4, "how many tokens back the copy begins")


class EchoDrafter(ContextDrafter):
    """Copy the tokens from ``distance`` tokens back.

    Exactness: lossless for any acceptance rule that takes deterministic drafts. Randomness: none.
    """

    facts = DrafterFacts("echo", is_free=True, drafts_from_text=True)

    def __init__(self, distance: int, length: int) -> None:
        self.distance, self.length = distance, length

    def propose_row(self, row: Row, budget: DraftSize) -> DraftTree:
        copy = row.token_ids[-self.distance :]
        return DraftTree.chain(row.pending, (copy * self.length)[: min(self.length, budget)], source=self.name)


def build(options: EchoOptions, context: DrafterContext) -> EchoDrafter:
    """Return the drafter, which needs only the tokens of the sequence."""
    return EchoDrafter(options.echo_distance, options.num_speculative_tokens)


METHOD = Method(EchoOptions, build, summary="the tokens that stand a fixed distance back", aliases=("repeat_after",))
