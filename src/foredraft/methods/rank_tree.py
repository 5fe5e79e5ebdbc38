"""Static draft trees as paths of ranks: published ones, cartesian products, and trees grown from accuracies."""

from __future__ import annotations

import math
import os
from ast import literal_eval
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate, pairwise, product, starmap
from pathlib import Path
from typing import Any

from foredraft.errors import CheckpointError, ConfigError
from foredraft.folders import keep_json, parsed_json
from foredraft.tree import DraftSize

PUBLISHED_TREES = {
    "mc_sim_7b_63": (
        "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004 005 "
        "0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070"
    ),
    "vicuna_7b_stage2": (
        "0 00 1 01 000 10 2 02 001 03 3 010 20 4 002 04 11 100 0000 5 003 05 020 30 011 06 6 07 004 40 12 08 7 030 "
        "0001 005 21 006 101 0010 200 50 09 012 8 040 021 13 007 0002 008 110 0100 60 9 013 0003 102 050 31 0020 70 "
        "14"
    ),
    "vicuna_7b_stage1_ablation": (
        "0 00 1 000 01 10 2 02 001 3 03 010 20 002 04 4 0000 100 11 003 020 05 5 30 011 06 6 004 12 0001 40 005 07 08 "
        "030 0010 101 7 200 006 21 012 50 021 09 0002 040 8 13 007 0100 110 60 9 008 009 050 0020 102 013 0003 300 31"
    ),
    "vicuna_7b_stage1": (
        "0 00 1 2 01 10 3 02 4 000 03 5 20 04 6 05 11 001 7 30 06 8 9 010 07 08 40 002 12 09 21 50 100 003 13 020 011 "
        "004 60 14 005 22 030 31 006 70 15 101 200 007 80 0000 41 012 040 90 021 23 16 008 050 32 51"
    ),
    "vicuna_13b_stage2": (
        "0 00 1 000 01 10 2 02 001 010 3 03 20 002 0000 04 100 11 4 003 05 020 5 30 011 06 004 0001 07 005 12 0010 "
        "030 101 40 006 08 200 09 6 7 21 50 012 0002 8 040 0100 021 007 110 13 0020 9 008 050 0003 009 013 102 0011 "
        "300 1000"
    ),
    "vicuna_13b_stage1": (
        "0 00 1 01 2 10 000 02 3 03 4 20 04 001 05 5 11 010 6 06 002 7 30 8 07 08 100 003 40 12 9 09 21 020 004 13 "
        "011 005 50 030 0000 006 60 14 200 012 31 040 101 22 007 15 70 008 80 050 009 021 110 013 41 23 16"
    ),
    "vicuna_33b_stage2": (
        "0 00 1 01 000 10 2 02 001 03 3 010 20 04 4 002 11 100 05 5 0000 003 30 020 06 011 6 004 07 7 12 40 8 030 005 "
        "0001 08 21 09 101 200 006 50 0010 13 012 040 007 021 9 110 0002 60 008 0100 70 013 050 14 009 31 102 22"
    ),
    "vicuna_33b_stage1": (
        "0 1 00 2 01 3 10 4 02 5 03 000 6 04 20 7 11 05 30 8 9 06 07 001 12 40 010 08 09 21 002 50 13 003 100 14 60 "
        "020 31 22 004 70 011 15 41 005 030 90 80 16 006 23 012 32 040 200 17 101 007 51 24 008 021"
    ),
    "zephyr_stage2": (
        "0 00 1 01 2 000 10 02 3 03 4 20 001 04 5 05 010 11 6 002 30 06 7 07 08 003 100 09 020 12 40 8 9 21 011 004 "
        "0000 50 030 13 005 006 60 200 101 012 040 14 31 22 007 70 021 008 013 050 15 009 110 0001 0010 41 23"
    ),
    "eagle": "0 00 000 0000 00000 1 01 10 001 010 100 0001 2 00001 02 20 3 002 020 30 0002 11 011 21 021",
}
"""Sparse trees published by their authors, with nodes in descending order of value.

Provenance: FasterDecoding/Medusa, commit e2a5d20 (2024-04-18), ``medusa/model/medusa_choices.py``, Apache-2.0. The
authors grew each tree from the accuracies of one set of heads (Cai et al. 2024, arXiv:2401.10774): "stage1" heads were
trained alone (Medusa-1), "stage2" heads were trained with their target (Medusa-2). Hydra (zankner/Hydra, commit
3f39fbd) uses ``mc_sim_7b_63`` for all of its heads. These trees have 63 nodes below the root and at most 10 siblings.

"eagle" is the tree of EAGLE: SafeAILab/EAGLE, branch v1, commit 4a9cf3a (2024-06-27), Apache-2.0, where the tree is
also called mc_sim_7b_63. The published tree has 25 nodes below the root and was not tuned. The nodes of this tree are
ordered by typical accuracies.

A node is written as the ranks on its path, one digit each: "021" is the child of rank 1 of the child of rank 2 of the
child of rank 0 of the pending token. Every prefix of a list is a tree. Medusa's trees keep the published order.
"""


