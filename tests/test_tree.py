"""DraftTree: what it refuses, and what it derives, on literal trees and on all small random ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foredraft.errors import TreeError
from foredraft.tree import DraftTree

# 1 -> 5 -> 6
#        -> 7 -> 8
#   -> 9
TREE = DraftTree((1, 5, 9, 6, 7, 8), (-1, 0, 0, 1, 1, 4), source="test")


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    """Any tree of at most 12 nodes over 5 tokens, siblings made distinct by dropping the later ones."""
    tokens, parents = [draw(st.integers(0, 4))], [-1]
    for _ in range(draw(st.integers(0, 11))):
        parent, token = draw(st.integers(0, len(tokens) - 1)), draw(st.integers(0, 4))
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
    return DraftTree(tuple(tokens), tuple(parents))


# --- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ((), (), "at least one"),
        ((1, 2), (-1,), "2 tokens and 1 parents"),
        ((1,), (0,), "must be -1"),
        ((1, 2), (-1, -1), "before their children"),
        ((1, 2), (-1, 1), "before their children"),
        ((1, 2, 3), (-1, 2, 0), "before their children"),
        ((1, 2, 2), (-1, 0, 0), "siblings share a token"),
    ],
)
def test_malformed_trees_are_refused(tokens: tuple[int, ...], parents: tuple[int, ...], message: str) -> None:
    with pytest.raises(TreeError, match=message):
        DraftTree(tokens, parents)


def test_scores_and_probs_have_to_fit() -> None:
    with pytest.raises(TreeError, match="1 scores for 2 nodes"):
        DraftTree((1, 2), (-1, 0), scores=(1.0,))
    with pytest.raises(TreeError, match="1 rows of draft probabilities, but node 1 has children"):
        DraftTree((1, 2, 3), (-1, 0, 1), probs=torch.ones(1, 4) / 4)
    DraftTree((1, 2, 3), (-1, 0, 1), probs=torch.ones(2, 4) / 4)


# --- literal trees -------------------------------------------------------------------------------------------------


def test_from_paths_keeps_the_first_nodes_under_a_limit() -> None:
    """The second path is cut after one new node; the third still finds its nodes, and the fourth no room."""
    tree = DraftTree.from_paths(1, [[5, 6], [5, 7, 8], [5, 7], [9]], max_nodes=4, source="ngram")
    assert (tree.tokens, tree.parents, tree.source) == ((1, 5, 6, 7), (-1, 0, 1, 1), "ngram")


def test_cut_renumbers_and_carries_what_belongs_to_the_nodes() -> None:
    """Below the root 1: 5 -> (6, 7) and, drawn last, 9. Cut to depth 1 the nodes 0, 1, 4 become 0, 1, 2."""
    probs = torch.arange(10.0).reshape(5, 2)
    tree = DraftTree((1, 5, 6, 7, 9), (-1, 0, 1, 1, 0), probs=probs, scores=(1.0, 0.9, 0.8, 0.7, 0.6), source="s")
    cut = tree.cut(1)
    assert (cut.tokens, cut.parents, cut.source) == ((1, 5, 9), (-1, 0, 0), "s")
    assert cut.scores == (1.0, 0.9, 0.6)
    assert cut.probs.tolist() == [[0.0, 1.0], [2.0, 3.0], [8.0, 9.0]]


def test_cut_keeps_the_rows_of_a_chain_with_fewer_distributions_than_nodes() -> None:
    chain = DraftTree.chain(1, [2, 3, 4], probs=torch.eye(3))
    cut = chain.cut(2)
    assert cut.tokens == (1, 2, 3)
    assert cut.probs[:2].tolist() == torch.eye(3)[:2].tolist()


def test_main_chain_follows_first_children() -> None:
    assert TREE.main_chain().tokens == (1, 5, 6)
    assert DraftTree.root(3).main_chain().tokens == (3,)


# --- all trees -----------------------------------------------------------------------------------------------------


@given(trees())
def test_mask_is_the_path_of_every_node(tree: DraftTree) -> None:
    mask = np.zeros((len(tree), len(tree)), dtype=bool)
    for node in range(len(tree)):
        mask[node, list(tree.path(node))] = True
    assert (tree.ancestor_mask == mask).all()
    assert tree.depths == tuple(mask.sum(1) - 1)


@given(trees())
def test_children_parents_and_lookup_agree(tree: DraftTree) -> None:
    for node, children in enumerate(tree.children):
        assert list(children) == [i for i, parent in enumerate(tree.parents) if parent == node]
        for token in range(5):
            carrying = [child for child in children if tree.tokens[child] == token]
            assert tree.child(node, token) == (carrying[0] if carrying else None)
    assert tree.leaves == tuple(i for i in range(len(tree)) if i not in tree.parents)


@given(trees())
def test_a_tree_is_the_merge_of_its_paths(tree: DraftTree) -> None:
    merged = DraftTree.from_paths(tree.tokens[0], [tree.path_tokens(node) for node in range(len(tree))])
    assert (merged.tokens, merged.parents) == (tree.tokens, tree.parents)


@given(trees(), st.integers(0, 6))
def test_cut_keeps_exactly_the_shallow_paths(tree: DraftTree, max_depth: int) -> None:
    cut = tree.cut(max_depth)
    kept = {tree.path_tokens(node) for node in range(len(tree)) if tree.depths[node] <= max_depth}
    assert {cut.path_tokens(node) for node in range(len(cut))} == kept
    assert len(cut) == len(kept)


@given(st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=6), st.integers(1, 12))
def test_from_paths_under_a_limit_is_a_part_of_the_unlimited_tree(paths: list[list[int]], max_nodes: int) -> None:
    whole = DraftTree.from_paths(9, paths)
    part = DraftTree.from_paths(9, paths, max_nodes=max_nodes)
    assert len(part) == min(max_nodes, len(whole))
    assert {part.path_tokens(i) for i in range(len(part))} <= {whole.path_tokens(i) for i in range(len(whole))}


@given(st.lists(st.integers(0, 4), max_size=8))
def test_a_chain_is_the_tree_of_one_path(draft: list[int]) -> None:
    chain, tree = DraftTree.chain(9, draft), DraftTree.from_paths(9, [draft])
    assert (chain.tokens, chain.parents) == (tree.tokens, tree.parents)
    assert tree.is_chain
    assert (chain.ancestor_mask == np.tri(len(draft) + 1, dtype=bool)).all()
