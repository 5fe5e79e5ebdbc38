"""The decoding steps that the probe makes, the texts that they stand for, and faults made on purpose."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from foretoken.model.nodes import Nodes
from foretoken.tree import DraftTree

if TYPE_CHECKING:
    from foretoken.model.cache.ragged import KVCache

Text: TypeAlias = tuple[int, ...]
Fault: TypeAlias = Callable[[Nodes, int], Nodes]

PREFIX_LENGTHS = (5, 8)  # ragged on purpose, and both longer than the window below
WINDOW = 4
BUSHY, FLAT, CHAIN, SHORT = (-1, 0, 0, 1, 1, 2, 4), (-1, 0, 0, 2, 2), (-1, 0, 1, 2), (-1, 0, 1)


# -- faults, made on purpose -----------------------------------------------------------------------------------------


def shift_positions(nodes: Nodes, row: int) -> Nodes:
    """Every node of a row one position too far from the prefix."""
    depths = nodes.depths.clone()
    depths[row] += 1
    return dataclasses.replace(nodes, depths=depths)


def hide_parents(nodes: Nodes, row: int) -> Nodes:
    """No node of a row sees the one before it."""
    return _with_ancestors(nodes, row, lambda seen, parent: seen & ~parent)


def show_siblings(nodes: Nodes, row: int) -> Nodes:
    """A node sees every node before it, related or not."""
    return _with_ancestors(nodes, row, lambda seen, parent: torch.ones_like(seen).tril())


def show_everything(nodes: Nodes, row: int) -> Nodes:
    """Every node sees every other, as without a mask."""
    return _with_ancestors(nodes, row, lambda seen, parent: torch.ones_like(seen))


def _with_ancestors(nodes: Nodes, row: int, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Nodes:
    num_rows, width = nodes.tokens.shape
    ancestors = torch.ones(num_rows, width, width, dtype=torch.bool).tril()  # of chains
    ancestors, depths = ancestors if nodes.ancestors is None else nodes.ancestors.clone(), nodes.depths[row]
    is_parent = depths[None, :] == depths[:, None] - 1  # among the ancestors of a node, one has this depth
    ancestors[row] = change(ancestors[row], is_parent)
    return dataclasses.replace(nodes, ancestors=ancestors)


FAULTS: tuple[tuple[str, Fault], ...] = (
    ("positions", shift_positions),
    ("masks", hide_parents),
    ("masks", show_siblings),
)
"""What is wrong, and how."""


# -- steps -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One forward over drafts, and what is committed after it.

    Args:
      trees: one per row, from ``first_row`` on.
      paths: nodes to commit of these rows; nothing where there are fewer paths than rows.
      faults: what is wrong on purpose, by row.
    """

    name: str
    trees: tuple[DraftTree, ...]
    paths: tuple[tuple[int, ...], ...] = ()
    first_row: int = 0
    faults: tuple[tuple[int, Fault], ...] = ()


@dataclass(frozen=True)
class Rehearsal:
    """Ragged rows of text, and the steps that go on from them."""

    prefixes: tuple[Text, ...]
    steps: tuple[Step, ...]

    @classmethod
    def whole(cls, vocab_size: int, seed: int, faults: Sequence[Fault]) -> Rehearsal:
        """Chains of which a part is rejected, a single token, trees of which a branch is kept, and what follows it.

        Args:
          faults: each made in the trees of one more row, which is like the first up to there.
        """
        (first, second), tree = _drawn(vocab_size, seed)
        copies = len(faults)
        chain, token, bushy = tree(CHAIN), tree((-1,)), tree(BUSHY)
        steps = (
            Step("chains", (chain, tree(SHORT), *(chain,) * copies), ((0, 1), (0,), *((0, 1),) * copies)),
            Step("token", (token,), ((0,),), first_row=1),
            Step(
                "trees",
                (bushy, tree(FLAT), *(bushy,) * copies),
                ((0, 1, 4, 6), (0, 2, 4)),
                faults=tuple(enumerate(faults, 2)),
            ),
            Step("branches", (tree((-1, 0)), tree((-1,)))),
        )
        return cls((first, second, *(first,) * copies), steps)

    @classmethod
    def of_trees(cls, vocab_size: int, seed: int, faults: Sequence[Fault]) -> Rehearsal:
        """Trees, and the same trees once more with a fault in each row."""
        prefixes, tree = _drawn(vocab_size, seed)
        trees = (tree(BUSHY), tree(FLAT))
        return cls(prefixes, (Step("trees", trees), Step("faults", trees, faults=tuple(enumerate(faults)))))

    def as_chains(self) -> Rehearsal:
        """The deepest path of every tree as a chain: texts that the trees have, too."""
        step = self.steps[0]
        paths = [max(map(tree.path, tree.leaves), key=len) for tree in step.trees]
        chains = tuple(
            DraftTree.chain(tree.tokens[0], [tree.tokens[node] for node in path[1:]])
            for tree, path in zip(step.trees, paths, strict=True)
        )
        return dataclasses.replace(self, steps=tuple(dataclasses.replace(each, trees=chains) for each in self.steps))

    @property
    def num_forwards(self) -> int:
        return 1 + len(self.steps)

    @property
    def num_tokens(self) -> int:
        """Rows times width, over all forwards."""
        widths = [max(map(len, step.trees)) * len(step.trees) for step in self.steps]
        return len(self.prefixes) * max(map(len, self.prefixes)) + sum(widths)

    def texts(self, step: Step) -> list[list[Text]]:
        """For every row of a step the text up to and including every node."""
        rows = list(self.prefixes)
        for each in self.steps:
            if each is step:
                break
            for row, (tree, path) in enumerate(zip(each.trees, each.paths, strict=False), each.first_row):
                rows[row] = (*rows[row], *(tree.tokens[node] for node in path))
        return [
            [(*rows[row], tree.tokens[0], *tree.path_tokens(node)) for node in range(len(tree))]
            for row, tree in enumerate(step.trees, step.first_row)
        ]

    def run(self, forward: Callable[..., torch.Tensor], cache: KVCache) -> dict[str, torch.Tensor]:
        """Logits (rows, nodes, V) of every step by the forward of an adapter whose cache has a row for each prefix."""
        results = {}
        forward(Nodes.from_chains(self.prefixes), cache, keep=slice(0, 0))
        cache.commit([range(len(prefix)) for prefix in self.prefixes])
        for step in self.steps:
            nodes = Nodes.from_trees(step.trees)
            for row, fault in step.faults:
                nodes = fault(nodes, row)
            results[step.name] = forward(nodes, cache, first_row=step.first_row)
            cache.commit(step.paths, step.first_row)
        return results


def _drawn(vocab_size: int, seed: int) -> tuple[tuple[Text, Text], Callable[[tuple[int, ...]], DraftTree]]:
    """Two prefixes, and a function from the parents of a tree to that tree with tokens of its own."""
    ids = np.random.default_rng(seed).permutation(vocab_size)[:64].tolist()
    first, second = (tuple(ids[(row + i) % len(ids)] for i in range(size)) for row, size in enumerate(PREFIX_LENGTHS))
    place = max(PREFIX_LENGTHS)

    def tree(parents: tuple[int, ...]) -> DraftTree:
        nonlocal place
        tokens = tuple(ids[(place + node) % len(ids)] for node in range(len(parents)))
        place += 3
        return DraftTree(tokens, parents)

    return (first, second), tree
