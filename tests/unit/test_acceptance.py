"""What the acceptance rules declare decides what goes together with them, and is what results say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foretoken import LLM, SamplingParams, SpeculativeConfig
from foretoken.config.acceptance import RULES
from foretoken.config.engine import EngineConfig
from foretoken.engine.drafter import Budget
from foretoken.engine.engine import Engine
from foretoken.errors import ConfigError
from foretoken.model.lm import CausalLM
from foretoken.testing import PerfectDrafter, toy_model


def test_names_and_aliases_are_different_and_stay() -> None:
    names = [name for rule in RULES.values() for name in (rule.name, *rule.aliases)]
    assert names == ["match", "standard", "rejection", "rejection_sampler", "block"]
    assert [name for name in names if SpeculativeConfig(method="ngram", acceptance=name).rule.name == name] == [*RULES]


def test_rules_that_take_chains_get_chains() -> None:
    budgets: list[Budget] = []

    class Watched(PerfectDrafter):
        def propose(self, rows, given):
            budgets.extend(given)
            return super().propose(rows, given)

    for rule in RULES:
        budgets.clear()
        lm = CausalLM(toy_model(16), execution="eager", probe=False)
        engine = Engine(lm, Watched([], 2, vocab_size=16), EngineConfig(acceptance=rule))
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=3, temperature=0))
        for _ in engine.run():
            pass
        assert {budget.chains_only for budget in budgets} == {not RULES[rule].takes_trees}


def test_results_say_whether_the_rule_is_lossless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "standard", replace(RULES["standard"], is_lossless=False))
    prompt, params = {"prompt_token_ids": [1, 2]}, SamplingParams(max_tokens=2)
    plain = LLM(toy_model(16))
    assert plain.generate(prompt, params)[0].lossless
    lossy = plain.with_speculative_config({"method": "ngram", "acceptance": "standard"})
    assert not lossy.generate(prompt, params)[0].lossless


def test_a_rule_that_is_not_known() -> None:
    with pytest.raises(ConfigError, match="acceptance is 'typical'; choose one of match, standard, block"):
        EngineConfig(acceptance="typical")
