"""The target as its own drafter over a part of its own cache: what it attends to, and that no token changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from test_identity import PROMPTS, plain_mixed, row_modes, run_mixed
from transformers import DynamicCache

from architectures import VOCAB_SIZE, in_turns, target_model
from compiled_models import build
from drafting import made, sparse_kv, view
from foredraft import LLM
from foredraft.config.sampling import SamplingParams
from foredraft.drafters.compose import UnionDrafter
from foredraft.drafters.parts.growth import GrowingDraft
from foredraft.drafters.parts.layer_set import LayerSet
from foredraft.drafters.parts.self_draft import SelfDrafter
from foredraft.engine.drafter import Drafter
from foredraft.engine.engine import Engine
from foredraft.engine.row import Row
from foredraft.engine.stopping import StopChecker
from foredraft.errors import ConfigError, ShapeError, UnsupportedModelError
from foredraft.model.cache.views import ViewCache
from foredraft.model.lm import CausalLM, Nodes
from foredraft.model.support import cache_argument
from foredraft.model.votes import SnapKVScorer
from foredraft.native.build import cpp_compiler
from foredraft.native.library import library
from foredraft.sampling.distribution import Sampler
from foredraft.testing import compare, toy_model
from foredraft.tree import DraftTree
from harness import adapter, buffers_of, first_attention, random_ids, tolerance

sparse = partial(sparse_kv, vocab_size=VOCAB_SIZE)
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "streaming": sparse,
    "streaming-tree": lambda: sparse(num_branches=3),
    "streaming-quantized-and-skipped": lambda: sparse(layer_set=LayerSet((1,), (0,)), group_size=32),
    "snapkv": lambda: sparse("snapkv"),
    "snapkv-tree": lambda: sparse("snapkv", num_branches=3),
    "union": lambda: UnionDrafter([made("ngram", 4, prompt_lookup_min=1), sparse("snapkv", num_branches=2)]),
}
OWN_ATTENTION = ("gemma2", "gpt-oss", "falcon", "falcon-multi-query")


def everywhere(drafters: Iterable[str]) -> list[Any]:
    """Architectures with one that can run on them by turns, and in the whole matrix with all of these."""
    found = []
    for pair in in_turns(drafters):
        name, drafter = pair.values
        if name not in OWN_ATTENTION:
            always = name == "llama" or (name in ("gemma3", "gpt2") and drafter in ("snapkv-tree", "streaming"))
            found.append(pytest.param(name, drafter, marks=() if always else pytest.mark.full))
        elif "streaming" in drafter:
            found.append(
                pytest.param(name, drafter, marks=pytest.mark.slow if drafter == "streaming" else pytest.mark.full)
            )
    return found


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "drafter"), everywhere(DRAFTERS))
def test_a_part_of_the_cache_changes_no_token(name: str, drafter: str) -> None:
    """Five ragged rows in one batch, greedy and sampled, float64, most of them longer than the budget."""
    compare(run_mixed(name, DRAFTERS[drafter]()), plain_mixed(name), f"{name}, {drafter}, rows {row_modes(name)}")


# -- the view ------------------------------------------------------------------------------------------------------


def filled(lm: CausalLM, texts: list[list[int]]) -> Any:
    """A cache that holds ragged texts."""
    cache = lm.new_cache(len(texts), capacity=64)
    lm.forward(Nodes.from_chains(texts), cache, keep=slice(0, 0))
    cache.commit([range(len(text)) for text in texts])
    return cache


def bind(drafter: SelfDrafter, lm: CausalLM, source: Any) -> None:
    """Give a drafter the target's cache, and its own as many rows, as an engine does."""
    caches = [own.cache for own in drafter.needs(lm, source).caches]
    for cache in caches:
        cache.add_rows(source.num_rows)


def kept_columns(length: int, budget: int, sinks: int, *, slides: bool) -> list[int]:
    if length <= budget:
        return list(range(length))
    sinks = 0 if slides else sinks
    return [*range(sinks), *range(length - budget + sinks, length)]


