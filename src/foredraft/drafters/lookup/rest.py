"""Retrieval-based drafting: continuations of the row's last tokens in a datastore of other texts."""

from __future__ import annotations

from foredraft.drafters.context import DrafterContext
from foredraft.drafters.parts.planned import PlannedDrafter
from foredraft.engine.drafter import DrafterFacts, DraftSize
from foredraft.engine.row import Row
from foredraft.errors import ConfigError
from foredraft.methods.lengths import LengthPolicy
from foredraft.methods.lookup import RestOptions
from foredraft.retrieval.automaton import SuffixAutomaton
from foredraft.retrieval.datastore import Datastore
from foredraft.retrieval.growth import GrowthRoot, TreeLimits, grow
from foredraft.retrieval.trie import candidates_of
from foredraft.tree import DraftTree

_OWN_FLOOR = 0.02
"""Least estimated probability of a token from the row itself; the datastore usually has a better candidate."""


class RestDrafter(PlannedDrafter[SuffixAutomaton | None]):
    """Drafter of the most frequent continuations of the longest suffix that occurs in the datastore.

    Source: REST (He et al. 2023, arXiv:2311.08252). Deviations: dev/deviations.md.

    Args:
      datastore: open datastore, made with the target's tokenizer. The datastore is only read, so any number of drafters
        may share it.
      options: keys of the method.
      length_policy: length policy that replaces the one in the options.

    Exactness: lossless for any acceptance rule that takes deterministic drafts. Randomness: none.
    Cost: one lookup per step, independent of the context length; see `Datastore`.
    """

    facts = DrafterFacts("rest", drafts_from_text=True)

    def __init__(
        self, datastore: Datastore, options: RestOptions | None = None, *, length_policy: LengthPolicy | None = None
    ) -> None:
        self.options = options or RestOptions()
        super().__init__(length_policy or self.options.new_policy(self.options.num_speculative_tokens))
        self.datastore, self._lookup = datastore, self.options.lookup

    def new_state(self, row: Row) -> SuffixAutomaton | None:
        if not self.options.retrieval_dynamic_index:
            return None
        text = SuffixAutomaton(min_match=self.options.retrieval_match_min, floor=_OWN_FLOOR)
        text.extend(row.token_ids)
        return text

    def propose_row(self, row: Row, budget: DraftSize) -> DraftTree:
        length = self.length(row, budget)
        if length == 0:
            return DraftTree.root(row.token_ids[-1], self.name)
        options = self.options
        shape = TreeLimits(budget.max_nodes(options.max_draft_nodes), length, budget.width(options.num_draft_branches))
        retrieved = self._retrieved(row, shape)
        own = self._own_text(row)
        if own is None:
            return retrieved
        return grow(row.token_ids[-1], [own, GrowthRoot(candidates_of(retrieved), 0)], shape, self.name)

    def _retrieved(self, row: Row, shape: TreeLimits) -> DraftTree:
        """Draft the continuations that the datastore has for the end of the row."""
        match = self.datastore.query(row.token_ids[-self._lookup.match_max :], self._lookup)
        pending = row.token_ids[-1]
        return DraftTree.root(pending, self.name) if match is None else match.trie.tree(pending, shape, self.name)

    def _own_text(self, row: Row) -> GrowthRoot | None:
        """Return the match of the row's end within the row itself, or None if the end is new or the row is not
        searched.
        """
        text: SuffixAutomaton | None = row.state[self]
        if text is None:
            return None
        text.extend(row.token_ids)
        place = text.match()
        return None if place is None else GrowthRoot(text.candidates, place)


def build(options: RestOptions, context: DrafterContext) -> RestDrafter:
    """Make the drafter, with one open datastore for all drafters of a model."""
    return RestDrafter(_datastore(options, context), options)


def _datastore(options: RestOptions, context: DrafterContext) -> Datastore:
    """Open the configured datastore, or the one that is included with a zoo target."""
    folder = options.datastore or context.asset("datastore")
    if folder is None:
        raise ConfigError(
            f"method 'rest' needs a datastore{context.without_asset}; build one with foredraft datastore build "
            "CORPUS... --tokenizer MODEL --out DIR and add datastore=DIR"
        )
    return context.keep(
        ("datastore", str(folder)),
        lambda: Datastore.open(folder, tokenizer=context.tokenizer, vocab_size=context.target.vocab_size),
    )
