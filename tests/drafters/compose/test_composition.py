"""Several drafters as one: merging, calibration, fall-through, and what every part is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafting import Says
from foredraft.config.sampling import SamplingParams
from foredraft.config.speculative import SpeculativeConfig
from foredraft.drafters.compose import FirstDrafter, UnionDrafter, merged
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.acceptance_model import FIRST_RATE
from foredraft.engine.drafter import (
    DraftCache,
    Drafter,
    DrafterFacts,
    DraftSize,
    Needs,
    PromptChunk,
    StepResult,
)
from foredraft.engine.engine import Engine
from foredraft.engine.row import Row, RowState
from foredraft.errors import ConfigError
from foredraft.llm import LLM
from foredraft.model.cache.prefixes import PrefixStore
from foredraft.model.cache.ragged import KVCache
from foredraft.model.lm import CausalLM
from foredraft.testing import GREEDY, decode
from foredraft.tree import DraftTree
from foredraft.tune.walk import RecordedText, Walk
from toys import VOCAB_SIZE, target


class Noted(RowState):
    """What is noted of the row that it was made for, of which `Fixedly.reach` tokens can be taken over."""

    def __init__(self, drafter: Fixedly, row: Row) -> None:
        self.drafter, self.row_id = drafter, row.id

    def cut(self, num_tokens: int) -> tuple[RowState, int]:
        self.drafter.asked.append(num_tokens)
        return self, min(num_tokens, self.drafter.reach)


class Fixedly(Drafter):
    """Proposes one tree below every pending token, and keeps what it is told."""

    def __init__(self, name: str, paths: Sequence[Sequence[int]], needs: Needs | None = None) -> None:
        self.facts = DrafterFacts(name)
        self.wanted = needs or Needs()
        self._paths = paths
        self.told: list[StepResult] = []
        self.learned: list[list[int]] = []
        self.by_node: list[tuple[tuple[int, ...], list[int]]] = []
        self.has_read: list[tuple[int, torch.Tensor]] = []
        self.asked: list[int] = []
        self.reach = 99
        self.num_asked = 0

    def needs(self, target: CausalLM, cache: KVCache) -> Needs:
        return self.wanted

    def propose(self, rows: Sequence[Row], budgets: Sequence[int]) -> list[DraftTree]:
        self.num_asked += sum(budget > 0 for budget in budgets)
        trees = [DraftTree.from_paths(row.pending, self._paths, source=self.name) for row in rows]
        return [tree.cut(budget) for tree, budget in zip(trees, budgets, strict=True)]

    def start(self, rows: Sequence[Row], chunks: Sequence[PromptChunk]) -> None:
        read = [chunk for chunk in chunks if not chunk.is_last]
        self.has_read += [(chunk.start, chunk.features.top_ids(2, range(chunk.num_tokens))) for chunk in read]
        for row in rows:
            row.state.setdefault(self, Noted(self, row))

    def observe(self, rows: Sequence[Row], results: Sequence[StepResult]) -> None:
        self.told += results
        self.learned += [result.committed.top_ids(1, range(len(result.emitted)))[:, 0].tolist() for result in results]
        if self.wanted.choices:
            nodes = [range(len(result.tree)) for result in results]
            self.by_node += [
                (result.features.choices, result.features.top_ids(2, own)[:, 0].tolist())
                for result, own in zip(results, nodes, strict=True)
            ]


# -- merging -------------------------------------------------------------------------------------------------------

PATHS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=0, max_size=5)


@given(st.lists(PATHS, min_size=1, max_size=3), st.integers(2, 12), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_a_merged_tree_holds_the_best_paths_of_all(parts: list[list[list[int]]], max_nodes: int, random: Any) -> None:
    """And states of each what the part that gives it its chance states of it; by its rank where it states nothing."""
    trees = [DraftTree.from_paths(9, paths, source=str(part)) for part, paths in enumerate(parts)]
    trees = [replace(tree, scores=falling(tree, random)) if random.random() < 0.5 else tree for tree in trees]
    chances = [falling(tree, random) for tree in trees]
    best: dict[tuple[int, ...], tuple[float, str, float]] = {}  # chance, source and statement of each path
    for tree, own in zip(trees, chances, strict=True):
        for node in range(1, len(tree)):
            path, parent = tree.path_tokens(node), tree.parents[node]
            statement = FIRST_RATE / (1 + tree.children[parent].index(node))
            if tree.scores is not None:
                statement = tree.scores[node] / tree.scores[parent]
            if own[node] > best.get(path, (0.0, "", 0.0))[0]:
                best[path] = own[node], tree.source, statement
    result = merged(trees, chances, max_nodes)
    kept = [result.path_tokens(node) for node in range(1, len(result))]
    assert set(kept) <= best.keys()
    assert len(kept) == min(max_nodes - 1, len(best))
    assert [best[path][0] for path in kept] == sorted([best[path][0] for path in kept], reverse=True)
    left_out = [chance for path, (chance, _, _) in best.items() if path not in kept]
    assert max(left_out, default=0.0) <= min((best[path][0] for path in kept), default=1.0)
    assert [result.source_of(node) for node in range(1, len(result))] == [best[path][1] for path in kept]
    expected = [prod(best[path[:end]][2] for end in range(1, len(path) + 1)) for path in kept]
    assert result.scores == pytest.approx((1.0, *expected))


def falling(tree: DraftTree, random: Any) -> tuple[float, ...]:
    """Numbers that fall along every path."""
    found = [1.0]
    for parent in tree.parents[1:]:
        found.append(found[parent] * random.choice([0.2, 0.5, 0.9]))
    return tuple(found)


def test_a_merged_tree_says_who_proposed_what() -> None:
    first = DraftTree.from_paths(9, [[1, 2], [3]], source="first")
    second = DraftTree.from_paths(9, [[1, 4]], source="second")
    both = merged([first, second], [[1.0, 0.5, 0.4, 0.1], [1.0, 0.6, 0.3]], 8, "union")
    named = {both.path_tokens(node): both.source_of(node) for node in range(len(both))}
    assert named == {(): "union", (1,): "second", (1, 2): "first", (1, 4): "second", (3,): "first"}
    chain = both.main_chain()
    assert chain.sources == ("union", "second", "first")
    assert both.cut(1).sources == ("union", "second", "first")
    assert first.source_of(2) == "first"


def test_compositions_are_chosen_by_name_and_results_say_what_each_drafter_has_brought() -> None:
    params = SamplingParams(max_tokens=40, temperature=0.0)
    plain = LLM("zoo:tiny", dtype="float32")
    text = ["One day a little girl went to the park."]
    expected = plain.generate(text, params)[0].outputs[0].token_ids
    for method, names in (
        ("ngram+draft_model", {"ngram", "draft_model"}),
        ("ngram>nasd+jacobi", {"ngram", "nasd", "jacobi"}),
        ("draft_model", set()),
    ):
        (output,) = plain.with_speculative_config(method).generate(text, params)
        assert output.outputs[0].token_ids == expected
        metrics = output.metrics.speculative_decoding
        by_drafter = metrics.get("by_drafter", {})
        assert by_drafter.keys() <= names
        assert bool(by_drafter) == bool(names)
        for key in ("num_draft_tokens", "num_accepted_draft_tokens") if names else ():
            assert sum(counts[key] for counts in by_drafter.values()) == metrics[key]


@pytest.mark.parametrize(("of_wrong", "of_right"), [(0.9, 0.4), (0.9, None), (None, 0.4)])
def test_a_union_ranks_nodes_by_what_became_of_nodes_like_them(of_wrong: float | None, of_right: float | None) -> None:
    """Whatever parts state, or not, of tokens of which one is always wrong and one right; with room for one node."""
    parts = [
        Says(name, token, scores=None if score is None else (1.0, score))
        for name, token, score in (("wrong", 1, of_wrong), ("right", 2, of_right))
    ]
    stated = {"wrong": of_wrong or FIRST_RATE, "right": of_right or FIRST_RATE}
    text = RecordedText("", (3,), (2,) * 60, SamplingParams(max_tokens=60))
    walk, named = Walk(target(), UnionDrafter(parts, max_nodes=2), [text]), []
    while walk.enter(1) and walk.rows[0].num_remaining_tokens > 1:
        (tree,) = walk.propose([DraftSize(1)])
        named.append(tree.source_of(1))
        assert tree.scores == (1.0, stated[named[-1]])
        walk.emit([tree])
    assert named[0] == "wrong"
    assert set(named[len(named) // 2 :]) == {"right"}


def test_first_asks_later_parts_only_where_little_is_promised() -> None:
    """By what became of drafts like the first part's: right at first, and wrong from the middle of the text on."""
    cheap, dear = Says("cheap", 1), Says("dear", 2)
    text = RecordedText("", (3,), (1,) * 60 + (2,) * 160, SamplingParams(max_tokens=220))
    walk, asked = Walk(target(), FirstDrafter([cheap, dear]), [text]), []
    while walk.enter(1) and walk.rows[0].num_remaining_tokens > 1:
        before = dear.num_asked
        (tree,) = walk.propose([DraftSize(1)])
        asked.append(dear.num_asked > before)
        assert tree.source == ("dear" if asked[-1] else "cheap")
        walk.emit([tree])
    assert not any(asked[:30])
    assert sum(asked[-40:]) > 30  # a first draft that was wrong is tried ever less


