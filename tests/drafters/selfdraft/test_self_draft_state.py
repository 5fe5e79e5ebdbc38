"""Self-drafting at its limit: a variant that leaves nothing out is the target, so every draft must be right.

A fault in the positions, masks, columns or rows of drafting changes no token, since verification protects them; here
it costs a step.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch

from architectures import VOCAB_SIZE
from drafting import layer_skip, swift
from foredraft.config.sampling import SamplingParams
from foredraft.drafters.parts.layer_set import LayerSet, quantized, run_once, skipping
from foredraft.drafters.selfdraft.layer_skip import SwiftDrafter
from foredraft.engine.engine import Engine
from foredraft.model.lm import CausalLM, Nodes
from foredraft.model.sublayers import SkippableLayers
from foredraft.testing import toy_model
from harness import adapter, random_ids
from toys import deep as target

SELF_DRAFTED = ("llama", "qwen3", "gemma2", "gemma3", "gpt2", "olmo2", "gpt-neox")
"""Grouped heads, norms of queries and keys, post-norms, windows, learned positions, parallel residuals."""
DEPTH = 3
nothing_left_out = partial(layer_skip, DEPTH, VOCAB_SIZE, layer_set=LayerSet())


@pytest.mark.parametrize(
    ("name", "num_branches"),
    [
        pytest.param(name, branches, marks=() if name == "llama" or branches == 1 + 2 * (i % 2) else pytest.mark.full)
        for i, name in enumerate(SELF_DRAFTED)
        for branches in (1, 3)
    ],
)
def test_a_variant_that_leaves_nothing_out_is_always_right(name: str, num_branches: int) -> None:
    """Ragged rows, greedy and sampled, that end at different steps: each takes ceil(tokens / (K + 1)) steps."""
    engine = Engine(adapter(name), nothing_left_out(num_branches=num_branches))
    sizes = (4, 12, 9, 20)
    rows = [
        engine.add_request(
            random_ids(5 + 4 * i, i), SamplingParams(max_tokens=size, temperature=0.9 * (i % 2), seed=i)
        )[0]
        for i, size in enumerate(sizes)
    ]
    list(engine.run())
    assert [row.stats.num_steps for row in rows] == [-(-size // (DEPTH + 1)) for size in sizes]


@pytest.mark.parametrize("num_branches", [1, 2])
def test_a_row_that_may_not_draft_takes_nobodys_place(num_branches: int) -> None:
    """Rows lie in the target's cache where they are, whether they draft or not."""
    drafter = nothing_left_out(num_branches=num_branches)
    engine = Engine(adapter("llama"), drafter)
    rows = [
        engine.add_request(random_ids(6 + i, i), SamplingParams(max_tokens=30, temperature=0.0))[0] for i in range(3)
    ]
    while not all(row.num_output_tokens for row in rows):
        engine.step()
    lengths = list(engine.cache.lengths)
    everybody = drafter.propose(rows, [DEPTH] * 3)
    for absent in range(3):
        budgets = [0 if i == absent else DEPTH for i in range(3)]
        some = drafter.propose(rows, budgets)
        assert [len(tree) for tree in some][absent] == 1
        assert [some[i].tokens for i in range(3) if i != absent] == [
            everybody[i].tokens for i in range(3) if i != absent
        ]
    assert list(engine.cache.lengths) == lengths


# -- variants ------------------------------------------------------------------------------------------------------


def logits_of(lm: CausalLM) -> torch.Tensor:
    return lm.forward(Nodes.from_chains([[5, 9, 2, 60]]), lm.new_cache(1))[0]


def test_what_was_left_out_is_put_back_before_something_else_is() -> None:
    lm, parts = CausalLM(toy_model(64), execution="eager"), []

    def edit(variant: CausalLM, _: Any) -> None:
        parts.append(SkippableLayers(variant.layers, lambda: run_once(variant)))

    variant = lm.variant("changing", edit)
    parts[0].leave_out([0], [1])
    parts[0].leave_out([1], [])
    torch.testing.assert_close(logits_of(variant), logits_of(skipping(lm, LayerSet((1,), ()))))
    parts[0].leave_out([], [])
    torch.testing.assert_close(logits_of(variant), logits_of(lm))


def test_four_bit_weights_and_a_layer_set_work_together() -> None:
    """As if the layers were not there."""
    model = toy_model(64, dtype=torch.float32)
    shorter = copy.deepcopy(model)
    shorter.model.layers = shorter.model.layers[:1]
    shorter.config.num_hidden_layers, shorter.config.layer_types = 1, None
    both = quantized(CausalLM(model, execution="eager"), 32, LayerSet.exit_at(1, 2))
    alone = quantized(CausalLM(shorter, execution="eager"), 32, LayerSet())
    torch.testing.assert_close(logits_of(both), logits_of(alone))


# -- the search ----------------------------------------------------------------------------------------------------


def searching(num_layers: int = 4, num_scored: int = 4) -> tuple[Engine, SwiftDrafter, list[Any]]:
    """An engine in the middle of decoding two rows, one greedy and one sampled."""
    drafter = swift(num_scored=num_scored)
    engine = Engine(target(num_layers), drafter)
    rows = [
        engine.add_request([3, 1, 4, i], SamplingParams(max_tokens=40, temperature=0.9 * i, seed=3))[0] for i in (0, 1)
    ]
    while min(row.num_output_tokens for row in rows) < 14:
        engine.step()
    return engine, drafter, rows


def test_the_search_scores_the_target_itself_as_faultless() -> None:
    """Of greedy and of sampled rows, in every place of the batch; and the cache is as it was."""
    engine, drafter, rows = searching()
    drafter._use(LayerSet())
    before = [buffer.clone() for buffer in engine.cache._buffers()]
    lengths = list(engine.cache.lengths)
    assert [drafter._score(row, engine.cache, slot) for slot, row in enumerate(rows)] == [1.0, 1.0]
    assert list(engine.cache.lengths) == lengths
    for slot, length in enumerate(lengths):
        for old, new in zip(before, engine.cache._buffers(), strict=True):
            assert torch.equal(old[slot, :, :length], new[slot, :, :length])


def test_drafting_goes_on_with_the_best_set_after_a_trial() -> None:
    engine, drafter, rows = searching()
    search = drafter.search
    for _ in range(6):
        drafter._try_one(search, rows)
        assert drafter.layer_set == search.best
        fresh = skipping(engine.target, search.best)
        torch.testing.assert_close(logits_of(drafter.model), logits_of(fresh))
