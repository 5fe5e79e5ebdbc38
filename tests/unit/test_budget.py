"""A budget is its depth where a number is wanted, and limits nodes and shape besides."""

from __future__ import annotations

import copy
import pickle
import sys

import pytest

from foretoken.config.sampling import SamplingParams
from foretoken.drafters.lm.draft_model import DraftModelDrafter
from foretoken.drafters.lookup.ngram import NGramDrafter
from foretoken.drafters.lookup.suffix import SuffixDrafter
from foretoken.engine.drafter import Budget, Drafter
from foretoken.engine.engine import Engine
from foretoken.model.lm import CausalLM
from foretoken.testing import toy_model
from foretoken.tree import DraftTree

TREE = DraftTree((9, 1, 2, 3, 4), (-1, 0, 0, 1, 2))


def test_a_number_limits_the_depth_alone() -> None:
    assert Budget.of(3) == Budget(3) == 3
    assert (Budget.of(3).depth, Budget.of(3).nodes, Budget.of(3).chains_only) == (3, sys.maxsize, False)
    budget = Budget(2, 5, chains_only=True)
    assert Budget.of(budget) is budget
    assert [7, 8, 9][:budget] == [7, 8]
    assert repr(budget) == "Budget(depth=2, nodes=5, chains_only=True, least=0.0)"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda budget: pickle.loads(pickle.dumps(budget))])
def test_a_copy_keeps_all_of_it(copied) -> None:
    assert repr(copied(Budget(2, 5, chains_only=True, least=0.5))) == repr(Budget(2, 5, True, 0.5))


def test_a_governor_takes_depth_away_and_says_what_is_not_worth_drafting() -> None:
    assert repr(Budget(4, 5, chains_only=True).within(2, 0.25)) == repr(Budget(2, 5, True, 0.25))
    assert Budget(4).within(9, 0.0).depth == 4


def test_a_draft_is_cut_to_it() -> None:
    assert Budget(2).cut(TREE) is TREE
    assert Budget(1).cut(TREE).tokens == (9, 1, 2)
    assert Budget(2, 4).cut(TREE).tokens == (9, 1, 2, 3)
    assert Budget(2, 0).cut(TREE).tokens == Budget(0).cut(TREE).tokens == (9,)
    assert Budget(2, chains_only=True).cut(TREE).tokens == (9, 1, 3)
    assert Budget(9, 2, chains_only=True).cut(TREE).tokens == (9, 1)


TEXT = [1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 5, 9, 1, 2]


def drafters() -> dict[str, Drafter]:
    draft = CausalLM(toy_model(16, seed=1), execution="eager", probe=False)
    return {
        "ngram": NGramDrafter(4, num_candidates=3),
        "suffix": SuffixDrafter(4, min_token_prob=0.0),
        "draft_model": DraftModelDrafter(draft, target_vocab_size=16, num_speculative_tokens=3, num_branches=3),
    }


@pytest.mark.parametrize("name", drafters())
def test_drafters_draft_no_more_than_is_allowed(name: str) -> None:
    """Without waste: chains where chains are wanted, and as deep as before."""

    def draft(budget: Budget) -> DraftTree:
        drafter = drafters()[name]
        engine = Engine(CausalLM(toy_model(16), execution="eager", probe=False), drafter)
        (row,) = engine.add_request(TEXT, SamplingParams(max_tokens=2, temperature=0.0))
        engine.step()
        (tree,) = drafter.propose([row], [budget])
        return tree

    widest = draft(Budget(3))
    assert not widest.is_chain
    assert len(draft(Budget(3, 4))) == 4 < len(widest)
    chain = draft(Budget(3, chains_only=True))
    assert chain.is_chain
    assert chain.tokens == widest.main_chain().tokens
