"""SWIFT: looking for a layer set while decoding changes no token, and puts back what it touches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_identity import PROMPTS

from drafting import layer_skip, swift
from foredraft.config.sampling import SamplingParams
from foredraft.drafters.none import EmptyDrafter
from foredraft.drafters.parts.layer_set import MAX_TRIALS, PATIENCE, LayerSet, SwiftSearch
from foredraft.drafters.selfdraft.layer_skip import SwiftDrafter
from foredraft.engine.engine import Engine
from foredraft.errors import ConfigError, ShapeError
from foredraft.llm import LLM
from foredraft.model.lm import CausalLM, Nodes
from foredraft.testing import compare, decode
from harness import buffers_of, drafted
from toys import VOCAB_SIZE
from toys import deep as target

REQUESTS = [
    ([token % VOCAB_SIZE for token in prompt], SamplingParams(max_tokens=40, temperature=temperature, seed=7))
    for prompt in PROMPTS
    for temperature in (0.0, 0.9)
]


@pytest.mark.parametrize("num_scored", [32, *(pytest.param(size, marks=pytest.mark.full) for size in (1, 4))])
def test_searching_changes_no_token(num_scored: int) -> None:
    """Greedy and sampled rows of different length in one batch, every step with a pass of another set."""
    lm, drafter = target(), swift(num_scored=num_scored)
    compare(drafted(decode(lm, drafter, REQUESTS)), decode(lm, EmptyDrafter(), REQUESTS), f"swift, C={num_scored}")
    assert drafter.num_scoring_passes > 3


def test_a_step_makes_one_target_forward_and_at_most_two_scoring_passes() -> None:
    lm, drafter = target(), swift(3)
    engine = Engine(lm, drafter)
    for prompt, params in REQUESTS[:3]:
        engine.add_request(prompt, params)
    most = 0
    while engine.has_unfinished:
        before = (lm.num_forwards, drafter.model.num_forwards, drafter.num_scoring_passes)
        engine.step()
        assert drafter.layer_set == drafter.search.best, "drafts go on with the best set after a trial"
        passes = drafter.num_scoring_passes - before[2]
        assert lm.num_forwards - before[0] == 1
        assert passes <= 2, "the candidate, and the set that it would replace"
        assert drafter.model.num_forwards - before[1] <= 3 + passes
        most = max(most, passes)
    assert most == 2
    assert 0 < drafter.search.num_trials < drafter.num_scoring_passes < 2 * drafter.search.num_trials


def test_the_score_is_the_share_of_tokens_that_the_set_would_have_drafted() -> None:
    """Equal to feeding the text to a model of that set, token by token, in a cache of its own keys and values."""
    lm, drafter = target(), swift(num_scored=6)
    engine = Engine(lm, drafter)
    (row,) = engine.add_request([3, 1, 4, 1, 5], SamplingParams(max_tokens=30, temperature=0.0))
    while row.num_output_tokens < 12:
        engine.step()
    layer_set = LayerSet((1, 2), (3,), 5)
    drafter.use(layer_set)
    length = engine.cache.lengths[0]
    before = engine.cache.export(0, length)
    score = drafter.score(row, engine.cache, 0)
    torch.testing.assert_close(engine.cache.export(0, length), before, atol=0, rtol=0)
    cache = lm.new_cache(1)
    lm.forward(Nodes.from_chains([row.token_ids[: length - 6]]), cache)
    cache.commit([range(length - 6)])
    right = 0
    for place in range(length - 6, length):
        logits = drafter.model.forward(Nodes.from_chains([[row.token_ids[place]]]), cache)
        cache.commit([range(1)])
        right += int(logits[0, -1].argmax()) == row.token_ids[place + 1]
    assert score == right / 6
    assert 0 < right < 6, "choose another set: this one says nothing"


def searching() -> tuple[Engine, SwiftDrafter, list[Any]]:
    """An engine in the middle of decoding two rows, one greedy and one sampled."""
    drafter = swift()
    engine = Engine(target(4), drafter)
    rows = [
        engine.add_request([3, 1, 4, i], SamplingParams(max_tokens=40, temperature=0.9 * i, seed=3))[0] for i in (0, 1)
    ]
    while min(row.num_output_tokens for row in rows) < 14:
        engine.step()
    return engine, drafter, rows


def test_the_search_scores_the_target_itself_as_faultless() -> None:
    """Of greedy and of sampled rows, in every place of the batch; and the cache is as it was."""
    engine, drafter, rows = searching()
    drafter.use(LayerSet())
    lengths = list(engine.cache.lengths)
    before = [engine.cache.export(slot, length) for slot, length in enumerate(lengths)]
    assert [drafter.score(row, engine.cache, slot) for slot, row in enumerate(rows)] == [1.0, 1.0]
    assert list(engine.cache.lengths) == lengths
    after = [engine.cache.export(slot, length) for slot, length in enumerate(lengths)]
    torch.testing.assert_close(after, before, atol=0, rtol=0)


def acceptance_rate(lm: CausalLM, layer_set: LayerSet) -> float:
    """Of drafts of length 2, on texts of their own."""
    drafter = layer_skip(2, layer_set=layer_set)
    engine = Engine(lm, drafter)
    params = SamplingParams(max_tokens=60, temperature=0.0)
    rows = [engine.add_request([60, first, 2], params)[0] for first in range(20, 30)]
    list(engine.run())
    drafted = sum(row.stats.num_draft_tokens for row in rows)
    return sum(row.stats.num_accepted_draft_tokens for row in rows) / drafted


@pytest.mark.full
def test_the_search_finds_better_sets_and_outlives_requests() -> None:
    lm, drafter = target(), swift(2, num_scored=16)
    decode(lm, drafter, [([1, 5, 9], SamplingParams(max_tokens=12, temperature=0.0))])
    assert drafter.search.num_trials == 0, "no row has generated enough"
    start = drafter.layer_set
    for first in range(4):
        decode(lm, drafter, [([first, 5, 9], SamplingParams(max_tokens=60, temperature=0.0))])
    assert drafter.search.num_trials > 60
    found = drafter.layer_set
    assert found == drafter.search.best
    assert not {0, 4} & {*found.attention, *found.mlp}
    assert acceptance_rate(lm, found) > acceptance_rate(lm, start) + 0.05


def test_the_start_is_every_other_layer_and_sizes_never_change() -> None:
    """Two layers leave nothing to search."""
    with pytest.raises(ConfigError, match="the model has only 2 layers"):
        SwiftSearch(2)
    search = SwiftSearch(6)
    assert search.best == LayerSet((1, 3), (1, 3), 6)
    sizes = set()
    for trial in range(60):
        sizes.add(len(search.candidate()))
        search.tell(0.1 + 0.001 * (trial % 7))
    assert sizes == {4}


def test_the_search_stops_when_it_is_good_enough_or_nothing_helps() -> None:
    good = SwiftSearch(6)
    good.candidate()
    good.tell(0.96)
    assert good.is_over
    stale = SwiftSearch(6)
    for _ in range(PATIENCE + 1):
        assert not stale.is_over
        stale.candidate()
        stale.tell(0.5)
    assert stale.is_over
    assert PATIENCE < MAX_TRIALS


def test_better_candidates_become_the_best() -> None:
    search = SwiftSearch(8, seed=3)
    wanted = {("attention", 2), ("attention", 5)}
    while not search.is_over and search.num_trials < 250:
        candidate = search.candidate()
        found = {("attention", i) for i in candidate.attention} & wanted
        search.tell(0.4 * len(found))
    assert set(search.best.attention) >= {2, 5}
    assert search.best_score == 0.8


def test_a_candidate_has_to_beat_the_best_set_on_the_same_tokens() -> None:
    """A text that repeats itself gives any set a high score, and must not bring in a worse one."""
    search = SwiftSearch(6)
    search.candidate()
    search.tell(0.5)
    start = search.best
    lucky = search.candidate()
    search.tell(0.8, lambda best: 0.9 if best == start else 0.0)
    assert search.best == start != lucky
    assert search.best_score == 0.9
    better = search.candidate()
    search.tell(0.92, lambda _: 0.7)
    assert search.best == better
    assert search.best_score == 0.92


def test_without_optuna_all_candidates_are_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    import foredraft.drafters.parts.layer_set as module

    monkeypatch.setattr(module, "find_spec", lambda _: None)
    search = SwiftSearch(6)
    for _ in range(80):
        before, candidate = search.best, search.candidate()
        changed = set(before.attention) ^ set(candidate.attention), set(before.mlp) ^ set(candidate.mlp)
        assert len(changed[0]) + len(changed[1]) in (0, 2)
        search.tell(0.5)


@pytest.mark.full
def test_the_users_set_is_where_the_search_begins() -> None:
    config = {"method": "layer_skip", "layer_search": "swift", "skipped_attention": [2], "skipped_mlp": [3]}
    prompt = {"prompt_token_ids": list(range(40, 60))}
    params = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)
    expected = LLM("zoo:tiny").generate([prompt], params)[0].outputs[0].token_ids
    llm = LLM("zoo:tiny", speculative_config=config)
    assert llm.generate([prompt], params)[0].outputs[0].token_ids == expected


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"exit_layer": 1}, "skips some but not all sublayers"),
        ({"skipped_attention": [0]}, "skips some but not all sublayers"),
        ({"skipped_attention": [9]}, "has 0..5"),
    ],
)
def test_what_the_search_cannot_begin_with_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("zoo:tiny", speculative_config={"method": "layer_skip", "layer_search": "swift", **config})


def test_kept_columns_come_back_also_after_an_error() -> None:
    lm = target()
    cache = lm.new_cache(2)
    lm.forward(Nodes.from_chains([[1, 2, 3, 4], [5, 6, 7, 8]]), cache)
    cache.commit([range(4), range(3)])
    before = [buffer.clone() for buffer in buffers_of(cache)]

    def overwrite() -> None:
        with cache.kept(1, 1, 3):
            assert cache.lengths == [4, 1]
            lm.forward(Nodes.from_chains([[9, 9]]), cache, first_row=1)
            assert not torch.equal(buffers_of(cache)[0], before[0])
            raise RuntimeError("in between")

    with pytest.raises(RuntimeError, match="in between"):
        overwrite()
    assert cache.lengths == [4, 3]
    assert all(torch.equal(old, new) for old, new in zip(before, buffers_of(cache), strict=True))
    with pytest.raises(ShapeError, match="has 3 columns"), cache.kept(1, 1, 4):
        pass
