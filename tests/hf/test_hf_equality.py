"""`generate` with `speculate` gives what plain `generate` gives: sequences, scores, logits, padding.

The reference is always the model's own `generate`, called with the same arguments.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput

from foredraft import speculate
from foredraft.loading.adapters import shared_adapter
from foredraft.native.build import cpp_compiler
from foredraft.native.library import library
from foredraft.testing import perturbed, toy_model

EOS, PAD = 7, 3
TOLERANCE = 1e-4

CONFIGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "repetition": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 3},
    "lengths": {"min_new_tokens": 6, "sequence_bias": {(EOS,): 4.0}, "max_length": 40},
    "words": {"bad_words_ids": [[11], [12, 13], [20, 21, 22]], "suppress_tokens": [30, 31]},
    "forced": {"forced_eos_token_id": EOS, "begin_suppress_tokens": [15], "exponential_decay_length_penalty": (4, 1.3)},
    "normalised": {"renormalize_logits": True, "repetition_penalty": 1.1, "sequence_bias": {(9, 9): -3.0, (EOS,): 1.0}},
}


@cache
def target() -> PreTrainedModel:
    model = toy_model()
    model.generation_config.eos_token_id = [EOS, 8]
    model.generation_config.pad_token_id = PAD
    return model


@cache
def draft() -> PreTrainedModel:
    return perturbed(target(), 0.3)


def prompts(count: int, *, seed: int = 0, lowest: int = 9) -> list[list[int]]:
    """Prompts of 1 to 14 tokens; without special tokens unless ``lowest`` lets them in."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 15, (count,), generator=generator).tolist()
    return [torch.randint(lowest, 64, (length,), generator=generator).tolist() for length in lengths]


def padded(rows: list[list[int]], pad: int = PAD) -> dict[str, torch.Tensor]:
    width = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[pad] * (width - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
    }


def same(ours: GenerateDecoderOnlyOutput, theirs: GenerateDecoderOnlyOutput) -> None:
    """Equal sequences, and scores and logits equal within the tolerance, impossible tokens included."""
    assert torch.equal(ours.sequences, theirs.sequences)
    assert ours.sequences.dtype == theirs.sequences.dtype
    for name in ("scores", "logits"):
        mine, plain = ours[name], theirs[name]
        assert len(mine) == len(plain) > 0
        for ours_at, theirs_at in zip(mine, plain, strict=True):
            assert ours_at.dtype == theirs_at.dtype == torch.float32
            torch.testing.assert_close(ours_at, theirs_at, atol=TOLERANCE, rtol=0)


def check(model: PreTrainedModel, inputs: dict[str, torch.Tensor], hook: Any, **options: Any) -> Any:
    everything = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "do_sample": False}
    if "max_length" not in options:
        options = {"max_new_tokens": 24, **options}
    theirs = model.generate(**inputs, **everything, **options)
    ours = model.generate(**inputs, **everything, **options, custom_generate=hook)
    same(ours, theirs)
    return ours


@pytest.mark.sample(2)
@pytest.mark.parametrize("config", CONFIGS)
def test_a_batch_and_two_of_its_rows(config: str) -> None:
    """Alone and beside others, padded; the draft model is often wrong."""
    hook = speculate("draft_model", model=draft())
    rows = prompts(5)
    check(target(), padded(rows), hook, **CONFIGS[config])
    for row in rows[:2]:
        check(target(), padded([row]), hook, **CONFIGS[config])
    assert 0 < hook.stats.num_accepted_draft_tokens < hook.stats.num_draft_tokens


@pytest.mark.parametrize(
    ("config", "method"),
    [
        pytest.param(config, method, marks=() if (config, method) == ("lengths", "ngram") else pytest.mark.full)
        for config in CONFIGS
        for method in ("draft_model", "none", "ngram", "nasd")
    ],
)
def test_twenty_prompts_by_fives(config: str, method: str) -> None:
    """Left-padded rows of different lengths; those that end early are padded, and their scores go on as theirs do."""
    hook = speculate(method, **({"model": draft()} if method == "draft_model" else {}))
    rows = prompts(20)
    ended_early = False
    for first in range(0, 20, 5):
        result = check(target(), padded(rows[first : first + 5]), hook, **CONFIGS[config])
        ended_early |= bool((result.sequences[:, -1] == PAD).any())
    assert ended_early or config not in ("lengths", "forced", "normalised")


def test_a_prompt_that_holds_the_pad_token() -> None:
    """With a mask, the pad token inside a text is a token like any other."""
    rows = [[PAD, 10, PAD, PAD, 11], [12, 13], [PAD]]
    check(target(), padded(rows), speculate("ngram"), repetition_penalty=1.5, no_repeat_ngram_size=2)


def test_without_a_mask_transformers_guesses_it() -> None:
    """It takes every pad token for padding, those inside the text too; the same tokens are left out here."""
    ids = torch.tensor([[PAD, PAD, 10, 11, 12], [20, 21, PAD, 22, 23]])
    check(target(), {"input_ids": ids}, speculate("ngram"), repetition_penalty=1.5, no_repeat_ngram_size=2)


