"""Several drafters as one: their trees merged, or the first of them that knows something."""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import replace

from foretoken.drafters.base import Drafter, Features, Requirements, StepResult
from foretoken.drafters.calibration import Calibration
from foretoken.engine.cache import KVCache
from foretoken.engine.errors import ConfigError
from foretoken.engine.model import CausalLM
from foretoken.engine.sequence import Sequence
from foretoken.engine.tree import DraftTree


class CompositeDrafter(Drafter):
    """Asks several drafters, and tells each what became of its own proposals.

    A part sees a step as if it had proposed those of its nodes that were verified: its tree is cut to them, the
    accepted path ends where its tree does, and features of nodes are those of its own.

    Args:
      parts: two or more drafters, most trusted first.

    Raises: ConfigError for fewer than two.
    """

    def __init__(self, parts: Seq[Drafter]) -> None:
        if len(parts) < 2:
            raise ConfigError(f"{self.name} combines drafters, and got {len(parts)}; give two or more")
        self.parts = tuple(parts)
        self.requires = _all_of([part.requires for part in parts])
        self._calibrations = [Calibration() for _ in parts]
        self._proposed: dict[int, list[DraftTree]] = {}

    def bind(self, target: CausalLM, cache: KVCache) -> None:
        for part in self.parts:
            part.bind(target, cache)

    def start(self, rows: Seq[Sequence], features: Seq[Features]) -> None:
        for part in self.parts:
            part.start(rows, [_restricted(part.requires.of_prompt, found) for found in features])

    def propose(self, rows: Seq[Sequence], budgets: Seq[int]) -> list[DraftTree]:
        proposed = self._ask(rows, budgets)
        self._proposed.update(zip((row.id for row in rows), proposed, strict=True))
        return [self._combined(trees) for trees in proposed]

    @abstractmethod
    def _ask(self, rows: Seq[Sequence], budgets: Seq[int]) -> list[list[DraftTree]]:
        """For every row, what every part proposes."""

    @abstractmethod
    def _combined(self, trees: Seq[DraftTree]) -> DraftTree:
        """One tree for a row, of the trees of the parts."""

    def observe(self, rows: Seq[Sequence], results: Seq[StepResult]) -> None:
        proposed = [self._proposed[row.id] for row in rows]
        for place, part in enumerate(self.parts):
            own = [
                _own_result(part.requires, trees[place], result, self.requires.all_nodes)
                for trees, result in zip(proposed, results, strict=True)
            ]
            for result in own:
                self._calibrations[place].observe(result.tree, result.path)
            part.observe(rows, own)

    def retain(self, rows: Seq[Sequence], limit: int) -> None:
        for part in self.parts:
            part.retain(rows, limit)

    def forget(self, rows: Seq[Sequence]) -> None:
        for part in self.parts:
            part.forget(rows)
        for row in rows:
            self._proposed.pop(row.id, None)


class UnionDrafter(CompositeDrafter):
    """Merges the trees of all parts under one node budget, most promising nodes first.

    A node that several parts propose counts with the best of their calibrated scores.

    Args:
      max_nodes: of the merged tree, root included.

    Exactness: lossless under "match", which takes any tree. Randomness: of the parts.
    """

    name = "union"

    def __init__(self, parts: Seq[Drafter], max_nodes: int = 32) -> None:
        super().__init__(parts)
        if max_nodes < 2:
            raise ConfigError(f"max_draft_nodes is {max_nodes}; a union needs 2 or more")
        self._max_nodes = max_nodes

    def _ask(self, rows: Seq[Sequence], budgets: Seq[int]) -> list[list[DraftTree]]:
        by_part = [part.propose(rows, budgets) for part in self.parts]
        return [list(trees) for trees in zip(*by_part, strict=True)]

    def _combined(self, trees: Seq[DraftTree]) -> DraftTree:
        scores = [calibration.scores(tree) for calibration, tree in zip(self._calibrations, trees, strict=True)]
        return merged(trees, scores, self._max_nodes, self.name)


class FirstDrafter(CompositeDrafter):
    """Takes the draft of the first part that expects enough of it; the last part is taken as it is.

    Parts behind it are not asked for that row, so a cheap drafter saves the forwards of a dear one.

    Args:
      min_expected: accepted tokens that a draft must promise, by its calibrated scores.

    Exactness: as of the parts; the choice between them looks at drafts, so rules other than "match" are refused.
    Randomness: of the parts.
    """

    name = "first"

    def __init__(self, parts: Seq[Drafter], min_expected: float = 0.5) -> None:
        super().__init__(parts)
        self._min_expected = min_expected

    def _ask(self, rows: Seq[Sequence], budgets: Seq[int]) -> list[list[DraftTree]]:
        left = list(budgets)
        by_part = []
        for calibration, part in zip(self._calibrations, self.parts, strict=True):
            trees = part.propose(rows, left)
            by_part.append(trees)
            left = [
                0 if tree.num_draft_tokens and self._is_enough(tree, calibration) else budget
                for tree, budget in zip(trees, left, strict=True)
            ]
        return [list(trees) for trees in zip(*by_part, strict=True)]

    def _is_enough(self, tree: DraftTree, calibration: Calibration) -> bool:
        return sum(calibration.scores(tree)[1:]) >= self._min_expected

    def _combined(self, trees: Seq[DraftTree]) -> DraftTree:
        """The last draft there is: behind one that promised enough nobody was asked."""
        return next((tree for tree in reversed(trees) if tree.num_draft_tokens), trees[-1])


