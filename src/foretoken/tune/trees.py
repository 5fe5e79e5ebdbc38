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
from foretoken.engine.costs import Forward, filled_cache, forward_times, seconds_of
from foretoken.engine.drafter import Budget, Drafter
from foretoken.engine.engine import Engine
from foretoken.engine.sequence import Sequence
from foretoken.model.lm import CausalLM
from foretoken.tune.hits import Hits

CONTEXT = 256
"""Tokens before the measured forwards."""


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


@dataclass(frozen=True)
class CostModel:
    """Seconds of a step.

    Args:
      verify: of the target over n nodes, by n.
      draft: of proposing a tree of n nodes, by n.
    """

    verify: dict[int, float]
    draft: dict[int, float]

    def cost(self, num_nodes: int) -> float:
        """Of a step with so many nodes, by a plain forward; between measured sizes in proportion."""
        return (_between(self.verify, num_nodes) + _between(self.draft, num_nodes)) / self.verify[1]


def _between(seconds: dict[int, float], size: int) -> float:
    below = max((known for known in seconds if known <= size), default=min(seconds))
    above = min((known for known in seconds if known >= size), default=max(seconds))
    share = (size - below) / (above - below) if above > below else 0.0
    return seconds[below] + share * (seconds[above] - seconds[below])


def sizes_to_measure(most: int) -> list[int]:
    """Nodes at which forwards are timed: all small numbers, then steps of a quarter."""
    sizes = [size for size in (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128) if size < most]
    return [*sizes, most]


def measured_costs(target: CausalLM, drafter: Any, tree: RankTree, prompt: Seq[int], repeats: int = 9) -> CostModel:
    """Time verifications and proposals of every size of a tree, after 256 tokens of context.

    The shortest of several timings counts, and no size counts for more than a larger one: what disturbs the machine
    only ever adds.

    Args:
      drafter: a `RankedDrafter` that is not in use.
      tree: the largest one.
      prompt: of the row for which trees are proposed.
    """
    sizes = sizes_to_measure(len(tree))
    cache, _ = filled_cache(target, CONTEXT, max(sizes))
    times = forward_times([Forward(target, cache, size) for size in sizes], repeats)
    verify = dict(zip(sizes, map(min, times), strict=True))
    drafter.growth.use(tree)
    engine = Engine(target, drafter, EngineConfig(max_num_seqs=1))
    engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=tree.depth + 4, ignore_eos=True))
    while not engine.decoding_rows:
        engine.step()
    engine.step()  # by now every row has a state to draft from
    rows = engine.decoding_rows
    propose = _Propose(drafter, rows, tree.depth)
    draft = {}
    with torch.inference_mode():
        for size in sizes:
            propose(size)
            draft[size] = min(seconds_of(propose, target.device, size) for _ in range(repeats))
    engine.abort(rows[0].request_id)
    return CostModel(_rising(verify), _rising(draft))


def _rising(seconds: dict[int, float]) -> dict[int, float]:
    """By size, the least that it or a larger one has taken."""
    return {size: min(value for other, value in seconds.items() if other >= size) for size in seconds}


@dataclass(frozen=True)
class _Propose:
    drafter: Drafter
    rows: list[Sequence]
    depth: int

    def __call__(self, num_nodes: int) -> None:
        self.drafter.propose(self.rows, [Budget(self.depth, num_nodes)] * len(self.rows))


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


def search(hits: Hits, max_nodes: int, costs_of: Callable[[RankTree], CostModel], num_nodes: int | None) -> TreeSearch:
    """Grow trees from the accuracies and choose the size that brings the most tokens per second.

    Args:
      max_nodes: of the largest tree, root included.
      costs_of: times steps with a tree.
      num_nodes: take this size, whatever it costs.
    """
    tree = RankTree.grown(hits.accuracies, num_nodes or max_nodes)
    costs = costs_of(tree)
    sizes = tuple(
        Sized(size, hits.tokens_per_step(tree.first(size)), costs.cost(size)) for size in range(2, len(tree) + 1)
    )
    best = sizes[-1] if num_nodes else max(sizes, key=lambda one: (one.speedup, -one.num_nodes))
    return TreeSearch(hits, tree, sizes, best)
