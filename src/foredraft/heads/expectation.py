"""What training has seen of a head's drafts, held against the first ones that it makes here."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from foredraft.errors import CheckpointError

logger = logging.getLogger("foredraft")

KEY = "first_token_acceptance"
"""In the config of a head: the share of drafts, 0 to 1, whose first token its target took when it was validated."""

NUM_DRAFTED = 200
"""Drafted tokens after which a head is judged."""

FAR_BELOW = 0.5
"""Of what was stored; other texts and temperatures explain less."""


class Expectation:
    """Counts the first drafts of a head, and says once when far fewer are accepted than its training has seen.

    A head that is good in training and useless in use was trained for something else: another target, another layer,
    other angles, another chat template.

    Args:
      name: of the head.
      stored: share of drafts whose first token was accepted.
    """

    def __init__(self, name: str, stored: float) -> None:
        self.name, self.stored = name, stored
        self.num_drafted = self.num_drafts = self.num_accepted = 0
        self.is_done = False

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

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """A draft of so many tokens has been verified."""
        if self.is_done or num_drafted == 0:
            return
        self.num_drafted += num_drafted
        self.num_drafts += 1
        self.num_accepted += num_accepted > 0
        if self.num_drafted < NUM_DRAFTED:
            return
        self.is_done = True
        share = self.num_accepted / self.num_drafts
        if share < FAR_BELOW * self.stored:
            logger.warning(
                "%s: the target took the first token of %.0f %% of the first %d drafts, and of %.0f %% when the head "
                "was validated. It may be of another target, of other layers or angles (draft_rope_theta), or made for "
                "another chat template.",
                self.name,
                100 * share,
                self.num_drafts,
                100 * self.stored,
            )
