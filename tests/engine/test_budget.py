"""A budget is its depth where a number is wanted, and limits nodes and shape; what is cut is counted once, by cause."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest

from drafting import made
from foredraft.config.engine import EngineConfig
from foredraft.config.sampling import SamplingParams
from foredraft.drafters.lm.draft_model import DraftModelDrafter
from foredraft.engine.cost_model import CostCurve, CostModel
from foredraft.engine.drafter import ContextDrafter, Drafter
from foredraft.engine.engine import Engine
from foredraft.engine.governor import Governor
from foredraft.engine.memory import bytes_per_token
from foredraft.engine.row import Row
from foredraft.engine.stats import NOTHING_FOUND, RowStats, StepClock, StepSeconds
from foredraft.model.lm import CausalLM
from foredraft.testing import toy_model
from foredraft.tree import DraftPlan, DraftSize, DraftTree

TREE = DraftTree((9, 1, 2, 3, 4), (-1, 0, 0, 1, 2))


def test_a_number_limits_the_depth_alone() -> None:
    assert DraftSize.of(3) == DraftSize(3) == 3
    assert (DraftSize.of(3).depth, DraftSize.of(3).nodes, DraftSize.of(3).chains_only) == (3, sys.maxsize, False)
    budget = DraftSize(2, 5, chains_only=True)
    assert DraftSize.of(budget) is budget
    assert [7, 8, 9][:budget] == [7, 8]
    assert repr(budget) == "DraftSize(depth=2, nodes=5, chains_only=True, least=0.0)"


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


class Reluctant(Silent):
    """A length policy that wants no draft."""

    def propose_row(self, row: Row, budget: DraftSize) -> DraftTree:
        return DraftTree.root(row.pending, self.name).planned(DraftPlan(0))


class Faulty(Silent):
    def propose_row(self, row: Row, budget: DraftSize) -> DraftTree:
        raise RuntimeError("lost")


@pytest.mark.parametrize(
    ("drafter", "steps"),
    [
        (Silent(), {NOTHING_FOUND: 11, "budget": 1}),
        (Reluctant(), {"policy": 11, "budget": 1}),
        (Faulty(), {"fault": 12}),
    ],
)
def test_a_step_without_a_draft_says_why(drafter: Drafter, steps: dict[str, int]) -> None:
    stats = check_sum(decoded(drafter, EngineConfig(contains_faults=True)), 0)
    assert stats.num_undrafted_steps == steps


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
