"""Compositions of drafters give the tokens of plain decoding, on every architecture.

In float64, greedy and seeded rows side by side in one ragged batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from test_identity import MODES, PROMPTS

from architectures import ALWAYS, ARCHITECTURES, VOCAB_SIZE
from drafting import layer_skip, made, quantized_self
from foredraft.drafters.compose import FirstDrafter, UnionDrafter
from foredraft.drafters.lm.draft_model import DraftModelDrafter
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.drafter import Drafter
from foredraft.testing import Trace, compare, decode
from harness import adapter, draft_adapter, drafted

NAMES = list(ARCHITECTURES)
SHORT_PROMPTS = PROMPTS[:3:2]


def draft_model(name: str, num_branches: int = 1) -> Drafter:
    return DraftModelDrafter(
        draft_adapter(name), target_vocab_size=VOCAB_SIZE, num_speculative_tokens=3, num_branches=num_branches
    )


def recycling() -> Drafter:
    return made("token_recycling", 4, VOCAB_SIZE, num_candidates=4, max_draft_nodes=12, initial_state="vocabulary")


COMPOSITIONS: dict[str, Callable[[str], Drafter]] = {
    "suffix+draft-model": lambda name: UnionDrafter(
        [made("suffix", 4, suffix_decoding_min_token_prob=0.0), draft_model(name)], 8
    ),
    "ngram>token-recycling": lambda _: FirstDrafter([made("ngram", 4, prompt_lookup_min=1), recycling()]),
    "layer-skip+nasd": lambda _: UnionDrafter([layer_skip(2, VOCAB_SIZE), made("nasd", 3, num_draft_branches=2)], 8),
    "jacobi+lookahead": lambda _: UnionDrafter([made("jacobi", 4), made("lookahead", 3, window_size=3)], 14),
    "nasd>quantized-self": lambda _: FirstDrafter([made("nasd", 3), quantized_self(3, VOCAB_SIZE)]),
    "suffix>draft-model-tree+layer-skip": lambda name: FirstDrafter(
        [
            made("suffix", 4, suffix_decoding_min_token_prob=0.0),
            UnionDrafter([draft_model(name, 2), layer_skip(2, VOCAB_SIZE)], 10),
        ]
    ),
}


def run(name: str, drafter: Drafter, modes: tuple[str, ...], num_tokens: int = 20) -> Trace:
    """Every prompt in every mode, one batch."""
    prompts = SHORT_PROMPTS if num_tokens < 20 else PROMPTS
    requests = [(prompt, replace(MODES[mode], max_tokens=num_tokens)) for mode in modes for prompt in prompts]
    return decode(adapter(name), drafter, requests)


@cache
def plain(name: str, modes: tuple[str, ...], num_tokens: int = 20) -> Trace:
    return run(name, EmptyDrafter(), modes, num_tokens)


@pytest.mark.parametrize(
    ("architecture", "composition"),
    [
        pytest.param(
            name,
            list(COMPOSITIONS)[number % len(COMPOSITIONS)],
            marks=() if name in ALWAYS else pytest.mark.full,
        )
        for number, name in enumerate(NAMES)
    ],
)
def test_an_architecture_keeps_its_tokens_under_some_composition(architecture: str, composition: str) -> None:
    """The covering part: greedy and seeded rows of one batch."""
    modes = ("greedy-biased", "sampled")
    trace = run(architecture, COMPOSITIONS[composition](architecture), modes, 7)
    compare(drafted(trace), plain(architecture, modes, 7), f"{architecture}, {composition}")


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_compositions_are_both_right_and_wrong(composition: str) -> None:
    """Often enough to exercise both ways."""
    trace = decode(adapter("llama"), COMPOSITIONS[composition]("llama"), [(PROMPTS[1], MODES["greedy"])])
    num_tokens = MODES["greedy"].max_tokens
    assert 2 + num_tokens // 5 < trace.num_steps < 1 + num_tokens


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("architecture", NAMES)
def test_compositions_change_no_token(architecture: str, composition: str, mode: str) -> None:
    """The whole product; five ragged rows, with and without processors."""
    trace = run(architecture, COMPOSITIONS[composition](architecture), (mode,))
    compare(drafted(trace), plain(architecture, (mode,)), f"{architecture}, {composition}, {mode}")
