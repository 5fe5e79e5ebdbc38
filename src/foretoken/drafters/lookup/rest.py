"""Retrieval-based drafting: what followed the end of the text in a datastore of other texts."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from foretoken.config.drafting import BranchOptions, branches, draft_length, node_limit
from foretoken.config.method import Method
from foretoken.config.options import flag, option, path, whole
from foretoken.drafters.length_options import LengthOptions
from foretoken.drafters.lengths import Fixed, LengthPolicy, policy_of
from foretoken.drafters.parts.planned import PlannedDrafter
from foretoken.engine.drafter import Budget
from foretoken.engine.sequence import Sequence
from foretoken.errors import ConfigError
from foretoken.retrieval.automaton import SuffixAutomaton
from foretoken.retrieval.datastore import MAX_DEPTH, Datastore, Lookup
from foretoken.retrieval.growth import Root, Shape, grow
from foretoken.retrieval.trie import Children
from foretoken.tree import DraftTree

if TYPE_CHECKING:
    from foretoken.drafters.context import DrafterContext


@dataclass(frozen=True, kw_only=True)
class RestOptions(LengthOptions, BranchOptions):
    """Keys of retrieval from a datastore."""

    method: ClassVar[str] = "rest"
    num_speculative_tokens: int = draft_length(10)
    max_draft_nodes: int = node_limit(32)
    num_draft_branches: int = branches(32)
    datastore: str | None = option(
        path(is_read=True),
        help="directory that foretoken datastore build wrote; by default what a model of the zoo brings",
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


_OWN_FLOOR = 0.02
"""Tokens of the row's own text less likely than this are not proposed; the datastore always has something."""


class RestDrafter(PlannedDrafter):
    """Drafts the most frequent continuations of the longest end of the text that the datastore knows.

    Source: REST (He et al. 2023, arXiv:2311.08252). Deviations: dev/deviations.md.

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
    drafts_from_text = True

    def __init__(
        self,
        datastore: Datastore,
        num_speculative_tokens: int = RestOptions.num_speculative_tokens,
        *,
        lookup: Lookup | None = None,
        max_nodes: int = RestOptions.max_draft_nodes,
        num_branches: int = RestOptions.num_draft_branches,
        min_token_prob: float = 0.0,
        dynamic_index: bool = RestOptions.retrieval_dynamic_index,
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

    def start(self, rows: Seq[Sequence]) -> None:
        if self._dynamic:
            for row in rows:
                self._text_of[row.id] = SuffixAutomaton(min_match=self.lookup.match_min, floor=_OWN_FLOOR)
                self._text_of[row.id].extend(row.token_ids)

    def propose_row(self, row: Sequence, budget: Budget) -> DraftTree:
        length = self.length_policy.length(row, budget)
        if length == 0:
            return DraftTree.root(row.token_ids[-1], self.name)
        nodes, branches = budget.max_nodes(self._max_nodes), budget.width(self._num_branches)
        shape = Shape(nodes, length, branches, self._min_prob)
        retrieved = self._retrieved(row, shape)
        own = self._own_text(row)
        if own is None:
            return retrieved
        return grow(row.token_ids[-1], [own, Root(Children.of_tree(retrieved), 0)], shape, self.name)

    def _retrieved(self, row: Sequence, shape: Shape) -> DraftTree:
        """Draft the continuations that the datastore has for the end of the text."""
        match = self.datastore.query(row.token_ids[-self.lookup.match_max :], self.lookup)
        pending = row.token_ids[-1]
        return DraftTree.root(pending, self.name) if match is None else match.trie.tree(pending, shape, self.name)

    def _own_text(self, row: Sequence) -> Root | None:
        """Where the row's own text stands; None where its end is new, or it is not looked up."""
        text = self._text_of.get(row.id)
        if text is None:
            return None
        text.extend(row.token_ids)
        place = text.match()
        return None if place is None else Root(text, place)

    def forget(self, rows: Seq[Sequence]) -> None:
        super().forget(rows)
        for row in rows:
            self._text_of.pop(row.id, None)


def build(options: RestOptions, context: DrafterContext) -> RestDrafter:
    """Opens the datastore, once for all drafters of a model."""
    lookup = Lookup(
        match_min=options.retrieval_match_min,
        match_max=options.retrieval_match_max,
        max_hits=options.retrieval_max_hits,
        depth=max(1, options.num_speculative_tokens),
    )
    return RestDrafter(
        _datastore(options, context),
        lookup=lookup,
        max_nodes=options.max_draft_nodes,
        num_branches=options.num_draft_branches,
        dynamic_index=options.retrieval_dynamic_index,
        length_policy=policy_of(options, options.num_speculative_tokens),
    )


def _datastore(options: RestOptions, context: DrafterContext) -> Datastore:
    """The datastore that is named, or the one that a target of the zoo brings along."""
    folder = options.datastore or context.asset("datastore")
    if folder is None:
        raise ConfigError(
            f"method 'rest' needs a datastore{context.brings_none}; build one with foretoken datastore build "
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
