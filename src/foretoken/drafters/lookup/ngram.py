"""Prompt lookup: what followed the last few tokens when they last occurred will follow them again."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from foretoken.config.drafting import DraftOptions, draft_length, node_limit
from foretoken.config.method import Method
from foretoken.config.options import one_of, option, whole
from foretoken.drafters.length_options import LengthOptions
from foretoken.drafters.lengths import Fixed, LengthPolicy, policy_of
from foretoken.drafters.parts.planned import PlannedDrafter
from foretoken.drafters.parts.suffix_index import MATCHES, SuffixIndex, continuation
from foretoken.engine.drafter import Budget
from foretoken.engine.sequence import Sequence
from foretoken.errors import ConfigError
from foretoken.tree import DraftTree

if TYPE_CHECKING:
    from foretoken.drafters.context import DrafterContext


__all__ = ["METHOD", "NGramDrafter", "NGramOptions", "SuffixIndex", "continuation"]


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
    def defaults_beside(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """A single bound moves the default of the other one along."""
        shortest, longest = given.get("prompt_lookup_min"), given.get("prompt_lookup_max")
        defaults: dict[str, Any] = {}
        if isinstance(longest, int):
            defaults["prompt_lookup_min"] = min(cls.prompt_lookup_min, longest)
        if isinstance(shortest, int):
            defaults["prompt_lookup_max"] = max(cls.prompt_lookup_max, shortest)
        return defaults

    def check(self) -> None:
        super().check()
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min={self.prompt_lookup_min} is more than prompt_lookup_max={self.prompt_lookup_max}; "
                "lower the first or raise the second"
            )


class NGramDrafter(PlannedDrafter):
    """Copies from the row's own text, prompt and output, after the longest suffix that has occurred before.

    Source: prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding), as in transformers and
    vLLM. Deviations: the latest occurrence comes first unless told otherwise; a continuation that runs into the end of
    the text goes on with its own copy (period P goes on with period P); several may be merged into one tree.

    Args:
      num_speculative_tokens: depth of the draft, unless ``length_policy`` says otherwise.
      prompt_lookup_min: shortest suffix worth copying after. 2: one token is found almost anywhere.
      prompt_lookup_max: longest suffix looked for.
      num_candidates: most continuations in one draft, longest match first; 1 gives a chain.
      match: which of several occurrences comes first, the "latest" or the "earliest".
      max_nodes: limit of the merged tree, root included; None for no limit but the candidates' own.

    Raises: ConfigError when a number is out of range.
    Exactness: lossless for any acceptance rule that takes deterministic drafts. Randomness: none.
    Cost: one dictionary entry per new token and suffix length; looking up does not depend on the length of the text.
    """

    name = "ngram"
    drafts_from_text = True

    def __init__(
        self,
        num_speculative_tokens: int = NGramOptions.num_speculative_tokens,
        *,
        prompt_lookup_min: int = NGramOptions.prompt_lookup_min,
        prompt_lookup_max: int = NGramOptions.prompt_lookup_max,
        num_candidates: int = NGramOptions.num_prompt_lookup_candidates,
        match: str = NGramOptions.prompt_lookup_match,
        max_nodes: int | None = NGramOptions.max_draft_nodes,
        length_policy: LengthPolicy | None = None,
    ) -> None:
        if not 1 <= prompt_lookup_min <= prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min is {prompt_lookup_min} and prompt_lookup_max {prompt_lookup_max}; "
                "want 1 <= min <= max"
            )
        if num_candidates < 1:
            raise ConfigError(f"num_candidates is {num_candidates}; want 1 (a chain) or more")
        if max_nodes is not None and max_nodes < 1:
            raise ConfigError(f"max_nodes is {max_nodes}; the root alone makes 1")
        self.length_policy = length_policy or Fixed(num_speculative_tokens)
        self._orders = range(prompt_lookup_min, prompt_lookup_max + 1)
        self._num_candidates = num_candidates
        self._match = match
        self._max_nodes = max_nodes
        self._index_of: dict[int, SuffixIndex] = {}

    def start(self, rows: Seq[Sequence]) -> None:
        for row in rows:
            self._index_of[row.id] = SuffixIndex(self._orders, match=self._match)
            self._index_of[row.id].extend(row.token_ids)

    def propose_row(self, row: Sequence, budget: Budget) -> DraftTree:
        length = self.length_policy.length(row, budget)
        index = self._index_of[row.id]
        index.extend(row.token_ids)
        num_paths = budget.width(self._num_candidates)
        paths = index.continuations(row.token_ids, length, num_paths) if length else []
        return DraftTree.from_paths(row.token_ids[-1], paths, budget.max_nodes(self._max_nodes), self.name)

    def forget(self, rows: Seq[Sequence]) -> None:
        super().forget(rows)
        for row in rows:
            self._index_of.pop(row.id, None)


def build(options: NGramOptions, context: DrafterContext) -> NGramDrafter:
    """Prompt lookup needs nothing but the text."""
    return NGramDrafter(
        prompt_lookup_min=options.prompt_lookup_min,
        prompt_lookup_max=options.prompt_lookup_max,
        num_candidates=options.num_prompt_lookup_candidates,
        match=options.prompt_lookup_match,
        max_nodes=options.max_draft_nodes,
        length_policy=policy_of(options, options.num_speculative_tokens),
    )


METHOD = Method(
    NGramOptions,
    build,
    summary="what followed the end of the text when it last occurred in prompt or output",
    aliases=("prompt_lookup", "prompt_lookup_decoding", "ngram_simple", "ngram_gpu"),
)
