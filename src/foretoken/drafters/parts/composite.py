"""Several drafters as one: their trees merged, or the first of them that knows something."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING

from foretoken.drafters.parts.calibration import Calibration
from foretoken.engine.drafter import Budget, Drafter, Features, Requirements, StepResult
from foretoken.engine.sequence import Sequence
from foretoken.errors import ConfigError
from foretoken.tree import DraftTree

if TYPE_CHECKING:
    from foretoken.model.cache.ragged import KVCache
    from foretoken.model.lm import CausalLM


class CompositeDrafter(Drafter):
    """Asks several drafters, and tells each the outcome of its own proposals.

    A part sees a step as if it had proposed those of its nodes that were verified: its tree is cut to them, the
    accepted path ends where its tree does, and features of nodes are those of its own.

    Args:
      parts: two or more drafters, most trusted first.

    Raises: ConfigError for fewer than two.
    """

    def __init__(self, parts: Seq[Drafter]) -> None:
        if len(parts) < 2:
            raise ConfigError(f"{self.name} combines drafters but got {len(parts)}; give two or more")
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

    def propose(self, rows: Seq[Sequence], budgets: Seq[Budget]) -> list[DraftTree]:
        proposed = self._ask(rows, budgets)
        self._proposed.update(zip((row.id for row in rows), proposed, strict=True))
        return [self._combined(trees) for trees in proposed]

    @abstractmethod
    def _ask(self, rows: Seq[Sequence], budgets: Seq[Budget]) -> list[list[DraftTree]]:
        """The proposals of all parts, for every row."""

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


def _own_result(requires: Requirements, tree: DraftTree, result: StepResult, has_all_nodes: bool) -> StepResult:
    """The outcome of a step for the proposal of one part; ``has_all_nodes``: features are of nodes, not of the path."""
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
    """Select the features that one part asked for from those that all parts together asked for."""
    return Features(
        features.last_hidden if requires.last_hidden else None,
        {layer: features.layer_inputs[layer] for layer in requires.layer_inputs if layer in features.layer_inputs},
        features.top_ids[:, : requires.top_k] if requires.top_k and features.top_ids is not None else None,
        features.choices if requires.choices else None,
    )


def _all_of(requirements: Seq[Requirements]) -> Requirements:
    """The union of the requirements of all parts."""
    return Requirements(
        last_hidden=any(requires.last_hidden for requires in requirements),
        layer_inputs=tuple(sorted({layer for requires in requirements for layer in requires.layer_inputs})),
        top_k=max(requires.top_k for requires in requirements),
        prompt_top_k=any(requires.prompt_top_k for requires in requirements),
        choices=any(requires.choices for requires in requirements),
        all_nodes=any(requires.all_nodes for requires in requirements),
    )
