"""Static trees: published, cartesian and grown ones; what a budget leaves of them; what is refused."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from foredraft.errors import CheckpointError, ConfigError, ForedraftError
from foredraft.methods.rank_tree import PUBLISHED_TREES, RankTree, path_value
from foredraft.tree import DraftSize

ACCURACIES = [[0.5, 0.2, 0.1, 0.05], [0.4, 0.15, 0.1, 0.05], [0.3, 0.1, 0.05, 0.01]]


def test_published_trees_have_the_published_numbers_of_nodes() -> None:
    """Nodes per depth and leaves, as counted in the authors' file by others."""
    counts = {
        "mc_sim_7b_63": ((10, 28, 23, 2), 42),
        "vicuna_7b_stage1": ((10, 32, 20, 1), 44),
        "vicuna_7b_stage2": ((10, 23, 23, 7), 42),
        "vicuna_13b_stage1": ((10, 29, 23, 1), 44),
        "vicuna_13b_stage2": ((10, 19, 25, 9), 42),
        "vicuna_33b_stage1": ((10, 34, 19), 46),
        "vicuna_33b_stage2": ((10, 24, 24, 5), 43),
        "zephyr_stage2": ((10, 27, 23, 3), 44),
    }
    for name, (per_depth, num_leaves) in counts.items():
        tree = RankTree.published(name)
        depths = [len(path) for path in tree.paths]
        assert tuple(depths.count(depth) for depth in range(1, tree.depth + 1)) == per_depth, name
        parents = {path[:-1] for path in tree.paths}
        assert sum(path not in parents for path in tree.paths) == num_leaves, name
    assert {len(RankTree.published(name)) for name in PUBLISHED_TREES if name != "eagle"} == {64}
    eagle = [len(path) for path in RankTree.published("eagle").paths]
    assert [eagle.count(depth) for depth in range(1, 6)] == [4, 8, 8, 3, 2]


@pytest.mark.parametrize("num_nodes", range(2, 64, 7))
def test_every_beginning_of_a_published_tree_is_a_tree(num_nodes: int) -> None:
    assert len(RankTree.published("mc_sim_7b_63").first(num_nodes)) == num_nodes


def test_cartesian_trees_have_all_combinations() -> None:
    tree = RankTree.cartesian((3, 2, 2))
    assert set(tree.paths) == {path for d in (1, 2, 3) for path in product(*map(range, (3, 2, 2)[:d]))}
    assert tree.paths[0] == (0,)
    assert RankTree.parse("3x2x2") == tree


@pytest.mark.parametrize("num_nodes", [2, 3, 8, 16, 33, 60])
def test_grown_trees_hold_the_most_valuable_paths(num_nodes: int) -> None:
    """Where accuracies fall with the rank, the grown tree is the top of all products."""
    everything = [path for d in (1, 2, 3) for path in product(range(4), repeat=d)]
    best = sorted((path_value(ACCURACIES, path) for path in everything), reverse=True)[: num_nodes - 1]
    tree = RankTree.grown(ACCURACIES, num_nodes)
    assert len(tree) == num_nodes
    assert [path_value(ACCURACIES, path) for path in tree.paths] == pytest.approx(best)
    assert tree.value(ACCURACIES) == pytest.approx(1 + math.fsum(best))


def test_grown_trees_stay_left_packed_where_accuracies_rise_again() -> None:
    accuracies = [[0.1, 0.0, 0.6, 0.2], [0.0, 0.5, 0.0]]
    for num_nodes in range(2, 17):
        tree = RankTree.grown(accuracies, num_nodes)  # its constructor checks
        assert len(tree) == num_nodes
    assert len(RankTree.grown(accuracies, 100)) == 1 + 4 + 4 * 3


def test_equal_values_make_the_same_tree_every_time() -> None:
    tree = RankTree.grown([[0.5, 0.5], [0.5, 0.5]], 7)
    assert tree.paths == ((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1))


def test_the_number_of_siblings_is_limited() -> None:
    assert max(path[-1] for path in RankTree.grown([[0.05] * 20], 15).paths) == 9


@pytest.mark.parametrize("depth", [0, 1, 2, 4, 9])
@pytest.mark.parametrize("nodes", [1, 2, 5, 17, 64, 999])
@pytest.mark.parametrize("chains_only", [False, True])
def test_a_tree_obeys_its_budget_to_the_node(depth: int, nodes: int, chains_only: bool) -> None:
    tree = RankTree.published("mc_sim_7b_63")
    shape = tree.within(DraftSize(depth, nodes, chains_only))
    allowed = [path for path in tree.paths if len(path) <= depth and (not chains_only or not any(path))]
    assert len(shape.children) == 1 + min(nodes - 1, len(allowed))
    assert shape.depth <= depth
    if chains_only:
        assert all(shape.widest(level) == 1 for level in range(shape.depth))
    below = [child for children in shape.children for child in children]
    assert below == list(range(1, len(shape.children)))
    assert all(child > node for node, children in enumerate(shape.children) for child in children)


def test_what_is_left_out_first_is_worth_least() -> None:
    tree = RankTree.of([[0], [0, 0], [1], [0, 0, 0]])
    assert tree.within(DraftSize(3, 4)).children == (range(1, 3), range(3, 4), range(4, 4), range(4, 4))
    assert tree.within(DraftSize(3, 3)).children == (range(1, 2), range(2, 3), range(3, 3))
    assert RankTree.of([[1], [0, 0], [0]]).paths == ((0,), (1,), (0, 0))


def test_trees_of_all_spellings(tmp_path: Path) -> None:
    tree = RankTree.of([[0], [0, 0], [1]])
    file = tmp_path / "tree.json"
    tree.save(file, expected_tokens_per_step=1.5)
    assert json.loads(file.read_text())["expected_tokens_per_step"] == 1.5
    for value in ([[0], [0, 0], [1]], "[(0,), (0, 0), (1,)]", str(file), f"@{file}", tree):
        assert RankTree.parse(value).paths == tree.paths
    assert RankTree.parse("mc_sim_7b_63").paths == RankTree.published("mc_sim_7b_63").paths
    assert RankTree.parse("3").paths == ((0,), (1,), (2,))


BAD: list[tuple[Any, str]] = [
    ([], "0 nodes"),
    ([[0, 0]], r"\[0, 0\] without \[0\], its parent"),
    ([[0], [2]], r"\[2\] without \[1\], the better sibling"),
    ([[0], [0]], "twice"),
    ([[-1]], "0 or more"),
    ([[0.5]], "0 or more"),
    ([[]], "one or more"),
    ([[True]], "0 or more"),
    (7, "list of paths"),
    ("[[0], [0", "is not a list of paths"),
    ("0x2", "widths of 1 or more"),
    ("99x99", "widths of 1 or more"),
    ("no_such_tree", "there is no tree 'no_such_tree'"),
]


@pytest.mark.parametrize(("value", "message"), BAD)
def test_impossible_trees_are_refused(value: Any, message: str) -> None:
    with pytest.raises(ForedraftError, match=message):
        RankTree.parse(value)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    file.write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        RankTree.parse(str(file))
    file.write_text('{"nodes": 3}')
    with pytest.raises(ConfigError, match="list of paths"):
        RankTree.parse(str(file))


@pytest.mark.parametrize("accuracies", [[], [[]], [[1.5]], [[float("nan")]]])
def test_impossible_accuracies_are_refused(accuracies: list[list[float]]) -> None:
    with pytest.raises(ConfigError):
        RankTree.grown(accuracies, 4)
