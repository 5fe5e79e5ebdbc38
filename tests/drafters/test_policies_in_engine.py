"""Policies in the engine: no token changes, no distribution changes, rows stop by themselves, and the trace says so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_rejection_distribution import (  # exact distribution over four tokens, and its chi-square
    VOCAB_SIZE as FEW,
)
from test_rejection_distribution import drafter_model as few_drafter
from test_rejection_distribution import p_value_of

from foredraft.config.engine import EngineConfig
from foredraft.config.sampling import SamplingParams
from foredraft.drafters.lm.draft_model import DraftModelDrafter
from foredraft.engine.engine import Engine
from foredraft.methods.lengths import CONFIDENCE, Acceptance, AdaEDL, Confidence, Egag, LengthPolicy
from foredraft.model.lm import CausalLM
from foredraft.testing import GREEDY, PROMPTS, SAMPLED, decode, toy_model
from foredraft.tree import DraftPlan
from toys import VOCAB_SIZE, small, target


def drafter(policy: LengthPolicy, model: CausalLM | None = None, **options: Any) -> DraftModelDrafter:
    return DraftModelDrafter(model or small(), target_vocab_size=VOCAB_SIZE, policy=policy, **options)


# -- the distribution under rejection --------------------------------------------------------------------------------

MEDIAN_ENTROPY = 1.0  # nats, of the drafter over four tokens: about half of the drafts end early


def early(kind: str, acceptance: str) -> DraftModelDrafter:
    policies = {
        "egag": Egag(3, reference_entropy=MEDIAN_ENTROPY, min_draft_tokens=0),
        "adaedl": AdaEDL(3, 0.55),
        "confidence": Confidence(3, 0.5),
        "acceptance": Acceptance(3, "code", threshold_step=0.5, threshold_momentum=0.0),
    }
    name, _, tree = kind.partition("-")
    return DraftModelDrafter(
        few_drafter(),
        target_vocab_size=FEW,
        num_branches=2 if tree else 1,
        acceptance=acceptance,
        policy=policies[name],
    )


QUICK = {("adaedl-tree", "standard"), ("confidence", "block")}
CELLS = [
    pytest.param(kind, acceptance, marks=pytest.mark.slow if (kind, acceptance) in QUICK else pytest.mark.full)
    for kind in ("egag", "adaedl", "confidence", "acceptance", "egag-tree", "adaedl-tree")
    for acceptance in ("match", "standard", "block")
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "acceptance"), CELLS)
def test_outputs_have_the_distribution_of_the_target(kind: str, acceptance: str) -> None:
    assert p_value_of(early(kind, acceptance), acceptance) > 1e-3


@pytest.mark.parametrize("kind", ["egag", "adaedl", "confidence"])
def test_the_policies_of_the_test_above_stop_early_and_late(kind: str) -> None:
    """Otherwise the chi-square would say nothing about them."""
    engine = Engine(CausalLM(toy_model(FEW, seed=3)), early(kind, "standard"), EngineConfig(acceptance="standard"))
    rows = engine.add_request((0, 3, 0, 3, 1, 0, 3), SamplingParams(n=16, max_tokens=12, temperature=1.2, seed=1))
    list(engine.run())
    drafted = [step.drafted for row in rows for step in row.trace if step.position < 7 + 8]
    assert len(set(drafted)) >= 3


# -- work ------------------------------------------------------------------------------------------------------------


class Script(LengthPolicy):
    """Stops each row after a number of tokens of its own, with or without the forward behind them."""

    name = "script"
    looks_at = CONFIDENCE

    def __init__(self, length_of: dict[int, int], saves_forward: bool) -> None:
        super().__init__(6)
        self.length_of, self.saves_forward = length_of, saves_forward

    def stop(self, row: Any, plan: DraftPlan, depth: int, log_probs: torch.Tensor) -> None:
        length = self.length_of[row.index]
        if depth >= length - self.saves_forward:
            plan.gamma = length


@pytest.mark.parametrize("saves_forward", [False, True])
def test_rows_of_a_batch_have_lengths_of_their_own_and_share_the_forwards(saves_forward: bool) -> None:
    """Lengths 1, 4 and 2: four tokens deep is four forwards; where the distribution has to be seen to stop, five."""
    model = small()
    policy = Script({0: 1, 1: 4, 2: 2}, saves_forward)
    engine = Engine(target(), drafter(policy, model))
    rows = engine.add_request(PROMPTS[0], replace(SAMPLED, n=3, max_tokens=30))
    engine.step()  # the prompt
    before = model.num_forwards
    engine.step()
    assert [row.trace[0].drafted for row in rows] == [1, 4, 2]
    assert model.num_forwards - before == (4 if saves_forward else 5)


def test_a_fixed_length_computes_no_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy is free where it does not look."""
    from foredraft.sampling import distribution as module

    def never(*_: Any) -> None:
        raise AssertionError("log_probs was called")

    monkeypatch.setattr(module, "log_probs", never)
    decode(target(), drafter(LengthPolicy(3)), [(PROMPTS[0], GREEDY)])
    with pytest.raises(AssertionError, match="log_probs was called"):
        decode(target(), drafter(Confidence(3)), [(PROMPTS[0], GREEDY)])


# -- trace -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [Egag(4), Acceptance(4, "code", threshold_step=0.1)], ids=["egag", "acceptance"])
def test_every_step_leaves_a_trace(policy: LengthPolicy) -> None:
    engine = Engine(target(), drafter(policy))
    rows = engine.add_request(PROMPTS[0], replace(SAMPLED, n=2, max_tokens=15))
    list(engine.run())
    for row in rows:
        assert len(row.trace) == row.stats.num_steps
        positions = [step.position for step in row.trace]
        ends = [*positions[1:], len(row.token_ids)]
        assert positions[0] == len(PROMPTS[0])
        assert [step.accepted + 1 for step in row.trace[:-1]] == [
            end - start for start, end in zip(positions[:-1], ends[:-1], strict=True)
        ]
        assert sum(step.accepted for step in row.trace) == row.stats.num_accepted_draft_tokens
        assert all(step.sample == row.index and step.accepted <= step.drafted <= step.gamma for step in row.trace)
        assert all((step.entropy is not None) == isinstance(policy, Egag) for step in row.trace if step.drafted)
