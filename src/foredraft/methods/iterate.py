"""Methods that refine guesses with the target's own outputs, step by step: their options and entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from foredraft.config.drafting import DraftOptions, draft_length, node_limit
from foredraft.config.options import flag, one_of, option, whole
from foredraft.errors import ConfigError
from foredraft.methods import Method
from foredraft.methods.lengths import LengthOptions

INITIAL_GUESS = one_of(("repeat", "prompt", "random"))
"""Allowed values of ``initial_guess``."""


@dataclass(frozen=True, kw_only=True)
class JacobiOptions(LengthOptions, DraftOptions):
    """Keys of Jacobi decoding."""

    method: ClassVar[str] = "jacobi"
    num_speculative_tokens: int = draft_length(16)
    initial_guess: str = option(
        INITIAL_GUESS, "repeat", "first guesses: the last token repeated, or random tokens of the prompt or vocabulary"
    )


@dataclass(frozen=True, kw_only=True)
class LookaheadOptions(DraftOptions):
    """Keys of lookahead decoding. N of the paper is num_speculative_tokens + 1."""

    method: ClassVar[str] = "lookahead"
    drafts_trees: ClassVar[bool] = True
    num_speculative_tokens: int = draft_length(4, least=1)
    max_draft_nodes: int | None = node_limit()
    window_size: int = option(whole(1, 1024), 7, "columns of the window, W")
    guess_set_size: int = option(whole(0, 1024), 7, "n-grams that are verified per step, G")
    pool_from_prompt: bool = option(flag(), True, "add n-grams of prompt and output to the pool")

    @property
    def num_cells(self) -> int:
        """Largest number of cells in the window, the pending token included."""
        return most_cells(self.window_size, self.num_speculative_tokens)

    def check(self) -> None:
        super().check()
        if self.max_draft_nodes is not None and self.max_draft_nodes < self.num_cells:
            raise ConfigError(
                f"max_draft_nodes={self.max_draft_nodes} is too small for window_size={self.window_size} and "
                f"num_speculative_tokens={self.num_speculative_tokens}; raise max_draft_nodes to {self.num_cells}, or "
                "lower the other two"
            )


def most_cells(size: int, num_levels: int) -> int:
    """Return the largest number of cells that a `GuessWindow` has at any step, the pending token included."""
    return max(count * (size + num_levels - count) for count in range(1, num_levels + 1))


METHODS = (
    Method(
        JacobiOptions,
        "foredraft.drafters.iterate.jacobi:build",
        summary="guesses that the target corrects in parallel at every step",
        aliases=("jacobi_decoding",),
    ),
    Method(
        LookaheadOptions,
        "foredraft.drafters.iterate.lookahead:build",
        summary="n-grams from a pool that a window of guesses fills while decoding",
        aliases=("lookahead_decoding", "lade"),
    ),
)
