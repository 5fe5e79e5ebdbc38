"""The target as its own drafter: layers left out, or 4-bit weights, over the target's own cache."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_identity import MODES, PROMPTS, plain, plain_mixed, row_modes, run, run_mixed

from architectures import ARCHITECTURES, VOCAB_SIZE, in_turns
from drafting import SKIPPED, layer_skip, quantized_self
from foredraft.config.engine import EngineConfig
from foredraft.config.sampling import SamplingParams
from foredraft.drafters.parts.layer_set import LayerSet, quantized, run_once, skipping
from foredraft.drafters.parts.self_draft import SelfDrafter
from foredraft.engine.engine import Engine
from foredraft.errors import ConfigError
from foredraft.llm import LLM
from foredraft.model.execution.forwards import replacement
from foredraft.model.execution.packing import PackedLinear, packed_products
from foredraft.model.lm import CausalLM, Nodes
from foredraft.model.sublayers import SkippableLayers, sublayers
from foredraft.native.codes import Codes
from foredraft.testing import compare, decode, toy_model
from harness import adapter, drafted, random_ids

IDS = [5, 9, 2, 60]
DRAFTERS: dict[str, Callable[[], SelfDrafter]] = {
    "layer-skip-chain": lambda: layer_skip(4, VOCAB_SIZE),
    "layer-skip-tree": lambda: layer_skip(4, VOCAB_SIZE, num_branches=3),
    "early-exit": lambda: layer_skip(3, VOCAB_SIZE, layer_set=LayerSet.exit_at(1, 2)),
    "quantized-chain": lambda: quantized_self(4, VOCAB_SIZE),
    "quantized-tree": lambda: quantized_self(4, VOCAB_SIZE, num_branches=3),
    "quantized-and-skipped": lambda: quantized_self(4, VOCAB_SIZE, layer_set=SKIPPED),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize(("name", "drafter"), in_turns(DRAFTERS))
def test_self_drafting_changes_no_token(name: str, drafter: str) -> None:
    """Five ragged rows in one batch, every architecture, every mode, float64."""
    trace = run_mixed(name, DRAFTERS[drafter]())
    compare(drafted(trace), plain_mixed(name), f"{name}, {drafter}, rows {row_modes(name)}")


@pytest.mark.full
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_self_drafting_changes_no_token_in_any_mode(name: str, drafter: str) -> None:
    """The whole product: five rows of one mode, in some of which drafts are accepted."""
    traces = {mode: run(name, DRAFTERS[drafter](), mode) for mode in MODES}
    for mode, trace in traces.items():
        compare(trace, plain(name, mode), f"{name}, {drafter}, {mode}")
    assert any(trace.num_accepted for trace in traces.values()), "no draft token was accepted"


@pytest.mark.sample(1)
@pytest.mark.parametrize("acceptance", ["standard", "block"])
def test_self_drafters_sample_under_the_rejection_rules(acceptance: str) -> None:
    """Drafts are accepted and rejected, and the run ends in good order; the rule's distribution is tested elsewhere."""
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=5)
    drafter = layer_skip(4, VOCAB_SIZE, acceptance=acceptance)
    engine = Engine(adapter("llama"), drafter, EngineConfig(acceptance=acceptance))
    rows = [engine.add_request(prompt, params)[0] for prompt in PROMPTS]
    list(engine.run())
    assert all(len(row.output_ids) == 40 for row in rows)
    accepted = sum(row.stats.num_accepted_draft_tokens for row in rows)
    assert 0 < accepted < sum(row.stats.num_draft_tokens for row in rows)


# -- at its limit: a variant that leaves nothing out is the target, so every draft must be right ---------------------

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


# -- the variants themselves ---------------------------------------------------------------------------------------


def logits_of(lm: CausalLM, tokens: list[int]) -> torch.Tensor:
    return lm.forward(Nodes.from_chains([tokens]), lm.new_cache(1))[0]