Ranks = tuple[int, ...]
"""Ranks on the path from the pending token to a node; 0 is the likeliest successor, and () is the pending token."""

MAX_SIBLINGS = 10
"""Largest number of children of a node in a grown tree, as in the published trees."""

MAX_NODES = 4096
"""Largest number of nodes of a tree, the root not counted."""


@dataclass(frozen=True)
class RankTree:
    """Shape of a static draft tree: the ranks of the successors to try below each node.

    Args:
      paths: nodes below the root in descending order of value. Parents and better siblings come before a node, so that
        the first n paths are a tree for every n.
      name: name of the tree in messages.

    Raises: ConfigError for paths that are not a tree. The message names the offending path and the reason.
    """

    paths: tuple[Ranks, ...]
    name: str = "tree"

    def __post_init__(self) -> None:
        if len(self.paths) > MAX_NODES:
            raise ConfigError(
                f"{self.name} has {len(self.paths)} nodes below its root; the limit is {MAX_NODES}; give a smaller tree"
            )
        seen: set[Ranks] = {()}
        for path in self.paths:
            if path in seen:
                raise ConfigError(f"{self.name} contains the node {list(path)} twice; list each node once")
            missing = self._missing_before(path, seen)
            if missing is not None:
                raise ConfigError(
                    f"{self.name} has the node {list(path)} without {list(missing)}, {_why(path, missing)}; add it"
                )
            seen.add(path)

    @staticmethod
    def _missing_before(path: Ranks, seen: set[Ranks]) -> Ranks | None:
        """Return the parent or the next better sibling of a node if it has not been seen, else None."""
        needed = [path[:-1]] + ([(*path[:-1], path[-1] - 1)] if path[-1] > 0 else [])
        return next((node for node in needed if node not in seen), None)

    # -- construction --------------------------------------------------------------------------------------------------

    @classmethod
    def of(cls, paths: Iterable[Sequence[int]], name: str = "tree") -> RankTree:
        """Make a tree from paths in any order; the order is kept if parents and better siblings come first.

        Raises: ConfigError for anything but a list of paths that form a tree.
        """
        given = [_ranks(path, name) for path in paths]
        if not given:
            raise ConfigError(f"{name} has 0 nodes below its root; it needs 1 to {MAX_NODES}")
        ordered = _in_order(given)
        return cls(tuple(given if ordered is None else ordered), name)

    @classmethod
    def published(cls, name: str) -> RankTree:
        """Return one of `PUBLISHED_TREES`."""
        return cls(tuple(tuple(map(int, path)) for path in PUBLISHED_TREES[name].split()), name)

    @classmethod
    def cartesian(cls, widths: Sequence[int], name: str = "") -> RankTree:
        """Make the tree of all combinations of the best ``widths[d]`` tokens at each depth d, as in the first trees of
        Medusa.

        Widths (3, 2) give 3 + 6 nodes. Paths with the smallest sum of ranks come first.
        """
        name = name or "x".join(map(str, widths))
        if not widths or any(width < 1 for width in widths) or math.prod(widths) > MAX_NODES:
            raise ConfigError(f"{name} is not a cartesian tree; give widths of 1 or more, such as 4x2x1")
        paths = [path for d in range(1, len(widths) + 1) for path in product(*map(range, widths[:d]))]
        return cls(tuple(sorted(paths, key=lambda path: (sum(path) + len(path), len(path), path))), name)

    @classmethod
    def grown(
        cls,
        accuracies: Sequence[Sequence[float]],
        num_nodes: int,
        max_siblings: int = MAX_SIBLINGS,
        name: str = "grown tree",
    ) -> RankTree:
        """Grow the tree of the ``num_nodes - 1`` most valuable paths; a path's value is the product of the accuracies
        along it.

        Source: Medusa (Cai et al. 2024, arXiv:2401.10774), sparse trees. Deviation: a heap replaces the repeated
          searches. A sibling always comes after the better one, whatever its value, so trees stay left-packed. Of two
          nodes of equal value, the shallower node comes first, then the node with the smaller ranks.

        Args:
          accuracies: ``[d][r]``, the probability that the candidate of rank r at depth d + 1 is right, given that its
            ancestors are right.
          num_nodes: number of nodes, root included; the tree is smaller if the accuracies cover fewer nodes.
          max_siblings: largest number of children of a node.
          name: name of the tree in messages.

        Raises: ConfigError for accuracies that are empty or outside 0..1, and for fewer than 2 nodes.
        """
        if num_nodes < 2 or not accuracies or any(not shares for shares in accuracies):
            raise ConfigError(
                f"a tree of {num_nodes} nodes over {len(accuracies)} depths cannot be grown; give 2 or more nodes, and "
                "one or more accuracies for every depth"
            )
        if any(not 0.0 <= share <= 1.0 for shares in accuracies for share in shares):
            raise ConfigError("the accuracies contain a value outside 0..1; measure them again")
        found: list[Ranks] = []
        heap: list[tuple[float, int, Ranks]] = [(-accuracies[0][0], 1, (0,))]
        while heap and len(found) < num_nodes - 1:
            _, depth, path = heappop(heap)
            found.append(path)
            if path[-1] + 1 < min(len(accuracies[depth - 1]), max_siblings):
                sibling = (*path[:-1], path[-1] + 1)
                heappush(heap, (-path_value(accuracies, sibling), depth, sibling))
            if depth < len(accuracies):
                heappush(heap, (-path_value(accuracies, (*path, 0)), depth + 1, (*path, 0)))
        return cls(tuple(found), name)

    @classmethod
    def parse(cls, value: Any) -> RankTree:
        """Parse a user's tree: a published name, widths such as "4x2x1", paths, paths as a string, or a file that
        `save` wrote.

        Raises: ConfigError for an invalid tree; CheckpointError for a file that cannot be read.
        """
        if isinstance(value, RankTree):
            return value
        if not isinstance(value, (str, os.PathLike)):
            return cls.of(_listed(value))
        text = os.fspath(value).strip()
        if text in PUBLISHED_TREES:
            return cls.published(text)
        if text.replace("x", "").isdigit() and text[0] != "x" and text[-1] != "x":
            return cls.cartesian([int(part) for part in text.split("x") if part])
        if not text.startswith(("[", "(")):
            return cls.load(text.removeprefix("@"))
        try:
            paths = literal_eval(text)
        except (ValueError, SyntaxError) as error:
            raise ConfigError(f"the tree {text[:60]!r} is not a list of paths such as [[0], [0, 0], [1]]") from error
        return cls.of(_listed(paths))

    # -- files ---------------------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> RankTree:
        """Load a tree that `save` or ``foredraft tune tree`` wrote.

        Raises: CheckpointError for a file that cannot be read; ConfigError for an invalid tree.
        """
        path = Path(file).expanduser()
        try:
            content = parsed_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            known = ", ".join(PUBLISHED_TREES)
            raise CheckpointError(
                f"there is no tree {os.fspath(file)!r} ({error.strerror}); give a file of foredraft tune tree, widths "
                f"such as 4x2x1, a list of paths, or one of {known}"
            ) from None
        except ValueError:
            raise CheckpointError(f"{path} is not JSON; write it again with foredraft tune tree") from None
        paths = content.get("paths") if isinstance(content, dict) else content
        return cls.of(_listed(paths), path.name)

    def save(self, file: str | os.PathLike[str], **details: Any) -> None:
        """Write the tree to a JSON file, together with details about its origin."""
        content = {"paths": [list(path) for path in self.paths], **details}
        keep_json(Path(file), content)

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of nodes, root included."""
        return len(self.paths) + 1

    @property
    def depth(self) -> int:
        """Number of levels below the root."""
        return max(map(len, self.paths), default=0)

    @property
    def is_chain(self) -> bool:
        return all(rank == 0 for path in self.paths for rank in path)

    def value(self, accuracies: Sequence[Sequence[float]]) -> float:
        """Return the expected tokens per step, bonus included, if depths are right or wrong independently."""
        return 1.0 + sum(path_value(accuracies, path) for path in self.paths if len(path) <= len(accuracies))

    def first(self, num_nodes: int) -> RankTree:
        """Return the tree of the most valuable nodes; ``num_nodes`` includes the root."""
        return RankTree(self.paths[: num_nodes - 1], self.name)

    def within(self, budget: DraftSize) -> RankTree:
        """Return the part of the tree within a draft size: the most valuable nodes that are not too deep."""
        depth = budget.depth
        paths = [path for path in self.paths if len(path) <= depth and not (budget.chains_only and any(path))]
        return RankTree(tuple(paths[: budget.max_nodes() - 1]), self.name)

    # -- breadth-first -------------------------------------------------------------------------------------------------

    @cached_property
    def children(self) -> tuple[range, ...]:
        """Children of every node, best rank first, with nodes numbered level by level.

        (range(1, 3), range(3, 4), range(4, 4), range(4, 4)) is a root with two children, the better of which has one
        child.
        """
        ordered = [(), *sorted(self.paths, key=lambda path: (len(path), path))]
        widths = Counter(path[:-1] for path in ordered if path)
        return tuple(starmap(range, pairwise(accumulate((widths[path] for path in ordered), initial=1))))

    @cached_property
    def levels(self) -> tuple[range, ...]:
        """Nodes of every depth, starting with the level of the root."""
        levels, below = list[range](), range(1)
        while below:
            levels.append(below)
            below = range(self.children[below.start].start, self.children[below.stop - 1].stop)
        return tuple(levels)

    def widest(self, depth: int) -> int:
        """Return the largest number of children of any node at this depth."""
        return max(len(self.children[node]) for node in self.levels[depth])


def path_value(accuracies: Sequence[Sequence[float]], path: Ranks) -> float:
    """Return the product of the accuracies along a path, or 0 if a rank was not measured."""
    shares = [accuracies[depth][rank] if rank < len(accuracies[depth]) else 0.0 for depth, rank in enumerate(path)]
    return math.prod(shares)


def _why(path: Ranks, missing: Ranks) -> str:
    return "its parent" if len(missing) < len(path) else "the better sibling, which would be tried first"


def _in_order(paths: list[Ranks]) -> list[Ranks] | None:
    """Return the paths sorted by depth and rank, or None if parents and better siblings already come first."""
    seen: set[Ranks] = {()}
    for path in paths:
        if RankTree._missing_before(path, seen) is not None:
            return sorted(paths, key=lambda path: (len(path), path))
        seen.add(path)
    return None


def _listed(value: Any) -> list[Any]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ConfigError(f"a tree is a list of paths such as [[0], [0, 0], [1]]; got {value!r}")
    return list(value)


def _ranks(path: Any, name: str) -> Ranks:
    ranks = tuple(_listed(path))
    if not ranks or any(isinstance(rank, bool) or not isinstance(rank, int) or rank < 0 for rank in ranks):
        raise ConfigError(f"{name} has the path {list(ranks)}; a path must be one or more ranks, each 0 or more")
    return ranks
