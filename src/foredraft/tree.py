"""The draft: a tree of proposed tokens below the pending token, and how large it may be. A chain is a tree."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from operator import lt
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from foredraft.config.keywords import has_items, shown, whole_number
from foredraft.errors import TreeError

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class DraftPlan:
    """The decision of a length policy for one draft.

    Args:
      gamma: draft length chosen by the policy.
      entropy: entropy of the drafter's distribution for the first drafted token, divided by log V, 0..1. None if the
        policy does not use it.
      cause: reason for a length of 0, a key of `foredraft.engine.stats.CAUSES`.
    """

    gamma: int
    entropy: float | None = None
    cause: str = "policy"


@dataclass(frozen=True, eq=False)
class DraftTree:
    """Proposed continuations of one sequence, checked by the target in one forward pass.

    Node 0 is the pending token. Parents come before their children. Siblings have different tokens and are in the order
    in which they were drawn.

    Args:
      tokens: N token ids; ``tokens[0]`` is the pending token. Lists, arrays and tensors become tuples of int, here and
        in the arguments below.
      parents: N node indices, ``parents[0] == -1`` and ``parents[i] < i``.
      probs: float tensor (M, V), with M larger than the index of any node that has children. Row i is the distribution
        from which the children of node i were drawn, without replacement. None if the draft is not a sample of a known
        distribution.
      scores: N estimates in 0..1 of the chance that a node is accepted, or None.
      source: name of the drafter.
      sources: N names, the drafter of each node, if several drafters contributed; else None.
      plan: decision of the drafter's length policy, if it has one.
      is_whole: True if a governor must verify either the whole draft or nothing, because the drafter cannot learn from
        a part of it.

    Raises: TreeError when the arrays do not describe such a tree.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    probs: torch.Tensor | None = None
    scores: tuple[float, ...] | None = None
    source: str = ""
    sources: tuple[str, ...] | None = None
    plan: DraftPlan | None = None
    is_whole: bool = False

    def __post_init__(self) -> None:
        tokens, parents = self.tokens, self.parents
        if type(tokens) is not tuple or type(parents) is not tuple or not _INTS.issuperset(map(type, tokens + parents)):
            tokens, parents = _whole_numbers("tokens", tokens), _whole_numbers("parents", parents)
            self.__dict__.update(tokens=tokens, parents=parents)
        if self.scores is not None:
            self.__dict__["scores"] = _chances(self.scores)
        if self.sources is not None or type(self.source) is not str:
            self.__dict__["sources"] = _names(self.source, self.sources)
        if not tokens or len(tokens) != len(parents):
            raise TreeError(f"{len(tokens)} tokens and {len(parents)} parents; give equally many of both, at least one")
        if self.scores is not None and len(self.scores) != len(tokens):
            raise TreeError(f"{len(self.scores)} scores for {len(tokens)} nodes")
        if self.sources is not None and len(self.sources) != len(tokens):
            raise TreeError(f"{len(self.sources)} sources for {len(tokens)} nodes")
        if parents[0] != -1:
            raise TreeError(f"parents[0] is {parents[0]}; node 0 is the pending token, and its parent must be -1")
        if self.probs is not None:
            self._check_probs()
        if len(tokens) == 1:
            return
        if min(parents[1:]) < 0 or not all(map(lt, parents, range(len(parents)))):
            raise TreeError(f"parents are {parents}; parents must stand before their children")
        if len(set(zip(parents[1:], tokens[1:], strict=True))) != len(tokens) - 1:
            raise TreeError(f"two siblings share a token: tokens {tokens}, parents {parents}")

    def _check_probs(self) -> None:
        probs: Any = self.probs
        if getattr(probs, "ndim", None) != 2 or not isinstance(getattr(probs, "shape", None), tuple):
            shape = tuple(probs.shape) if hasattr(probs, "shape") else type(probs).__name__
            raise TreeError(f"draft probabilities are {shape}; give a tensor (M, V), one row per node with children")
        if probs.shape[0] <= max(self.parents):
            raise TreeError(f"{probs.shape[0]} rows of draft probabilities, but node {max(self.parents)} has children")

    @classmethod
    def root(cls, pending: int, source: str = "") -> DraftTree:
        """The empty draft, which is plain decoding."""
        if type(pending) is not int or type(source) is not str:
            return cls((pending,), (-1,), source=source)
        tree = object.__new__(cls)
        tree.__dict__.update(_EMPTY, tokens=(pending,), source=source)
        return tree

    @classmethod
    def chain(
        cls, pending: int, draft: Sequence[int], probs: torch.Tensor | None = None, source: str = ""
    ) -> DraftTree:
        """A draft of one continuation; ``probs`` (K, V) are the distributions from which its K tokens were drawn."""
        tree = cls((pending, *draft), tuple(range(-1, len(draft))), probs=probs, source=source)
        tree.__dict__.update(depths=tuple(range(len(tree.tokens))), depth=len(tree.tokens) - 1, is_chain=True)
        return tree

    @classmethod
    def from_paths(
        cls, pending: int, paths: Iterable[Sequence[int]], max_nodes: int | None = None, source: str = ""
    ) -> DraftTree:
        """Merge continuations, best first, into a trie of at most ``max_nodes`` nodes, root included.

        For example, [[5, 6], [5, 7]] below token 1 become tokens (1, 5, 6, 7), parents (-1, 0, 1, 1).
        """
        tokens, parents, depths = [pending], [-1], [0]
        child_of: dict[tuple[int, int], int] = {}
        for path in paths:
            node = 0
            for token in path:
                child = child_of.get((node, token))
                if child is None:
                    if max_nodes is not None and len(tokens) >= max_nodes:
                        break
                    child = child_of[node, token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                    depths.append(depths[node] + 1)
                node = child
        tree = cls(tuple(tokens), tuple(parents), source=source)
        tree.__dict__.update(depths=tuple(depths), depth=max(depths))
        return tree

    def __len__(self) -> int:
        """Number of nodes N, root included."""
        return len(self.tokens)

    @property
    def num_draft_tokens(self) -> int:
        return len(self.tokens) - 1

    @cached_property
    def _child_of(self) -> dict[tuple[int, int], int]:
        pairs = zip(self.parents[1:], self.tokens[1:], strict=True)
        return dict(zip(pairs, range(1, len(self.tokens)), strict=True))

    def source_of(self, node: int) -> str:
        """The drafter that proposed a node."""
        return self.source if self.sources is None else self.sources[node]

    def child(self, node: int, token: int) -> int | None:
        """The child of ``node`` that carries ``token``, or None."""
        return self._child_of.get((node, token)) if len(self.tokens) > 1 else None

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of every node, in draw order."""
        lists: list[list[int]] = [[]]
        for node, parent in enumerate(self.parents[1:], 1):
            lists.append([])
            lists[parent].append(node)
        return tuple(map(tuple, lists))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Distance of every node from the root, which has depth 0."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def depth(self) -> int:
        """Length of the longest continuation."""
        return max(self.depths)

    @cached_property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.tokens) - 1))

    @cached_property
    def ancestor_mask(self) -> np.ndarray:
        """Bool (N, N): ``[i, j]`` is True where node j is node i or one of its ancestors.

        For parents (-1, 0, 0, 2):
            1 0 0 0
            1 1 0 0
            1 0 1 0
            1 0 1 1
        """
        num_nodes = len(self.tokens)
        mask = np.eye(num_nodes, dtype=bool)
        if self.is_chain:
            return np.tri(num_nodes, dtype=bool)
        for node, parent in enumerate(self.parents[1:], 1):
            mask[node] |= mask[parent]
        return mask

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the root to ``node``, both included."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))

    def path_tokens(self, node: int) -> tuple[int, ...]:
        """Draft tokens on the path from the root to ``node``, without the root's own; empty for the root."""
        return tuple(self.tokens[i] for i in self.path(node)[1:])

    def planned(self, plan: DraftPlan | None) -> DraftTree:
        """Return this draft together with the decision of a length policy."""
        return self if plan is None else self._with(plan=plan)

    def _with(self, **changes: Any) -> DraftTree:
        """Copy this draft with other values of some fields, without checking them.

        If the shape changes, ``tokens`` and all other fields that depend on the shape must be given. Everything derived
        from the old shape is then dropped.
        """
        other = object.__new__(DraftTree)
        kept = {name: self.__dict__[name] for name in _FIELDS} if "tokens" in changes else self.__dict__
        other.__dict__.update(kept, **changes)
        return other

    @property
    def leaves(self) -> tuple[int, ...]:
        return tuple(node for node, children in enumerate(self.children) if not children)

    def cut(self, max_depth: int) -> DraftTree:
        """Return the tree without the nodes deeper than ``max_depth``."""
        if self.depth <= max_depth:
            return self
        return self.restricted([node for node, depth in enumerate(self.depths) if depth <= max_depth])

    def below(self, vocab_size: int) -> DraftTree:
        """Return the tree without drafted tokens >= ``vocab_size`` and without their descendants."""
        if max(self.tokens[1:], default=0) < vocab_size:
            return self
        kept = {0}
        for node in range(1, len(self.tokens)):
            if self.tokens[node] < vocab_size and self.parents[node] in kept:
                kept.add(node)
        return self.restricted(sorted(kept))

    def restricted(self, nodes: Sequence[int]) -> DraftTree:
        """Return the tree of some of its nodes. ``nodes`` are ascending and include the parent of each of them."""
        tokens, parents, scores, sources, num_kept = self.tokens, self.parents, self.scores, self.sources, len(nodes)
        if num_kept == len(tokens):
            return self
        probs = None if self.probs is None else self.probs[[n for n in nodes if n < len(self.probs)]]
        if nodes[-1] == num_kept - 1:  # a prefix of the nodes
            return self._with(
                tokens=tokens[:num_kept],
                parents=parents[:num_kept],
                probs=probs,
                scores=scores and scores[:num_kept],
                sources=sources and sources[:num_kept],
                is_whole=False,
            )
        new_index = dict(zip(nodes, range(num_kept), strict=True))
        return self._with(
            tokens=tuple([tokens[node] for node in nodes]),
            parents=(-1, *[new_index[parents[node]] for node in nodes[1:]]),
            probs=probs,
            scores=scores and tuple([scores[node] for node in nodes]),
            sources=sources and tuple([sources[node] for node in nodes]),
            is_whole=False,
        )

    def joined(self, other: DraftTree, max_nodes: int) -> DraftTree:
        """Return this draft extended by nodes that only the other draft has, up to ``max_nodes``.

        Nodes keep their sources.

        If this draft has scores, an added node has at most the score of its parent. Chains 1 5 6 and 1 5 7 become
        tokens (1, 5, 6, 7), parents (-1, 0, 1, 1). The result has no ``probs``, since it is not a sample of one
        distribution.
        """
        tokens, parents = list(self.tokens), list(self.parents)
        sources = list(self.sources or (self.source,) * len(tokens))
        scores = None if self.scores is None else list(self.scores)
        found = dict(self._child_of)
        places = {0: 0}  # node of the other draft -> node of the result
        for node in range(1, len(other.tokens)):
            above, token = places.get(other.parents[node]), other.tokens[node]
            if above is None:
                continue
            place = found.get((above, token))
            if place is None and len(tokens) < max_nodes:
                place = found[above, token] = len(tokens)
                tokens.append(token)
                parents.append(above)
                sources.append(other.source_of(node))
                if scores is not None:
                    stated = scores[above] if other.scores is None else other.scores[node]
                    scores.append(min(scores[above], stated))
            if place is not None:
                places[node] = place
        return DraftTree(
            tuple(tokens),
            tuple(parents),
            scores=None if scores is None else tuple(scores),
            source=other.source,
            sources=tuple(sources),
            plan=other.plan,
            is_whole=self.is_whole or other.is_whole,
        )

    def main_chain(self) -> DraftTree:
        """Return the chain of first children, for rules and models that can only verify chains.

        First draws are plain samples of their distributions, so ``probs`` remain the distributions of the nodes that
        are left.
        """
        if self.is_chain:
            return self
        nodes = [0]
        while self.children[nodes[-1]]:
            nodes.append(self.children[nodes[-1]][0])
        probs = None if self.probs is None else self.probs[nodes[:-1]]
        return self.restricted(nodes)._with(probs=probs)


class DraftSize(int):
    """Upper limits of a draft for one row in one step. As an int, it is the depth.

    Args:
      depth: tokens on one path, the pending one not counted; 0 for no draft.
      nodes: nodes of the whole draft, root included.
      chains_only: True if only the chain of first children will be verified.
      least: smallest acceptance probability of a node. Nodes below it, and their descendants, will not be verified.
        Drafters may ignore this limit.

    Attributes:
      arm: index of the mode in which the drafter should draft, among its modes (`DrafterFacts.arms`). None leaves the
        choice to the drafter.
    """

    nodes: int
    chains_only: bool
    least: float
    arm: int | None = None

    def __new__(cls, depth: int, nodes: int = sys.maxsize, chains_only: bool = False, least: float = 0.0) -> Self:
        self = super().__new__(cls, depth)
        self.nodes, self.chains_only, self.least = nodes, chains_only, least
        return self

    def __repr__(self) -> str:
        return f"DraftSize(depth={self.depth}, nodes={self.nodes}, chains_only={self.chains_only}, least={self.least})"

    @property
    def depth(self) -> int:
        """Tokens on one path."""
        return int(self)

    @classmethod
    def of(cls, budget: int) -> DraftSize:
        """Return the budget itself if it is a `DraftSize`; else a size that limits only the depth."""
        return budget if isinstance(budget, DraftSize) else cls(budget)

    def within(self, depth: int, least: float, arm: int | None = None) -> DraftSize:
        """Return this size reduced to the depth, least chance and arm that a governor has chosen."""
        if depth >= self and not least and arm is None:
            return self
        size = DraftSize(min(self, depth), self.nodes, self.chains_only, least)
        size.arm = arm
        return size

    def width(self, num_branches: int) -> int:
        """Number of siblings worth drafting, out of the ``num_branches`` that a drafter would propose."""
        return 1 if self.chains_only else num_branches

    def max_nodes(self, limit: int | None = None) -> int:
        """Number of nodes allowed, also within the drafter's own limit if it has one."""
        return self.nodes if limit is None else min(self.nodes, limit)

    def cut(self, tree: DraftTree) -> DraftTree:
        """Cut a draft to this size. If it has too many nodes, the first ones stay."""
        if len(tree.tokens) == 1:
            return tree
        tree = (tree.main_chain() if self.chains_only else tree).cut(self)
        return tree if len(tree.tokens) <= self.nodes else tree.restricted(range(max(1, self.nodes)))


_FIELDS = tuple(one.name for one in fields(DraftTree))
_EMPTY: Mapping[str, Any] = {
    **{one.name: one.default for one in fields(DraftTree)},
    "parents": (-1,),
    "depths": (0,),
    "depth": 0,
    "is_chain": True,
    "children": ((),),
}
"""Fields and derived values of every empty draft."""
_INTS, _FLOATS = frozenset([int]), frozenset([float])


def _whole_numbers(name: str, values: Any) -> tuple[int, ...]:
    """Convert whole numbers of any type, including torch and numpy, to a tuple of int."""
    if not has_items(values):
        raise TreeError(f"{name} are {shown(values)}; give whole numbers, one for each node")
    items = list(values)
    try:
        return tuple(map(whole_number, items))
    except TypeError:
        wrong = next(item for item in items if not _is_whole(item))
        raise TreeError(f"{name} contain {shown(wrong)}; every item must be a whole number") from None


def _is_whole(value: Any) -> bool:
    try:
        whole_number(value)
    except TypeError:
        return False
    return True


def _chances(scores: Any) -> tuple[float, ...]:
    if type(scores) is tuple and _FLOATS.issuperset(map(type, scores)) and scores:
        least, most = min(scores), max(scores)
        if least >= 0.0 and most <= _MOST_SCORE and sum(scores) >= 0.0:  # a sum with NaN is NaN
            return scores
    if not has_items(scores):
        raise TreeError(f"scores are {shown(scores)}; give a probability in 0..1 for each node")
    given = tuple(scores)
    try:
        chances = tuple(map(float, given))
    except (TypeError, ValueError):
        chances = ()
    if len(chances) != len(given) or not all(0.0 <= chance <= _MOST_SCORE for chance in chances):
        raise TreeError(f"scores are {shown(given)}; every score must be a probability in 0..1")
    return chances


_MOST_SCORE = 1.0 + 1e-3
"""Largest score that is accepted; slightly above 1, because products of probabilities are rounded."""


def _names(source: Any, sources: Any) -> tuple[str, ...] | None:
    if not isinstance(source, str):
        raise TreeError(f"source is {shown(source)}; give the name of the drafter")
    if sources is None:
        return None
    names = tuple(sources) if type(sources) in (list, tuple) or has_items(sources) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise TreeError(f"sources are {shown(sources)}; give the name of a drafter for each node")
    return names
