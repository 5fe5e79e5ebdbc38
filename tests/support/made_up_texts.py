"""Texts that are made up, drafters that are right as often as they say, and what steps cost; no clock is read."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from foredraft.engine.cost_model import CostCurve
from foredraft.engine.governor import Governor
from foredraft.engine.stats import RowStats, StepSeconds
from foredraft.tree import DraftSize, DraftTree

FLAT = {1: 22.2, 5: 24.2, 16: 27.8, 32: 32.5, 64: 45.0}
STEEP = {1: 20.0, 2: 28.0, 4: 38.0, 8: 60.0, 16: 110.0, 32: 210.0, 64: 400.0}
"""Milliseconds by nodes: a model that reads more than it computes, and one that does not."""

LENGTH, PROMPT = 220, 20


@dataclass(eq=False)
class Text:
    """A row whose text is 0, 1, 2, ... and ends after so many tokens."""

    id: int
    length: int = LENGTH
    state: dict[Any, Any] = field(default_factory=dict)
    stats: RowStats = field(default_factory=RowStats)
    is_plain: bool = False
    token_ids: list[int] = field(default_factory=lambda: list(range(PROMPT)))

    @property
    def num_remaining_tokens(self) -> int:
        return self.length - len(self.token_ids)

    @property
    def is_finished(self) -> bool:
        return self.num_remaining_tokens <= 0


def new_text(number: int, length: int = LENGTH) -> Any:
    """A text where a `Row` is wanted."""
    return Text(number, length)


Draft = Callable[[Text, DraftSize], DraftTree]


def chains(rate: Callable[[int], float] | float, depth: int = 8, *, is_whole: bool = False) -> Draft:
    """Drafts that are right with a chance that may depend on the place in the text."""

    def draft(row: Text, size: DraftSize) -> DraftTree:
        place, tokens, is_right = len(row.token_ids), list[int](), True
        for position in range(place, place + min(size, depth)):
            chance = rate(position) if callable(rate) else rate
            is_right = is_right and random.Random(f"{row.id}/{place}/{position}").random() < chance
            tokens.append(position if is_right else 10_000 + position)
        return replace(DraftTree.chain(place - 1, tokens, source="drafter"), is_whole=is_whole)

    return draft


def sure(rates: Mapping[float, float], shares: Mapping[float, float]) -> Draft:
    """Drafts of a token: scores are had by these shares of them, and right so often."""
    rng = random.Random(1)

    def draft(row: Text, size: DraftSize) -> DraftTree:
        (score,) = rng.choices([*shares], [*shares.values()])
        place = len(row.token_ids)
        token = place if rng.random() < rates[score] else 10_000
        tree = DraftTree((place - 1, token), (-1, 0), scores=(1.0, score), source="drafter")
        return tree if size else DraftTree.root(place - 1)

    return draft


@dataclass
class World:
    """Decodes made-up texts at made-up costs, as an engine does. All milliseconds.

    Args:
      level: that a drafted level takes.
      observing: that the drafter takes of every step that it is told of.
      governing: that deciding takes.
      noise: spread of the logarithms of times, and ``pauses``: share of the steps that take three times as long.
    """

    draft: Draft | Sequence[Draft]
    curve: Mapping[int, float]
    level: float | Sequence[float] = 0.01
    num_rows: int = 1
    observing: float = 0.0
    governing: float = 0.0
    noise: float = 0.05
    pauses: float = 0.01
    plain: float = 0.0
    spent: float = 0.0
    num_resting: int = 0
    sizes: list[int] = field(default_factory=list)
    asked: list[DraftSize] = field(default_factory=list)
    ways: list[int] = field(default_factory=list)
    verified: dict[float, list[bool]] = field(default_factory=dict)

    def run(self, governor: Governor | None, num_texts: int = 8, length: int = 0) -> float:
        """Speed by that of plain decoding; without a governor with drafts of this length."""
        costs, noise = CostCurve(self.curve), random.Random(0)
        waiting = [Text(number) for number in range(num_texts)]
        rows: list[Any] = []
        while waiting or rows:
            attends = governor is None or governor.attends(min(self.num_rows, len(rows) + len(waiting)))
            while waiting and len(rows) < self.num_rows:
                rows.append(waiting.pop(0))
                rows[-1].is_plain = not attends
            self._step(governor, rows, costs, noise, length)
            if governor is not None and not governor.attends(len(rows)):
                for row in rows:
                    row.is_plain = True
            rows = [row for row in rows if not row.is_finished]
        return float(self.plain / self.spent)

    def _step(self, governor: Governor | None, rows: Any, costs: CostCurve, noise: random.Random, length: int) -> None:
        limits = [DraftSize(row.num_remaining_tokens - 1) for row in rows]
        is_resting = all(row.is_plain for row in rows)
        self.num_resting += is_resting
        if is_resting:
            sizes = [DraftSize(0)] * len(rows)
        elif governor is not None:
            sizes = governor.plan(rows, limits)
        else:
            sizes = [DraftSize(min(limit, length)) for limit in limits]
        way = sizes[0].arm or 0
        draft = self.draft if callable(self.draft) else self.draft[way]
        whole = [
            DraftTree.root(row.token_ids[-1]) if row.is_plain else draft(row, size)
            for row, size in zip(rows, sizes, strict=True)
        ]
        trees = whole
        if governor is not None and not is_resting:
            for row, tree in zip(rows, whole, strict=True):
                governor.acceptance.proposed(row, tree, governor.title)
            trees = governor.select(rows, whole)
        for drafted, tree in zip(whole, trees, strict=True):
            if drafted.scores is not None and len(drafted) > 1:
                self.verified.setdefault(drafted.scores[1], []).append(len(tree) > 1)
        outputs: Any = [accept(row, tree, governor) for row, tree in zip(rows, trees, strict=True)]
        level = self.level if isinstance(self.level, float) else self.level[way]
        drafting = level * max(tree.depth for tree in whole) + self.observing * (not is_resting)
        verifying, governing = costs.at(sum(map(len, trees))), self.governing * (not is_resting)
        self.sizes.append(sum(map(len, trees)))
        self.asked.append(max(sizes))
        self.ways.append(way)
        self.spent += drafting + verifying + governing
        self.plain += costs.at(len(rows)) / len(rows) * sum(len(output.token_ids) for output in outputs)
        factor = math.exp(noise.gauss(0.0, self.noise)) * (3.0 if noise.random() < self.pauses else 1.0) / 1e3
        if governor is not None:
            governor.observe(trees, outputs, StepSeconds(drafting * factor, verifying * factor, governing * factor))

    def share(self, score: float) -> float:
        """Share of the drafts with a score, of the second half of them, that was verified."""
        found = self.verified[score]
        return sum(found[len(found) // 2 :]) / (len(found) - len(found) // 2)


def accept(row: Text, tree: DraftTree, governor: Governor | None) -> Any:
    """What a step makes of a row: the tokens of its text as far as they were drafted, and one more."""
    node: int | None = 0
    emitted = list[int]()
    while node is not None and not row.is_finished:
        emitted.append(len(row.token_ids))
        row.token_ids.append(emitted[-1])
        node = tree.child(node, emitted[-1])
    row.stats.record(tree, range(1, len(emitted)), len(emitted))
    if governor is not None:
        governor.acceptance.came(row, emitted)
    return SimpleNamespace(row=row, token_ids=tuple(emitted))