# -- what parts are told -------------------------------------------------------------------------------------------


def test_every_part_is_told_about_its_own_nodes() -> None:
    plain = decode(target(), EmptyDrafter(), [([1, 2, 3], replace(GREEDY, max_tokens=3))]).outputs["0.0"]
    needs = Needs(choices=True)
    right = Fixedly("right", [plain[:1]], needs)
    wrong = Fixedly("wrong", [[(plain[0] + 1) % VOCAB_SIZE], [plain[0], (plain[1] + 1) % VOCAB_SIZE]], needs)
    path_only = Fixedly("path", [plain[:2]])
    engine = Engine(target(), UnionDrafter([right, wrong, path_only], max_nodes=16))
    engine.add_request([1, 2, 3], replace(GREEDY, max_tokens=6))
    engine.step()
    (output,) = engine.step()
    assert output.token_ids == plain
    told = [part.told[0] for part in (right, wrong, path_only)]
    assert [result.tree.tokens[1:] for result in told] == [
        plain[:1],
        ((plain[0] + 1) % VOCAB_SIZE, plain[0], (plain[1] + 1) % VOCAB_SIZE),
        plain[:2],
    ]
    assert [result.path for result in told] == [(0, 1), (0, 2), (0, 1, 2)]
    assert all(result.emitted == plain for result in told)
    for part in (right, wrong):
        choices, best = part.by_node[0]
        assert len(choices) == len(part.told[0].tree)
        assert best == list(choices)
        assert choices[0] == plain[0]
    assert right.learned[0] == wrong.learned[0] == path_only.learned[0] == list(plain)


