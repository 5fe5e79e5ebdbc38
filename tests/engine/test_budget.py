"""A budget is its depth where a number is wanted, and limits nodes and shape; what is cut is counted once, by cause."""

from __future__ import annotations

import copy
import pickle
import sys
from collections import Counter
from collections.abc import Sequence

import pytest

from drafting import made
from foredraft.config.engine import EngineConfig
from foredraft.config.sampling import SamplingParams
from foredraft.drafters.lm.draft_model import DraftModelDrafter
from foredraft.engine.budget import CAUSES, NOTHING_FOUND, DraftSize, Limits, describe_cuts
from foredraft.engine.cost_model import CostCurve, CostModel
from foredraft.engine.drafter import ContextDrafter, Drafter
from foredraft.engine.engine import Engine
from foredraft.engine.governor import Governor
from foredraft.engine.memory import bytes_per_token
from foredraft.engine.row import Row
from foredraft.engine.stats import RowStats, StepClock, StepSeconds
from foredraft.model.lm import CausalLM
from foredraft.testing import toy_model
from foredraft.tree import DraftPlan, DraftTree

TREE = DraftTree((9, 1, 2, 3, 4), (-1, 0, 0, 1, 2))


def test_a_number_limits_the_depth_alone() -> None:
    assert DraftSize.of(3) == DraftSize(3) == 3
    assert (DraftSize.of(3).depth, DraftSize.of(3).nodes, DraftSize.of(3).chains_only) == (3, sys.maxsize, False)
    budget = DraftSize(2, 5, chains_only=True)
    assert DraftSize.of(budget) is budget
    assert [7, 8, 9][:budget] == [7, 8]
    assert repr(budget) == "DraftSize(depth=2, nodes=5, chains_only=True, least=0.0)"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda budget: pickle.loads(pickle.dumps(budget))])
def test_a_copy_keeps_all_of_it(copied) -> None:
    assert repr(copied(DraftSize(2, 5, chains_only=True, least=0.5))) == repr(DraftSize(2, 5, True, 0.5))


def test_a_governor_takes_depth_away_and_says_what_is_not_worth_drafting() -> None:
    assert repr(DraftSize(4, 5, chains_only=True).within(2, 0.25)) == repr(DraftSize(2, 5, True, 0.25))
    assert DraftSize(4).within(9, 0.0).depth == 4


def test_a_draft_is_cut_to_it() -> None:
    assert DraftSize(2).cut(TREE) is TREE
    assert DraftSize(1).cut(TREE).tokens == (9, 1, 2)
    assert DraftSize(2, 4).cut(TREE).tokens == (9, 1, 2, 3)
    assert DraftSize(2, 0).cut(TREE).tokens == DraftSize(0).cut(TREE).tokens == (9,)
    assert DraftSize(2, chains_only=True).cut(TREE).tokens == (9, 1, 3)
    assert DraftSize(9, 2, chains_only=True).cut(TREE).tokens == (9, 1)


TEXT = [1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 5, 9, 1, 2]


def drafters() -> dict[str, Drafter]:
    draft = CausalLM(toy_model(16, seed=1), execution="eager", probe=False)
    return {
        "ngram": made("ngram", 4, num_prompt_lookup_candidates=3),
        "suffix": made("suffix", 4, suffix_decoding_min_token_prob=0.0),
        "draft_model": DraftModelDrafter(draft, target_vocab_size=16, num_speculative_tokens=3, num_branches=3),
    }


@pytest.mark.parametrize("name", drafters())
def test_drafters_draft_no_more_than_is_allowed(name: str) -> None:
    """Without waste: chains where chains are wanted, and as deep as before."""

    def draft(budget: DraftSize) -> DraftTree:
        drafter = drafters()[name]
        engine = Engine(CausalLM(toy_model(16), execution="eager", probe=False), drafter)
        (row,) = engine.add_request(TEXT, SamplingParams(max_tokens=2, temperature=0.0))
        engine.step()
        (tree,) = drafter.propose([row], [budget])
        return tree

    widest = draft(DraftSize(3))
    assert not widest.is_chain
    assert len(draft(DraftSize(3, 4))) == 4 < len(widest)
    chain = draft(DraftSize(3, chains_only=True))
    assert chain.is_chain
    assert chain.tokens == widest.main_chain().tokens


