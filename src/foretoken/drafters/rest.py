"""Retrieval-based drafting: what followed the end of the text in a datastore of other texts."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from foretoken.drafters.base import ContextDrafter, Features, StepResult
from foretoken.drafters.lengths import Fixed, LengthPolicy
from foretoken.engine.errors import ConfigError
from foretoken.engine.sequence import Sequence
from foretoken.engine.tree import DraftTree
from foretoken.retrieval.automaton import SuffixAutomaton
from foretoken.retrieval.datastore import Datastore, Lookup
from foretoken.retrieval.growth import Root, grow


class RestDrafter(ContextDrafter):
    """Drafts the most frequent continuations of the longest end of the text that the datastore knows.

    Source: REST (He et al. 2023, arXiv:2311.08252). Deviations: docs/methods/rest.md.

    Args:
      datastore: opened, of the target's tokenizer. It is only read, so any number of drafters may share it.
      num_speculative_tokens: deepest draft, unless ``length_policy`` says otherwise.
      lookup: how the datastore is asked; its depth is not more than the draft needs.
      max_nodes: limit of the tree, root included.
      num_branches: most children of a node; 1 drafts chains.
      min_token_prob: nodes whose estimated chance is smaller are not drafted.
      dynamic_index: also look up the row's own text, prompt and output, and merge what both know.

    Raises: ConfigError when a number is out of range.
    Exactness: lossless for any acceptance rule that takes deterministic drafts. Randomness: none.
    Cost: one lookup per step, whatever the length of the text; see `Datastore`.
    """

    name = "rest"

    def __init__(
        self,
        datastore: Datastore,
        num_speculative_tokens: int = 10,
        *,
        lookup: Lookup | None = None,
        max_nodes: int = 32,
        num_branches: int = 32,
        min_token_prob: float = 0.0,
        dynamic_index: bool = True,
        length_policy: LengthPolicy | None = None,
    ) -> None:
        if max_nodes < 2:
            raise ConfigError(f"max_nodes is {max_nodes}; want 2 (the root and one token) or more")
        if num_branches < 1:
            raise ConfigError(f"num_branches is {num_branches}; want 1 (a chain) or more")
        if not 0 <= min_token_prob <= 1:
            raise ConfigError(f"min_token_prob is {min_token_prob}; want 0 to 1")
        self.datastore = datastore
        self.lookup = lookup or Lookup()
        self.length_policy = length_policy or Fixed(num_speculative_tokens)
        self._max_nodes, self._num_branches, self._min_prob = max_nodes, num_branches, min_token_prob
        self._dynamic = dynamic_index
        self._text_of: dict[int, SuffixAutomaton] = {}

    def start(self, rows: Seq[Sequence], features: Seq[Features]) -> None:
        if self._dynamic:
            for row in rows:
                self._text_of[row.id] = SuffixAutomaton(min_match=self.lookup.match_min)
                self._text_of[row.id].extend(row.token_ids)

    def propose_row(self, row: Sequence, budget: int) -> DraftTree:
        length = self.length_policy.length(row, budget)
        roots = self._roots(row) if length else []
        return grow(
            row.token_ids[-1],
            roots,
            max_nodes=self._max_nodes,
            max_depth=length,
            max_branches=self._num_branches,
            min_score=self._min_prob,
            name=self.name,
        )

    def _roots(self, row: Sequence) -> list[Root]:
        """Where the datastore and the row's own text stand at the end of the text."""
        roots = []
        match = self.datastore.query(row.token_ids[-self.lookup.match_max :], self.lookup)
        if match is not None:
            roots.append(Root(match.trie, match.trie.root))
        text = self._text_of.get(row.id)
        if text is not None:
            text.extend(row.token_ids)
            place = text.match()
            if place is not None:
                roots.append(Root(text, place))
        return roots

    def observe(self, rows: Seq[Sequence], results: Seq[StepResult]) -> None:
        for row, result in zip(rows, results, strict=True):
            self.length_policy.end(row, result.tree.depth, result.num_accepted)

    def forget(self, rows: Seq[Sequence]) -> None:
        for row in rows:
            self._text_of.pop(row.id, None)
            self.length_policy.forget(row)