def test_a_union_asks_for_all_that_its_parts_ask_for() -> None:
    own = [DraftCache(target().new_cache(), lambda: 1) for _ in range(2)]
    asking = [
        Needs(last_hidden=True, partial_prompts=True, caches=(own[0],)),
        Needs(layer_inputs=(1,), caches=(own[1],)),
        Needs(layer_inputs=(0,), prompt_logits=True, prompts=True, choices=True),
    ]
    together = needs_of(asking)
    for name in {field.name for field in fields(Needs)} - {"partial_prompts"}:
        assert getattr(together, name), name
    assert together.layer_inputs == (0, 1)
    assert together.caches == (own[0], own[1])
    assert not together.partial_prompts
    assert needs_of([Needs(last_hidden=True, partial_prompts=True), Needs(choices=True)]).partial_prompts


def needs_of(asking: Sequence[Needs]) -> Needs:
    """What a union of drafters needs that need these."""
    union = UnionDrafter([Fixedly(str(i), [[1]], needs) for i, needs in enumerate(asking)])
    return union.needs(target(), target().new_cache())


def test_parts_read_prompts_if_they_want_to_and_are_asked_what_to_keep() -> None:
    curious = Fixedly("curious", [[1]], Needs(prompt_logits=True))
    plain = Fixedly("plain", [[2]])
    engine = Engine(target(), UnionDrafter([curious, plain]), prefixes=PrefixStore(1))
    (row,) = engine.add_request([1, 2, 3], replace(GREEDY, max_tokens=2))
    engine.step()
    ((start, best),) = curious.has_read
    assert (start, best.shape) == (0, (2, 2))
    assert plain.has_read == []
    list(engine.run())
    known = len(row.token_ids) - 1
    assert curious.asked == plain.asked == [known]
    curious.reach = 3
    (again,) = engine.add_request([*row.token_ids, 5, 6], replace(GREEDY, max_tokens=2))
    engine.step()
    assert curious.asked[1] == known
    assert curious.asked[-1] == plain.asked[-1] == 3
    assert again.num_cached_tokens == 3
    assert [start for start, _ in curious.has_read] == [0, 3]
    assert [again.state[part].row_id for part in (curious, plain)] == [row.id, row.id]


