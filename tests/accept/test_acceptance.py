"""What the acceptance rules declare decides what goes together with them, and is what results say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foredraft import LLM, SamplingParams, SpeculativeConfig
from foredraft.cli.writers import as_record
from foredraft.config.acceptance import RULES, TypicalLimits
from foredraft.config.engine import EngineConfig
from foredraft.engine.drafter import DraftSize
from foredraft.engine.engine import Engine
from foredraft.errors import ConfigError
from foredraft.model.lm import CausalLM
from foredraft.testing import PerfectDrafter, toy_model


def test_names_and_aliases_are_different_and_stay() -> None:
    names = [name for rule in RULES.values() if rule.is_lossless for name in (rule.name, *rule.aliases)]
    assert names == ["match", "standard", "rejection", "rejection_sampler", "block"]
    kept = [name for name in names if SpeculativeConfig(method="ngram", acceptance=name).rule.name == name]
    assert [*kept, "typical"] == [*RULES]


def test_only_methods_that_know_of_it_take_a_lossy_rule() -> None:
    for name in ("typical", "typical_acceptance", "typical_acceptance_sampler"):
        assert SpeculativeConfig(method="medusa", acceptance=name).rule.name == "typical"
        for method in ("ngram", "draft_model", "eagle3"):
            with pytest.raises(ConfigError, match="choose one of match, standard"):
                SpeculativeConfig(method=method, acceptance=name)
    with pytest.raises(ConfigError, match="'match' only; it got typical"):
        SpeculativeConfig(drafters=["ngram", {"method": "hydra", "acceptance": "typical"}], method="union")


def test_what_typical_accepts_is_a_part_of_the_config() -> None:
    config = SpeculativeConfig(method="hydra", acceptance="typical", posterior_threshold=0.2)
    assert config.typical_limits == TypicalLimits(0.2, 0.3)
    named = {"typical_acceptance_sampler_posterior_alpha": 0.5, "rejection_sample_method": "typical"}
    assert SpeculativeConfig(method="medusa", **named).typical_limits == TypicalLimits(0.09, 0.5)
    assert SpeculativeConfig(method="ngram").typical_limits == TypicalLimits()
    with pytest.raises(ConfigError, match="need rejection_sample_method='typical'"):
        SpeculativeConfig(method="medusa", posterior_alpha=0.5)
    with pytest.raises(ConfigError, match="posterior_threshold is 2"):
        SpeculativeConfig(method="medusa", acceptance="typical", posterior_threshold=2)


def test_rules_that_take_chains_get_chains() -> None:
    budgets: list[DraftSize] = []

    class Watched(PerfectDrafter):
        def propose(self, rows, given):
            budgets.extend(given)
            return super().propose(rows, given)

    for rule in RULES:
        budgets.clear()
        lm = CausalLM(toy_model(16), execution="eager", probe=False)
        engine = Engine(lm, Watched([], 2, vocab_size=16), EngineConfig(acceptance=rule))
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=3, temperature=0))
        list(engine.run())
        assert {budget.chains_only for budget in budgets} == {not RULES[rule].takes_trees}


def test_results_say_whether_the_rule_is_lossless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "standard", replace(RULES["standard"], is_lossless=False))
    prompt, params = {"prompt_token_ids": [1, 2]}, SamplingParams(max_tokens=2)
    plain = LLM(toy_model(16))
    assert plain.generate(prompt, params)[0].lossless
    lossy = plain.with_speculative_config({"method": "ngram", "acceptance": "standard"})
    result = lossy.generate(prompt, params)[0]
    assert not result.lossless
    assert result.metrics.speculative_decoding["lossless"] is False
    assert as_record(result)["lossless"] is False


def test_a_rule_that_is_not_known() -> None:
    with pytest.raises(ConfigError, match="acceptance is 'generous'; choose one of match, standard, block, typical"):
        EngineConfig(acceptance="generous")
