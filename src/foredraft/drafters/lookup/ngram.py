"""Prompt lookup: what followed the last few tokens when they last occurred will follow them again."""

from __future__ import annotations

from foredraft.drafters.context import DrafterContext
from foredraft.drafters.parts.planned import PlannedDrafter
from foredraft.drafters.parts.suffix_index import SuffixIndex
from foredraft.engine.drafter import DrafterFacts, DraftSize
from foredraft.engine.row import Row
from foredraft.methods.lengths import LengthPolicy
from foredraft.methods.lookup import NGramOptions
from foredraft.tree import DraftTree


class NGramDrafter(PlannedDrafter[SuffixIndex]):
    """Copies from the row's own text, prompt and output, after the longest suffix that has occurred before.

    Source: prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding), as in transformers and
    vLLM. Deviations: the latest occurrence comes first unless told otherwise; a continuation that runs into the end of
    the text goes on with its own copy (period P goes on with period P); several may be merged into one tree.

    Args:
      length_policy: instead of the one that the options name.

    Exactness: lossless for any acceptance rule that takes deterministic drafts. Randomness: none.
    Cost: one dictionary entry per new token and suffix length; looking up does not depend on the length of the text.
    """

    facts = DrafterFacts("ngram", is_free=True, drafts_from_text=True)

    def __init__(self, options: NGramOptions | None = None, *, length_policy: LengthPolicy | None = None) -> None:
        self.options = options or NGramOptions()
        super().__init__(length_policy or self.options.new_policy(self.options.num_speculative_tokens))

    def new_state(self, row: Row) -> SuffixIndex:
        orders = range(self.options.prompt_lookup_min, self.options.prompt_lookup_max + 1)
        index = SuffixIndex(orders, match=self.options.prompt_lookup_match)
        index.extend(row.token_ids)
        return index

    def propose_row(self, row: Row, budget: DraftSize) -> DraftTree:
        length = self.length(row, budget)
        index: SuffixIndex = row.state[self]
        index.extend(row.token_ids)
        num_paths = budget.width(self.options.num_prompt_lookup_candidates)
        paths = index.continuations(row.token_ids, length, num_paths) if length else []
        max_nodes = budget.max_nodes(self.options.max_draft_nodes)
        return DraftTree.from_paths(row.token_ids[-1], paths, max_nodes, self.name)


def build(options: NGramOptions, context: DrafterContext) -> NGramDrafter:
    """Prompt lookup needs nothing but the text."""
    return NGramDrafter(options)
