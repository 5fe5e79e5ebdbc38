"""Counts of the tokens that followed each context, in one row or in all rows, and their state file."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from foredraft.drafters.parts.state_file import read_state, save_state
from foredraft.errors import CheckpointError, ConfigError
from foredraft.methods.lookup import RUNNER_UP_WEIGHT
from foredraft.tree import DraftTree

_FORMAT = "foredraft nasd 1"
_TENSORS = ("contexts", "sizes", "totals", "tokens", "weights")

Guess = Callable[[int], tuple[int, float]]
"""Function for unknown contexts, from the index of a draft node to a token and its estimated probability."""


class NGramStorage:
    """Successor counts of contexts, for growing rows.

    Args:
      ngram_size: number of tokens of the longest n-gram, the predicted one included; 2 or more.
      num_branches: number of successors per context that can be drafted.
      storage: "levels" keeps contexts of ``ngram_size`` - 1 tokens down to one, and falls back from the longest to the
        shortest; "single" keeps only the longest.
      filler_weight: weight of a token that the target ranked high but did not emit.
    """

    def __init__(
        self,
        ngram_size: int,
        num_branches: int,
        *,
        storage: str = "levels",
        filler_weight: float = RUNNER_UP_WEIGHT,
    ) -> None:
        self.ngram_size, self.kind = ngram_size, storage
        self._orders = range(ngram_size - 1, ngram_size - 2 if storage == "single" else 0, -1)
        self._num_branches = num_branches
        self._filler_weight = filler_weight
        self.epoch = object()
        """Object that is replaced by every `reset`. Code that keeps the old object can thus detect the reset."""
        self._successors_of: dict[tuple[int, ...], Successors] = {}

    def __len__(self) -> int:
        """Return the number of contexts."""
        return len(self._successors_of)

    def reset(self) -> None:
        """Remove all counts."""
        self._successors_of = {}
        self.epoch = object()

    def extend(self, tokens: Sequence[int], ranked: Sequence[Sequence[int]], first: int) -> None:
        """Count ``tokens[first:]``, each in all its contexts, together with the target's top tokens at the same
        positions.

        Args:
          tokens: all tokens of the row.
          ranked: ``ranked[i]`` are the target's top tokens, best first, at the position of ``tokens[first + i]``; the
            list may be shorter than the tokens. The emitted token itself is counted once, with the weight of an emitted
            token.
          first: index of the first token to count.
        """
        for place in range(max(first, 1), len(tokens)):
            runners_up = ranked[place - first] if place - first < len(ranked) else ()
            for order in self._orders:
                if order <= place:
                    successors = self._known(tuple(tokens[place - order : place]))
                    for token in reversed(runners_up):
                        if token != tokens[place]:
                            successors.add(token, self._filler_weight)
                    successors.add(tokens[place], 1.0)

    def successors(self, tokens: Sequence[int]) -> list[tuple[int, float]]:
        """Return the likeliest tokens after the longest known suffix of ``tokens``, best first, with their shares.

        Each context reserves one observation for unknown tokens, so the shares sum to less than one. The list is empty
        if no stored context matches.
        """
        for order in self._orders:
            if order <= len(tokens):
                known = self._successors_of.get(tuple(tokens[-order:]))
                if known is not None:
                    return known.ranked()
        return []

    def log_shares(self, tokens: Sequence[int], guess: Guess | None = None) -> Callable[[int], Tensor | None]:
        """Return a function that is called for every level. It returns the log share (1,) of the best token, and None
        at the end of the path.
        """
        context = list(tokens[-self._orders.start :])

        def next_share(depth: int) -> Tensor | None:
            ranked = self.successors(context) or ([] if guess is None else [guess(depth)])
            if not ranked:
                return None
            token, share = ranked[0]
            context.append(token)
            return torch.tensor([math.log(share)])

        return next_share

    def draft(self, tokens: Sequence[int], depth: int, source: str = "", guess: Guess | None = None) -> DraftTree:
        """Draft the likeliest paths below the last token, with at most ``num_branches`` * ``depth`` drafted nodes.

        The score of a node is the product of the shares along its path. ``guess`` continues the draft at unknown
        contexts.
        """
        longest = self._orders.start
        nodes, parents, scores = [tokens[-1]], [-1], [1.0]
        contexts, levels = [tuple(tokens[-longest:])], [0]
        open_ends: list[tuple[float, int, int, int]] = []  # minus score, age, parent, token
        for newest in range(self._num_branches * depth):
            if levels[newest] < depth:
                known = self.successors(contexts[newest]) or ([] if guess is None else [guess(newest)])
                for token, share in known:
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

    # -- the file --------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], vocab_size: int) -> None:
        """Write all counts to a safetensors file atomically.

        Raises: CheckpointError if the file cannot be written.
        """
        arrays = {f"{what}{order}": array for order in self._orders for what, array in self._table(order).items()}
        about = {"format": _FORMAT, "vocab_size": vocab_size, "ngram_size": self.ngram_size, "storage": self.kind}
        save_state(path, arrays, about)

    def _table(self, order: int) -> dict[str, np.ndarray]:
        found = {context: known for context, known in self._successors_of.items() if len(context) == order}
        entries = [known.entries() for known in found.values()]
        flat = [entry for known in entries for entry in known]
        return {
            "contexts": np.array(list(found), dtype=np.int32).reshape(-1, order),
            "sizes": np.array([len(known) for known in entries], dtype=np.int64),
            "totals": np.array([known.total for known in found.values()], dtype=np.float64),
            "tokens": np.array([token for token, _ in flat], dtype=np.int32),
            "weights": np.array([weight for _, weight in flat], dtype=np.float64),
        }

    def load(self, path: str | os.PathLike[str], vocab_size: int) -> None:
        """Replace all counts by those that `save` wrote.

        Raises: CheckpointError for a file that is missing, truncated, of another kind or damaged; ConfigError for a
        file of another vocabulary or of other n-grams.
        """
        about, arrays = read_state(path, _FORMAT, "n-gram storage")
        wanted = {"vocab_size": str(vocab_size), "ngram_size": str(self.ngram_size), "storage": self.kind}
        if any(about.get(name) != value for name, value in wanted.items()):
            raise ConfigError(
                f"{path} was made for a vocabulary of {about.get('vocab_size')} tokens, ngram_size "
                f"{about.get('ngram_size')} and storage {about.get('storage')!r}, but the target has {vocab_size} "
                f"tokens, ngram_size is {self.ngram_size} and storage is {self.kind!r}; use the file with the model "
                "and options that it was made with"
            )
        loaded: dict[tuple[int, ...], Successors] = {}
        for order in self._orders:
            table = [arrays[f"{what}{order}"] for what in _TENSORS]
            _check(path, order, vocab_size, *table)
            contexts, sizes, totals, tokens, weights = (array.tolist() for array in table)
            entries = list(zip(tokens, weights, strict=True))
            for context, total, (start, end) in zip(
                contexts, totals, pairwise(accumulate(sizes, initial=0)), strict=True
            ):
                loaded[tuple(context)] = Successors.of(entries[start:end], total, self._num_branches)
        self._successors_of = loaded


class Successors:
    """Weights of the tokens after one context, and the heaviest few of them in order.

    Weights only grow, so the ranking is maintained by moving the token whose weight grew. Ties go to the most recent
    token.
    """

    __slots__ = ("_best", "_limit", "_weight_of", "total")

    def __init__(self, limit: int) -> None:
        self._weight_of: dict[int, float] = {}
        self._best: list[int] = []
        self._limit = limit
        self.total = 0.0

    @classmethod
    def of(cls, entries: Sequence[tuple[int, float]], total: float, limit: int) -> Successors:
        """Make successors with these weights, the best first."""
        made = cls(limit)
        made._weight_of = dict(entries)
        made._best = [token for token, _ in entries[:limit]]
        made.total = total
        return made

    def add(self, token: int, weight: float) -> None:
        """Add ``weight`` to ``token``."""
        grown = self._weight_of.get(token, 0.0) + weight
        self._weight_of[token] = grown
        self.total += weight
        best = self._best
        if token in best:
            best.remove(token)
        place = 0
        while place < len(best) and self._weight_of[best[place]] > grown:
            place += 1
        best.insert(place, token)
        del best[self._limit :]

    def ranked(self) -> list[tuple[int, float]]:
        """Return the heaviest tokens with their shares of the total weight plus one unknown observation."""
        return [(token, self._weight_of[token] / (self.total + 1.0)) for token in self._best]

    def entries(self) -> list[tuple[int, float]]:
        """Return all tokens with their weights: the ranked ones in order, then the others by weight."""
        others = sorted(self._weight_of.keys() - set(self._best), key=lambda token: (-self._weight_of[token], token))
        return [(token, self._weight_of[token]) for token in (*self._best, *others)]


def _check(path: str | os.PathLike[str], order: int, vocab_size: int, *table: np.ndarray) -> None:
    """Check a loaded table of contexts.

    Raises: CheckpointError for a table that `NGramStorage.save` would not have written.
    """
    contexts, sizes, totals, tokens, weights = table
    ids = np.concatenate([contexts.ravel(), tokens.ravel()])
    is_sound = (
        contexts.shape == (len(sizes), order)
        and len(totals) == len(sizes)
        and len(tokens) == len(weights) == sizes.sum()
        and sizes.min(initial=1) >= 1
        and ids.min(initial=0) >= 0
        and ids.max(initial=0) < vocab_size
        and bool(np.isfinite(weights).all() and np.isfinite(totals).all())
        and weights.min(initial=1.0) > 0.0
    )
    if not is_sound:
        raise CheckpointError(
            f"{path} contains an inconsistent table of contexts of {order} tokens; the file is damaged; save it again"
        )
