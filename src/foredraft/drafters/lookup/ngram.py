"""Prompt lookup: what followed the last few tokens when they last occurred will follow them again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from foredraft.drafters.context import DrafterContext
from foredraft.drafters.parts.planned import PlannedDrafter
from foredraft.engine.drafter import DrafterFacts, DraftSize
from foredraft.engine.row import Row
from foredraft.errors import ConfigError
from foredraft.methods.lengths import LengthPolicy
from foredraft.methods.lookup import MATCHES, NGramOptions
from foredraft.tree import DraftTree

_MAX_OCCURRENCES = 32  # looked at per n-gram and step, so that a text of one repeated token costs no more than another


class NGramDrafter(PlannedDrafter["SuffixIndex"]):
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


class SuffixIndex:
    """Places where every n-gram of a growing text ends, for n in ``orders``.

    An n-gram counts from the moment its next token is known, so the end of the text never matches itself.

    Args:
      match: see `MATCHES`.

    Raises: ConfigError for another word.
    """

    def __init__(self, orders: Sequence[int], *, match: str = MATCHES[0]) -> None:
        if match not in MATCHES:
            raise ConfigError(f"match is {match!r}; choose one of {', '.join(MATCHES)}")
        self._is_latest_first = match == "latest"
        self._ends: dict[int, dict[tuple[int, ...], list[int]]] = {order: {} for order in orders}
        self._num_tokens = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in the tokens of the text that are new since the last call."""
        for end in range(max(self._num_tokens, 1), len(tokens)):
            for order, ends in self._ends.items():
                if order <= end:
                    ends.setdefault(tuple(tokens[end - order : end]), []).append(end)
        self._num_tokens = len(tokens)

    def continuations(self, tokens: Sequence[int], length: int, limit: int) -> list[tuple[int, ...]]:
        """At most ``limit`` distinct continuations of the text, each of ``length`` tokens, best first."""
        found: dict[tuple[int, ...], None] = {}
        for end in self.occurrences(tokens):
            found[continuation(tokens, end, length)] = None
            if len(found) == limit:
                break
        return list(found)

    def occurrences(self, tokens: Sequence[int]) -> Iterator[int]:
        """Ends of earlier occurrences of the text's suffixes: longest suffix first, then as ``match`` says."""
        for order in sorted(self._ends, reverse=True):
            if order < len(tokens):
                ends = self._ends[order].get(tuple(tokens[-order:]), [])
                yield from islice(reversed(ends) if self._is_latest_first else ends, _MAX_OCCURRENCES)


def continuation(tokens: Sequence[int], start: int, length: int) -> tuple[int, ...]:
    """``length`` tokens of the text from ``start`` on; past its end the copy goes on with itself.

    (1, 2, 3) from 1 for 5 tokens: 2 3 2 3 2.
    """
    copy = tokens[start : start + length]
    repeats = -(-length // len(copy))
    return (tuple(copy) * repeats)[:length]


def build(options: NGramOptions, context: DrafterContext) -> NGramDrafter:
    """Prompt lookup needs nothing but the text."""
    return NGramDrafter(options)
