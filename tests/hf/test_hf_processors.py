"""transformers' processors as sampling parameters: what the sampler takes over, and that nothing changes by it."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from foredraft import speculate
from foredraft.errors import ShapeError
from foredraft.hf.processors import RowPlace, sampling_fields
from foredraft.hf.rows import InputRow
from foredraft.testing import perturbed, toy_model

EOS, PAD = 7, 3


@cache
def model() -> PreTrainedModel:
    return toy_model()


@cache
def draft() -> PreTrainedModel:
    return perturbed(model(), 0.3)


PROMPTS = torch.tensor([[PAD, PAD, 10, 11, 12, 9, 13], [PAD, 20, 21, 20, 21, 20, 9], [12, 9, 12, 9, PAD, 9, 12]])
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])


def check_scores(**options: Any) -> None:
    """Over a left-padded batch, with wrong drafts and right ones; of samples the first scores, as texts differ then."""
    call = {"eos_token_id": EOS, "pad_token_id": PAD, "return_dict_in_generate": True, "output_scores": True, **options}
    call |= {"input_ids": PROMPTS, "attention_mask": MASK, "max_new_tokens": 16}
    theirs = model().generate(**call)
    ours = model().generate(**call, custom_generate=speculate("draft_model", model=draft()))
    assert options["do_sample"] or torch.equal(ours.sequences, theirs.sequences)
    last = 1 if options["do_sample"] else len(theirs.scores)
    for mine, plain in zip(ours.scores[:last], theirs.scores[:last], strict=True):
        torch.testing.assert_close(mine, plain, atol=1e-5, rtol=1e-5, msg=str(options))


class Shift(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + input_ids[:, -1:] / 64 * torch.arange(scores.shape[1])


MENU: dict[str, Any] = {
    "sequence_bias": [{(9,): 2.0, (EOS,): -1.0}, {(9, 12): 5.0}],
    "repetition_penalty": [1.3, 0.8],
    "no_repeat_ngram_size": [1, 2, 3],
    "bad_words_ids": [[[12], [13, 14]], [[EOS], [15]]],
    "min_length": [12, 20],
    "min_new_tokens": [3, 9],
    "suppress_tokens": [[20, 21]],
    "forced_eos_token_id": [EOS],
    "remove_invalid_values": [True],
    "temperature": [0.7, 1.6],
    "top_k": [5, 20],
    "top_p": [0.5, 0.95],
    "min_p": [0.05],
    "typical_p": [0.7],
    "eta_cutoff": [0.01],
    "renormalize_logits": [True],
}


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed < 12 else pytest.mark.full) for seed in range(60)]
)
def test_random_lists_give_the_same_scores(seed: int) -> None:
    draw = random.Random(seed)
    options = {name: draw.choice(MENU[name]) for name in draw.sample(sorted(MENU), draw.randint(1, 7))}
    do_sample = draw.random() < 0.6
    if not do_sample:
        options = {name: value for name, value in options.items() if name not in SAMPLING_ONLY}
    user = [Shift()] if draw.random() < 0.3 else []
    check_scores(do_sample=do_sample, logits_processor=LogitsProcessorList(user), **options)


SAMPLING_ONLY = {"temperature", "top_k", "top_p", "min_p", "typical_p", "eta_cutoff"}


def test_ordinary_lists_need_no_processor_at_all() -> None:
    eos, device = torch.tensor([EOS]), torch.device("cpu")
    processors = [
        RepetitionPenaltyLogitsProcessor(1.2),
        NoRepeatNGramLogitsProcessor(3),
        NoBadWordsLogitsProcessor([[5], [6, 8]], eos),
        MinNewTokensLengthLogitsProcessor(2, 4, eos),
        TemperatureLogitsWarper(0.7),
        TopKLogitsWarper(50),
        TopPLogitsWarper(0.9),
        MinPLogitsWarper(0.1),
    ]
    row = InputRow((9, 10), (9, 10), 0)
    found = sampling_fields(LogitsProcessorList(processors), True, RowPlace(0, 1, row, frozenset({EOS}), device))
    assert found == {
        **{"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "bad_words_ids": [(5,), (6, 8)], "min_tokens": 4},
        **{"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.1},
    }


class Louder(RepetitionPenaltyLogitsProcessor):
    pass


@pytest.mark.parametrize(
    "processors",
    [
        [Louder(1.2)],
        [RepetitionPenaltyLogitsProcessor(1.2), SequenceBiasLogitsProcessor({(9,): 1.0})],
        [RepetitionPenaltyLogitsProcessor(1.2, prompt_ignore_length=1)],
        [RepetitionPenaltyLogitsProcessor(1.2), RepetitionPenaltyLogitsProcessor(1.2)],
        [NoBadWordsLogitsProcessor([[EOS]])],
        [SequenceBiasLogitsProcessor({(9, 9): 1.0})],
        [TopKLogitsWarper(5), TemperatureLogitsWarper(0.5)],
        [TopKLogitsWarper(5, filter_value=-1.0)],
        [TopPLogitsWarper(0.5, min_tokens_to_keep=2)],
        [TemperatureLogitsWarper(1e-7)],
        [TopPLogitsWarper(0.0)],
    ],
)
def test_what_the_distribution_does_otherwise_runs_as_it_is(processors: list[Any]) -> None:
    """Subclasses, another order, other options."""
    check_scores(do_sample=True, top_k=0, logits_processor=LogitsProcessorList(processors))
    check_scores(do_sample=False, logits_processor=LogitsProcessorList(processors))


@pytest.mark.parametrize("words", [[[]], [[], [5], [], [9, 3]]], ids=str)
def test_empty_bad_words_ban_nothing(words: list[list[int]]) -> None:
    """As in transformers; they were refused as "()", which nobody had written."""
    ids = torch.tensor([[5, 6, 7, 8]])
    asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    try:
        plain = model().generate(**asked, bad_words_ids=words)
    except IndexError:
        pytest.skip("this transformers has no empty entries")
    assert torch.equal(model().generate(**asked, bad_words_ids=words, custom_generate=speculate("ngram")), plain)


def narrow(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores[:, :32]


def silent(input_ids: torch.Tensor, scores: torch.Tensor) -> None:
    """Changes nothing, and forgets to return it."""


class NarrowTopK(TopKLogitsWarper):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores[0]


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (narrow, r"logits processor <function narrow at .*> returned \(1, 32\); it must return scores \(1, 64\)"),
        (silent, r"logits processor <function silent at .*> returned NoneType"),
        (NarrowTopK(4), r"logits processor <.*NarrowTopK object at .*> returned \(64,\)"),
    ],
)
def test_a_processor_that_returns_something_else_is_named(processor: Any, message: str) -> None:
    """The message named a class of this library."""
    ids = torch.tensor([[5, 6, 7, 8]])
    with pytest.raises(ShapeError, match=message):
        model().generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=4,
            logits_processor=[processor],
            custom_generate=speculate("ngram"),
        )