# -- by name -------------------------------------------------------------------------------------------------------


def test_keys_are_handed_on_to_the_drafters_that_know_them() -> None:
    config = SpeculativeConfig(method="ngram+draft_model", model="zoo:tiny", num_speculative_tokens=3)
    assert config.method == "union"
    assert [part.method for part in config.drafters] == ["ngram", "draft_model"]
    assert [part.num_speculative_tokens for part in config.drafters] == [3, 3]
    assert config.model_part.model == "zoo:tiny"
    assert config.without_model().model_part.model is None
    given = SpeculativeConfig(method="first", drafters=[{"method": "ngram", "num_speculative_tokens": 7}, "nasd"])
    assert (given.drafters[0].num_speculative_tokens, given.num_speculative_tokens) == (7, 7)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "union"}, "needs drafters"),
        ({"method": "union", "drafters": ["ngram"]}, "two or more"),
        ({"method": "ngram+none"}, "two or more"),
        ({"method": "ngram+ngrm"}, "did you mean 'ngram'"),
        ({"method": "ngram+nasd", "rejection_sample_method": "standard"}, "'match' only"),
        ({"method": "ngram+nasd", "drafters": ["nasd"]}, "give only one"),
        (
            {"method": "union", "drafters": ["nasd", {"method": "ngram", "ngram_size": 3}]},
            "no meaning for method 'ngram'",
        ),
    ],
)
def test_impossible_compositions_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig(**config)


RECALLING = [
    "suffix+eagle3",
    *(pytest.param(name, marks=pytest.mark.full) for name in ("medusa+eagle3", "eagle3+suffix", "auto")),
]


@pytest.mark.parametrize("method", RECALLING)
def test_a_head_among_several_drafters_recalls_what_it_recalls_alone(method: str) -> None:
    """It recalls one token less than it is asked for, so the parts once agreed on nothing, and chats were read anew."""

    def recalled(config: str) -> int:
        llm = LLM("zoo:tiny", config, dtype="float32", num_cached_prefixes=2, prefill_chunk_size=64)
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        first = llm.generate("Once upon a time there was a little", params)[0]
        longer = [*first.prompt_token_ids, *first.outputs[0].token_ids, 5, 6]
        output = llm.generate({"prompt_token_ids": longer}, params)[0]
        plain = llm.with_speculative_config(None).generate({"prompt_token_ids": longer}, params)[0]
        assert output.outputs[0].token_ids == plain.outputs[0].token_ids
        assert output.metrics.speculative_decoding["num_draft_tokens"] > 0
        return output.num_cached_tokens

    assert recalled(method) == recalled("eagle3") > 0
