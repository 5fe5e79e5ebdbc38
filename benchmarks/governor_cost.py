"""What the governor takes of a step: microseconds of processor time, by batch and kind of draft. No model runs.

    python benchmarks/governor_cost.py [--batch-sizes 1 8 64] [--steps 400]

Drafts are chains of ten tokens, of which the first ones are right at random, or trees of 60 nodes in 5 levels.
"""

from __future__ import annotations

import argparse
import random
from time import process_time
from types import SimpleNamespace
from typing import Any

from foretoken.engine.budget import Budget
from foretoken.engine.governor import Governor
from foretoken.engine.step_costs import StepCosts
from foretoken.tree import DraftTree

CURVE = {1: 0.022, 5: 0.024, 16: 0.028, 32: 0.0325, 64: 0.045, 512: 0.3}
WIDE = [(child,) for child in range(8)] + [(0, *[0] * level, child) for level in range(4) for child in range(13)]


def draft(kind: str, pending: int, text: list[int], rng: random.Random, depth: int) -> DraftTree:
    """A draft of which the first tokens are those of the text."""
    right = text[: rng.randrange(4)]
    if kind == "chain":
        tokens = [*right, *(10_000 + i for i in range(10 - len(right)))][:depth]
        return DraftTree.chain(pending, tokens, source=kind)
    paths = [tuple(text[level] if step == 0 else 10_000 + step for level, step in enumerate(path)) for path in WIDE]
    return DraftTree.from_paths(pending, paths, source=kind).cut(depth)


def seconds_per_step(kind: str, num_rows: int, num_steps: int) -> tuple[float, float]:
    """Processor seconds of the governor per step, and the nodes that it let through per row."""
    rng = random.Random(0)
    governor = Governor(StepCosts(CURVE))
    rows: list[Any] = [SimpleNamespace(id=i, is_finished=False) for i in range(num_rows)]
    spent, nodes = 0.0, 0

    def num_nodes(sizes: Any, are_chains: bool) -> int:
        return sum(sizes)

    for step in range(num_steps):
        texts = [[rng.randrange(1000) for _ in range(12)] for _ in rows]
        start = process_time()
        budgets = governor.budgets(rows, [Budget(50)] * num_rows, num_nodes)
        taken = process_time() - start
        trees = [draft(kind, 1, text, rng, budget) for text, budget in zip(texts, budgets, strict=True)]
        start = process_time()
        trees = governor.trimmed(rows, trees, num_nodes, is_padded=False)
        taken += process_time() - start
        outputs = []
        for row, tree, text in zip(rows, trees, texts, strict=True):
            node, count = 0, 0
            while (found := tree.child(node, text[count])) is not None:
                node, count = found, count + 1
            outputs.append(SimpleNamespace(row=row, token_ids=tuple(text[: count + 1]), num_accepted=count))
        size = sum(map(len, trees))
        start = process_time()
        cost = StepCosts(CURVE).curve(size)
        governor.learn(trees, outputs, num_nodes, drafting_seconds=0.0005, other_seconds=cost)
        taken += process_time() - start
        if step >= num_steps // 4:
            spent += taken
            nodes += size
    counted = num_steps - num_steps // 4
    return spent / counted, nodes / counted / num_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    print("| drafts | batch | us per step | us per row | nodes verified per row |\n|---|---|---|---|---|")
    for kind in ("chain", "tree"):
        for size in options.batch_sizes:
            seconds, nodes = seconds_per_step(kind, size, options.steps)
            print(f"| {kind} | {size} | {seconds * 1e6:.0f} | {seconds * 1e6 / size:.0f} | {nodes:.1f} |")


if __name__ == "__main__":
    main()
