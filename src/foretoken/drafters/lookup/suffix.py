"""Suffix decoding: copy what followed the longest end of the text that has occurred before."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from foretoken.config.drafting import BranchOptions, branches, draft_length, node_limit
from foretoken.config.method import Method
from foretoken.config.options import flag, number, option, path, whole
from foretoken.drafters.length_options import LengthOptions
from foretoken.drafters.lengths import Fixed, LengthPolicy, policy_of
from foretoken.drafters.parts.planned import PlannedDrafter
from foretoken.engine.drafter import Budget, StepResult
from foretoken.engine.sequence import Sequence
from foretoken.errors import ConfigError, DatastoreError
from foretoken.retrieval.automaton import SuffixAutomaton
from foretoken.retrieval.growth import Root, Shape, grow
from foretoken.retrieval.history import OutputHistory
from foretoken.retrieval.manifest import fingerprint_of
from foretoken.retrieval.suffix_tree import Spot
from foretoken.tree import DraftTree

if TYPE_CHECKING:
    from foretoken.drafters.context import DrafterContext


@dataclass(frozen=True, kw_only=True)
class SuffixOptions(LengthOptions, BranchOptions):
    """Keys of suffix decoding."""

    method: ClassVar[str] = "suffix"
    num_speculative_tokens: int = draft_length(16)
    max_draft_nodes: int = node_limit(24)
    num_draft_branches: int = branches(4)
    shared: bool = option(flag(), False, "whether requests learn from each other's outputs")
    state_file: str | None = option(path(), help="where outputs that requests share are kept from run to run")
    suffix_decoding_max_tree_depth: int = option(
        whole(2, 1024), 24, "longest string that is counted, context and continuation together"
    )
    suffix_decoding_max_cached_requests: int = option(
        whole(0), 10_000, "past outputs that are remembered when it is shared"
    )
    suffix_decoding_max_spec_factor: float = option(number(0.0, above=True), 4.0, "drafted tokens per matched token")
    suffix_decoding_min_token_prob: float = option(
        number(0.0, 1.0), 0.1, "estimated chance below which a token is not drafted"
    )

    def check(self) -> None:
        super().check()
        if self.state_file is not None and not self.shared:
            raise ConfigError("state_file is of a history that requests share; add shared=true, or leave it out")


class SuffixDrafter(PlannedDrafter):
    """Drafts the likeliest continuations of the text's end, by how often and how long a context they have followed.

    Source: SuffixDecoding (Oliaro et al. 2024, arXiv:2411.04975) for counts, draft lengths and past outputs;
    SAM-Decoding (Hu et al. 2024, arXiv:2411.10666) for the automaton over the request. Deviations:
    dev/deviations.md.

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

    Raises: ConfigError when a number is out of range; DatastoreError for a file whose directory cannot be written.
    Exactness: lossless for any acceptance rule that takes deterministic drafts. Randomness: none.
    Cost: amortised O(max_tree_depth) per new token and per drafted node; none depends on the length of the text.
    """

    name = "suffix"
    drafts_from_text = True

    def __init__(
        self,
        num_speculative_tokens: int = SuffixOptions.num_speculative_tokens,
        *,
        max_tree_depth: int = SuffixOptions.suffix_decoding_max_tree_depth,
        max_spec_factor: float = SuffixOptions.suffix_decoding_max_spec_factor,
        min_token_prob: float = SuffixOptions.suffix_decoding_min_token_prob,
        min_match: int = 1,
        max_nodes: int = SuffixOptions.max_draft_nodes,
        num_branches: int = SuffixOptions.num_draft_branches,
        history: OutputHistory | None = None,
        history_file: str | Path | None = None,
        length_policy: LengthPolicy | None = None,
        escape: float = 1.0,
    ) -> None:
        for name, value, least in (
            ("max_tree_depth", max_tree_depth, 2),
            ("min_match", min_match, 1),
            ("max_nodes", max_nodes, 2),
            ("num_branches", num_branches, 1),
        ):
            if value < least:
                raise ConfigError(f"{name} is {value}; want {least} or more")
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

    def start(self, rows: Seq[Sequence]) -> None:
        for row in rows:
            text = self._text_of[row.id] = SuffixAutomaton(
                self._max_tree_depth, escape=self._escape, min_match=self._min_match, floor=self._min_prob
            )
            text.extend(row.token_ids)

    def propose_row(self, row: Sequence, budget: Budget) -> DraftTree:
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
        nodes, branches = budget.max_nodes(self._max_nodes), budget.width(self._num_branches)
        shape = Shape(nodes, depth, branches, self._min_prob)
        return grow(row.token_ids[-1], roots, shape, self.name)

    def observe(self, rows: Seq[Sequence], results: Seq[StepResult]) -> None:
        super().observe(rows, results)
        for row, result in zip(rows, results, strict=True):
            spot = self._spot_of.pop(row.id, None)
            if spot is not None and self.history is not None and result.num_accepted:
                self.history.touch(spot)

    def forget(self, rows: Seq[Sequence]) -> None:
        super().forget(rows)
        for row in rows:
            self._text_of.pop(row.id, None)
            self._spot_of.pop(row.id, None)
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


def build(options: SuffixOptions, context: DrafterContext) -> SuffixDrafter:
    """Reads the history where requests share one."""
    return SuffixDrafter(
        max_tree_depth=options.suffix_decoding_max_tree_depth,
        max_spec_factor=options.suffix_decoding_max_spec_factor,
        min_token_prob=options.suffix_decoding_min_token_prob,
        max_nodes=options.max_draft_nodes,
        num_branches=options.num_draft_branches,
        history=_history(options, context) if options.shared else None,
        history_file=options.state_file,
        length_policy=policy_of(options, options.num_speculative_tokens),
    )


def _history(options: SuffixOptions, context: DrafterContext) -> OutputHistory:
    """Past outputs, from the state file where there is one; the same for all drafters of one model."""
    depth, limit = options.suffix_decoding_max_tree_depth, options.suffix_decoding_max_cached_requests

    def load() -> OutputHistory:
        fingerprint = "" if context.tokenizer is None else fingerprint_of(context.tokenizer)
        history = OutputHistory(depth, max_outputs=limit, fingerprint=fingerprint)
        if options.state_file is not None and Path(options.state_file).expanduser().exists():
            history.load(options.state_file, context.target.vocab_size)
        return history

    return context.keep(("history", options.state_file, depth, limit), load)


METHOD = Method(
    SuffixOptions,
    build,
    summary="the likeliest continuations of the end of the text, by how often they followed it",
    aliases=("suffix_decoding", "sam", "sam_decoding"),
)
