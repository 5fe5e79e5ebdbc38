"""Compositions of drafters give the tokens of plain decoding, on every architecture, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from test_identity import MODES, PROMPTS, plain_mixed, row_modes, run_mixed

from architectures import VOCAB_SIZE, in_turns
from drafting import layer_skip, made, quantized_self
from foredraft.drafters.compose import FirstDrafter, UnionDrafter
from foredraft.drafters.lm.draft_model import DraftModelDrafter
from foredraft.engine.drafter import Drafter
from foredraft.testing import compare, decode
from harness import adapter, draft_adapter, drafted


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


@pytest.mark.sample(6)
@pytest.mark.parametrize(("name", "composition"), in_turns(COMPOSITIONS))
def test_compositions_change_no_token(name: str, composition: str) -> None:
    """Five ragged rows in one batch, each in a mode of its own."""
    trace = run_mixed(name, COMPOSITIONS[composition](name))
    compare(drafted(trace), plain_mixed(name), f"{name}, {composition}, rows {row_modes(name)}")


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_compositions_are_both_right_and_wrong(composition: str) -> None:
    """Often enough to exercise both ways."""
    trace = decode(adapter("llama"), COMPOSITIONS[composition]("llama"), [(PROMPTS[1], MODES["greedy"])])
    num_tokens = MODES["greedy"].max_tokens
    assert 2 + num_tokens // 5 < trace.num_steps < 1 + num_tokens
