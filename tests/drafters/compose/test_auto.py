"""Method auto: what it chooses from, what it asks, and what it makes of the answers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from drafting import Says, begin
from foredraft.config.sampling import SamplingParams
from foredraft.config.speculative import SpeculativeConfig
from foredraft.drafters import make_drafter
from foredraft.drafters.compose import FirstDrafter, UnionDrafter, auto_drafter
from foredraft.drafters.context import DrafterContext
from foredraft.drafters.lookup.suffix import SuffixDrafter
from foredraft.engine.acceptance_model import AcceptanceModel
from foredraft.engine.cost_model import CostModel
from foredraft.engine.drafter import DraftSize
from foredraft.engine.engine import Engine
from foredraft.engine.governor import Governor
from foredraft.errors import ConfigError
from foredraft.model.lm import CausalLM
from foredraft.testing import toy_model
from foredraft.tune.walk import RecordedText, Walk


def drafter(*parts: Says, free: int) -> UnionDrafter:
    for place, part in enumerate(parts):
        part.facts = replace(part.facts, is_free=place < free)
    return auto_drafter(parts)


LONG = CausalLM(toy_model(max_position_embeddings=2048), execution="eager")


def row_of(*tokens: int) -> Any:
    """A row that has read its prompt."""
    known = {"output_ids": [], "num_prompt_tokens": len(tokens), "pending": tokens[-1], "params": SamplingParams()}
    return SimpleNamespace(id=0, token_ids=list(tokens), state={}, acceptance=AcceptanceModel(), **known)


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


def test_composites_among_the_parts_are_not_told_the_way_of_the_whole() -> None:
    """Their own ways have other numbers."""
    inner = UnionDrafter([SuffixDrafter(), Says("b", 2)])
    one = auto_drafter([SuffixDrafter(), Says("c", 3), inner])
    assert (one.facts.arms, inner.facts.arms) == (
        ("suffix", "suffix+c", "suffix+union"),
        ("suffix", "suffix+b"),
    )
    row = row_of(9)
    begin(one, [row])
    assert [one.propose([row], [size(2, arm)])[0].tokens for arm in (0, 1, 2)] == [(9,), (9, 3), (9, 2)]


def test_where_only_chains_are_verified_what_is_left_drafts_alone() -> None:
    """Its one part that drafts chains was once refused as one drafter where several are combined."""
    target = CausalLM(toy_model(), execution="eager")
    target.supports_trees = False
    config = SpeculativeConfig("auto", drafters=["suffix", "token_recycling"])
    assert isinstance(make_drafter(config, DrafterContext(target)), SuffixDrafter)


def test_a_governor_that_serves_several_engines_tells_the_drafter_of_each() -> None:
    """`generate` of transformers makes a drafter for every call, of which only the first was told."""
    target = CausalLM(toy_model(), execution="eager")
    makes = [UnionDrafter([Says("a", 1), SuffixDrafter()]) for _ in range(2)]
    governor = Governor(CostModel({1: 1.0, 64: 1.0}), replace(makes[0].facts, arm=0))
    assert makes[0].facts.arms == ("suffix", "a+suffix")
    assert [one.facts.arm for one in makes] == [1, 1]
    for one in makes:
        engine = Engine(target, one, governor=governor)
        engine.add_request([5, 6, 7], SamplingParams(max_tokens=4, temperature=0.0))
        list(engine.run())
        assert governor.way == 0
        assert one.parts[0].num_asked == 0


def test_a_union_of_free_parts_and_others_drafts_with_all_unless_told() -> None:
    parts = Says("a", 1), Says("b", 2), Says("c", 3)
    parts[1].facts = replace(parts[1].facts, is_free=True)
    for made, titles in ((UnionDrafter(parts), ("b", "a+b+c")), (FirstDrafter(parts, 9.0), ("b", "a>b>c"))):
        assert (made.facts.arms, made.facts.arm) == (titles, 1)
        asked = [part.num_asked for part in parts]
        row = row_of(9)
        made.propose([row], [DraftSize(2)])
        assert [part.num_asked - before for part, before in zip(parts, asked, strict=True)] == [1, 1, 1]
        (tree,) = made.propose([row], [size(2, arm=0)])
        assert tree.tokens == (9, 2)
        assert [part.num_asked - before for part, before in zip(parts, asked, strict=True)] == [1, 2, 1]
    for part in parts:
        part.facts = replace(part.facts, is_free=False)
    assert UnionDrafter(parts).facts.arms == FirstDrafter(parts).facts.arms == ()


def test_a_model_that_is_given_is_one_more_to_choose_from() -> None:
    assert [part.method for part in SpeculativeConfig("auto").parts] == ["suffix"]
    config = SpeculativeConfig("auto", model="zoo:tiny")
    assert [part.method for part in config.parts] == ["suffix", "draft_model"]
    assert config.parts[-1].model == "zoo:tiny"
    assert config.title == "auto"


def test_it_refuses_a_length_policy_that_keeps_it_from_choosing() -> None:
    with pytest.raises(ConfigError, match=r"auto.*measured time.*fixed"):
        SpeculativeConfig("auto", length_policy="fixed")


def test_a_part_is_not_asked_where_another_promises_enough() -> None:
    """By what became of its drafts: 8 tokens that were right so far, and none of which is right afterwards."""
    first, second = Says("a", *range(1, 9)), Says("b", 20)
    one = drafter(first, second, free=2)
    right, wrong = [*range(1, 10)] * 20, [9, 8, 7, 6, 5, 4, 3, 2] * 20
    params = SamplingParams(max_tokens=len(right + wrong), temperature=0.0)
    walk, asked = Walk(LONG, one, [RecordedText("", (9,), tuple(right + wrong), params)]), []
    while walk.enter(1) and walk.rows[0].num_remaining_tokens > 8:
        before = second.num_asked
        (tree,) = walk.propose([DraftSize(8)])
        asked.append(second.num_asked > before)
        assert (tree.child(0, 20) is not None) == asked[-1]
        walk.emit([tree])
    assert not any(asked[10:20])
    assert all(asked[-20:])