def model_over_kept_keys(model: Any, lm: CausalLM, text: list[int], tree: DraftTree, budget: int) -> torch.Tensor:
    """Logits of every node by `transformers` alone: each path over the kept keys, at the positions of the text."""
    rows = []
    for node in range(len(tree)):
        path = [tree.tokens[0], *tree.path_tokens(node)]
        whole, kept = DynamicCache(), DynamicCache()
        model(torch.tensor([text]), **{cache_argument(model): whole})
        for index, (layer, kind) in enumerate(zip(whole.layers, lm.layer_types, strict=True)):
            columns = kept_columns(len(text), budget, 1, slides=kind == "sliding_attention")
            kept.update(layer.keys[:, :, columns], layer.values[:, :, columns], index)
        size = min(budget, len(text))
        mask = torch.ones(len(path), size + len(path), dtype=torch.bool).tril(size)[None, None]
        positions = torch.arange(len(text), len(text) + len(path))[None]
        output = model(
            torch.tensor([path]), position_ids=positions, attention_mask=mask, **{cache_argument(model): kept}
        )
        rows.append(output.logits[0, -1])
    return torch.stack(rows)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "execution"), [("llama", "eager"), ("gpt2", "eager"), ("llama", "packed"), ("llama", "compiled")]
)
@torch.inference_mode()
def test_streaming_is_the_model_over_the_kept_keys_at_their_positions(name: str, execution: str) -> None:
    """Ragged rows, chains and trees, in every execution; the whole cache gives something else.

    Compiled in single precision, in which graphs of this architecture are made once for all tests.
    """
    if execution != "eager" and library() is None:
        pytest.skip("nothing can be packed here")
    if execution == "compiled" and cpp_compiler() is None:
        pytest.skip("no C++ compiler")
    is_compiled = execution == "compiled"
    model = build(name, torch.float32) if is_compiled else target_model(name, "sdpa")
    bound = 1e-4 if is_compiled else 1e-9
    lm = CausalLM(model, execution=execution)
    assert (lm.execution.compiled is not None) == is_compiled
    texts = [random_ids(30, 1), random_ids(5, 2), random_ids(19, 3)]
    chosen = view()
    drafter = sparse(view=chosen)
    source = filled(lm, texts)
    bind(drafter, lm, source)
    chosen.follow([draft_of(i, text) for i, text in enumerate(texts)])
    assert chosen.cache.lengths == [8, 5, 8]
    for trees in (
        [DraftTree.root(3)] * 3,
        [DraftTree.chain(3, (4, 5)), DraftTree.root(7), DraftTree((7, 8, 9, 4), (-1, 0, 0, 1))],
    ):
        logits = drafter.model.forward(Nodes.from_trees(trees), chosen.cache)
        whole = drafter.model.forward(Nodes.from_trees(trees), source)
        for i, (text, tree) in enumerate(zip(texts, trees, strict=True)):
            expected = model_over_kept_keys(model, lm, text, tree, 8)
            torch.testing.assert_close(logits[i, : len(tree)], expected, atol=bound, rtol=bound)
            assert ((whole[i, : len(tree)] - expected).abs().max() > 1e-3) == (len(text) > 8)


@torch.inference_mode()
def test_sliding_layers_keep_the_last_columns() -> None:
    """Window 8 of gemma3 over a budget of 8: the first tokens of a draft see the last columns of the window alone."""
    lm, model = adapter("gemma3"), target_model("gemma3", first_attention("gemma3"))
    text = random_ids(30, 1)
    chosen = view()
    drafter = sparse(view=chosen)
    bind(drafter, lm, filled(lm, [text]))
    chosen.follow([draft_of(0, text)])
    logits = drafter.model.forward(Nodes.from_trees([DraftTree.root(3)]), chosen.cache)
    window = model.config.sliding_window
    whole, kept = DynamicCache(), DynamicCache()
    model(torch.tensor([text]), **{cache_argument(model): whole})
    masks = {}
    for index, (layer, kind) in enumerate(zip(whole.layers, lm.layer_types, strict=True)):
        columns = kept_columns(30, 8, 1, slides=kind == "sliding_attention")
        kept.update(layer.keys[:, :, columns], layer.values[:, :, columns], index)
        seen = torch.ones(1, 9, dtype=torch.bool)
        if kind == "sliding_attention":
            seen[0, : max(0, 9 - window)] = False
        masks[kind] = seen[None, None]
    expected = model(
        torch.tensor([[3]]), past_key_values=kept, position_ids=torch.tensor([[30]]), attention_mask=masks
    ).logits[0]
    torch.testing.assert_close(logits[0], expected, atol=tolerance("gemma3"), rtol=1e-7)


