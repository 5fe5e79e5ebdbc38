"""The forwards of an engine, and the limits of its drafts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from foredraft.config.engine import Promise
from foredraft.engine.budget import DraftSize, Limits
from foredraft.engine.drafter import Needs
from foredraft.model.capture import Output, Wanted
from foredraft.model.nodes import Nodes
from foredraft.native.library import loaded_helpers
from foredraft.tree import DraftTree

if TYPE_CHECKING:
    from foredraft.config.acceptance import AcceptanceRule
    from foredraft.config.engine import EngineConfig
    from foredraft.engine.row import Row
    from foredraft.model.cache.ragged import KVCache
    from foredraft.model.lm import CausalLM

NO_LIMIT = 1 << 20


class Forwards:
    """Reads prompts and verifies drafts with the target.

    Args:
      target: the model.
      cache: of its rows.
      config: of the engine.
      needs: what the drafter wants beside the logits.
    """

    def __init__(self, target: CausalLM, cache: KVCache, config: EngineConfig, needs: Needs) -> None:
        self._target = target
        self._cache = cache
        self._config = config
        self._wanted = Wanted(needs.last_hidden, needs.layer_inputs)
        self._keeps_prompt_logits = needs.prompt_logits
        self._helpers = loaded_helpers() if target.device.type == "cpu" else None
        self.promise: Promise = target.promise(config.exactness)

    def begin_step(self) -> None:
        """Ask anew what is promised: the model may have changed."""
        self.promise = self._target.promise(self._config.exactness)

    @property
    def rule(self) -> AcceptanceRule:
        """How what is verified is accepted."""
        return self._config.rule

    def limits(self, rows: Sequence[Row], max_nodes: int) -> list[Limits]:
        """Limits of the drafts of every row: accepted tokens and the bonus together fit what is left of it.

        A draft stays within what the promise covers and what the rule of acceptance and the model take. A row in doubt
        runs without one, and a request may want shorter ones.

        Args:
          max_nodes: that the memory has room for.
        """
        takes_trees = self._config.rule.takes_trees and self._target.supports_trees
        of_promise = min(self.promise.max_nodes, NO_LIMIT)
        nodes, of_nodes = (max_nodes, "memory") if max_nodes < of_promise else (of_promise, "bits")
        found = []
        for row in rows:
            depth, cause = row.num_remaining_tokens - 1, "budget"
            if nodes - 1 < depth:
                depth, cause = nodes - 1, of_nodes
            wanted = row.params.num_speculative_tokens
            if wanted is not None and wanted < depth:
                depth, cause = wanted, "request"
            if row.is_in_doubt:
                depth, cause = 0, "doubt"
            found.append(Limits(DraftSize(depth, nodes, not takes_trees), cause, of_nodes))
        return found

    def read(
        self, chunks: Sequence[Sequence[int]], first_row: int, *, keeps_logits: bool = False, shows: bool = True
    ) -> Output:
        """Run the next tokens of prompts in neighbouring rows. Logits only where they or the drafter want them.

        Args:
          shows: whether the drafter is shown what was read.
        """
        return self._target.forward_with(
            self._wanted if shows else Wanted(),
            Nodes.from_chains(chunks),
            self._cache,
            first_row=first_row,
            keep=None if keeps_logits or (shows and self._keeps_prompt_logits) else slice(0, 0),
        )

    def verify(self, trees: Sequence[DraftTree], *, shows: bool = True) -> Output:
        """Run drafts, one for each of the first rows; logits of every node, and what the drafter wants if `shows`."""
        wanted = self._wanted if shows else Wanted()
        with self._helpers.watched() if self._helpers is not None else nullcontext():
            return self._target.forward_with(wanted, Nodes.from_trees(trees), self._cache, listed=True)
