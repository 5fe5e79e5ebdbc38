"""Heads of EAGLE in the engine: what they draft is what the published algorithm says, and their cache never drifts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from covering import pairwise
from eagle_heads import HandsOn, Unrolled, logits_of, model, random_head, streams_of, target, trained
from foredraft.config.engine import EngineConfig
from foredraft.config.sampling import SamplingParams
from foredraft.drafters.heads import eagle
from foredraft.drafters.heads.eagle import EagleDrafter
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.drafter import DraftSize
from foredraft.engine.engine import Engine
from foredraft.engine.features import RowFeatures
from foredraft.engine.row import Row
from foredraft.heads.eagle import EagleHead
from foredraft.heads.layers import AttentionContext
from foredraft.methods.lengths import LengthPolicy
from foredraft.model.cache.prefixes import PrefixStore
from foredraft.model.lm import CausalLM
from foredraft.model.nodes import Nodes
from foredraft.testing import GREEDY, PROMPTS, SAMPLED, compare, decode
from foredraft.tree import DraftTree
from mutants import Apply, with_result, wrapped

NUM_NODES, NUM_BRANCHES = 9, 3


def drafter(head: EagleHead, depth: int, lm: CausalLM | None = None, **growth: Any) -> EagleDrafter:
    lm = lm or target()
    given = {"num_branches": NUM_BRANCHES, "reranks": True, "max_nodes": NUM_NODES, **growth}
    return EagleDrafter(head, lm, target_vocab_size=lm.vocab_size, policy=LengthPolicy(depth), **given)


def chains(head: EagleHead, depth: int) -> EagleDrafter:
    return drafter(head, depth, num_branches=1, reranks=False, max_nodes=None)


@pytest.mark.sample(1)
@pytest.mark.parametrize(*pairwise(generation=[1, 3], make=[drafter, chains], params=[GREEDY, SAMPLED]))
def test_drafts_of_a_head_that_knows_the_text_are_accepted_to_their_end(
    generation: int, make: Callable[..., EagleDrafter], params: SamplingParams
) -> None:
    """24 tokens, 6 per step at best: a shift, a wrong position or a wrong mask would show at the deeper levels."""
    engine = Engine(target(), make(trained(generation), 5))
    rows = [engine.add_request(prompt, replace(params, max_tokens=24))[0] for prompt in (PROMPTS[0], PROMPTS[4])]
    list(engine.run())
    for row in rows:
        assert row.stats.num_steps <= 6
        assert row.stats.num_accepted_draft_tokens >= 18


def test_a_step_runs_the_head_once_per_level_for_all_rows_together() -> None:
    """Five ragged rows: one forward of the target; of the head one per level after the first, and one to take it in."""
    head = trained(1)
    calls = []
    handle = head.register_forward_hook(lambda *_: calls.append(1))
    try:
        engine = Engine(target(), drafter(head, 4))
        rows = [engine.add_request(prompt, replace(SAMPLED, max_tokens=60))[0] for prompt in PROMPTS]
        while not all(row.output_ids for row in rows):
            engine.step()
        for _ in range(3):
            calls.clear()
            before = target().num_forwards
            engine.step()
            assert target().num_forwards == before + 1
            assert len(calls) == 4
    finally:
        handle.remove()


# -- against a head that is run from scratch -----------------------------------------------------------------------


def from_scratch(head: EagleHead, text: Sequence[int], path: Sequence[int] = ()) -> tuple[Unrolled, torch.Tensor]:
    """The cache of a text and of drafted tokens behind it, entry by entry, and the last output (H,).

    Of a text of n tokens, the last one pending, there are n - 1 entries.
    """
    ids = torch.tensor([list(text)])
    features = head.features(streams_of(ids, head, head.dtype))[:, :-1]
    embedding = model().get_input_embeddings().weight
    cache = Unrolled()

    def fed(tokens: torch.Tensor, features: torch.Tensor, first: int) -> torch.Tensor:
        count = tokens.shape[1]
        positions = torch.arange(first, first + count)[None]
        mask = torch.ones(count, first + count, dtype=torch.bool).tril(first)[None, None]
        return head(embedding[tokens], features, AttentionContext(*head.place(positions), mask, cache))

    output = fed(ids[:, 1:], features, 0)[:, -1:]
    for i, token in enumerate(path):
        output = fed(torch.tensor([[token]]), output, len(text) - 1 + i)
    return cache, output[0, -1]


def pool(head: EagleHead, row: Row, depth: int, sharpness: float) -> dict[tuple[int, ...], float]:
    """Every candidate of EAGLE-2 by its path, with its score, in the order in which they come up."""
    found: dict[tuple[int, ...], float] = {}
    frontier: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        level: list[tuple[float, tuple[int, ...]]] = []
        for path in frontier:
            found_logits = logits_of(head, from_scratch(head, row.token_ids, path)[1])
            distribution = torch.log_softmax(sharpness * found_logits.float(), dim=-1)
            best = sorted(enumerate(distribution.tolist()), key=lambda candidate: -candidate[1])[:NUM_BRANCHES]
            for column, score in best:
                token = column if head.vocabulary is None else int(head.vocabulary.target_ids[column])
                level.append((found.get(path, 0.0) + score, (*path, token)))
        level.sort(key=lambda candidate: -candidate[0])
        found |= {path: score for score, path in level}
        frontier = [path for _, path in level[:NUM_BRANCHES]]
    return found


class Watched(HandsOn):
    """Hands everything on, and checks drafts and entries after every call."""

    def __init__(self, drafter: EagleDrafter, depth: int, checks_trees: bool = True) -> None:
        super().__init__(drafter)
        self.depth, self.checks_trees = depth, checks_trees
        self.num_trees = self.num_entries = 0

    def propose(self, rows: Sequence[Row], budgets: Sequence[DraftSize]) -> list[DraftTree]:
        for row in rows:
            self.check_entries(row)
        trees = self.drafter.propose(rows, budgets)
        for row, tree, budget in zip(rows, trees, budgets, strict=True):
            self.check_entries(row)
            if self.checks_trees and row.sampler.is_greedy and len(row.token_ids) > 1:
                self.check_tree(row, tree, min(self.depth, budget))
        return trees

    def observe(self, rows: Sequence[Row], results: Any) -> None:
        self.drafter.observe(rows, results)
        for row in rows:
            self.check_entries(row)

    def check_entries(self, row: Row) -> None:
        """The cache of a row equals one that is made from scratch."""
        states = self.drafter
        num_entries = len(row.token_ids) - 1
        if num_entries == 0:
            assert not states.has_state(row)
            return
        slot = row.slot
        assert states.cache.lengths[slot] == num_entries
        cache, output = from_scratch(states.head, row.token_ids)
        torch.testing.assert_close(states.last_of([row])[0], output, rtol=0, atol=1e-9)
        for layer, (keys, values) in cache.states.items():
            own = states.cache.layers[layer]
            torch.testing.assert_close(own.keys[slot, :, :num_entries], keys[0], rtol=0, atol=1e-9)
            torch.testing.assert_close(own.values[slot, :, :num_entries], values[0], rtol=0, atol=1e-9)
        self.num_entries += 1

    def check_tree(self, row: Row, tree: DraftTree, depth: int) -> None:
        """A draft holds the best candidates of the pool."""
        candidates = pool(self.drafter.head, row, depth, self.drafter.growth.sharpness) if depth > 0 else {}
        best = sorted(candidates, key=lambda path: -candidates[path])[: NUM_NODES - 1]
        assert {tree.path_tokens(node) for node in range(1, len(tree))} == set(best)
        self.num_trees += 1


def run_watched(
    head: EagleHead, depth: int = 3, max_tokens: int = 8, checks_trees: bool = True, **config: Any
) -> tuple[Watched, list[Row]]:
    """Five ragged rows, greedy and sampled ones, two at a time, prompts in chunks of three."""
    watched = Watched(drafter(head, depth), depth, checks_trees)
    engine = Engine(target(), watched, EngineConfig(**{"max_num_seqs": 2, "prefill_chunk_size": 3, **config}))
    with torch.inference_mode():
        rows = [
            row
            for i, prompt in enumerate(PROMPTS)
            for row in engine.add_request(
                prompt, replace((GREEDY, SAMPLED)[i % 2], max_tokens=max_tokens, n=3 if i == 3 else 1)
            )
        ]
        list(engine.run())
    return watched, rows


VARIANTS: dict[str, Callable[[], EagleHead]] = {
    "eagle": lambda: random_head(1, has_fc_bias=True),
    "eagle-with-norms": lambda: random_head(1, embed_norm=True, input_norm=True, output_norm=True),
    "eagle3": lambda: random_head(3),
    "eagle3-speculators": lambda: random_head(3, norm_before_residual=True, norm_before_fc=True, num_layers=2),
    "eagle3.1": lambda: random_head(3, fc_norm=True, norm_output=True),
    "eagle3-last-hidden": lambda: random_head(3, streams=(2,)),
    "trained": lambda: trained(3),
}


ALWAYS = ("eagle-with-norms", "eagle3-speculators", "eagle3.1")
"""Variants that have all between them."""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.full) for name in VARIANTS]
)
def test_drafts_and_cache_are_those_of_a_head_that_is_run_from_scratch(name: str) -> None:
    watched, _ = run_watched(VARIANTS[name]())
    assert watched.num_trees >= 5
    assert watched.num_entries >= 40


# -- faults --------------------------------------------------------------------------------------------------------


def stale_features(observe: Any) -> Any:
    """Drafts begin at what was known a step ago."""

    def wrong(self: EagleDrafter, rows: Any, results: Any) -> None:
        before = [row.state[self].last if self in row.state else None for row in rows]
        observe(self, rows, results)
        for row, last in zip(rows, before, strict=True):
            if last is not None:
                row.state[self].last = last

    return wrong


def siblings_seen(masks: Any) -> Any:
    """Drafted nodes see all that were fed before them."""

    class Open(masks):
        def visible(self, nodes: Nodes, starts: torch.Tensor, columns: int, counts: Any = None) -> torch.Tensor:
            return super().visible(replace(nodes, ancestors=None, num_fed=0), starts + nodes.num_fed, columns, counts)

    return Open


FAULTS: dict[str, Apply] = {
    "drafted nodes see all that were fed before them": wrapped(eagle.masks, "Masks", siblings_seen),
    "drafts begin at what was known a step ago": wrapped(EagleDrafter, "observe", stale_features),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them changes a token, whatever is drafted: `always-wrong` and hopeless heads conform."""
    FAULTS[fault](monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        run_watched(random_head(3))


# -- prefixes, budgets, what is not a number -----------------------------------------------------------------------


def trees_of(engine: Engine, prompt: Sequence[int], seen: list[DraftTree]) -> list[DraftTree]:
    """The drafts of one request."""
    seen.clear()
    engine.add_request(prompt, replace(GREEDY, max_tokens=9))
    list(engine.run())
    return list(seen)


class Recording(HandsOn):
    """Hands everything on, and remembers drafts and how much of prompts was read."""

    def __init__(self, drafter: EagleDrafter) -> None:
        super().__init__(drafter)
        self.trees: list[DraftTree] = []
        self.num_read = 0

    def start(self, rows: Sequence[Row], chunks: Any) -> None:
        self.num_read += sum(chunk.num_tokens for chunk in chunks)
        self.drafter.start(rows, chunks)

    def propose(self, rows: Sequence[Row], budgets: Sequence[DraftSize]) -> list[DraftTree]:
        trees = self.drafter.propose(rows, budgets)
        self.trees += trees
        return trees


@pytest.mark.parametrize("generation", [3, pytest.param(1, marks=pytest.mark.full)])
def test_a_prompt_that_begins_like_an_earlier_text_is_not_read_again(generation: int) -> None:
    """As in a chat: the second turn begins with the first and its answer; drafts are those of a fresh drafter."""
    first = PROMPTS[0]
    recording = Recording(drafter(trained(generation), 4))
    engine = Engine(target(), recording, prefixes=PrefixStore(4))
    trees_of(engine, first, recording.trees)
    answer = decode(target(), EmptyDrafter(), [(first, replace(GREEDY, max_tokens=9))]).outputs["0.0"]
    second = (*first, *answer, 7, 8, 9)
    recording.num_read = 0
    again = trees_of(engine, second, recording.trees)
    assert recording.num_read <= len(second) - 1 - len(first)  # the last step of the first turn was not observed
    fresh = Recording(drafter(trained(generation), 4))
    assert [(tree.tokens, tree.parents) for tree in again] == [
        (tree.tokens, tree.parents) for tree in trees_of(Engine(target(), fresh), second, fresh.trees)
    ]


@pytest.mark.parametrize("generation", [3, pytest.param(1, marks=pytest.mark.full)])
def test_a_system_prompt_is_taken_over_beside_plain_decoding(generation: int) -> None:
    """Another engine leaves the same texts, of which the head knows nothing; drafts, and the chances that the head
    gives them, are those of an engine that reads every prompt whole."""
    store, recording, whole = PrefixStore(4), *(Recording(drafter(trained(generation), 4)) for _ in range(2))
    engine, plain = Engine(target(), recording, prefixes=store), Engine(target(), EmptyDrafter(), prefixes=store)
    reading = Engine(target(), whole)
    shared = len(PROMPTS[0]) + len(PROMPTS[4])
    for turn in range(3):
        prompt = (*PROMPTS[0], *PROMPTS[4], 7 + turn, 8, 9)
        trees_of(plain, prompt, [])
        recording.num_read = 0
        again, expected = trees_of(engine, prompt, recording.trees), trees_of(reading, prompt, whole.trees)
        assert recording.num_read == len(prompt) - 1 - (shared - 1 if turn else 0)
        assert [(tree.tokens, tree.parents) for tree in again] == [(tree.tokens, tree.parents) for tree in expected]
        for ours, theirs in zip(again, expected, strict=True):
            assert ours.scores == pytest.approx(theirs.scores, abs=1e-5)


def test_another_head_recalls_nothing() -> None:
    store = PrefixStore(4)
    for head in (trained(1), random_head(1)):
        recording = Recording(drafter(head, 4))
        trees_of(Engine(target(), recording, prefixes=store), PROMPTS[0], recording.trees)
        assert recording.num_read == len(PROMPTS[0]) - 1


def test_features_that_are_not_numbers_spoil_no_other_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache stays finite, so that whoever gets the slot next drafts as ever."""
    own = drafter(trained(3), 4)
    engine = Engine(target(), own, EngineConfig(max_num_seqs=1))
    with monkeypatch.context() as patch:
        with_result(RowFeatures, "layer_input", lambda found, _: found * torch.nan)(patch)
        engine.add_request(PROMPTS[0], replace(GREEDY, max_tokens=8))
        list(engine.run())
    assert all(bool(layer.keys.isfinite().all()) for layer in own.cache.layers)
    (row,) = engine.add_request(PROMPTS[0], replace(GREEDY, max_tokens=24))
    list(engine.run())
    assert row.stats.num_steps <= 6


def test_a_head_that_says_nothing_is_followed_by_plain_steps() -> None:
    head = random_head(1)
    with torch.no_grad():
        head.fc.weight.fill_(torch.nan)
    trace = decode(target(), drafter(head, 4), [(PROMPTS[0], replace(GREEDY, max_tokens=5))])
    compare(trace, decode(target(), EmptyDrafter(), [(PROMPTS[0], replace(GREEDY, max_tokens=5))]), "NaN weights")