@pytest.mark.parametrize("execution", ["eager", "packed"])
def test_early_exit_is_the_model_without_its_last_layers(execution: str) -> None:
    model = toy_model(64, dtype=torch.float32)
    shorter = copy.deepcopy(model)
    shorter.model.layers = shorter.model.layers[:1]
    variant = skipping(CausalLM(model, execution=execution), LayerSet.exit_at(1, len(model.model.layers)))
    expected = shorter(torch.tensor([IDS]), use_cache=False).logits[0]
    torch.testing.assert_close(logits_of(variant, IDS), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.sample(6)
@pytest.mark.parametrize("branch", ["attention", "mlp"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3", "gpt2", "olmo2", "gpt-neox", "opt", "falcon"])
def test_a_skipped_branch_adds_nothing(name: str, branch: str) -> None:
    """Equal to a model whose branch ends in zero weights, which changes nothing but what the branch adds."""
    model = ARCHITECTURES[name].build(ARCHITECTURES[name].attention[0])
    silent = copy.deepcopy(model)
    lm = CausalLM(model, execution="eager")
    variant = skipping(lm, LayerSet((1,), ()) if branch == "attention" else LayerSet((), (1,)))
    silence(silent, 1, branch)
    expected = silent(torch.tensor([IDS]), use_cache=False).logits[0]
    torch.testing.assert_close(logits_of(variant, IDS), expected, atol=1e-9, rtol=1e-9)
    assert (logits_of(lm, IDS) - expected).abs().max() > 1e-3


def test_what_was_left_out_is_put_back_before_something_else_is() -> None:
    lm, parts = CausalLM(toy_model(64), execution="eager"), []

    def edit(variant: CausalLM, _: Any) -> None:
        parts.append(SkippableLayers(variant.layers, lambda: run_once(variant)))

    variant = lm.variant("changing", edit)
    parts[0].leave_out([0], [1])
    parts[0].leave_out([1], [])
    torch.testing.assert_close(logits_of(variant, IDS), logits_of(skipping(lm, LayerSet((1,), ())), IDS))
    parts[0].leave_out([], [])
    torch.testing.assert_close(logits_of(variant, IDS), logits_of(lm, IDS))


def test_four_bit_weights_and_a_layer_set_work_together() -> None:
    """As if the layers were not there."""
    model = toy_model(64, dtype=torch.float32)
    shorter = copy.deepcopy(model)
    shorter.model.layers = shorter.model.layers[:1]
    shorter.config.num_hidden_layers, shorter.config.layer_types = 1, None
    both = quantized(CausalLM(model, execution="eager"), 32, LayerSet.exit_at(1, 2))
    alone = quantized(CausalLM(shorter, execution="eager"), 32, LayerSet())
    torch.testing.assert_close(logits_of(both, IDS), logits_of(alone, IDS))


ENDS = {
    "attention": ("o_proj", "c_proj", "dense", "out_proj"),
    "mlp": ("down_proj", "c_proj", "dense_4h_to_h", "fc2"),
}
"""Names of the last matrix of a branch."""


def silence(model: Any, layer: int, branch: str) -> None:
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 2)
    changed = 0
    for path, module in layers[layer].named_modules():
        is_attention = "attn" in path or "attention" in path
        if path.split(".")[-1] in ENDS[branch] and is_attention == (branch == "attention"):
            for parameter in module.parameters():
                parameter.data.zero_()
                changed += 1
    assert changed


def test_the_users_model_and_its_other_users_see_nothing() -> None:
    model = toy_model(64)
    ids = torch.tensor([IDS])
    before, forwards = model(ids).logits.clone(), [vars(module).get("forward") for module in model.modules()]
    target = CausalLM(model, execution="eager")
    drafter = layer_skip(3, 64)
    engine = Engine(target, drafter)
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=8, temperature=0.0))
    engine.step()

    def fail(**_: Any) -> None:
        raise RuntimeError("in the middle of a draft")

    drafter.model.execution.run = fail
    with pytest.raises(RuntimeError, match="middle of a draft"):
        engine.step()
    assert torch.equal(model(ids).logits, before)
    assert [vars(module).get("forward") for module in model.modules()] == forwards
    other = decode(target, layer_skip(3, 64), [([1, 2, 3], SamplingParams(max_tokens=8, temperature=0.0))])
    assert len(other.outputs["0.0"]) == 8


# -- 4-bit weights -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group_size", [32, 64])
def test_four_bit_weights_are_the_nearest_of_sixteen_levels(group_size: int) -> None:
    weight = torch.randn(32, 128, generator=torch.Generator().manual_seed(0))
    dense = Codes.rounded(weight, 4, group_size, has_zeros=True).dense()
    groups = weight.view(32, -1, group_size)
    step = (groups.amax(-1) - groups.amin(-1)) / 15
    error = (dense - weight).view(32, -1, group_size).abs()
    assert bool((error <= step[..., None] * 0.501 + 1e-6).all())  # scales are in half precision
    assert float(error.max()) > 0.0


def test_released_weights_are_quantised_from_their_packed_copies() -> None:
    """A model that the library loaded keeps packed weights only."""
    model = toy_model(64, dtype=torch.float32)
    kept = quantized(CausalLM(copy.deepcopy(model), execution="eager"), 32, LayerSet())
    lm = CausalLM(model, execution="packed", release_originals=True)
    torch.testing.assert_close(
        logits_of(quantized(lm, 32, LayerSet()), [5, 9]), logits_of(kept, [5, 9]), atol=0.1, rtol=0.1
    )


