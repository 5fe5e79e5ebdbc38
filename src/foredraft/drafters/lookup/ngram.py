"""Prompt lookup: what followed the last few tokens when they last occurred will follow them again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from foredraft.config.drafting import DraftOptions, draft_length, node_limit
from foredraft.config.method import Method
from foredraft.config.options import one_of, option, whole
from foredraft.drafters.lengths import LengthOptions, LengthPolicy, PlannedDrafter
from foredraft.drafters.parts.suffix_index import MATCHES, SuffixIndex
from foredraft.engine.drafter import DrafterFacts, DraftSize
from foredraft.engine.row import Row
from foredraft.errors import ConfigError
from foredraft.tree import DraftTree

if TYPE_CHECKING:
    from foredraft.drafters.context import DrafterContext


@dataclass(frozen=True, kw_only=True)
class NGramOptions(LengthOptions, DraftOptions):
    """Keys of prompt lookup."""

    method: ClassVar[str] = "ngram"
    num_speculative_tokens: int = draft_length(10)
    max_draft_nodes: int | None = node_limit()
    prompt_lookup_min: int = option(whole(1), 2, "shortest suffix of the text that is looked up")
    prompt_lookup_max: int = option(whole(1), 5, "longest suffix of the text that is looked up")
    num_prompt_lookup_candidates: int = option(whole(1), 1, "continuations that are merged into one tree")
    prompt_lookup_match: str = option(one_of(MATCHES), MATCHES[0], "which occurrence of the suffix is copied after")

    @property
    def num_branches(self) -> int:
        return self.num_prompt_lookup_candidates

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> NGramOptions:
        """A single bound moves the default of the other one along."""
        shortest, longest = given.get("prompt_lookup_min"), given.get("prompt_lookup_max")
        defaults: dict[str, Any] = {}
        if isinstance(longest, int):
            defaults["prompt_lookup_min"] = min(cls.prompt_lookup_min, longest)
        if isinstance(shortest, int):
            defaults["prompt_lookup_max"] = max(cls.prompt_lookup_max, shortest)
        return super().read({**defaults, **given})

    def check(self) -> None:
        super().check()
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min={self.prompt_lookup_min} is more than prompt_lookup_max={self.prompt_lookup_max}; "
                "lower the first or raise the second"
            )


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


METHOD = Method(
    NGramOptions,
    build,
    summary="what followed the end of the text when it last occurred in prompt or output",
    aliases=("prompt_lookup", "prompt_lookup_decoding", "ngram_simple", "ngram_gpu"),
)