def draft_of(row_id: int, text: list[int]) -> GrowingDraft:
    """A draft that is about to grow after a text and the pending token 3."""
    params = SamplingParams(temperature=0.0)
    sampler = Sampler(params, vocab_size=VOCAB_SIZE)
    checker = StopChecker(params, (), len(text), 100)
    row = Row(row_id, "0", 0, [*text, 3], len(text), params, 7, sampler, 100, checker, slot=row_id)
    return GrowingDraft(row, cap=4)


def naive_choice(attentions: torch.Tensor, budget: int, sinks: int, window: int, num_kv_heads: int) -> list[set[int]]:
    """Columns that every head of the cache keeps, from the attention (H_q, T, T) of a whole text, by loops."""
    num_heads, length, _ = attentions.shape
    group = num_heads // num_kv_heads
    chosen = []
    for head in range(num_kv_heads):
        votes = [
            sum(float(attentions[g, query, column]) for g in range(head * group, (head + 1) * group)
                for query in range(length - window, length))
            for column in range(length - window)
        ]  # fmt: skip
        pooled = [sum(votes[max(0, i - 2) : i + 3]) / 5 for i in range(len(votes))]
        ranked = sorted(range(sinks, len(pooled)), key=lambda i: -pooled[i])
        chosen.append({*range(sinks), *ranked[: budget - window - sinks], *range(length - window, length)})
    return chosen


def columns_of(kept: torch.Tensor, whole: torch.Tensor, length: int, size: int) -> list[list[int]]:
    """Where the first keys of a row of a view lie in the whole row, head by head."""
    return [
        [int((keys[:length] == key).all(-1).nonzero()[0, 0]) for key in chosen[:size]]
        for keys, chosen in zip(whole, kept, strict=True)
    ]


@pytest.mark.parametrize("execution", ["eager", "packed"])
@torch.inference_mode()
def test_snapkv_keeps_what_a_naive_reference_keeps(execution: str) -> None:
    """The columns of every layer and head, found again by their keys; and the target's cache stays as it was."""
    if execution == "packed" and library() is None:
        pytest.skip("nothing can be packed here")
    model = target_model("llama", "eager")
    lm = CausalLM(target_model("llama", "sdpa"), execution=execution)
    text = random_ids(40, 5)
    source = filled(lm, [random_ids(6, 6), text])
    before = [buffer.clone() for buffer in buffers_of(source)]
    chosen = view("snapkv")
    drafter = sparse(view=chosen)
    bind(drafter, lm, source)
    forwards = lm.num_forwards
    chosen.follow([draft_of(0, random_ids(6, 6)), draft_of(1, text)])
    assert all(torch.equal(old, new) for old, new in zip(before, buffers_of(source), strict=True))
    assert source.lengths == [6, 40]
    assert lm.num_forwards == forwards
    attentions = model(torch.tensor([text]), output_attentions=True).attentions
    differ = 0
    for layer, attention in enumerate(attentions):
        whole, kept = source.layers[layer].keys[1], chosen.cache.layers[layer].keys[1]
        expected = naive_choice(attention[0], 8, 1, 3, whole.shape[0])
        found = columns_of(kept, whole, 40, 8)
        assert found == [sorted(columns) for columns in expected]
        differ += sum(of_head != [0, *range(33, 40)] for of_head in found)
    assert differ  # heads vote for more than the last columns