# -- what is cut ------------------------------------------------------------------------------------------------------

ROOT = DraftTree.root(9)


def counted(tree: DraftTree, budget: DraftSize, error: str = "") -> RowStats:
    """What is counted of one draft within a budget whose depth is that of the text's."""
    stats = RowStats(drafter_error=error)
    cut = budget.cut(tree)
    stats.count_cuts(Limits(budget, "budget"), budget, tree, cut, is_empty=len(cut) == 1, is_plain=False)
    return stats


class Eager(ContextDrafter):
    """Drafts as much whatever it is allowed: a chain, or two of three tokens."""

    name = "eager"

    def __init__(self, length: int = 6, *, branches: bool = False) -> None:
        self._length = length
        self._branches = branches

    def propose(self, rows: Sequence[Row], budgets: Sequence[DraftSize]) -> list[DraftTree]:
        return [self.propose_row(row, budget) for row, budget in zip(rows, budgets, strict=True)]

    def propose_row(self, row: Row, budget: DraftSize) -> DraftTree:
        paths = [[1, 2, 3], [2, 3, 1]] if self._branches else [[token % 8 for token in range(self._length)]]
        return DraftTree.from_paths(row.pending, paths, source=self.name)


class Silent(ContextDrafter):
    """Finds nothing."""

    name = "silent"

    def propose_row(self, row: Row, budget: DraftSize) -> DraftTree:
        return DraftTree.root(row.pending, self.name)


def decoded(drafter: Drafter, config: EngineConfig, governor: Governor | None = None, num_tokens: int = 12) -> Row:
    engine = Engine(CausalLM(toy_model(), execution="eager"), drafter, config, governor=governor)
    (row,) = engine.add_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True))
    list(engine.run())
    ended = engine.profile.ended
    assert ended.num_cut_tokens == row.stats.num_cut_tokens
    assert ended.num_undrafted_steps == row.stats.num_undrafted_steps
    return row


def check_sum(row: Row, num_per_step: int) -> RowStats:
    """Every token that was drafted is verified or cut, and every step drafts or says why not."""
    stats = row.stats
    assert stats.num_proposed_tokens == num_per_step * stats.num_steps
    assert stats.num_steps == stats.num_spec_steps + stats.num_undrafted_steps.total()
    return stats


def test_the_stage_that_cuts_is_the_one_that_counts() -> None:
    """Eight tokens, of which the promise of bits leaves five; then the governor leaves two of them, or none."""
    draft, stats = DraftTree.chain(9, range(8)), RowStats()
    limits = Limits(DraftSize(5), "bits")
    for left in (2, 0):
        stats.count_cuts(limits, limits.budget, draft, draft.cut(5), is_empty=False, is_plain=False)
        stats.count_unverified(draft.cut(5), draft.cut(left))
    assert (stats.num_cut_tokens, stats.num_undrafted_steps) == ({"bits": 6, "governor": 8}, {"governor": 1})
    stats.count_cuts(limits, limits.budget, ROOT, ROOT, is_empty=True, is_plain=False)
    assert stats.num_undrafted_steps == {"governor": 1, NOTHING_FOUND: 1}
    stats.add(RowStats(num_cut_tokens=Counter(bits=1), num_undrafted_steps=Counter(memory=2)))
    assert stats.num_proposed_tokens == 15
    assert describe_cuts(stats.num_cut_tokens, stats.num_undrafted_steps) == (
        "the limit of memory left 2 steps without a draft, the governor cut 8 drafted tokens and left 1 step without "
        "a draft, the promise of bits cut 7 drafted tokens"
    )


@pytest.mark.parametrize(
    ("tree", "budget", "error", "cause"),
    [
        (ROOT, DraftSize(4), "", NOTHING_FOUND),
        (ROOT, DraftSize(0), "", "budget"),
        (ROOT, DraftSize(4, 1), "", "memory"),
        (ROOT, DraftSize(4), "lost", "fault"),
        (ROOT.planned(DraftPlan(0)), DraftSize(4), "", "policy"),
        (ROOT.planned(DraftPlan(3)), DraftSize(4), "", NOTHING_FOUND),
    ],
)
def test_a_step_without_a_draft_says_why(tree: DraftTree, budget: DraftSize, error: str, cause: str) -> None:
    stats = counted(tree, budget, error)
    assert (stats.num_cut_tokens, stats.num_undrafted_steps) == ({}, {cause: 1})
    assert cause == NOTHING_FOUND or cause in CAUSES


