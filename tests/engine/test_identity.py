"""Speculative decoding gives the tokens of plain decoding, and plain decoding those of transformers.

In float64, so that a tie that rounding could decide never comes up: for every architecture, drafter, way of
choosing tokens, batch and draft shape. What always runs puts rows of all ways into one ragged batch, and gives every
architecture a tree of a draft model, and one of the others alone by turns; the whole product, each mode in a batch of
its own, is marked full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache

import pytest
import torch

from architectures import (
    ALWAYS,
    ARCHITECTURES,
    LONGROPE_BORDER,
    VOCAB_SIZE,
    but_variants,
    in_turns,
    target_model,
)
from drafting import made
from foredraft.config.sampling import SamplingParams
from foredraft.drafters.lm.draft_model import DraftModelDrafter
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.drafter import Drafter
from foredraft.retrieval.datastore import Datastore
from foredraft.testing import PerfectDrafter, Trace, compare, decode
from harness import adapter, draft_adapter, drafted, first_attention, random_ids
from toys import datastore_of

NAMES = list(ARCHITECTURES)
PATTERN = random_ids(5, 1)
PROMPTS = (
    tuple(random_ids(13, 2)),
    tuple(PATTERN * 4),
    (7,),
    tuple(random_ids(3, 3)),
    tuple(random_ids(40, 4)),
)
EOS = (11, 29)

MODES = {
    "greedy": SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=20, temperature=0.9, top_p=0.95, seed=17, ignore_eos=True),
    "greedy-processed": SamplingParams(
        max_tokens=20,
        temperature=0.0,
        repetition_penalty=1.3,
        min_tokens=6,
        bad_words_ids=((3,), (8, 9), (40, 41, 42)),
    ),
    "sampled-processed": SamplingParams(
        max_tokens=20,
        temperature=0.7,
        top_k=30,
        min_p=0.01,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        no_repeat_ngram_size=3,
        min_tokens=6,
        logit_bias={5: 2.0, 6: -3.0},
        seed=23,
    ),
    # of two tokens, so that texts of random models repeat themselves and every lookup finds something
    "greedy-biased": SamplingParams(max_tokens=20, temperature=0.0, logit_bias={3: 50.0, 9: 50.0}, ignore_eos=True),
}
UNPROCESSED_MODES = ("greedy", "sampled")
COVERING_TOKENS = 14
"""Tokens of every row in what always runs: enough for drafts to be accepted, cut and refused."""

DRAFTERS: dict[str, Callable[[str], Drafter]] = {
    "draft-model-chain": lambda name: _draft_model(name, 1),
    "draft-model-tree": lambda name: _draft_model(name, 3),
    "ngram-chain": lambda _: made("ngram", 4, prompt_lookup_min=1),
    "ngram-tree": lambda _: made("ngram", 4, prompt_lookup_min=1, num_prompt_lookup_candidates=3),
    "nasd-chain": lambda _: made("nasd", 4),
    "nasd-tree": lambda _: made("nasd", 4, num_draft_branches=3),
    "jacobi": lambda _: made("jacobi", 6),
    "lookahead": lambda _: made("lookahead", 3, window_size=4, guess_set_size=3),
    "suffix": lambda _: made("suffix", 4, suffix_decoding_min_token_prob=0.0),
    "rest": lambda name: made("rest", 4, _datastore(name)),
    "token-recycling": lambda _: made("token_recycling", 4, VOCAB_SIZE, max_draft_nodes=24, initial_state="prompt"),
}


@cache
def _datastore(name: str) -> Datastore:
    """What the target says after half of the prompts."""
    outputs = run(name, EmptyDrafter(), "greedy", PROMPTS[::2]).outputs
    texts = [(*PROMPTS[2 * int(key.split(".")[0])], *output) for key, output in outputs.items()]
    return datastore_of(texts, VOCAB_SIZE)


def _draft_model(name: str, num_branches: int, depth: int = 4, sample_method: str = "probabilistic") -> Drafter:
    return DraftModelDrafter(
        draft_adapter(name),
        target_vocab_size=VOCAB_SIZE,
        num_speculative_tokens=depth,
        num_branches=num_branches,
        sample_method=sample_method,
    )


def run(name: str, drafter: Drafter, mode: str, prompts: tuple[tuple[int, ...], ...] = PROMPTS) -> Trace:
    """All prompts in one mode."""
    return decode(adapter(name), drafter, [(prompt, MODES[mode]) for prompt in prompts], eos_token_ids=EOS)


@cache
def plain(name: str, mode: str) -> Trace:
    """The plain loop over all prompts in one batch."""
    return run(name, EmptyDrafter(), mode)


def row_modes(name: str) -> tuple[str, ...]:
    """A mode for every prompt: all modes on each architecture, and each prompt in every mode on some."""
    shift = NAMES.index(name)
    return tuple(list(MODES)[(row + shift) % len(MODES)] for row in range(len(PROMPTS)))


def run_mixed(name: str, drafter: Drafter, rows: Iterable[int] = range(len(PROMPTS))) -> Trace:
    """Every prompt, or the given ones, in its own mode, one batch."""
    modes = row_modes(name)
    requests = [(PROMPTS[row], replace(MODES[modes[row]], max_tokens=COVERING_TOKENS)) for row in rows]
    return decode(adapter(name), drafter, requests, eos_token_ids=EOS)


@cache
def plain_mixed(name: str) -> Trace:
    return run_mixed(name, EmptyDrafter())


# -- what always runs ------------------------------------------------------------------------------------------------

TREES = "draft-model-tree"
"""What every architecture has in a batch; those that differ in kind have all others too."""
BATCHED = but_variants(in_turns(DRAFTERS, 0, [TREES], pytest.mark.every_version))
ALONE = but_variants(
    pytest.param(name, drafters[(number + 3 * row) % len(DRAFTERS)], row, marks=marks)
    for drafters in [list(DRAFTERS)]
    for number, name in enumerate(NAMES)
    for row in range(len(MODES))
    for marks in [() if (row - number) % len(MODES) == 0 else pytest.mark.full]
)


@pytest.mark.sample(7)
@pytest.mark.parametrize(("name", "drafter"), BATCHED)
def test_drafting_changes_no_token(name: str, drafter: str) -> None:
    """Five ragged rows in one batch: greedy and seeded, with and without processors, with and without EOS."""
    trace = run_mixed(name, DRAFTERS[drafter](name))
    compare(drafted(trace), plain_mixed(name), f"{name}, {drafter}, rows {row_modes(name)}")


@pytest.mark.sample(10)
@pytest.mark.parametrize(("name", "drafter", "row"), ALONE)
def test_a_row_alone_gives_the_tokens_it_gives_in_a_batch(name: str, drafter: str, row: int) -> None:
    """Batch 1; every mode on each architecture, every drafter in each mode."""
    alone = run_mixed(name, DRAFTERS[drafter](name), [row])
    assert alone.outputs["0.0"] == plain_mixed(name).outputs[f"{row}.0"]
    assert alone.reasons["0.0"] == plain_mixed(name).reasons[f"{row}.0"]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "drafter",
    [
        pytest.param(
            name, marks=() if name in ("draft-model-tree", "ngram-chain", "token-recycling") else pytest.mark.full
        )
        for name in DRAFTERS
    ],
)
def test_a_few_allowed_tokens_are_drafted_for_as_well(drafter: str) -> None:
    """Masks hold at every node of a draft, beside penalties, for samples that share a prompt, and in what is told."""
    allowed = (3, 8, 9, 29, 40)
    params = SamplingParams(
        n=3,
        max_tokens=24,
        frequency_penalty=0.4,
        allowed_token_ids=allowed,
        logprobs=2,
        seed=5,
    )
    requests = [(prompt, replace(params, temperature=row % 2)) for row, prompt in enumerate(PROMPTS)]
    want, got = (
        decode(adapter("llama"), each, requests, eos_token_ids=EOS)
        for each in (EmptyDrafter(), DRAFTERS[drafter]("llama"))
    )
    compare(drafted(got), want, drafter)
    said = {token for output in got.outputs.values() for token in output}
    assert {3, 8, 9, 40} <= said <= set(allowed)


# -- the whole product -----------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", NAMES)
def test_drafting_changes_no_token_in_any_mode(name: str, drafter: str) -> None:
    """Five ragged rows of one mode; penalties, bans, minimum lengths and EOS see every node's own path.

    A lookup finds nothing in texts that never repeat, but in some mode every drafter does.
    """
    traces = {mode: run(name, DRAFTERS[drafter](name), mode) for mode in MODES}
    for mode, trace in traces.items():
        compare(trace, plain(name, mode), f"{name}, {drafter}, {mode}")
    assert any(trace.num_accepted for trace in traces.values()), "no draft token was accepted"


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", NAMES)
def test_every_row_alone_gives_the_tokens_it_gives_in_a_batch(name: str, drafter: str, mode: str) -> None:
    for row, prompt in enumerate(PROMPTS):
        alone = run(name, DRAFTERS[drafter](name), mode, (prompt,))
        assert alone.outputs["0.0"] == plain(name, mode).outputs[f"{row}.0"]


@pytest.mark.full
@pytest.mark.parametrize("depth", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("num_branches", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_draft_depth_and_width_change_no_token(name: str, num_branches: int, depth: int) -> None:
    for mode in UNPROCESSED_MODES:
        trace = run(name, _draft_model(name, num_branches, depth), mode)
        compare(drafted(trace), plain(name, mode), f"{name}, K={depth}, {num_branches} branches, {mode}")


# -- the controls, and plain decoding itself --------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "num_branches"), [("llama", 1), ("gemma2", 3), ("mistral-filled", 1), ("deepseek-v3", 3)]
)
def test_a_greedy_drafter_of_a_sampling_target_changes_no_token(name: str, num_branches: int) -> None:
    drafter = _draft_model(name, num_branches, sample_method="greedy")
    compare(drafted(run(name, drafter, "sampled")), plain(name, "sampled"), f"{name}, greedy drafts")


@pytest.mark.sample(4)
@pytest.mark.every_version
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *but_variants(pytest.param(name, "greedy") for name in NAMES),
        *(pytest.param(name, "greedy-processed", marks=() if name in ALWAYS else pytest.mark.full) for name in NAMES),
    ],
)
def test_plain_decoding_equals_generate(name: str, mode: str) -> None:
    """Greedy, and with repetition penalty, minimum length and bad words."""
    model, params = target_model(name, first_attention(name)), replace(MODES[mode], max_tokens=COVERING_TOKENS)
    ours = decode(adapter(name), EmptyDrafter(), [(prompt, params) for prompt in PROMPTS], eos_token_ids=EOS)
    options = {}
    if mode == "greedy-processed":
        options = {
            "repetition_penalty": params.repetition_penalty,
            "min_new_tokens": params.min_tokens,
            "bad_words_ids": [list(words) for words in params.bad_words_ids or ()],
            "eos_token_id": list(EOS),
        }
    for row, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt])
        text = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=params.max_tokens,
            pad_token_id=0,
            **options,
        )
        assert ours.outputs[f"{row}.0"] == tuple(text[0, len(prompt) :].tolist())


@pytest.mark.sample(2)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_are_both_accepted_and_rejected(drafter: str) -> None:
    """The drafters of this file are right and wrong often enough to exercise both ways."""
    names = ("llama", "gemma3", "gpt2")
    num_plain_steps = sum(plain(name, "greedy").num_steps for name in names)
    num_steps = sum(run(name, DRAFTERS[drafter](name), "greedy").num_steps for name in names)
    fewest = len(names) * (2 + MODES["greedy"].max_tokens // 5)
    assert fewest < num_steps < num_plain_steps


def test_seeds_give_different_texts() -> None:
    """The control of every identity under sampling: another seed gives another text."""
    requests = [(PROMPTS[0], replace(MODES["sampled"], seed=seed)) for seed in range(8)]
    outputs = decode(adapter("llama"), EmptyDrafter(), requests).outputs
    assert len(set(outputs.values())) == 8


def test_longrope_ends_where_its_frequencies_change() -> None:
    """Beyond the border a draft would change the tokens before it: the row ends there instead, the same in each loop.

    Found by a perfect drafter whose drafts crossed the border: 14 of 20 tokens differed from plain decoding.
    """
    lm = adapter("phi3-longrope")
    assert lm.context_length == LONGROPE_BORDER
    request = (tuple(random_ids(LONGROPE_BORDER - 6, 5)), SamplingParams(max_tokens=20, temperature=0.0))
    trace = decode(lm, EmptyDrafter(), [request])
    text = (*request[0], *trace.outputs["0.0"])
    assert len(text) == LONGROPE_BORDER
    assert trace.reasons["0.0"] == "length"
    drafter = PerfectDrafter([(*text, 1, 2, 3)], 5, vocab_size=VOCAB_SIZE)
    compare(drafted(decode(lm, drafter, [request])), trace, "drafts up to the border")
