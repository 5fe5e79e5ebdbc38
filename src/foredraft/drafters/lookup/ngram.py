"""Prompt lookup: the tokens that followed the latest tokens at an earlier occurrence are drafted again."""

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

_MAX_OCCURRENCES = 32  # per n-gram and step, so that a row of one repeated token costs no more than any other


class NGramDrafter(PlannedDrafter["SuffixIndex"]):
    """Drafter that copies the continuation of an earlier occurrence of the row's last tokens. The drafter takes the
    longest suffix that occurs earlier in the prompt or output.

    Source: prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding), as in transformers and
      vLLM. Deviations: the latest occurrence comes first by default. A continuation that reaches the end of the row
      goes on with its own copy, so that text of period P continues with period P. Several continuations may be merged
      into one tree.

    Args:
      options: keys of the method.
      length_policy: length policy that replaces the one in the options.

    Exactness: lossless for any acceptance rule that takes deterministic drafts. Randomness: none.
    Cost: one dictionary entry per new token and suffix length; the cost of a lookup is independent of the context
    length.
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
    """End positions of all n-grams of a growing token sequence, for n in ``orders``.

    An n-gram is indexed when its next token is known, so the end of the sequence never matches itself.

    Args:
      orders: n-gram sizes to index.
      match: order of occurrences, see `MATCHES`.

    Raises: ConfigError for an unknown ``match``.
    """

    def __init__(self, orders: Sequence[int], *, match: str = MATCHES[0]) -> None:
        if match not in MATCHES:
            raise ConfigError(f"match is {match!r}; choose one of {', '.join(MATCHES)}")
        self._is_latest_first = match == "latest"
        self._ends: dict[int, dict[tuple[int, ...], list[int]]] = {order: {} for order in orders}
        self._num_tokens = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Index the tokens that were added since the last call."""
        for end in range(max(self._num_tokens, 1), len(tokens)):
            for order, ends in self._ends.items():
                if order <= end:
                    ends.setdefault(tuple(tokens[end - order : end]), []).append(end)
        self._num_tokens = len(tokens)

    def continuations(self, tokens: Sequence[int], length: int, limit: int) -> list[tuple[int, ...]]:
        """Return at most ``limit`` distinct continuations of ``length`` tokens each, best first."""
        found: dict[tuple[int, ...], None] = {}
        for end in self.occurrences(tokens):
            found[continuation(tokens, end, length)] = None
            if len(found) == limit:
                break
        return list(found)

    def occurrences(self, tokens: Sequence[int]) -> Iterator[int]:
        """Yield end positions of earlier occurrences of the suffixes, longest suffix first, then in the order of
        ``match``.
        """
        for order in sorted(self._ends, reverse=True):
            if order < len(tokens):
                ends = self._ends[order].get(tuple(tokens[-order:]), [])
                yield from islice(reversed(ends) if self._is_latest_first else ends, _MAX_OCCURRENCES)


def continuation(tokens: Sequence[int], start: int, length: int) -> tuple[int, ...]:
    """Return ``length`` tokens from index ``start`` on; past the end of the tokens the copy repeats itself.

    For tokens (1, 2, 3), start 1 and length 5, the result is 2 3 2 3 2.
    """
    copy = tokens[start : start + length]
    repeats = -(-length // len(copy))
    return (tuple(copy) * repeats)[:length]


def build(options: NGramOptions, context: DrafterContext) -> NGramDrafter:
    """Make the drafter, which needs nothing but the tokens of the row."""
    return NGramDrafter(options)
