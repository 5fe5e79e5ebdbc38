"""Retrieval-based drafting: what followed the end of the text in a datastore of other texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from foredraft.config.drafting import BranchOptions, branches, draft_length, node_limit
from foredraft.config.method import Method
from foredraft.config.options import flag, option, path, whole
from foredraft.drafters.lengths import LengthOptions, LengthPolicy, PlannedDrafter
from foredraft.engine.drafter import DrafterFacts, DraftSize
from foredraft.engine.row import Row
from foredraft.errors import ConfigError
from foredraft.retrieval.automaton import SuffixAutomaton
from foredraft.retrieval.datastore import MAX_DEPTH, Datastore, Lookup
from foredraft.retrieval.growth import GrowthRoot, TreeLimits, grow
from foredraft.retrieval.trie import Children
from foredraft.tree import DraftTree

if TYPE_CHECKING:
    from foredraft.drafters.context import DrafterContext


@dataclass(frozen=True, kw_only=True)
class RestOptions(LengthOptions, BranchOptions):
    """Keys of retrieval from a datastore."""

    method: ClassVar[str] = "rest"
    num_speculative_tokens: int = draft_length(10)
    max_draft_nodes: int = node_limit(32)
    num_draft_branches: int = branches(32)
    datastore: str | None = option(
        path(is_read=True),
        help="directory that foredraft datastore build wrote; by default what a model of the zoo brings",
    )
    retrieval_match_min: int = option(whole(1, 64), 1, "shortest suffix of the text that is looked up")
    retrieval_match_max: int = option(whole(1, 64), 16, "longest suffix of the text that is looked up")
    retrieval_max_hits: int = option(whole(1, 1 << 20), 512, "occurrences that are read per step")
    retrieval_dynamic_index: bool = option(flag(), True, "whether the request's own text is searched, too")

    def check(self) -> None:
        super().check()
        if self.num_speculative_tokens > MAX_DEPTH:
            raise ConfigError(
                f"num_speculative_tokens is {self.num_speculative_tokens}; method 'rest' drafts at most {MAX_DEPTH} "
                "tokens deep"
            )
        if self.retrieval_match_min > self.retrieval_match_max:
            raise ConfigError(
                f"the shortest match is {self.retrieval_match_min} tokens and the longest {self.retrieval_match_max}; "
                "want 1 <= min <= max"
            )

    @property
    def lookup(self) -> Lookup:
        """How the datastore is asked."""
        return Lookup(
            match_min=self.retrieval_match_min,
            match_max=self.retrieval_match_max,
            depth=max(1, self.num_speculative_tokens),
            max_hits=self.retrieval_max_hits,
        )


_OWN_FLOOR = 0.02
"""Tokens of the row's own text less likely than this are not proposed; the datastore always has something."""


class RestDrafter(PlannedDrafter[SuffixAutomaton | None]):
    """Drafts the most frequent continuations of the longest end of the text that the datastore knows.

    Source: REST (He et al. 2023, arXiv:2311.08252). Deviations: dev/deviations.md.

    Args:
      datastore: opened, of the target's tokenizer. It is only read, so any number of drafters may share it.
      length_policy: instead of the one that the options name.

    Exactness: lossless for any acceptance rule that takes deterministic drafts. Randomness: none.
    Cost: one lookup per step, whatever the length of the text; see `Datastore`.
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
        return grow(row.token_ids[-1], [own, GrowthRoot(Children.of_tree(retrieved), 0)], shape, self.name)

    def _retrieved(self, row: Row, shape: TreeLimits) -> DraftTree:
        """Draft the continuations that the datastore has for the end of the text."""
        match = self.datastore.query(row.token_ids[-self._lookup.match_max :], self._lookup)
        pending = row.token_ids[-1]
        return DraftTree.root(pending, self.name) if match is None else match.trie.tree(pending, shape, self.name)

    def _own_text(self, row: Row) -> GrowthRoot | None:
        """Where the row's own text stands; None where its end is new, or it is not looked up."""
        text: SuffixAutomaton | None = row.state[self]
        if text is None:
            return None
        text.extend(row.token_ids)
        place = text.match()
        return None if place is None else GrowthRoot(text, place)


def build(options: RestOptions, context: DrafterContext) -> RestDrafter:
    """Opens the datastore, once for all drafters of a model."""
    return RestDrafter(_datastore(options, context), options)


def _datastore(options: RestOptions, context: DrafterContext) -> Datastore:
    """The datastore that is named, or the one that a target of the zoo brings along."""
    folder = options.datastore or context.asset("datastore")
    if folder is None:
        raise ConfigError(
            f"method 'rest' needs a datastore{context.brings_none}; build one with foredraft datastore build "
            "CORPUS... --tokenizer MODEL --out DIR and add datastore=DIR"
        )
    return context.keep(
        ("datastore", str(folder)),
        lambda: Datastore.open(folder, tokenizer=context.tokenizer, vocab_size=context.target.vocab_size),
    )


METHOD = Method(
    RestOptions,
    build,
    summary="what followed the end of the text in a datastore of other texts",
    aliases=("retrieval",),
)