@pytest.mark.parametrize(
    ("budget", "tokens"),
    [
        (DraftSize(2), {}),
        (DraftSize(1), {"budget": 2}),
        (DraftSize(2, 3), {"memory": 2}),
        (DraftSize(1, 9, chains_only=True), {"chains": 2, "budget": 1}),
    ],
)
def test_a_tree_beyond_its_budget_names_what_limits_that(budget: DraftSize, tokens: dict[str, int]) -> None:
    assert counted(TREE, budget).num_cut_tokens == tokens


def test_what_a_governor_did_not_want_is_cut_by_it() -> None:
    """And a row without the drafter is left without a draft by it, unless its grammar or prediction has one."""
    draft, size, stats = DraftTree.chain(9, range(8)), DraftSize(2), RowStats()
    stats.count_cuts(Limits(DraftSize(5), "bits"), size, draft, draft.cut(2), is_empty=False, is_plain=False)
    assert (stats.num_cut_tokens, stats.num_undrafted_steps) == ({"governor": 6}, {})
    for is_empty in (True, False):
        stats.count_cuts(Limits(size, "bits"), size, ROOT, ROOT, is_empty=is_empty, is_plain=True)
    assert stats.num_undrafted_steps == {"governor": 1}


def test_the_end_of_a_text_is_a_cause() -> None:
    stats = check_sum(decoded(Eager(), EngineConfig()), 6)
    assert stats.num_cut_tokens.keys() == {"budget"}
    assert stats.num_undrafted_steps == {"budget": 1}  # the last step has room for its own token alone


def test_rules_that_take_chains_are_a_cause() -> None:
    by_rule = check_sum(decoded(Eager(branches=True), EngineConfig(acceptance="block")), 6)
    assert by_rule.num_cut_tokens["chains"] > 0
    assert by_rule.num_cut_tokens["chains"] % 3 == 0


def test_memory_is_a_cause() -> None:
    """A plan leaves a step of 64 columns behind the longest row."""
    num_bytes = 128 * bytes_per_token(CausalLM(toy_model(), execution="eager"))
    stats = check_sum(decoded(Eager(100), EngineConfig(max_kv_bytes=num_bytes), num_tokens=60), 100)
    assert stats.num_cut_tokens["budget"] > 0
    assert decoded(Eager(100), EngineConfig(), num_tokens=60).stats.num_cut_tokens["memory"] == 0


def test_a_drafter_that_finds_nothing_is_no_cut() -> None:
    stats = check_sum(decoded(Silent(), EngineConfig()), 0)
    assert stats.num_undrafted_steps == {NOTHING_FOUND: 11, "budget": 1}
    assert (
        describe_cuts(stats.num_cut_tokens, stats.num_undrafted_steps)
        == "the end of the text's budget left 1 step without a draft"
    )


def test_the_governor_is_a_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of two nodes that take ten times as long as plain ones: nothing is worth verifying."""
    monkeypatch.setattr(StepClock, "enter", lambda *_: StepSeconds(0.0001, 0.01))
    monkeypatch.setattr(CostModel, "verified", lambda *args, **keys: None)
    dear = CostModel(CostCurve({1: 0.01, 2: 0.1, 64: 6.4}))
    stats = check_sum(decoded(Eager(), EngineConfig(), Governor(dear), num_tokens=40), 6)
    assert (
        stats.num_cut_tokens["governor"] + stats.num_cut_tokens["budget"]
        == stats.num_proposed_tokens - stats.num_draft_tokens
    )
    assert stats.num_undrafted_steps["governor"] > 30


def test_a_fault_is_a_cause() -> None:
    class Faulty(Silent):
        def propose_row(self, row: Row, budget: DraftSize) -> DraftTree:
            raise RuntimeError("lost")

    assert decoded(Faulty(), EngineConfig(contains_faults=True)).stats.num_undrafted_steps == {"fault": 12}
