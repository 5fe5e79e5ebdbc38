"""Method auto: what it chooses from, what it asks, and what it makes of the answers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from foredraft.config.sampling import SamplingParams
from foredraft.config.speculative import SpeculativeConfig
from foredraft.drafters import make_drafter
from foredraft.drafters.compose.auto import AutoDrafter
from foredraft.drafters.compose.first import FirstDrafter
from foredraft.drafters.compose.union import UnionDrafter
from foredraft.drafters.context import DrafterContext
from foredraft.drafters.lookup.suffix import SuffixDrafter
from foredraft.engine.cost_model import CostModel
from foredraft.engine.drafter import ContextDrafter, DrafterFacts, DraftSize, StepResult
from foredraft.engine.engine import Engine
from foredraft.engine.governor import Governor
from foredraft.engine.method_bandit import MethodBandit
from foredraft.errors import ConfigError
from foredraft.model.lm import CausalLM
from foredraft.testing import toy_model
from foredraft.tree import DraftTree


class Says(ContextDrafter):
    """Proposes the same tokens always."""

    def __init__(self, name: str, *tokens: int) -> None:
        self.facts = DrafterFacts(name)
        self.tokens = tokens
        self.num_asked = 0

    def propose_row(self, row: Any, budget: DraftSize) -> DraftTree:
        self.num_asked += 1
        return DraftTree.chain(row.token_ids[-1], self.tokens[:budget], source=self.name)


def drafter(*parts: Says, free: int) -> AutoDrafter:
    for place, part in enumerate(parts):
        part.facts = replace(part.facts, is_free=place < free)
    return AutoDrafter(parts)


def size(depth: int, arm: int | None = None) -> DraftSize:
    """A budget, and in which way it is to be drafted."""
    found = DraftSize(depth)
    found.arm = arm
    return found


def test_a_free_arm_and_one_for_every_other_part() -> None:
    assert drafter(Says("a", 1), Says("b", 2), Says("c", 3), Says("d", 4), free=2).facts.arms == (
        "a+b",
        "a+b+c",
        "a+b+d",
    )
    assert drafter(Says("a", 1), Says("b", 2), free=2).facts.arms == ()
    assert drafter(Says("c", 1), Says("d", 2), free=0).facts.arms == ("c", "d")


def test_only_the_parts_of_the_arm_are_asked_and_their_drafts_merged() -> None:
    parts = Says("a", 1, 2), Says("b", 1, 3), Says("c", 4)
    one = drafter(*parts, free=2)
    row = SimpleNamespace(id=0, token_ids=[9], state={})
    (tree,) = one.propose([row], [DraftSize(5)])
    assert parts[2].num_asked == 0
    assert {tree.path_tokens(node) for node in range(len(tree))} == {(), (1,), (1, 2), (1, 3)}
    (tree,) = one.propose([row], [size(5, arm=1)])
    assert parts[2].num_asked == 1
    assert tree.child(0, 4) is not None


def test_where_only_chains_are_verified_what_is_left_drafts_alone() -> None:
    """Its one part that drafts chains was once refused as one drafter where several are combined."""
    target = CausalLM(toy_model(), execution="eager")
    target.supports_trees = False
    made = make_drafter(SpeculativeConfig("auto"), DrafterContext(target))
    assert isinstance(made, SuffixDrafter)


def told(budgets: list[DraftSize], arm: int) -> list[DraftSize]:
    """The budgets, as an engine hands them to a drafter."""
    for budget in budgets:
        budget.arm = arm
    return budgets


def run(governor: MethodBandit, one: AutoDrafter, arm_of_text: list[int], costs: dict[str, float]) -> list[int]:
    """Decode a text of which the token at place p is that of part ``arm_of_text[p]``; the arm of every step."""
    row = SimpleNamespace(id=0, token_ids=[9], state={}, is_finished=False)
    arms = []
    for wanted in arm_of_text:
        budgets = governor.budgets([row], [DraftSize(1)])
        trees = one.propose([row], told(budgets, governor.arm))
        trees = governor.trimmed([row], trees)
        arms.append(governor.arm)
        token = one.parts[wanted].tokens[0]
        hit = trees[0].child(0, token) is not None
        tokens = (token, 0) if hit else (token,)
        output = SimpleNamespace(row=row, token_ids=tokens, num_accepted=int(hit))
        drafting = costs[one.facts.arms[governor.arm]] if budgets[0] else 0.0
        governor.learn(
            trees,
            [output],
            drafting_seconds=drafting,
            other_seconds=0.02 + 0.001 * (len(trees[0]) - 1),
        )
    return arms


def test_the_arm_whose_tokens_take_the_least_time_runs() -> None:
    one = drafter(Says("a", 1), Says("b", 2), Says("c", 3), free=0)
    governor = MethodBandit(one.facts, CostModel({1: 0.02, 8: 0.027}))
    costs = {"a": 0.004, "b": 0.004, "c": 0.03}
    arms = run(governor, one, [1] * 300 + [0] * 400, costs)
    assert sum(arm == 1 for arm in arms[100:300]) > 170
    assert sum(arm == 0 for arm in arms[500:]) > 150  # the text has changed, and so has the choice
    assert sum(arm == 2 for arm in arms[100:]) < 60  # right or not, it takes too long
    said = governor.describe()
    assert said is not None
    assert "speeds of late by plain decoding: a " in said
    assert governor.totals.num_steps == 700


def test_a_drafter_too_slow_to_pay_is_left_alone_though_it_is_right() -> None:
    one = drafter(Says("a", 1), Says("c", 3), free=0)
    governor = MethodBandit(one.facts, CostModel({1: 0.02, 8: 0.027}))
    run(governor, one, [1] * 400, {"a": 0.0001, "c": 0.05})
    assert governor.totals.speedup == pytest.approx(1.0, abs=0.05)


def run_rows(governor: MethodBandit, one: AutoDrafter, num_rows: int, num_steps: int, seconds_per_row: float) -> int:
    """Decode rows of which part 1 is always right and costs so much for every row; steps in which it drafted."""
    rows = [
        SimpleNamespace(id=i, token_ids=[9], state={}, is_finished=False, num_remaining_tokens=99)
        for i in range(num_rows)
    ]
    asked = 0
    for _ in range(num_steps):
        budgets = governor.budgets(rows, [DraftSize(1)] * num_rows)
        trees = governor.trimmed(rows, one.propose(rows, told(budgets, governor.arm)))
        asked += governor.arm == 1 and budgets[0] > 0
        outputs = [
            SimpleNamespace(row=row, token_ids=(1,) if tree.child(0, 2) is None else (2, 0))
            for row, tree in zip(rows, trees, strict=True)
        ]
        drafting = num_rows * seconds_per_row if governor.arm == 1 and budgets[0] else 1e-4
        governor.learn(trees, outputs, drafting_seconds=drafting, other_seconds=0.02)
    return asked


def test_what_pays_for_one_row_is_not_chosen_for_eight_and_the_other_way_round() -> None:
    """Of free drafts that are never right and one that always is, but takes 4 ms for every row."""
    one = drafter(Says("a", 1), Says("b", 2), free=1)
    governor = MethodBandit(one.facts, CostModel({1: 0.02, 64: 0.0201}))
    for _ in range(4):
        run_rows(governor, one, 1, 60, 0.004)
        run_rows(governor, one, 8, 60, 0.004)
    assert run_rows(governor, one, 1, 60, 0.004) > 50
    assert run_rows(governor, one, 8, 60, 0.004) < 10
    assert run_rows(governor, one, 1, 60, 0.004) > 50


def test_a_governor_that_serves_several_engines_tells_the_drafter_of_each() -> None:
    """`generate` of transformers makes a drafter for every call, of which only the first was told."""
    target = CausalLM(toy_model(), execution="eager")
    makes = [UnionDrafter([Says("a", 1), SuffixDrafter()]) for _ in range(2)]
    governor = MethodBandit(replace(makes[0].facts, arm=0), CostModel({1: 1.0, 64: 1.0}))
    assert governor.governors[0].title == "suffix"
    assert [one.facts.arm for one in makes] == [1, 1]
    for one in makes:
        engine = Engine(target, one, governor=governor)
        engine.add_request([5, 6, 7], SamplingParams(max_tokens=4, temperature=0.0))
        list(engine.run())
        assert governor.arm == 0
        assert one.parts[0].num_asked == 0


def test_a_union_of_free_parts_and_others_drafts_with_all_unless_told() -> None:
    parts = Says("a", 1), Says("b", 2), Says("c", 3)
    parts[1].facts = replace(parts[1].facts, is_free=True)
    for made, titles in ((UnionDrafter(parts), ("b", "a+b+c")), (FirstDrafter(parts, 9.0), ("b", "a>b>c"))):
        assert (made.facts.arms, made.facts.arm) == (titles, 1)
        asked = [part.num_asked for part in parts]
        row = SimpleNamespace(id=0, token_ids=[9], state={})
        made.propose([row], [DraftSize(2)])
        assert [part.num_asked - before for part, before in zip(parts, asked, strict=True)] == [1, 1, 1]
        (tree,) = made.propose([row], [size(2, arm=0)])
        assert tree.tokens == (9, 2)
        assert [part.num_asked - before for part, before in zip(parts, asked, strict=True)] == [1, 2, 1]
    for part in parts:
        part.facts = replace(part.facts, is_free=False)
    assert UnionDrafter(parts).facts.arms == FirstDrafter(parts).facts.arms == ()


def test_a_model_that_is_given_is_one_more_to_choose_from() -> None:
    assert [part.method for part in SpeculativeConfig("auto").parts] == ["suffix", "token_recycling"]
    config = SpeculativeConfig("auto", model="zoo:tiny")
    assert [part.method for part in config.parts] == ["suffix", "token_recycling", "draft_model"]
    assert config.parts[-1].model == "zoo:tiny"
    assert config.title == "auto"


def test_it_refuses_a_length_policy_that_keeps_it_from_choosing() -> None:
    with pytest.raises(ConfigError, match=r"auto.*measured time.*fixed"):
        SpeculativeConfig("auto", length_policy="fixed")


def test_a_part_that_adds_nothing_is_asked_in_every_fourth_step() -> None:
    """And as soon as it adds something again, in every step."""
    one = drafter(Says("a", 1), Says("b", 2), free=2)
    governor = Governor(CostModel({1: 0.02, 8: 0.021}))

    def asked(wanted: int, num_steps: int) -> int:
        before = one.parts[1].num_asked
        row = SimpleNamespace(id=0, token_ids=[9], state={}, is_finished=False, pending=9)
        for _ in range(num_steps):
            budgets = governor.budgets([row], [DraftSize(1)])
            (tree,) = one.propose([row], budgets)
            hit = tree.child(0, wanted)
            path = (0,) if hit is None else (0, hit)
            one.observe([row], [StepResult(tree, path, (wanted,))])
        return one.parts[1].num_asked - before

    assert asked(2, 20) == 20
    asked(1, 60)
    assert asked(1, 40) == 10
    asked(2, 40)
    assert asked(2, 20) == 20


def test_a_part_is_not_asked_where_another_promises_enough() -> None:
    one = drafter(Says("a", *range(1, 9)), Says("b", 20), free=2)
    row = SimpleNamespace(id=0, token_ids=[9], state={})
    for _ in range(40):
        (tree,) = one.propose([row], [DraftSize(8)])
        one.observe([row], [StepResult(tree, tuple(range(9)) if tree.is_chain else tree.path(8), tree.tokens[1:])])
    before = one.parts[1].num_asked
    (tree,) = one.propose([row], [DraftSize(8)])
    assert one.parts[1].num_asked == before
    assert tree.tokens == (9, *range(1, 9))