def merged(trees: Seq[DraftTree], scores: Seq[Seq[float]], max_nodes: int, source: str = "") -> DraftTree:
    """The best nodes of several trees with one root, as one tree.

    Args:
      scores: per tree and node, at most the score of its parent; a node of several trees has the largest.
      max_nodes: root included.
    """
    best = _best_scores(trees, scores)
    tokens, parents, kept_scores = [trees[0].tokens[0]], [-1], [1.0]
    index_of: dict[tuple[int, ...], int] = {(): 0}
    heap: list[tuple[float, int, tuple[int, ...]]] = []
    children: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for path in best:
        children.setdefault(path[:-1], []).append(path)
    opened: tuple[int, ...] = ()
    while True:
        for path in children.get(opened, ()):
            heapq.heappush(heap, (-best[path], len(path), path))
        if not heap or len(tokens) >= max_nodes:
            break
        negative, _, opened = heapq.heappop(heap)
        index_of[opened] = len(tokens)
        tokens.append(opened[-1])
        parents.append(index_of[opened[:-1]])
        kept_scores.append(-negative)
    return DraftTree(tuple(tokens), tuple(parents), scores=tuple(kept_scores), source=source)


def _best_scores(trees: Seq[DraftTree], scores: Seq[Seq[float]]) -> dict[tuple[int, ...], float]:
    """The largest score of every path of tokens that any tree holds."""
    best: dict[tuple[int, ...], float] = {}
    for tree, tree_scores in zip(trees, scores, strict=True):
        paths: list[tuple[int, ...]] = [()]
        for node in range(1, len(tree)):
            path = (*paths[tree.parents[node]], tree.tokens[node])
            paths.append(path)
            best[path] = max(best.get(path, 0.0), tree_scores[node])
    return best


def _own_result(requires: Requirements, tree: DraftTree, result: StepResult, has_all_nodes: bool) -> StepResult:
    """What a step did to the proposal of one part; ``has_all_nodes``: features are of nodes, not of the path."""
    places = {0: 0}  # node of the part's tree -> node of the tree that was verified
    for node in range(1, len(tree)):
        above = places.get(tree.parents[node])
        place = None if above is None else result.tree.child(above, tree.tokens[node])
        if place is not None:
            places[node] = place
    own = tree.restricted(list(places))
    verified = list(places.values())  # of node i of ``own``
    accepted = set(result.path)
    path = tuple(node for node, place in enumerate(verified) if place in accepted)
    return StepResult(own, path, result.emitted, _own_features(requires, result, verified, has_all_nodes))


def _own_features(requires: Requirements, result: StepResult, verified: Seq[int], has_all_nodes: bool) -> Features:
    """Features of a part's own nodes, or of all committed tokens, whoever proposed them, as it asked."""
    found = result.features
    if has_all_nodes:
        found = _picked(found, verified if requires.all_nodes else result.path)
    if found.choices is not None:
        found = replace(found, choices=tuple(found.choices[place] for place in verified))
    return _restricted(requires, found)


def _picked(features: Features, nodes: Seq[int]) -> Features:
    """Features of some of the nodes."""
    index = list(nodes)
    return Features(
        None if features.last_hidden is None else features.last_hidden[index],
        {layer: states[index] for layer, states in features.layer_inputs.items()},
        None if features.top_ids is None else features.top_ids[index],
        features.choices,
    )


def _restricted(requires: Requirements, features: Features) -> Features:
    """What one part asked for, of what all parts together did."""
    return Features(
        features.last_hidden if requires.last_hidden else None,
        {layer: features.layer_inputs[layer] for layer in requires.layer_inputs if layer in features.layer_inputs},
        features.top_ids[:, : requires.top_k] if requires.top_k and features.top_ids is not None else None,
        features.choices if requires.choices else None,
    )


def _all_of(requirements: Seq[Requirements]) -> Requirements:
    """What all parts ask for together."""
    return Requirements(
        last_hidden=any(requires.last_hidden for requires in requirements),
        layer_inputs=tuple(sorted({layer for requires in requirements for layer in requires.layer_inputs})),
        top_k=max(requires.top_k for requires in requirements),
        prompt_top_k=any(requires.prompt_top_k for requires in requirements),
        choices=any(requires.choices for requires in requirements),
        all_nodes=any(requires.all_nodes for requires in requirements),
    )
