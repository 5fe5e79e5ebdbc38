"""N-gram storage learned online: which token has followed these tokens most often."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING, ClassVar

from foretoken.config.drafting import BranchOptions, draft_length, node_limit
from foretoken.config.method import Method
from foretoken.config.options import option, whole
from foretoken.drafters.lengths import Fixed, LengthPolicy, policy_of
from foretoken.drafters.lengths.options import CONFIDENCE, NOTHING, LengthOptions
from foretoken.drafters.parts.depth import depth_within
from foretoken.drafters.parts.planned import PlannedDrafter
from foretoken.engine.drafter import Budget, Features, StepResult
from foretoken.engine.sequence import Sequence
from foretoken.errors import ConfigError
from foretoken.lazy import Lazy
from foretoken.tree import DraftTree

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from foretoken.drafters.materials import Materials
else:
    torch = Lazy("torch")


@dataclass(frozen=True, kw_only=True)
class NasdOptions(LengthOptions, BranchOptions):
    """Keys of drafting from an n-gram storage."""

    method: ClassVar[str] = "nasd"
    looks: ClassVar[frozenset[str]] = frozenset({NOTHING, CONFIDENCE})
    num_speculative_tokens: int = draft_length(5)
    max_draft_nodes: int | None = node_limit()
    ngram_size: int = option(whole(2), 4, "n of the longest n-gram, the predicted token included")
    filler_top_k: int = option(
        whole(1), 3, "tokens that the target ranked highest which enter the storage, per position"
    )


RUNNER_UP_WEIGHT = 0.25  # of a token that the target ranked high but did not choose; a chosen one weighs 1


class NasdDrafter(PlannedDrafter):
    """Drafts the most frequent successor of the last tokens, again and again, by counts of the row's text.

    Source: n-gram assisted speculative decoding (romsto/Speculative-Decoding; the text-only case is ANPD, Ou
    et al. 2024, arXiv:2404.08698). Deviations: contexts of every length ngram_size - 1 down to 1 are stored
    and tried; an unknown context ends the draft; ties go to the most recent; runners-up weigh less than
    observed tokens; every position counts once; counts belong to one row and end with it.

    Args:
      num_speculative_tokens: depth of the draft, unless ``length_policy`` says otherwise.
      ngram_size: tokens of the longest n-gram, the predicted one included; 2 or more.
      filler_top_k: how many of the target's most likely tokens to learn per position; 0 for none.
      num_branches: most successors per node; 1 drafts a chain, more a tree of at most
        ``num_branches`` * depth drafted nodes, the likeliest paths first.

    Raises: ConfigError when a number is out of range.
    Exactness: lossless for any acceptance rule that takes deterministic drafts. Randomness: none.
    Cost: dictionary operations per new token and per drafted node; none depends on the length of the text.
    """

    name = "nasd"

    def __init__(
        self,
        num_speculative_tokens: int = NasdOptions.num_speculative_tokens,
        *,
        ngram_size: int = NasdOptions.ngram_size,
        filler_top_k: int = NasdOptions.filler_top_k,
        num_branches: int = NasdOptions.num_draft_branches,
        length_policy: LengthPolicy | None = None,
    ) -> None:
        for name, value, least in (("ngram_size", ngram_size, 2), ("filler_top_k", filler_top_k, 0)):
            if value < least:
                raise ConfigError(f"{name} is {value}; want {least} or more")
        if num_branches < 1:
            raise ConfigError(f"num_branches is {num_branches}; want 1 (a chain) or more")
        self._filler_top_k = filler_top_k
        self.length_policy = length_policy or Fixed(num_speculative_tokens)
        self._ngram_size = ngram_size
        self._num_branches = num_branches
        self._storage_of: dict[int, NGramStorage] = {}

    def start(self, rows: Seq[Sequence]) -> None:
        for row in rows:
            storage = self._storage_of[row.id] = NGramStorage(self._ngram_size, self._num_branches)
            storage.extend(row.token_ids, [], first=1)

    def propose_row(self, row: Sequence, budget: Budget) -> DraftTree:
        storage = self._storage_of[row.id]
        length = self.length_policy.length(row, budget, storage.log_shares(row.token_ids))
        return storage.draft(row.token_ids, length, self.name)

    def observe(self, rows: Seq[Sequence], results: Seq[StepResult]) -> None:
        for row, result in zip(rows, results, strict=True):
            num_emitted = len(result.emitted)
            first = len(row.token_ids) - num_emitted
            self._storage_of[row.id].extend(row.token_ids, self._runners_up(result.committed, num_emitted), first)
            self.length_policy.end(row, result.tree.depth, result.num_accepted)

    def _runners_up(self, features: Features, num_tokens: int) -> list[list[int]]:
        """The target's best tokens per place, best first; none where they are not learned."""
        if not self._filler_top_k:
            return []
        ranked: list[list[int]] = features.top_ids(self._filler_top_k, range(num_tokens)).tolist()
        return ranked

    def forget(self, rows: Seq[Sequence]) -> None:
        for row in rows:
            self._storage_of.pop(row.id, None)
            self.length_policy.forget(row)


