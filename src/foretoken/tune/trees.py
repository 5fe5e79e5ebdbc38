"""The draft tree of heads: grown from what their candidates get right, sized by what steps cost here."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch

from foretoken.config.engine import EngineConfig
from foretoken.config.sampling import SamplingParams
from foretoken.drafters.parts.rank_tree import RankTree
from foretoken.engine.cost_model import CostCurve
from foretoken.engine.costs import CONTEXT, forward_curve, seconds_of
from foretoken.engine.drafter import Budget
from foretoken.engine.engine import Engine
from foretoken.model.lm import CausalLM
from foretoken.tune.hits import Hits


@dataclass(frozen=True)
class Sized:
    """A size that a tree could have.

    Args:
      num_nodes: root included.
      tokens_per_step: counted, the bonus included.
      cost: seconds of a step by those of a plain forward: verification and drafting.
    """

    num_nodes: int
    tokens_per_step: float
    cost: float

    @property
    def speedup(self) -> float:
        """Of plain decoding, as far as forwards and drafting decide it."""
        return self.tokens_per_step / self.cost


def sizes_to_measure(most: int) -> list[int]:
    """Nodes at which forwards are timed: all small numbers, then steps of a quarter."""
    sizes = [size for size in (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128) if size < most]
    return [*sizes, most]


def measured_costs(
    target: CausalLM, drafter: Any, tree: RankTree, prompt: Seq[int], repeats: int = 9
) -> tuple[CostCurve, CostCurve]:
    """Time verifications and proposals of every size of a tree, after 256 tokens of context.

    The shortest of several timings counts, and no size counts for more than a larger one: what disturbs the machine
    only ever adds.

    Args:
      drafter: one with a `Growth`, that is not in use.
      tree: the largest one.
      prompt: of the row for which trees are proposed.

    Returns: seconds of verifying, and of proposing a tree of n nodes, by n.
    """
    sizes = sizes_to_measure(len(tree))
    verify = forward_curve(target, sizes, CONTEXT, repeats, of=min)
    drafter.growth.use(tree)
    engine = Engine(target, drafter, EngineConfig(max_num_seqs=1))
    engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=tree.depth + 4, ignore_eos=True))
    while not engine.decoding_rows:
        engine.step()
    engine.step()  # by now every row has a state to draft from
    rows = engine.decoding_rows
    draft = {}
    with torch.inference_mode():
        for size in sizes:
            budgets = [Budget(tree.depth, size)] * len(rows)
            times = [seconds_of(drafter.propose, target.device, rows, budgets) for _ in range(repeats + 1)]
            draft[size] = min(times[1:])  # the first one warms up
    engine.abort(rows[0].request_id)
    return verify.rising(), CostCurve(draft).rising()


@dataclass(frozen=True)
class TreeSearch:
    """What a search for a tree has found.

    Args:
      hits: where the target's tokens stood.
      tree: the largest that was looked at; its beginnings are the smaller ones.
      sizes: all that were compared.
      best: the one that is taken.
    """

    hits: Hits
    tree: RankTree
    sizes: tuple[Sized, ...]
    best: Sized

    @property
    def chosen(self) -> RankTree:
        return self.tree.first(self.best.num_nodes)


def search(
    hits: Hits, max_nodes: int, costs_of: Callable[[RankTree], tuple[CostCurve, CostCurve]], num_nodes: int | None
) -> TreeSearch:
    """Grow trees from the accuracies and choose the size that brings the most tokens per second.

    Args:
      max_nodes: of the largest tree, root included.
      costs_of: times steps with a tree; see `measured_costs`.
      num_nodes: take this size, whatever it costs.
    """
    tree = RankTree.grown(hits.accuracies, num_nodes or max_nodes)
    verify, draft = costs_of(tree)
    sizes = tuple(
        Sized(size, hits.tokens_per_step(tree.first(size)), (verify.at(size) + draft.at(size)) / verify.at(1))
        for size in range(2, len(tree) + 1)
    )
    best = sizes[-1] if num_nodes else max(sizes, key=lambda one: (one.speedup, -one.num_nodes))
    return TreeSearch(hits, tree, sizes, best)