def test_padding_with_the_end_of_sequence_token() -> None:
    inputs = padded(prompts(4, seed=5), pad=EOS)
    hook = speculate("draft_model", model=draft())
    check(target(), inputs, hook, pad_token_id=EOS, **CONFIGS["lengths"])


def test_without_an_end_of_sequence_token_rows_only_end_together() -> None:
    check(target(), padded(prompts(3)), speculate("ngram"), eos_token_id=None)


class Seen(LogitsProcessor):
    """Penalises by position and row, and remembers what it was shown."""

    def __init__(self) -> None:
        self.shown: set[tuple[int, ...]] = set()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert not any(given.is_inference() for given in (input_ids, scores)), "they may be kept"
        self.shown |= {tuple(ids) for ids in input_ids.tolist()}
        rows = torch.arange(len(scores))[:, None]
        scores[:, 40:] -= 0.5  # in place, as many a user's does
        return scores - (torch.arange(scores.shape[1]) + rows + input_ids.sum(-1, keepdim=True)) % 5


def test_a_users_processor_sees_the_padded_batch() -> None:
    """It may tell rows apart and write in place; every text that plain decoding shows it, it is shown too."""
    inputs, plain, ours = padded(prompts(4, seed=2)), Seen(), Seen()
    options = {**inputs, "max_new_tokens": 12, "return_dict_in_generate": True, "output_logits": True}
    theirs = target().generate(**options, logits_processor=LogitsProcessorList([plain]))
    hook = speculate("draft_model", model=draft())
    got = target().generate(**options, logits_processor=LogitsProcessorList([ours]), custom_generate=hook)
    assert torch.equal(got.sequences, theirs.sequences)
    torch.testing.assert_close(got.logits[0], target().generate(**options).logits[0], atol=TOLERANCE, rtol=0)
    width = inputs["input_ids"].shape[1]
    ended = {ids for ids in plain.shown if {EOS, 8} & {*ids[width:]}}
    assert plain.shown - ended <= ours.shown
    assert plain.shown - ended


def test_a_prefix_function_is_asked_for_its_own_row() -> None:
    """Constrained decoding: every row of the batch has its own allowed tokens."""
    asked = set()

    def allowed(row: int, sent: torch.Tensor) -> list[int]:
        asked.add(row)
        return list(range(10 + 10 * row + len(sent) % 3, 18 + 10 * row))

    inputs = padded(prompts(3, seed=3))
    result = check(target(), inputs, speculate("ngram"), prefix_allowed_tokens_fn=allowed)
    assert asked == {0, 1, 2}
    new = result.sequences[:, inputs["input_ids"].shape[1] :]
    assert all(10 * (row + 1) <= int(new[row].min()) and int(new[row].max()) < 10 * row + 18 for row in range(3))


def test_processors_that_hold_the_prompts_of_all_rows() -> None:
    options = {"encoder_repetition_penalty": 1.3, "encoder_no_repeat_ngram_size": 2}
    check(target(), padded(prompts(4, seed=4)), speculate("draft_model", model=draft()), **options)


def test_chunks_of_the_prompt() -> None:
    check(target(), padded([list(range(9, 60))]), speculate("ngram"), prefill_chunk_size=7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_half_and_single_precision(dtype: torch.dtype) -> None:
    """bfloat16 may flip a near tie, so the first token's scores are compared: no further from those in single precision
    than transformers' own, which rounds more often."""
    model = toy_model(dtype=dtype)
    inputs = padded(prompts(3))
    options = {**inputs, "max_new_tokens": 8, "return_dict_in_generate": True, "output_scores": True}
    theirs = model.generate(**options)
    ours = model.generate(**options, custom_generate=speculate("ngram"))
    assert ours.scores[0].dtype == theirs.scores[0].dtype == torch.float32
    truth = copy.deepcopy(model).float().generate(**options).scores[0]
    errors = [float((found.scores[0] - truth).abs().max()) for found in (ours, theirs)]
    assert errors[0] <= 1.5 * errors[1] + 1e-5 * float(truth.std())
    if dtype == torch.float32:
        assert torch.equal(ours.sequences, theirs.sequences)


# -- compiled layers -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(library() is None or cpp_compiler() is None, reason="layers are compiled for the CPU, in C++")
def test_compiled_layers_give_the_sequences_of_generate_and_follow_the_model() -> None:
    """A model whose weights or hooks change after the first call is decoded as it is now."""
    model, hook = toy_model(), speculate("ngram", execution="compiled")
    ids = torch.tensor([[10, 11, 12] * 20, [20, 21, 22] * 20])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    first = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, **options, custom_generate=hook), first)
    execution = shared_adapter(model, "compiled").target.execution
    assert execution.num_compiled == model.config.num_hidden_layers, execution.describe()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(-1.0)
    changed = model.generate(ids, **options)
    assert not torch.equal(changed, first)
    assert torch.equal(model.generate(ids, **options, custom_generate=hook), changed)
    handle = model.model.layers[0].register_forward_hook(lambda _module, _args, output: 0.5 * output)
    hooked = model.generate(ids, **options)
    assert not torch.equal(hooked, changed)
    assert torch.equal(model.generate(ids, **options, custom_generate=hook), hooked)
    handle.remove()
    assert torch.equal(model.generate(ids, **options, custom_generate=hook), changed)