class NGramStorage:
    """Successors of every context of 1 to ``ngram_size`` - 1 tokens of one growing text."""

    def __init__(self, ngram_size: int, num_branches: int) -> None:
        self._orders = range(ngram_size - 1, 0, -1)
        self._num_branches = num_branches
        self._successors_of: dict[tuple[int, ...], Successors] = {}

    def extend(self, tokens: Seq[int], ranked: Seq[Seq[int]], first: int) -> None:
        """Count ``tokens[first:]``, each in its contexts, and what the target ranked high in the same places.

        ``ranked[i]`` are the target's best tokens, best first, for the place of ``tokens[first + i]``; it may
        be shorter than the text. A place's own token is counted as observed and not as a runner-up too.
        """
        for place in range(max(first, 1), len(tokens)):
            runners_up = ranked[place - first] if place - first < len(ranked) else ()
            for order in self._orders:
                if order <= place:
                    successors = self._known(tuple(tokens[place - order : place]))
                    for token in reversed(runners_up):
                        if token != tokens[place]:
                            successors.add(token, RUNNER_UP_WEIGHT)
                    successors.add(tokens[place], 1.0)

    def successors(self, tokens: Seq[int]) -> list[tuple[int, float]]:
        """The likeliest tokens after the longest known suffix of ``tokens``, best first, with their shares.

        A context keeps one observation for the unknown, so shares sum to less than one. Empty when even the
        last token is new.
        """
        for order in self._orders:
            if order <= len(tokens):
                known = self._successors_of.get(tuple(tokens[-order:]))
                if known is not None:
                    return known.ranked()
        return []

    def log_shares(self, tokens: Seq[int]) -> Callable[[int], Tensor | None]:
        """Along the likeliest path, asked level by level: the logarithm of the best share, (1,); None at its end."""
        context = list(tokens[-self._orders.start :])

        def next_share(depth: int) -> Tensor | None:
            ranked = self.successors(context)
            if not ranked:
                return None
            token, share = ranked[0]
            context.append(token)
            return torch.tensor([math.log(share)])

        return next_share

    def draft(self, tokens: Seq[int], depth: int, source: str = "") -> DraftTree:
        """The likeliest paths below the last token: at most ``num_branches`` * ``depth`` nodes drafted.

        The score of a node is the product of the shares along its path.
        """
        longest = self._orders.start
        nodes, parents, scores = [tokens[-1]], [-1], [1.0]
        contexts, levels = [tuple(tokens[-longest:])], [0]
        open_ends: list[tuple[float, int, int, int]] = []  # minus score, age, parent, token
        for newest in range(self._num_branches * depth):
            if levels[newest] < depth:
                for token, share in self.successors(contexts[newest]):
                    heappush(open_ends, (-scores[newest] * share, len(nodes) + len(open_ends), newest, token))
            if not open_ends:
                break
            negative_score, _, parent, token = heappop(open_ends)
            nodes.append(token)
            parents.append(parent)
            scores.append(-negative_score)
            contexts.append((*contexts[parent], token)[-longest:])
            levels.append(levels[parent] + 1)
        return DraftTree(tuple(nodes), tuple(parents), scores=tuple(scores), source=source)

    def _known(self, context: tuple[int, ...]) -> Successors:
        successors = self._successors_of.get(context)
        if successors is None:
            successors = self._successors_of[context] = Successors(self._num_branches)
        return successors


class Successors:
    """Weights of the tokens seen after one context, and the heaviest few of them in order.

    Weights only grow, so the ranking is kept by moving the token that grew; equal weights go to the most
    recent.
    """

    __slots__ = ("_best", "_limit", "_total", "_weight_of")

    def __init__(self, limit: int) -> None:
        self._weight_of: dict[int, float] = {}
        self._best: list[int] = []
        self._total = 0.0
        self._limit = limit

    def add(self, token: int, weight: float) -> None:
        """Count ``token`` once more, with ``weight``."""
        grown = self._weight_of.get(token, 0.0) + weight
        self._weight_of[token] = grown
        self._total += weight
        best = self._best
        if token in best:
            best.remove(token)
        place = 0
        while place < len(best) and self._weight_of[best[place]] > grown:
            place += 1
        best.insert(place, token)
        del best[self._limit :]

    def ranked(self) -> list[tuple[int, float]]:
        """The heaviest tokens with their shares of all that was seen here and one unknown observation."""
        return [(token, self._weight_of[token] / (self._total + 1.0)) for token in self._best]


def build(options: NasdOptions, materials: Materials) -> NasdDrafter:
    """An n-gram storage begins empty."""
    depth = depth_within(options.num_speculative_tokens, options.max_draft_nodes, options.num_draft_branches)
    return NasdDrafter(
        ngram_size=options.ngram_size,
        filler_top_k=options.filler_top_k,
        num_branches=options.num_draft_branches,
        length_policy=policy_of(options, depth),
    )


METHOD = Method(
    NasdOptions,
    build,
    summary="the most frequent successors of the last tokens in this text",
    aliases=("ngram_storage", "ngram_assisted"),
)