def test_the_output_embedding_keeps_its_weights_unless_asked() -> None:
    """Its rounding alone cost more agreement than that of all layers: 0.82 of the drafted tokens instead of 0.91."""
    lm = CausalLM(toy_model(64, dtype=torch.float32), execution="eager")
    heads = {}
    for with_head in (False, True):
        variant = quantized(lm, 32, LayerSet(), with_head=with_head)
        heads[with_head] = type(replacement(variant.shadow.get_output_embeddings()))
        assert len(packed_products(variant.shadow)) == 12 + with_head
    assert heads == {False: type(None), True: PackedLinear}


# -- by name, and refusals -----------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "config",
    [
        {"method": "layer_skip", "exit_layer": 4, "length_policy": "fixed", "num_speculative_tokens": 2},
        {"method": "layer_skip", "skipped_attention": [2, 1], "length_policy_mode": "paper"},
        {"method": "qspec", "skipped_mlp": [2], "quantization_group_size": 64},
    ],
)
def test_self_drafting_is_chosen_by_name_on_the_zoo(config: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.0)
    prompt = {"prompt_token_ids": list(range(40, 60))}
    plain = LLM("zoo:tiny")
    expected = plain.generate([prompt], params)[0].outputs[0].token_ids
    (output,) = plain.with_speculative_config(config).generate([prompt], params)
    assert output.outputs[0].token_ids == expected
    assert output.metrics.speculative_decoding["num_draft_tokens"] > 0


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "layer_skip", "skipped_attention": [1, 6]}, r"layers \[6\], and .* has 0\.\.5"),
        ({"method": "layer_skip", "exit_layer": 6}, "exit_layer is 6"),
        ({"method": "layer_skip", "exit_layer": 2, "skipped_mlp": [1]}, "exclude each other"),
        ({"method": "layer_skip", "layer_set": "/nowhere/set.json"}, "which does not exist"),
        ({"method": "quantized_self", "quantization_group_size": 48}, "choose one of 32"),
    ],
)
def test_wrong_layer_sets_and_groups_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("zoo:tiny", speculative_config=config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ('{"format": "foredraft-layer-set"}', "skipped_attention"),
        ('{"format": "foredraft-layer-set", "skipped_attention": [1.7], "skipped_mlp": []}', "has 1.7, not a whole"),
        ('{"format": "foredraft-layer-set", "skipped_attention": [true], "skipped_mlp": []}', "has True, not a whole"),
        ('{"format": "foredraft-layer-set", "skipped_attention": "12", "skipped_mlp": []}', "is '12', not a list"),
        ('[{"format": "foredraft-layer-set"}]', "not a foredraft layer set file"),
    ],
)
def test_damaged_layer_sets_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "set.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        LayerSet.load(path)


def test_layer_sets_are_kept_and_belong_to_a_depth(tmp_path: Path) -> None:
    path = tmp_path / "set.json"
    layer_set = LayerSet((0, 3), (1,), 6, {"trials": 9})
    layer_set.save(path)
    assert LayerSet.load(path) == layer_set
    assert LayerSet.load(path).details == {"trials": 9}
    with pytest.raises(ConfigError, match="for a model of 6 layers, and toy has 2"):
        replace(layer_set).check(2, "toy")


def test_a_model_without_a_layer_set_is_searched_for_one() -> None:
    """The name alone was refused, unlike that of every other method that needs neither training nor another model."""
    model = toy_model(64, num_hidden_layers=4)
    llm = LLM(model, speculative_config={"method": "layer_skip", "length_policy": "fixed"})
    params = SamplingParams(temperature=0, max_tokens=12)
    (output,), (plain,) = (each.generate([IDS], params) for each in (llm, LLM(model)))
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    assert output.metrics.speculative_decoding["num_draft_tokens"] > 0


def test_an_mlp_that_knows_its_layer_is_no_attention() -> None:
    """HunYuan's does, and was refused as a layer of two attentions."""
    model = toy_model(64)
    for index, layer in enumerate(model.model.layers):
        layer.mlp.layer_idx = index
    layer = model.model.layers[0]
    assert sublayers(layer) == (layer.self_attn, (layer.mlp,))


def test_a_model_of_two_layers_asks_for_a_set() -> None:
    with pytest.raises(ConfigError, match="needs a set of layers to skip"):
        LLM(toy_model(64), speculative_config={"method": "layer_skip"})
