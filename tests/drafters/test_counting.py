"""One step makes one forward of the target, whatever the batch, and at most K + 1 of the drafter.

Counted from outside: by hooks on every module that torch runs, not by the library's own counters.
"""

from __future__ import annotations

from atexit import register
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import PreTrainedModel

from foretoken.config.engine import EngineConfig
from foretoken.config.sampling import SamplingParams
from foretoken.drafters.compose.first import FirstDrafter
from foretoken.drafters.compose.union import UnionDrafter
from foretoken.drafters.iterate.jacobi import JacobiDrafter
from foretoken.drafters.iterate.lookahead import LookaheadDrafter
from foretoken.drafters.lengths import Fixed
from foretoken.drafters.lm.draft_model import DraftModelDrafter
from foretoken.drafters.lookup.nasd import NasdDrafter
from foretoken.drafters.lookup.ngram import NGramDrafter
from foretoken.drafters.lookup.rest import RestDrafter
from foretoken.drafters.lookup.suffix import SuffixDrafter
from foretoken.drafters.lookup.token_recycling import TokenRecyclingDrafter
from foretoken.drafters.none import EmptyDrafter
from foretoken.drafters.parts.layer_set import LayerSet
from foretoken.drafters.selfdraft.layer_skip import LayerSkipDrafter
from foretoken.drafters.selfdraft.quantized_self import QuantizedSelfDrafter
from foretoken.engine.drafter import Drafter
from foretoken.engine.engine import Engine
from foretoken.model.lm import CausalLM
from foretoken.retrieval.datastore import Datastore
from foretoken.retrieval.documents import from_tokens
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


@cache
def datastore() -> Datastore:
    folder = mkdtemp()
    register(rmtree, folder)
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(0, VOCAB_SIZE, (40, 30), generator=generator).tolist()
    from_tokens([*PROMPTS, *texts], folder, vocab_size=VOCAB_SIZE)
    return Datastore.open(folder)


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
    if kind == "rest":
        return RestDrafter(datastore(), depth)
    if kind == "ngram>token_recycling":
        parts = [NGramDrafter(depth, prompt_lookup_min=1), TokenRecyclingDrafter(VOCAB_SIZE, depth, max_nodes=8)]
        return FirstDrafter(parts)
    if kind in ("suffix+chain", "suffix>chain"):
        composed = UnionDrafter if "+" in kind else FirstDrafter
        return composed([SuffixDrafter(depth, min_token_prob=0.0), drafter_of("chain", model, depth)])
    if kind == "rest+layer_skip":
        return UnionDrafter([RestDrafter(datastore(), depth), drafter_of("layer_skip", model, depth)])
    if kind == "layer_skip":
        return LayerSkipDrafter(LayerSet((1,), ()), target_vocab_size=VOCAB_SIZE, policy=Fixed(depth))
    if kind == "layer_skip_tree":
        return LayerSkipDrafter(LayerSet((1,), ()), target_vocab_size=VOCAB_SIZE, policy=Fixed(depth), num_branches=2)
    if kind == "quantized_self":
        return QuantizedSelfDrafter(target_vocab_size=VOCAB_SIZE, policy=Fixed(depth))
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
        ("rest", 4),
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
    assert (most > 0) == ("chain" in kind or kind == "tree")  # the hooks do see the drafter


@pytest.mark.parametrize("kind", ["ngram>token_recycling", "suffix+chain", "suffix>chain"])
def test_compositions_make_the_forwards_of_their_parts(kind: str) -> None:
    test_a_step_makes_one_target_forward_and_few_draft_forwards(kind, depth=3, batch_size=5, temperature=0.9)


@pytest.mark.parametrize(("batch_size", "temperature"), [(1, 0.0), (5, 0.9)])
@pytest.mark.parametrize("kind", ["layer_skip", "layer_skip_tree", "quantized_self", "rest+layer_skip"])
def test_a_step_runs_every_layer_of_the_target_once_when_it_drafts_for_itself(
    kind: str, batch_size: int, temperature: float
) -> None:
    """Target and variant are told apart by their modules: one shadow runs once, the other at most K times."""
    depth = 3
    target = CausalLM(toy_model(VOCAB_SIZE), execution="eager")
    engine = Engine(target, drafter_of(kind, models()[1], depth))
    for i in range(batch_size):
        engine.add_request(PROMPTS[i % len(PROMPTS)], SamplingParams(max_tokens=12, temperature=temperature, seed=3))
    counts: Counter[int] = Counter()

    def count(module: Any, _: Any) -> None:
        if isinstance(module, PreTrainedModel) and hasattr(module, "lm_head"):
            counts[id(module)] += 1

    handle = register_module_forward_pre_hook(count)
    own, seen, num_draft_forwards = id(target._shadow), set(), 0
    try:
        while engine.has_unfinished:
            is_decoding = len(engine.decoding_rows) == engine.num_running > 0
            counts.clear()
            engine.step()
            seen |= set(counts)
            assert counts[own] == 1
            if is_decoding:
                assert counts.total() <= 1 + depth
            num_draft_forwards += counts.total() - 1
    finally:
        handle.remove()
    assert len(seen) == 2
    assert num_draft_forwards > 0
