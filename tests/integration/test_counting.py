"""One step makes one forward of the target, whatever the batch, and at most K + 1 of the drafter.

Counted from outside: by hooks on every module that torch runs, not by the library's own counters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import PreTrainedModel

from foretoken.drafters.base import Drafter
from foretoken.drafters.draft_model import DraftModelDrafter
from foretoken.drafters.jacobi import JacobiDrafter
from foretoken.drafters.lookahead import LookaheadDrafter
from foretoken.drafters.nasd import NasdDrafter
from foretoken.drafters.ngram import NGramDrafter
from foretoken.drafters.none import EmptyDrafter
from foretoken.drafters.suffix import SuffixDrafter
from foretoken.drafters.token_recycling import TokenRecyclingDrafter
from foretoken.engine.config import EngineConfig
from foretoken.engine.engine import Engine
from foretoken.engine.model import CausalLM
from foretoken.params import SamplingParams
from foretoken.testing import PROMPTS, perturbed, toy_model

VOCAB_SIZE = 64
TARGET_LAYERS, DRAFTER_LAYERS = 2, 1


def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target and a drafter that can be told apart by their depth."""
    drafter = toy_model(VOCAB_SIZE)
    drafter.model.layers = drafter.model.layers[:DRAFTER_LAYERS]
    drafter.config.num_hidden_layers = DRAFTER_LAYERS
    drafter.config.layer_types = None
    return toy_model(VOCAB_SIZE), perturbed(drafter, 0.1)


@contextmanager
def counted() -> Iterator[Counter[int]]:
    """Forwards of whole models inside the block, by number of layers."""
    counts: Counter[int] = Counter()

    def count(module: Any, _: Any) -> None:
        if isinstance(module, PreTrainedModel) and hasattr(module, "lm_head"):
            counts[module.config.num_hidden_layers] += 1

    handle = register_module_forward_pre_hook(count)
    try:
        yield counts
    finally:
        handle.remove()


def drafter_of(kind: str, model: PreTrainedModel, depth: int) -> Drafter:
    if kind == "none":
        return EmptyDrafter()
    if kind == "ngram":
        return NGramDrafter(depth, prompt_lookup_min=1, num_candidates=2)
    if kind == "nasd":
        return NasdDrafter(depth, num_branches=2)
    if kind == "jacobi":
        return JacobiDrafter(depth)
    if kind == "lookahead":
        return LookaheadDrafter(depth, window_size=4, guess_set_size=3)
    if kind == "suffix":
        return SuffixDrafter(depth, min_token_prob=0.0)
    if kind == "token_recycling":
        return TokenRecyclingDrafter(VOCAB_SIZE, depth, max_nodes=16)
    return DraftModelDrafter(
        CausalLM(model),
        target_vocab_size=VOCAB_SIZE,
        num_speculative_tokens=depth,
        num_branches=3 if kind == "tree" else 1,
    )


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("batch_size", [1, 5, 16])
@pytest.mark.parametrize(
    ("kind", "depth"),
    [
        ("none", 1),
        ("ngram", 4),
        ("nasd", 4),
        ("jacobi", 6),
        ("lookahead", 3),
        ("suffix", 4),
        ("token_recycling", 4),
        ("chain", 1),
        ("chain", 5),
        ("tree", 3),
    ],
)
def test_a_step_makes_one_target_forward_and_few_draft_forwards(
    kind: str, depth: int, batch_size: int, temperature: float
) -> None:
    target_model, draft_model = models()
    drafter = drafter_of(kind, draft_model, depth)
    engine = Engine(CausalLM(target_model), drafter, EngineConfig(max_num_seqs=16))
    params = SamplingParams(max_tokens=12, temperature=temperature, seed=3)
    for i in range(batch_size):
        engine.add_request(PROMPTS[i % len(PROMPTS)], params)
    most = 0
    while engine.has_unfinished:
        is_decoding = len(engine.decoding_rows) == engine.num_running > 0
        with counted() as counts:
            engine.step()
        assert counts[TARGET_LAYERS] == 1
        if is_decoding:
            assert counts[DRAFTER_LAYERS] <= depth + 1
        most = max(most, counts[DRAFTER_LAYERS])
    assert (most > 0) == (kind in ("chain", "tree"))  # the hooks do see the drafter
