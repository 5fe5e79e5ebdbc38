"""Suffix decoding: copy what followed the longest end of the text that has occurred before."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence as Seq
from pathlib import Path

from foretoken.drafters.base import ContextDrafter, Features, StepResult
from foretoken.drafters.lengths import Fixed, LengthPolicy
from foretoken.engine.errors import ConfigError, DatastoreError
from foretoken.engine.sequence import Sequence
from foretoken.engine.tree import DraftTree
from foretoken.retrieval.automaton import SuffixAutomaton
from foretoken.retrieval.growth import Root, Shape, grow
from foretoken.retrieval.history import OutputHistory, Spot


class SuffixDrafter(ContextDrafter):
    """Drafts the likeliest continuations of the text's end, by how often and how long a context they have followed.

    Source: SuffixDecoding (Oliaro et al. 2024, arXiv:2411.04975) for counts, draft lengths and past outputs;
    SAM-Decoding (Hu et al. 2024, arXiv:2411.10666) for the automaton over the request. Deviations:
    docs/methods/suffix.md.

    Args:
      num_speculative_tokens: deepest draft, unless ``length_policy`` says otherwise.
      max_tree_depth: longest string whose occurrences are counted, context and continuation together.
      max_spec_factor: a match of n tokens is worth n * max_spec_factor drafted ones.
      min_token_prob: nodes whose estimated chance is smaller are not drafted.
      min_match: shortest match, in tokens.
      max_nodes: limit of the tree, root included; 1 + num_speculative_tokens makes the likeliest chain possible.
      num_branches: most children of a node; 1 drafts chains.
      history: past outputs of all requests, which this drafter reads and extends; None keeps every request to itself.
      history_file: where the history is saved whenever no request is running.

    Raises: ConfigError when a number is out of range; DatastoreError for a file in no directory of one's own.
    Exactness: lossless for any acceptance rule that takes deterministic drafts. Randomness: none.
    Cost: amortised O(max_tree_depth) per new token and per drafted node; none depends on the length of the text.
    """

    name = "suffix"

    def __init__(
        self,
        num_speculative_tokens: int = 16,
        *,
        max_tree_depth: int = 24,
        max_spec_factor: float = 4.0,
        min_token_prob: float = 0.1,
        min_match: int = 1,
        max_nodes: int = 24,
        num_branches: int = 4,
        history: OutputHistory | None = None,
        history_file: str | Path | None = None,
        length_policy: LengthPolicy | None = None,
        escape: float = 1.0,
    ) -> None:
        for option, value, least in (
            ("max_tree_depth", max_tree_depth, 2),
            ("min_match", min_match, 1),
            ("max_nodes", max_nodes, 2),
            ("num_branches", num_branches, 1),
        ):
            if value < least:
                raise ConfigError(f"{option} is {value}; want {least} or more")
        if max_spec_factor <= 0:
            raise ConfigError(f"max_spec_factor is {max_spec_factor}; want more than 0")
        if not 0 <= min_token_prob <= 1:
            raise ConfigError(f"min_token_prob is {min_token_prob}; want 0 to 1")
        if history_file is not None and not os.access(Path(history_file).expanduser().parent, os.W_OK):
            raise DatastoreError(f"{history_file} cannot be written; check that its directory exists and is yours")
        self.length_policy = length_policy or Fixed(num_speculative_tokens)
        self.history = history
        self._history_file = history_file
        self._num_saved = 0 if history is None else history.num_added
        self._max_tree_depth, self._factor, self._escape = max_tree_depth, max_spec_factor, escape
        self._min_prob, self._min_match = min_token_prob, min_match
        self._max_nodes, self._num_branches = max_nodes, num_branches
        self._text_of: dict[int, SuffixAutomaton] = {}
        self._spot_of: dict[int, Spot] = {}

    def start(self, rows: Seq[Sequence], features: Seq[Features]) -> None:
        for row in rows:
            text = self._text_of[row.id] = SuffixAutomaton(
                self._max_tree_depth, escape=self._escape, min_match=self._min_match, floor=self._min_prob
            )
            text.extend(row.token_ids)

    def propose_row(self, row: Sequence, budget: int) -> DraftTree:
        length = self.length_policy.length(row, budget)
        text = self._text_of[row.id]
        text.extend(row.token_ids)
        roots, longest = [], 0
        place = text.match()
        if place is not None:
            roots.append(Root(text, place))
            longest = place.length
        if self.history is not None:
            spot = self.history.match(row.token_ids, self._min_match)
            if spot is not None:
                roots.append(Root(self.history, spot))
                longest = max(longest, len(spot.string) // 4)
                self._spot_of[row.id] = spot
        depth = min(length, max(1, int(longest * self._factor)))
        if not roots or depth == 0:
            return DraftTree.root(row.token_ids[-1], self.name)
        shape = Shape(self._max_nodes, depth, self._num_branches, self._min_prob)
        return grow(row.token_ids[-1], roots, shape, self.name)

    def observe(self, rows: Seq[Sequence], results: Seq[StepResult]) -> None:
        for row, result in zip(rows, results, strict=True):
            self.length_policy.end(row, result.tree.depth, result.num_accepted)
            spot = self._spot_of.pop(row.id, None)
            if spot is not None and self.history is not None and result.num_accepted:
                self.history.touch(spot)

    def forget(self, rows: Seq[Sequence]) -> None:
        for row in rows:
            self._text_of.pop(row.id, None)
            self._spot_of.pop(row.id, None)
            self.length_policy.forget(row)
            if self.history is not None:
                self.history.add(row.output_ids)
        if not self._text_of:
            self._save()

    def _save(self) -> None:
        """Write the history where it has grown."""
        if self.history is None or self._history_file is None or self.history.num_added == self._num_saved:
            return
        self._num_saved = self.history.num_added
        try:
            self.history.save(self._history_file)
        except DatastoreError as error:  # what was generated is worth more than what was learned
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)
