"""Sampling through the hook: the same tokens whatever is drafted, and the distribution of plain `generate`."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from scipy.stats import chi2_contingency
from transformers import PreTrainedModel

from foredraft import speculate
from foredraft.loading.adapters import Adapter
from foredraft.testing import perturbed, toy_model

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "warm": {"temperature": 1.4, "top_k": 20},
    "nucleus": {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2},
    "typical": {"typical_p": 0.8, "min_p": 0.02},
    "odd": {"epsilon_cutoff": 0.01, "top_k": 30, "renormalize_logits": True},
}


@cache
def target() -> PreTrainedModel:
    model = toy_model()
    model.generation_config.eos_token_id = 7
    model.generation_config.pad_token_id = 3
    model.generation_config.top_k = None
    return model


@cache
def draft() -> PreTrainedModel:
    return perturbed(target(), 0.2)


def batch() -> dict[str, torch.Tensor]:
    ids = torch.tensor([[3, 3, 10, 11], [12, 13, 14, 15], [3, 20, 21, 22]])
    return {"input_ids": ids, "attention_mask": (ids != 3).long()}


def sample(hook: Any, seed: int = 1, **options: Any) -> Any:
    model = target()
    torch.manual_seed(seed)
    return model.generate(**batch(), do_sample=True, max_new_tokens=20, custom_generate=hook, **options)


@pytest.mark.sample(2)
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_method_says_the_same_under_one_seed(setting: str) -> None:
    plain = sample(speculate("none"), **SETTINGS[setting])
    hook = speculate("draft_model", model=draft())
    assert torch.equal(sample(hook, **SETTINGS[setting]), plain)
    assert hook.stats.num_accepted_draft_tokens > 0


def test_samples_of_one_prompt_differ_and_repeat() -> None:
    options = {"num_return_sequences": 4, "return_dict_in_generate": True, "output_scores": True}
    once = sample(speculate("ngram"), **options)
    again = sample(speculate("draft_model", model=draft()), **options)
    assert once.sequences.shape[0] == 12
    assert torch.equal(once.sequences, again.sequences)
    assert len({tuple(row) for row in once.sequences[:4].tolist()}) == 4
    assert len(once.scores) == once.sequences.shape[1] - 4
    for ours, theirs in zip(once.scores, again.scores, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_the_global_generator_decides_and_moves_on() -> None:
    hook = speculate("ngram")
    first, second = sample(hook, seed=1), sample(hook, seed=2)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    draws = [target().generate(**batch(), do_sample=True, max_new_tokens=20, custom_generate=hook) for _ in range(2)]
    assert torch.equal(draws[0], first)
    assert not torch.equal(draws[0], draws[1])


def test_without_sampling_the_global_generator_stays() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    target().generate(**batch(), max_new_tokens=4, do_sample=False, custom_generate=speculate("ngram"))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_call_draws_one_number_whatever_it_has_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call makes adapters and loads the drafter, which may draw numbers; nobody must notice."""
    model = toy_model()
    load = Adapter.drafting

    def drawing(*args: Any) -> Any:
        torch.rand(5)
        return load(*args)

    monkeypatch.setattr(Adapter, "drafting", drawing)
    torch.manual_seed(5)
    torch.randint(0, 2**63 - 1, ())
    expected = torch.get_rng_state()
    torch.manual_seed(5)
    hook = speculate("ngram")
    model.generate(**batch(), do_sample=True, max_new_tokens=2, custom_generate=hook)
    assert torch.equal(torch.get_rng_state(), expected)


def small(rows: int) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    model = toy_model(vocab_size=6, seed=4)
    ids = torch.tensor([[1, 2]]).repeat(rows, 1)
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("method", ["match", "standard"])
def test_the_distribution_is_that_of_generate(method: str) -> None:
    """Two tokens of 800 samples on each side, 36 outcomes, chi-square test of homogeneity.

    A right distribution fails with a chance below 1e-4; the seeds are fixed, so it fails always or never.
    """
    model, inputs = small(800)
    options = {**inputs, "do_sample": True, "max_new_tokens": 2, "temperature": 1.5, "top_k": 5}
    hook = speculate("draft_model", model=perturbed(model, 0.5), rejection_sample_method=method)
    torch.manual_seed(0)
    ours = model.generate(**options, custom_generate=hook)[:, 2:]
    theirs = model.generate(**options)[:, 2:]
    assert pvalue(ours, theirs) > 1e-4
    cold = model.generate(**{**options, "temperature": 1.0})[:, 2:]
    assert pvalue(ours, cold) < 1e-4  # the test can tell


def pvalue(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    counts = torch.stack([(6 * side[:, 0] + side[:, 1]).bincount(minlength=36) for side in (ours, theirs)])
    table = counts[:, counts.sum(0) >= 10].numpy()
    return float(chi2_contingency(table).pvalue)
