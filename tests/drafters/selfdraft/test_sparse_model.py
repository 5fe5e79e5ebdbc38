"""A small model that drafts over a part of its own cache: what it attends to and costs, and that no token changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_identity import PROMPTS
from test_sparse_kv import columns_of, draft_of, model_over_kept_keys, naive_choice

import toys
from architectures import VOCAB_SIZE, draft_model, target_model
from drafting import begin, made, view
from drafting import sparse_model as small
from foredraft import LLM
from foredraft.config.speculative import SpeculativeConfig
from foredraft.drafters.compose import UnionDrafter
from foredraft.drafters.lm.draft_model import DraftModelDrafter
from foredraft.drafters.parts.self_draft import SelfDrafter
from foredraft.drafters.parts.sparse_view import SparseView
from foredraft.engine.engine import Engine, EngineConfig
from foredraft.errors import ConfigError, UnsupportedModelError
from foredraft.model.cache.prefixes import PrefixStore
from foredraft.model.cache.ragged import CacheGroup
from foredraft.model.lm import CausalLM, Nodes
from foredraft.testing import GREEDY, decode, perturbed, toy_model
from foredraft.tree import DraftTree
from harness import draft_adapter, first_attention, random_ids

TOY = 64


# -- the view ------------------------------------------------------------------------------------------------------


def started(drafter: DraftModelDrafter, texts: list[list[int]]) -> list[Any]:
    """Drafts that are about to grow, one for each text, whose prompts the drafter has read."""
    drafts = [draft_of(i, text) for i, text in enumerate(texts)]
    for draft in drafts:
        draft.row.token_ids[-1] = 3
    begin(drafter, [draft.row for draft in drafts])
    return drafts


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@torch.inference_mode()
def test_streaming_is_the_small_model_over_the_kept_keys_at_their_positions(name: str) -> None:
    """Ragged rows, by `transformers` alone; the whole cache gives something else."""
    lm, model = draft_adapter(name), draft_model(name, first_attention(name))
    drafter, whole = small(lm), DraftModelDrafter(lm, target_vocab_size=VOCAB_SIZE)
    texts = [random_ids(30, 1), random_ids(5, 2), random_ids(19, 3)]
    found = drafter.open(started(drafter, texts))
    over_all = whole.open(started(whole, texts))
    for i, text in enumerate(texts):
        expected = model_over_kept_keys(model, lm, text, DraftTree.root(3), 8)
        torch.testing.assert_close(found[i][None], expected, atol=1e-9, rtol=1e-9)
        assert ((over_all[i] - expected[0]).abs().max() > 1e-3) == (len(text) > 8)


@torch.inference_mode()
def test_snapkv_keeps_what_a_naive_reference_keeps_of_a_small_model() -> None:
    """Columns of every layer and head of rows that have moved since they were read, found again by their keys."""
    lm, model = draft_adapter("qwen2"), draft_model("qwen2", "eager")
    chosen = view("snapkv")
    drafter, texts = small(lm, view=chosen), [random_ids(6, 6), random_ids(40, 5), random_ids(25, 7)]
    drafts = started(drafter, texts)
    CacheGroup([drafter.cache, chosen.cache]).swap(0, 2)
    drafts[0].row.slot, drafts[2].row.slot = 2, 0
    drafts.reverse()
    drafter.open(drafts)
    for slot, draft in enumerate(drafts):
        text = draft.row.token_ids[:-1]
        attentions = model(torch.tensor([text]), output_attentions=True).attentions
        for layer, attention in enumerate(attentions):
            whole, kept = drafter.cache.layers[layer].keys[slot], chosen.cache.layers[layer].keys[slot]
            expected = naive_choice(attention[0], 8, 1, 3, whole.shape[0])
            wanted = [sorted(columns) if len(text) > 8 else list(range(len(text))) for columns in expected]
            assert columns_of(kept, whole, len(text), min(8, len(text))) == wanted


class Watched(DraftModelDrafter):
    """Notes over how many columns its forwards run, and its own rows after every step."""

    def __init__(self, *args: Any, view: SparseView, **options: Any) -> None:
        super().__init__(*args, view=view, **options)
        self.seen = view.cache
        self.widest = 0
        self.held: list[int] = []
        forward = self.model.forward

        def watched(nodes: Any, cache: Any, **others: Any) -> Any:
            found = forward(nodes, cache, **others)
            if cache is self.seen:
                self.widest = max(self.widest, cache.window.view_length)
            return found

        self.model.forward = watched

    def propose(self, rows: Any, budgets: Any) -> Any:
        found = super().propose(rows, budgets)
        self.held += [self.seen.row_lengths(0, len(rows))[0]]
        return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("selector", ["streaming", "snapkv"])
def test_what_a_step_reads_does_not_grow_with_the_text(selector: str) -> None:
    """Over 150 tokens: forwards run over the budget, what is kept besides, and a draft; choices come seldom."""
    own = CausalLM(perturbed(toy_model(TOY), 0.1, seed=2), execution="eager")
    chosen = view(selector)
    drafter = small(own, depth=3, cls=Watched, view=chosen)
    engine = Engine(toys.target(), drafter)
    (row,) = engine.add_request(random_ids(30, 1, TOY), replace(GREEDY, max_tokens=120, ignore_eos=True))
    list(engine.run())
    assert row.stats.num_accepted_draft_tokens > 0
    assert drafter.widest <= 8 + 3 + 3 + 4
    assert max(drafter.held) <= 8 + 3 + 3 + 4
    assert 120 // (3 + 4) <= chosen.num_choices <= 120 // 3
    assert drafter.cache.num_rows == drafter.seen.num_rows == 0


def test_what_was_missed_is_read_in_pieces_over_the_view() -> None:
    """A drafter that was not asked for 60 tokens reads them by `kv_refresh`, and keeps all of them when it is asked."""
    own = CausalLM(perturbed(toy_model(TOY), 0.1, seed=2), execution="eager")
    chosen = view()
    drafter = small(own, depth=3, cls=Watched, view=chosen)
    text = random_ids(100, 3, TOY)
    (draft,) = started(drafter, [[token % VOCAB_SIZE for token in text[:40]]])
    draft.row.token_ids[:] = text[:41]
    drafter.open([draft])
    draft.row.token_ids[:] = text
    count = own.num_forwards
    drafter.open([draft])
    assert own.num_forwards - count == 20  # 59 unseen tokens: 19 times 3, and the last 2 with their logits
    assert drafter.widest <= 8 + 2 * 3
    draft.row.state[chosen].ended(draft.row, is_kept=True)
    assert drafter.cache.lengths == [100]
    states = drafter.cache.export(0, 100)
    assert all(pair is not None and pair[0].shape[1] == 100 for pair in states)
    pair = states[0]
    fresh = own.new_cache(1)
    own.forward(Nodes.from_chains([text]), fresh)
    torch.testing.assert_close(pair[0], fresh.layers[0].keys[0, :, :100])  # keys of the first layer see no other token


def test_a_step_makes_one_target_forward_and_at_most_k_of_the_small_model() -> None:
    """Prompts are read as the target reads them: as many forwards as chunks."""
    for selector in ("streaming", "snapkv"):
        target, own = CausalLM(toy_model(TOY), execution="eager"), CausalLM(toy_model(TOY), execution="eager")
        engine = Engine(target, small(own, selector, 3), EngineConfig(prefill_chunk_size=16))
        for length in (60, 10, 45):
            engine.add_request(random_ids(length, length, TOY), replace(GREEDY, max_tokens=20))
        while engine.has_unfinished:
            before = (target.num_forwards, own.num_forwards, engine.profile.num_prefill_tokens)
            engine.step()
            is_reading = engine.profile.num_prefill_tokens > before[2]
            assert target.num_forwards - before[0] == 1
            assert own.num_forwards - before[1] <= (1 if is_reading else 3)


def test_a_budget_that_holds_the_whole_text_accepts_everything() -> None:
    """The small model is the target, and K = 3: 13 tokens after the first chunk are four steps of 4 at most."""
    drafter = small(toys.small(0.0), depth=3, view=view("streaming", 64))
    engine = Engine(toys.target(), drafter)
    rows = [
        engine.add_request([t % TOY for t in p], replace(GREEDY, max_tokens=16, ignore_eos=True))[0] for p in PROMPTS
    ]
    list(engine.run())
    assert all(row.stats.num_accepted_draft_tokens == row.stats.num_draft_tokens == 12 for row in rows)


def test_a_text_that_goes_on_finds_what_was_read_over_the_view() -> None:
    """Two turns with kept prefixes: the second reads its own text only, and says what it says without any."""
    store, own = PrefixStore(2), CausalLM(perturbed(toy_model(TOY), 0.1, seed=2), execution="eager")
    engine = Engine(toys.target(), small(own), prefixes=store)
    (row,) = engine.add_request(random_ids(40, 1, TOY), replace(GREEDY, max_tokens=30, ignore_eos=True))
    list(engine.run())
    text = [*row.token_ids, *random_ids(5, 2, TOY)]
    (again,) = engine.add_request(text, replace(GREEDY, max_tokens=20, ignore_eos=True))
    engine.step()
    drafter = engine.drafter
    assert isinstance(drafter, DraftModelDrafter)
    assert again.num_cached_tokens >= 60
    assert drafter.cache.lengths[again.slot] == len(text) - 1
    list(engine.run())
    plain = decode(toys.target(), small(own), [(tuple(text), replace(GREEDY, max_tokens=20, ignore_eos=True))])
    assert plain.outputs["0.0"] == tuple(again.output_ids)


def test_a_text_that_is_longer_than_the_small_models_context_goes_on_without_drafts() -> None:
    """48 positions under 100 tokens; another row, which fits, is drafted for all along."""
    narrow = toy_model(TOY, max_position_embeddings=48)
    own = CausalLM(narrow, execution="eager")
    prompts = [random_ids(30, 1, TOY), random_ids(60, 2, TOY), random_ids(4, 3, TOY)]
    requests = [(tuple(prompt), replace(GREEDY, max_tokens=40, ignore_eos=True)) for prompt in prompts]
    found = decode(toys.target(), small(own, "snapkv"), requests)
    assert found.outputs == decode(toys.target(), made("ngram", 1), requests).outputs


# -- options -------------------------------------------------------------------------------------------------------


def test_a_model_is_named_and_may_be_left_out() -> None:
    other = perturbed(toy_model(TOY), 0.1, seed=2)
    named = LLM(toy_model(TOY), speculative_config={"method": "sparse_kv", "model": other, "kv_budget": 16})
    assert named.drafting.model is not None
    assert isinstance(named.drafting.new_drafter(), DraftModelDrafter)
    alone = LLM("zoo:tiny", speculative_config={"method": "sparse_kv", "kv_budget": 16})
    assert alone.drafting.model is None  # though it brings a drafter of its own along
    assert isinstance(alone.drafting.new_drafter(), SelfDrafter)
    prompts: Any = [{"prompt_token_ids": random_ids(50, 1, TOY)}]
    plain = LLM(toy_model(TOY)).generate(prompts, GREEDY)[0].outputs[0].token_ids
    assert named.generate(prompts, GREEDY)[0].outputs[0].token_ids == plain


def test_beside_a_method_that_needs_a_model_it_drafts_with_the_target_unless_told_otherwise() -> None:
    beside = SpeculativeConfig.parse({"method": "sparse_kv+draft_model", "model": "zoo:tiny"})
    assert [part.model for part in beside.parts] == ["zoo:tiny", "zoo:tiny"]
    llm = LLM("zoo:tiny", speculative_config="sparse_kv+draft_model")
    drafter = llm.drafting.new_drafter()
    assert isinstance(drafter, UnionDrafter)
    assert [(type(part), part.name) for part in drafter.parts] == [
        (SelfDrafter, "sparse_kv"),
        (DraftModelDrafter, "draft_model"),
    ]
    assert SpeculativeConfig.parse({"model": "zoo:tiny"}).method == "draft_model"


@pytest.mark.parametrize("key", [{"quantize_draft": True}, {"skipped_attention": [1]}])
def test_forms_of_the_target_are_refused_beside_another_model(key: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="turn the target into a drafter, and model names another drafter"):
        SpeculativeConfig.parse({"method": "sparse_kv", "model": "zoo:tiny", **key})


def test_small_models_with_an_attention_of_their_own_are_refused_by_name() -> None:
    """Their target's attention plays no part."""
    config = {"method": "sparse_kv", "model": target_model("llama", "eager"), "kv_selector": "snapkv"}
    with pytest.raises(UnsupportedModelError, match="its own attention code"):
        LLM(target_model("llama", "sdpa"), speculative_config=config)
