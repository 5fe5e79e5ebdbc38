"""One step makes one forward of the target, whatever the batch, and at most K + 1 of the drafter.

Counted from outside: by hooks on every module that torch runs, not by the library's own counters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from test_drafters import DRAFTERS
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import PreTrainedModel

from foredraft.config.engine import EngineConfig
from foredraft.config.sampling import SamplingParams
from foredraft.drafters.compose import FirstDrafter, UnionDrafter
from foredraft.drafters.lm.draft_model import DraftModelDrafter
from foredraft.engine.drafter import Drafter
from foredraft.engine.engine import Engine
from foredraft.methods.lengths import LengthPolicy
from foredraft.model.lm import CausalLM
from foredraft.testing import PROMPTS, perturbed, toy_model
from toys import VOCAB_SIZE, target

TARGET_LAYERS, DRAFTER_LAYERS = 2, 1


def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target and a drafter that can be told apart by their depth."""
    drafter = toy_model(VOCAB_SIZE)
    drafter.model.layers = drafter.model.layers[:DRAFTER_LAYERS]
    drafter.config.num_hidden_layers = DRAFTER_LAYERS
    drafter.config.layer_types = None
    return toy_model(VOCAB_SIZE), perturbed(drafter, 0.1)


@contextmanager
def counted(key: Callable[[Any], int] = lambda model: model.config.num_hidden_layers) -> Iterator[Counter[int]]:
    """Forwards of whole models inside the block, by number of layers."""
    counts: Counter[int] = Counter()

    def count(module: Any, _: Any) -> None:
        if isinstance(module, PreTrainedModel) and hasattr(module, "lm_head"):
            counts[key(module)] += 1

    handle = register_module_forward_pre_hook(count)
    try:
        yield counts
    finally:
        handle.remove()


def drafter_of(kind: str, model: PreTrainedModel, depth: int) -> Drafter:
    own: dict[str, Any] = {"target_vocab_size": VOCAB_SIZE, "policy": LengthPolicy(depth)}
    made: dict[str, Callable[[], Drafter]] = {
        "chain": lambda: DraftModelDrafter(CausalLM(model), **own),
        "tree": lambda: DraftModelDrafter(CausalLM(model), **own, num_branches=3),
    }
    for sign, composed in (("+", UnionDrafter), ("-then-", FirstDrafter)):
        if sign in kind:
            return composed([drafter_of(part, model, depth) for part in kind.split(sign)])
    return made[kind]() if kind in made else DRAFTERS[kind](depth)


KINDS = (
    *(("none", 1), ("ngram-tree", 4), ("nasd-tree", 4), ("jacobi", 6), ("lookahead", 3), ("suffix", 4)),
    *(("token-recycling", 4), ("rest", 4), ("chain", 1), ("chain", 5), ("tree", 3)),
    *(("ngram-then-token-recycling", 3), ("suffix+chain", 3), ("suffix-then-chain", 3)),
)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("kind", "depth", "batch_size", "temperature"),
    [
        pytest.param(*kind, *batch, marks=() if number % 2 == place else pytest.mark.full)
        for number, kind in enumerate(KINDS)
        for place, batch in enumerate(((1, 0.9), (16, 0.0)))
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


@pytest.mark.parametrize(("batch_size", "temperature"), [(5, 0.9), pytest.param(1, 0.0, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", ["layer-skip", "layer-skip-tree", "quantized-self", "sparse-kv", "rest+layer-skip"])
def test_a_step_runs_every_layer_of_the_target_once_when_it_drafts_for_itself(
    kind: str, batch_size: int, temperature: float
) -> None:
    """Target and variant are told apart by their modules: one shadow runs once, the other at most K times."""
    depth = 3
    engine = Engine(target(), drafter_of(kind, models()[1], depth))
    for i in range(batch_size):
        engine.add_request(PROMPTS[i % len(PROMPTS)], SamplingParams(max_tokens=12, temperature=temperature, seed=3))
    own, seen, num_draft_forwards = id(target().shadow), set(), 0
    while engine.has_unfinished:
        is_decoding = len(engine.decoding_rows) == engine.num_running > 0
        with counted(id) as counts:
            engine.step()
        seen |= set(counts)
        assert counts[own] == 1
        if is_decoding:
            assert counts.total() <= 1 + depth
        num_draft_forwards += counts.total() - 1
    assert len(seen) == 2
    assert num_draft_forwards > 0
