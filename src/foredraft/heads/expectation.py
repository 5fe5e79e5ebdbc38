"""What training has seen of a head's drafts, held against the first ones that it makes here."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from foredraft.errors import CheckpointError
from foredraft.tree import DraftTree

logger = logging.getLogger("foredraft")

KEY = "first_token_acceptance"
"""In the config of a head: the share of drafts, 0 to 1, whose first token its target took when it was validated."""

NUM_TOKENS = 128
"""Different tokens that were drafted after when a head is judged."""

FAR_BELOW = 0.2
"""Share of what was stored. A right head keeps more on text unlike its training: on zoo:tiny 0.3 in the worst of 8
prompts (random letters, sampled), and heads with permuted weights 0 to 0.15, all prompts together."""


class Expectation:
    """Counts the first drafts of a head, and says once when far fewer are accepted than its training has seen.

    A head that is good in training and useless in use was trained for something else: another target, another layer,
    other angles, another chat template. Only the first draft after a token counts: a text that repeats itself repeats
    the same rejection, which says nothing new.

    Args:
      name: of the head.
      stored: share of drafts whose first token was accepted.
    """

    def __init__(self, name: str, stored: float) -> None:
        self.name, self.stored = name, stored
        self.is_accepted: dict[int, bool] = {}

    @classmethod
    def of(cls, config: Mapping[str, Any], name: str) -> Expectation | None:
        """From the config of a checkpoint; None where nothing is stored.

        Raises: CheckpointError for what is no share.
        """
        stored = config.get(KEY)
        if stored is None:
            return None
        if isinstance(stored, bool) or not isinstance(stored, (int, float)) or not 0.0 <= stored <= 1.0:
            raise CheckpointError(f"{KEY} is {stored!r} in the config of {name}; it must be a share, 0 to 1")
        return cls(name, float(stored))

    def add(self, tree: DraftTree, num_accepted: int) -> None:
        """Count a draft that has been verified."""
        if tree.num_draft_tokens == 0 or len(self.is_accepted) == NUM_TOKENS or tree.tokens[0] in self.is_accepted:
            return
        self.is_accepted[tree.tokens[0]] = num_accepted > 0
        share = sum(self.is_accepted.values()) / len(self.is_accepted)
        if len(self.is_accepted) == NUM_TOKENS and share < FAR_BELOW * self.stored:
            logger.warning(
                "%s: the target took the first token of %.0f %% of the drafts after %d different tokens, and of "
                "%.0f %% when the head was validated. It may be of another target, of other layers or angles "
                "(draft_rope_theta), or made for another chat template.",
                self.name,
                100 * share,
                NUM_TOKENS,
                100 * self.stored,
            )
