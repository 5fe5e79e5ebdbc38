"""Suffix decoding: copy the continuations of the longest suffix that has occurred before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakSet

from foredraft.drafters.context import DrafterContext
from foredraft.drafters.parts.planned import PlannedDrafter
from foredraft.drafters.parts.state_file import check_writable, warned
from foredraft.engine.drafter import DrafterFacts, DraftSize, StepResult
from foredraft.engine.row import Row, RowState
from foredraft.methods.lengths import LengthPolicy
from foredraft.methods.lookup import SuffixOptions
from foredraft.retrieval.automaton import SuffixAutomaton
from foredraft.retrieval.growth import GrowthRoot, TreeLimits, grow
from foredraft.retrieval.history import OutputHistory
from foredraft.retrieval.manifest import fingerprint_of
from foredraft.retrieval.suffix_tree import SuffixMatch
from foredraft.tree import DraftTree


class SuffixDrafter(PlannedDrafter["_Known"]):
    """Drafter of the likeliest continuations of the row's end, by their counts and the lengths of their contexts.

    Source: SuffixDecoding (Oliaro et al. 2024, arXiv:2411.04975) for counts, draft lengths and past outputs;
    SAM-Decoding (Hu et al. 2024, arXiv:2411.10666) for the automaton over the request. Deviations: dev/deviations.md.

    Args:
      options: keys of the method.
      history: past outputs of all requests. The drafter reads and extends them, and saves them in the state file
        whenever no request is running. With None, requests share nothing.
      length_policy: length policy that replaces the one in the options.

    Raises: CheckpointError for a state file whose directory is not writable.
    Exactness: lossless for any acceptance rule that takes deterministic drafts. Randomness: none.
    Cost: amortised O(max_tree_depth) per new token and per drafted node, independent of the context length.
    """

    facts = DrafterFacts("suffix", is_free=True, drafts_from_text=True)

    def __init__(
        self,
        options: SuffixOptions | None = None,
        *,
        history: OutputHistory | None = None,
        length_policy: LengthPolicy | None = None,
    ) -> None:
        self.options = options or SuffixOptions()
        super().__init__(length_policy or self.options.new_policy(self.options.num_speculative_tokens))
        self.history = history
        self._state_file = None if self.options.state_file is None else Path(self.options.state_file).expanduser()
        if self._state_file is not None:
            check_writable(self._state_file)
        self._num_saved = 0 if history is None else history.num_added
        self._running: WeakSet[_Known] = WeakSet()
        self.facts = replace(self.facts, is_shared=history is not None)

    def new_state(self, row: Row) -> _Known:
        options = self.options
        text = SuffixAutomaton(options.suffix_decoding_max_tree_depth, floor=options.suffix_decoding_min_token_prob)
        text.extend(row.token_ids)
        known = _Known(self, text)
        self._running.add(known)
        return known

    def propose_row(self, row: Row, budget: DraftSize) -> DraftTree:
        length = self.length(row, budget)
        known = row.state[self]
        text = known.text
        text.extend(row.token_ids)
        roots, longest = [], 0
        place = text.match()
        if place is not None:
            roots.append(GrowthRoot(text.candidates, place))
            longest = place.length
        if self.history is not None:
            spot = self.history.match(row.token_ids)
            if spot is not None:
                roots.append(GrowthRoot(self.history.candidates, spot))
                longest = max(longest, len(spot.string) // 4)
                known.spot = spot
        options = self.options
        depth = min(length, max(1, int(longest * options.suffix_decoding_max_spec_factor)))
        if not roots or depth == 0:
            return DraftTree.root(row.token_ids[-1], self.name)
        nodes, width = budget.max_nodes(options.max_draft_nodes), budget.width(options.num_draft_branches)
        shape = TreeLimits(nodes, depth, width, options.suffix_decoding_min_token_prob)
        return grow(row.token_ids[-1], roots, shape, self.name)

    def observe(self, rows: Sequence[Row], results: Sequence[StepResult]) -> None:
        super().observe(rows, results)
        for row, result in zip(rows, results, strict=True):
            known = row.state[self]
            spot, known.spot = known.spot, None
            if spot is not None and self.history is not None and result.num_accepted:
                self.history.touch(spot)

    def remember(self, known: _Known, output_ids: Sequence[int]) -> None:
        """Add a finished output to the history; the state file is written when no other row is running."""
        self._running.discard(known)
        if self.history is None:
            return
        self.history.add(output_ids)
        if self._state_file is not None and not self._running and self.history.num_added != self._num_saved:
            self._num_saved = self.history.num_added
            with warned():
                self.history.save(self._state_file)


@dataclass(eq=False)
class _Known(RowState):
    """State of a row: its suffix automaton, and the match in the history that its newest draft came from."""

    drafter: SuffixDrafter
    text: SuffixAutomaton
    spot: SuffixMatch | None = None

    def ended(self, row: Row, *, is_kept: bool) -> None:
        self.drafter.remember(self, row.output_ids)


def build(options: SuffixOptions, context: DrafterContext) -> SuffixDrafter:
    """Make the drafter, with the shared history if requests share one."""
    return SuffixDrafter(options, history=_history(options, context) if options.shared else None)


def _history(options: SuffixOptions, context: DrafterContext) -> OutputHistory:
    """Return the past outputs, loaded from the state file if it exists; all drafters of a model share them."""
    depth, limit = options.suffix_decoding_max_tree_depth, options.suffix_decoding_max_cached_requests

    def load() -> OutputHistory:
        fingerprint = "" if context.tokenizer is None else fingerprint_of(context.tokenizer)
        history = OutputHistory(depth, max_outputs=limit, fingerprint=fingerprint)
        if options.state_file is not None and Path(options.state_file).expanduser().exists():
            history.load(options.state_file, context.target.vocab_size)
        return history

    return context.keep(("history", options.state_file, depth, limit), load)