def test_the_view_stays_small_and_is_chosen_anew() -> None:
    """Whatever the length, a row of the view holds the budget and at most as many tokens as are to be kept besides."""
    lm = adapter("llama")
    chosen = view()
    engine = Engine(lm, sparse(depth=2, view=chosen))
    (row,) = engine.add_request(PROMPTS[4], SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True))
    held = []
    while engine.has_unfinished:
        engine.step()
        if not row.is_finished and row.num_output_tokens > 1:
            held.append(chosen.cache.lengths[0])
            assert chosen.cache.end(0) <= engine.cache.lengths[0]
    assert max(held) <= 8 + 3
    assert min(held) == 8
    assert chosen.num_choices >= 60 // (3 + 3)
    assert len(chosen.cache.lengths) == len(chosen.cache.offsets) == 0


def test_columns_are_chosen_by_one_forward_over_the_tokens_that_vote() -> None:
    """Besides those of the target and of the drafts."""
    target = CausalLM(toy_model(64), execution="eager")
    chosen = view("snapkv")
    drafter = sparse_kv(depth=3, view=chosen)
    engine = Engine(target, drafter)
    for prompt in PROMPTS[:3]:
        engine.add_request([token % 64 for token in prompt], SamplingParams(max_tokens=20, temperature=0.0))
    while engine.has_unfinished:
        before = (target.num_forwards, drafter.model.num_forwards)
        engine.step()
        assert target.num_forwards - before[0] == 1
        assert drafter.model.num_forwards - before[1] <= 3
    assert chosen.scorer is not None
    assert chosen.scorer.model.num_forwards == chosen.num_choices > 0


def test_a_budget_that_holds_the_whole_text_accepts_everything() -> None:
    """Then the drafter is the target: 13 tokens at K = 3 are four steps of 4 at most, greedy and sampled."""
    lm = adapter("llama")
    for temperature in (0.0, 0.9):
        engine = Engine(lm, sparse(depth=3, budget=64))
        params = SamplingParams(max_tokens=16, temperature=temperature, seed=4, ignore_eos=True)
        rows = [engine.add_request(prompt, params)[0] for prompt in PROMPTS]
        list(engine.run())
        assert all(row.stats.num_accepted_draft_tokens == row.stats.num_draft_tokens == 12 for row in rows)


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kv_budget": 4}, "kv_budget is 4 columns and kv_sinks is 4, which leaves no column"),
        ({"kv_budget": 16, "kv_sinks": 20}, "kv_budget is 16 columns and kv_sinks is 20"),
        ({"kv_selector": "snapkv", "kv_budget": 30}, "kv_sinks=4 and kv_window=32 use all"),
        ({"kv_selector": "snapkv", "kv_budget": 64, "kv_window": 64}, "kv_window=64 use all"),
        ({"kv_window": 16}, "no meaning for kv_selector='streaming'"),
        ({"quantize_draft": True, "quantization_group_size": 48}, "choose one of 32"),
        ({"skipped_attention": [9]}, "contains the layers"),
    ],
)
def test_options_that_make_no_sense_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(toy_model(64), speculative_config={"method": "sparse_kv", **config})


def test_models_with_an_attention_of_their_own_are_refused_by_name() -> None:
    lm = CausalLM(target_model("llama", "eager"), execution="eager")
    with pytest.raises(UnsupportedModelError, match=r"the llama model has its own attention code.*'streaming'"):
        SnapKVScorer(lm)
    config = {"method": "sparse_kv", "kv_selector": "snapkv"}
    with pytest.raises(UnsupportedModelError, match="its own attention code"):
        LLM(target_model("llama", "eager"), speculative_config=config)


def test_views_refuse_gaps_layers_of_different_sizes_and_what_they_do_not_hold() -> None:
    lm = adapter("llama")
    source = filled(lm, [random_ids(12, 1)])
    cache = ViewCache(lm.num_layers, num_rows=1)
    with pytest.raises(ShapeError, match=r"keep \[2, 3\] columns"):
        cache.choose(0, source, [(range(2),), (range(3),)])
    with pytest.raises(ShapeError, match="ends at 0, not at 3"):
        cache.append(source, {0: range(3, 5)})
    cache.offsets[0] = 5
    with pytest.raises(ShapeError, match="has 0 columns, but the other cache lacks 5"):
        cache.give_back(0, lm.new_cache(1))
