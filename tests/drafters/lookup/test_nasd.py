"""N-gram storage against plain counting, on literal texts and on random ones."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafting import made
from drafting import started as begun
from foredraft.drafters.lookup.nasd import NasdDrafter
from foredraft.engine.drafter import Features, StepResult
from foredraft.tree import DraftTree


class Ranked(Features):
    """The target's best tokens by place; nothing for places after the last."""

    def __init__(self, rows: list[list[int]]) -> None:
        self._rows = rows

    def top_ids(self, k: int, nodes: Any) -> torch.Tensor:
        return torch.tensor([self._rows[node][:k] for node in nodes if node < len(self._rows)])


def ranked(*rows: list[int]) -> Features:
    return Ranked(list(rows))


NOTHING = ranked()


def started(drafter: NasdDrafter, tokens: list[int], features: Features = NOTHING) -> Any:
    """A row whose text after the first token came in one step, with what the target ranked high in its places."""
    row = begun(drafter, tokens[0])
    if tokens[1:]:
        row.token_ids += tokens[1:]
        drafter.observe([row], [StepResult(DraftTree.root(tokens[0]), (0,), tuple(tokens[1:]), text_features=features)])
    return row


def proposal(tokens: list[int], features: Features = NOTHING, budget: int = 9, **options: Any) -> DraftTree:
    drafter = made("nasd", **options)
    return drafter.propose([started(drafter, tokens, features)], [budget])[0]


def observed(drafter: NasdDrafter, row: Any, tree: DraftTree, emitted: list[int], features: Features = NOTHING) -> None:
    row.token_ids.extend(emitted)
    path = tuple(range(len(emitted)))
    drafter.observe([row], [StepResult(tree, path, tuple(emitted), text_features=features)])


# --- the reference: count everything anew ----------------------------------------------------------


def counted(
    tokens: list[int], runners_up: list[list[int]], context: tuple[int, ...], longest: int
) -> dict[int, tuple[float, int, int]] | None:
    """Token -> (weight, last place, standing there) after the longest known suffix; the largest is drafted."""
    for order in range(longest, 0, -1):
        found: dict[int, tuple[float, int, int]] = {}
        weights: dict[int, float] = defaultdict(float)
        for place in range(order, len(tokens)):
            if order <= len(context) and tuple(tokens[place - order : place]) == context[-order:]:
                ranks = runners_up[place - 1] if place - 1 < len(runners_up) else []
                for rank, token in enumerate(ranks):
                    if token != tokens[place]:
                        weights[token] += 0.25
                        found[token] = (weights[token], place, -rank)
                weights[tokens[place]] += 1.0
                found[tokens[place]] = (weights[tokens[place]], place, 1)
        if found:
            return found
    return None


def naive_chain(tokens: list[int], runners_up: list[list[int]], length: int, longest: int) -> tuple[int, ...]:
    text = list(tokens)
    while len(text) < len(tokens) + length:
        found = counted(tokens, runners_up, tuple(text), longest)
        if found is None:
            break
        text.append(max(found, key=lambda token: found[token]))
    return tuple(text[len(tokens) - 1 :])


texts = st.lists(st.integers(0, 3), min_size=1, max_size=25)
fillers = st.lists(st.permutations([0, 1, 2, 3]).map(lambda ids: ids[:2]), min_size=40, max_size=40)


@given(texts, fillers, st.integers(2, 5), st.integers(1, 6), st.booleans())
def test_chain_equals_plain_counting(
    tokens: list[int], runners_up: list[list[int]], ngram_size: int, length: int, with_fillers: bool
) -> None:
    places = runners_up[: len(tokens) - 1] if with_fillers else []
    features = ranked(*places) if places else NOTHING
    tree = proposal(tokens, features, num_speculative_tokens=length, ngram_size=ngram_size, filler_top_k=2)
    assert tree.is_chain
    assert tree.tokens == naive_chain(tokens, places, length, ngram_size - 1)


@given(texts, fillers, st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=5), st.integers(1, 3))
def test_a_text_that_grew_equals_a_text_that_was_given(
    tokens: list[int], runners_up: list[list[int]], blocks: list[list[int]], branches: int
) -> None:
    """Every place counts once, whether it came with the prompt or in a step, and so do its runners-up."""
    drafter = made("nasd", num_draft_branches=branches)
    places = len(tokens) - 1
    row = started(drafter, tokens, ranked(*runners_up[:places]) if places else NOTHING)
    for emitted in blocks:
        tree = drafter.propose([row], [5])[0]
        places = len(row.token_ids) - 1
        observed(drafter, row, tree, emitted, ranked(*runners_up[places : places + len(emitted)]))
    grown = drafter.propose([row], [5])[0]
    places = len(row.token_ids) - 1
    features = ranked(*runners_up[:places]) if places else NOTHING
    given_at_once = proposal(row.token_ids, features, num_draft_branches=branches)
    assert (grown.tokens, grown.parents, grown.scores) == (
        given_at_once.tokens,
        given_at_once.parents,
        given_at_once.scores,
    )


@given(texts, st.integers(1, 4), st.integers(1, 5))
def test_a_tree_keeps_to_its_limits_and_contains_the_chain(tokens: list[int], branches: int, budget: int) -> None:
    tree = proposal(tokens, budget=budget, num_draft_branches=branches)
    assert tree.depth <= budget
    assert tree.num_draft_tokens <= branches * budget
    assert max(map(len, tree.children)) <= branches
    assert all(tree.scores[node] <= tree.scores[parent] for node, parent in enumerate(tree.parents) if node)
    first = proposal(tokens, budget=1).tokens[1:]
    assert tree.tokens[1 : 1 + len(first)] == first


# --- literal texts ---------------------------------------------------------------------------------


def test_runners_up_fill_unknown_places_but_weigh_less() -> None:
    """Place 1 holds 5, the target ranked 6 and 7 there too: after 1 comes 5 first, then 6, then 7."""
    features = ranked([5, 6, 7], [0, 8, 9])
    tree = proposal([1, 5, 1], features, num_speculative_tokens=1, ngram_size=2, num_draft_branches=3)
    assert tree.tokens == (1, 5, 6, 7)
    assert tree.scores == pytest.approx((1.0, 1 / 2.5, 0.25 / 2.5, 0.25 / 2.5))


def test_features_of_a_cut_step_do_not_spill() -> None:
    """Three nodes were accepted but only two tokens emitted: the third node's ranking has no place."""
    drafter = made("nasd", length=1, ngram_size=2)
    row = started(drafter, [1])
    row.token_ids.extend([2, 3])
    features = ranked([2, 9], [3, 9], [8, 9])
    drafter.observe([row], [StepResult(DraftTree.chain(1, [2, 3]), (0, 1, 2), (2, 3), features)])
    assert drafter.propose([row], [1])[0].tokens == (3,)


def test_tree_takes_the_likeliest_paths() -> None:
    """After 1: twice 2, once 3; after 2 always 1. Shares 2/4, 1/4 and 2/3: path 2 1 (1/3) precedes 3 (1/4)."""
    tokens = [1, 3, 1, 2, 1, 2, 1]
    tree = proposal(tokens, num_speculative_tokens=2, ngram_size=2, num_draft_branches=2)
    assert (tree.tokens, tree.parents) == ((1, 2, 1, 3, 1), (-1, 0, 1, 0, 3))
    assert tree.scores == pytest.approx((1.0, 1 / 2, 1 / 3, 1 / 4, 1 / 8))
    assert tree.source == "nasd"
