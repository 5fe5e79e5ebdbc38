"""What the governor takes of a step: microseconds by kind of draft, batch and length of steps.

    python benchmarks/governor_cost.py [--milliseconds 2 8 20] [--batch-sizes 1 8] [--steps 600]

No model runs: steps are said to take what a curve says, which begins with so many milliseconds for a plain step of one
row. In every step 32 MB are read, as weights would be, so that the governor finds its own data and code gone from the
processor's caches. Drafts are chains of ten tokens, and trees of 16 and of 60 nodes as token_recycling makes them,
or scored as a head's are; the first tokens are right at random. Times are medians, since other processes interrupt some
steps: of those that decide and of those between, added up by how many there were of each.
"""

from __future__ import annotations

import argparse
import random
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np

from foretoken.drafters.parts.treeshape import best_shape
from foretoken.engine.budget import Budget
from foretoken.engine.governing import Governing
from foretoken.engine.governor import Governor
from foretoken.engine.step_costs import StepCosts
from foretoken.tree import DraftTree

RELATIVE = {1: 1.0, 5: 1.1, 16: 1.27, 32: 1.5, 64: 2.1, 512: 14.0}
"""Time of a step by its nodes, of SmolLM2-135M in bfloat16."""

WEIGHTS = np.ones(2**23, dtype=np.float32)
CHANCES = (0.6, 0.16, 0.08, 0.05, 0.03)
FORWARDS: Any = SimpleNamespace(num_nodes=lambda sizes, _: sum(sizes))
BATCH: Any = SimpleNamespace(waiting=[1], prefilling=[])


def shape_of(kind: str, num_nodes: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...] | None]:
    """Parents, ranks among siblings and, of a head's drafts, scores."""
    if kind == "chain":
        return tuple(range(-1, num_nodes - 1)), (0,) * num_nodes, None
    shape = best_shape(num_nodes, 6, 8)
    scores = [1.0]
    for parent, rank in zip(shape.parents[1:], shape.ranks[1:], strict=True):
        scores.append(scores[parent] * 0.7 / (1 + rank))
    return shape.parents, shape.ranks, tuple(scores) if kind == "scored" else None


def draft(kind: str, num_nodes: int, text: list[int], depth: int, rng: random.Random) -> DraftTree:
    """A draft of which the nodes of some rank hold the tokens of the text."""
    parents, ranks, scores = shape_of(kind, num_nodes)
    right = [rng.choices(range(6), (*CHANCES, 0.1))[0] for _ in text]
    tokens, depths = [1], [0]
    for node in range(1, num_nodes):
        level = depths[parents[node]]
        depths.append(level + 1)
        tokens.append(text[level] if ranks[node] == right[level] else 10_000 + node)
    source = "chain" if kind == "chain" else kind
    return DraftTree(tuple(tokens), parents, scores=scores, source=source).cut(depth)


class Cell:
    """Steps of one kind of draft and batch.

    Args:
      plain: seconds of a plain step of one row.
    """

    def __init__(self, kind: str, num_nodes: int, num_rows: int, plain: float) -> None:
        self.kind, self.num_nodes = kind, num_nodes
        curve = {nodes: plain * factor for nodes, factor in RELATIVE.items()}
        self.costs = StepCosts(curve)
        self.governing = Governing(Governor(StepCosts(curve)), FORWARDS, BATCH)
        self.rows: list[Any] = [SimpleNamespace(id=i, is_finished=False, token_ids=[0] * 300) for i in range(num_rows)]
        self.random = random.Random(0)
        self.seconds: dict[bool, list[float]] = {True: [], False: []}  # by whether the step was decided in
        self.num_nodes_verified = 0

    def step(self, *, is_counted: bool) -> None:
        texts = [[self.random.randrange(1000) for _ in range(12)] for _ in self.rows]
        start = perf_counter()
        budgets = self.governing.budgets(self.rows, [Budget(50)] * len(self.rows))
        taken = perf_counter() - start
        depths = map(int, budgets)
        trees = [draft(self.kind, self.num_nodes, *one, self.random) for one in zip(texts, depths, strict=True)]
        start = perf_counter()
        trees = self.governing.trimmed(self.rows, trees)
        taken += perf_counter() - start
        WEIGHTS.sum()
        outputs: list[Any] = []
        for row, tree, text in zip(self.rows, trees, texts, strict=True):
            node, count = 0, 0
            while (found := tree.child(node, text[count])) is not None:
                node, count = found, count + 1
            outputs.append(SimpleNamespace(row=row, token_ids=tuple(text[: count + 1]), num_accepted=count))
        size = sum(map(len, trees))
        drafting = 0.00005 * len(self.rows) * bool(max(budgets))
        clock: Any = SimpleNamespace(
            laps={"propose_seconds": drafting + taken, "verify_seconds": self.costs.curve(size)}
        )
        start = perf_counter()
        self.governing.learn(trees, outputs, clock)
        taken += perf_counter() - start
        if is_counted:
            self.seconds[getattr(self.governing, "is_deciding", True)].append(taken)
            self.num_nodes_verified += size

    def run(self, num_steps: int) -> tuple[float, float, float, float]:
        """Seconds of a step that is decided in, of another, the share of the first, and nodes verified per row."""
        for number in range(num_steps):
            self.step(is_counted=number >= num_steps // 4)
        deciding, following = self.seconds[True], self.seconds[False]
        counted = len(deciding) + len(following)
        return (
            median(deciding), median(following) if following else 0.0, len(deciding) / counted,
            self.num_nodes_verified / counted / len(self.rows),
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--milliseconds", type=float, nargs="+", default=[2.0, 8.0, 20.0])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=1200)
    options = parser.parse_args()
    print("| drafts | rows | plain step of one row, ms | us deciding | us following | share deciding | us per step |")
    print("|---|---|---|---|---|---|---|")
    for kind, num_nodes in (("chain", 11), ("tree", 16), ("tree", 60), ("scored", 32)):
        for num_rows in options.batch_sizes:
            for milliseconds in options.milliseconds:
                cell = Cell(kind, num_nodes, num_rows, milliseconds / 1e3)
                deciding, following, share, nodes = cell.run(options.steps)
                mean = share * deciding + (1 - share) * following
                of_plain = mean / cell.costs.curve(num_rows)
                print(
                    f"| {kind} of {num_nodes}, {nodes:.1f} verified | {num_rows} | {milliseconds:g} "
                    f"| {deciding * 1e6:.0f} | {following * 1e6:.0f} | {share:.2f} "
                    f"| {mean * 1e6:.0f} ({of_plain:.2%}) |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
