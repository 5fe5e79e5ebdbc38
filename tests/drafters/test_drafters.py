"""All drafters, claim by claim: contract, batching, seeds, ends, budgets and state. A new method is one line here."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest

import eagle_heads
import toy_heads
from drafting import check_conforms, layer_skip, made, quantized_self, sparse_kv, sparse_model, swift
from foredraft import SamplingParams
from foredraft.drafters.compose import FirstDrafter, UnionDrafter
from foredraft.drafters.heads.eagle import EagleDrafter
from foredraft.drafters.heads.medusa_hydra import MultiHeadDrafter
from foredraft.drafters.lm.draft_model import DraftModelDrafter
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.drafter import Drafter, DraftSize, PromptChunk, StepResult
from foredraft.engine.engine import Engine
from foredraft.engine.row import Row
from foredraft.methods.lengths import Acceptance, AdaEDL, Confidence, Egag, Heuristic, LengthPolicy
from foredraft.methods.rank_tree import RankTree
from foredraft.model.lm import CausalLM
from foredraft.retrieval.datastore import Datastore
from foredraft.retrieval.history import OutputHistory
from foredraft.testing import (
    GREEDY,
    PROMPTS,
    SAMPLED,
    MakeDrafter,
    PerfectDrafter,
    WrongDrafter,
    check_drafter,
    check_no_state,
    decode,
)
from foredraft.testing.conformance import FIRST_ROW_ID
from foredraft.tree import DraftTree
from toys import VOCAB_SIZE, datastore_of, deep, small, target


@cache
def plain_texts() -> tuple[tuple[int, ...], ...]:
    """Prompts with what plain decoding makes of them, greedy and sampled, with the samples of each."""
    texts = []
    for params in (GREEDY, SAMPLED):
        outputs = decode(target(), EmptyDrafter(), [(prompt, replace(params, n=3)) for prompt in PROMPTS]).outputs
        texts += [(*PROMPTS[int(key.split(".")[0])], *output) for key, output in outputs.items()]
    return tuple(texts)


def model_drafter(scale: float, num_branches: int = 1, **options: Any) -> MakeDrafter:
    return lambda depth: DraftModelDrafter(
        small(scale),
        target_vocab_size=VOCAB_SIZE,
        num_speculative_tokens=depth,
        num_branches=num_branches,
        **options,
    )


def with_policy(policy: Callable[[int], LengthPolicy], num_branches: int = 1) -> MakeDrafter:
    """A small model whose drafts are as long as a policy says."""
    return lambda depth: model_drafter(0.1, num_branches, policy=policy(depth))(depth)


@cache
def datastore() -> Datastore:
    """What plain decoding says for half of the prompts, and the start of the rest with a wrong end."""
    texts = plain_texts()
    wrong = [(*text[: len(text) // 2], 1, 2, 3) for text in texts[1::2]]
    return datastore_of([*texts[::2], *wrong], max_shard_tokens=100)


def heads_drafter(kind: str, **options: str) -> MakeDrafter:
    """Heads that were fitted to the toy target, in a tree of 12 nodes, four levels deep."""
    tree = RankTree.grown([[0.6, 0.1, 0.05]] * 4, 12)

    def make(depth: int) -> Drafter:
        growth: dict[str, Any] = {"tree": tree, "target_vocab_size": VOCAB_SIZE, "max_depth": depth, **options}
        is_medusa = kind.startswith("medusa")
        heads = toy_heads.medusa_heads(kind == "medusa") if is_medusa else toy_heads.hydra_heads(kind == "hydra++")
        return MultiHeadDrafter(heads, 2, **growth)

    return make


def eagle_drafter(generation: int, *, knows: bool = True, **growth: Any) -> MakeDrafter:
    """A head that knows the toy target's texts, or nothing: a static tree, or a dynamic one of 9 nodes."""
    dynamic: dict[str, Any] = {"num_branches": 3, "reranks": True, "max_nodes": 9}

    def make(depth: int) -> Drafter:
        head = eagle_heads.trained(generation) if knows else eagle_heads.random_head(generation)
        own = {"max_depth": depth} if "tree" in growth else {"policy": LengthPolicy(depth), **dynamic}
        return EagleDrafter(head, target(), target_vocab_size=VOCAB_SIZE, **{**own, **growth})

    return make


EAGLE_TREE = RankTree.published("eagle")


def draft_model(depth: int) -> Drafter:
    return model_drafter(0.1)(depth)


DRAFTERS: dict[str, MakeDrafter] = {
    "none": lambda _: EmptyDrafter(),
    "draft-model": model_drafter(0.1),
    "draft-model-greedy": model_drafter(0.1, sample_method="greedy"),
    "draft-model-tree": model_drafter(0.1, 3),
    "draft-model-greedy-tree": model_drafter(0.1, 3, sample_method="greedy"),
    "draft-model-is-target": model_drafter(0.0),
    "draft-model-is-target-tree": model_drafter(0.0, 2),
    "draft-model-is-hopeless": model_drafter(5.0, 2),
    "heuristic": with_policy(Heuristic),
    "confidence": with_policy(lambda depth: Confidence(depth, 0.6)),
    "egag": with_policy(Egag),
    "egag-paper": with_policy(lambda depth: Egag(depth, "paper", egag_ema_beta=0.5)),
    "adaedl-tree": with_policy(lambda depth: AdaEDL(depth, 0.5, threshold_step=0.1), 2),
    "acceptance": with_policy(lambda depth: Acceptance(depth, "code", threshold_step=0.1)),
    "nasd-confidence": lambda depth: made("nasd", depth, length_policy=Confidence(depth, 0.6)),
    "ngram": lambda depth: made("ngram", depth, prompt_lookup_min=1),
    "ngram-tree": lambda depth: made("ngram", depth, prompt_lookup_min=1, num_prompt_lookup_candidates=3),
    "nasd": lambda depth: made("nasd", depth),
    "nasd-tree": lambda depth: made("nasd", depth, num_draft_branches=3),
    "nasd-without-filler": lambda depth: made("nasd", depth, filler_top_k=1),
    "nasd-even": lambda depth: made("nasd", depth, filler_weight=1.0, num_draft_branches=2),
    "nasd-single-random": lambda depth: made("nasd", depth, storage="single", unknown="random", vocab_size=VOCAB_SIZE),
    "nasd-tree-random": lambda depth: made(
        "nasd", depth, num_draft_branches=2, unknown="random", vocab_size=VOCAB_SIZE
    ),
    "nasd-shared": lambda depth: made("nasd", depth, num_draft_branches=2, shared=True),
    "jacobi": lambda depth: made("jacobi", depth),
    "jacobi-random": lambda depth: made("jacobi", depth, initial_guess="random", vocab_size=VOCAB_SIZE),
    "jacobi-from-prompt": lambda depth: made("jacobi", depth, initial_guess="prompt"),
    "lookahead": lambda depth: made("lookahead", depth, window_size=5, guess_set_size=3),
    "lookahead-without-pool": lambda depth: made("lookahead", depth, window_size=3, guess_set_size=0),
    "lookahead-narrow": lambda depth: made("lookahead", depth, window_size=1, pool_from_prompt=False),
    "suffix": lambda depth: made("suffix", depth, suffix_decoding_min_token_prob=0.0),
    "suffix-chain": lambda depth: made("suffix", depth, num_draft_branches=1, suffix_decoding_max_tree_depth=2),
    "suffix-shared": lambda depth: made("suffix", depth, history=OutputHistory(6, max_outputs=4)),
    "rest": lambda depth: made("rest", depth, datastore()),
    "rest-chain": lambda depth: made("rest", depth, datastore(), num_draft_branches=1, retrieval_dynamic_index=False),
    "token-recycling": lambda depth: made(
        "token_recycling", depth, VOCAB_SIZE, max_draft_nodes=24, initial_state="prompt"
    ),
    "token-recycling-shared": lambda depth: made("token_recycling", depth, VOCAB_SIZE, max_draft_nodes=12, shared=True),
    "token-recycling-vocabulary": lambda depth: made(
        "token_recycling", depth, VOCAB_SIZE, num_candidates=3, initial_state="vocabulary"
    ),
    "token-recycling-empty": lambda depth: made("token_recycling", depth, VOCAB_SIZE, initial_state="empty"),
    "token-recycling-text": lambda depth: made("token_recycling", depth, VOCAB_SIZE, initial_state="text"),
    "layer-skip": layer_skip,
    "layer-skip-tree": partial(layer_skip, num_branches=3),
    "quantized-self": quantized_self,
    "quantized-self-tree": partial(quantized_self, num_branches=3),
    "swift": swift,
    "swift-tree": partial(swift, num_branches=3),
    "sparse-kv": partial(sparse_kv, "streaming"),
    "sparse-kv-voting-tree": partial(sparse_kv, "snapkv", num_branches=3),
    "sparse-model": lambda depth: sparse_model(small(), "streaming", depth),
    "sparse-model-voting-tree": lambda depth: sparse_model(small(), "snapkv", depth, num_branches=3),
    "medusa": heads_drafter("medusa"),
    "medusa-shared": heads_drafter("medusa-shared"),
    "hydra": heads_drafter("hydra"),
    "hydra++": heads_drafter("hydra++"),
    "hydra++-greedy": heads_drafter("hydra++", sample_method="greedy"),
    "eagle": eagle_drafter(1, tree=EAGLE_TREE),
    "eagle-small": eagle_drafter(1, tree=EAGLE_TREE, max_nodes=7),
    "eagle-is-hopeless": eagle_drafter(1, tree=EAGLE_TREE, knows=False),
    "eagle2": eagle_drafter(1),
    "eagle2-chain": eagle_drafter(1, num_branches=1, reranks=False, max_nodes=None),
    "eagle3": eagle_drafter(3),
    "eagle3-chain": eagle_drafter(3, num_branches=1, reranks=False, max_nodes=None),
    "eagle3-is-hopeless": eagle_drafter(3, knows=False),
    "ngram+draft-model": lambda k: UnionDrafter([made("ngram", k, prompt_lookup_min=1), draft_model(k)], 6),
    "jacobi+nasd+lookahead": lambda k: UnionDrafter(
        [made("jacobi", k), made("nasd", k, num_draft_branches=2), made("lookahead", 2, window_size=2)], 12
    ),
    "suffix+token-recycling": lambda k: UnionDrafter(
        [made("suffix", k), made("token_recycling", k, VOCAB_SIZE, num_candidates=3, max_draft_nodes=8)], 10
    ),
    "ngram>layer-skip": lambda k: FirstDrafter([made("ngram", k, prompt_lookup_min=1), layer_skip(k)]),
    "nasd>jacobi+draft-model": lambda k: FirstDrafter(
        [made("nasd", k), UnionDrafter([made("jacobi", k), draft_model(k)])]
    ),
    "perfect": lambda depth: PerfectDrafter(plain_texts(), depth, vocab_size=VOCAB_SIZE),
    "perfect-tree": lambda depth: PerfectDrafter(plain_texts(), depth, vocab_size=VOCAB_SIZE, num_branches=3),
    "always-wrong": lambda depth: WrongDrafter(plain_texts(), depth, vocab_size=VOCAB_SIZE),
    "always-wrong-tree": lambda depth: WrongDrafter(plain_texts(), depth, vocab_size=VOCAB_SIZE, num_branches=3),
}
NEVER_RIGHT = ("none", "always-wrong", "always-wrong-tree", "draft-model-is-hopeless", "eagle-is-hopeless")

QUICK = ("draft-model", "ngram-tree", "nasd-shared", "jacobi", "lookahead", "suffix-shared", "rest")
KINDS = (
    *(*QUICK, "draft-model-tree", "token-recycling-shared", "hydra++", "eagle3", "layer-skip-tree", "swift-tree"),
    *("sparse-kv-voting-tree", "nasd>jacobi+draft-model", "always-wrong-tree"),
)
"""What differs in kind; the others combine what these have, and conform in the whole matrix."""


def target_of(name: str) -> CausalLM:
    """The target that a drafter is tried on: searches need more layers than the toy has."""
    return searched() if name.startswith("swift") else target()


searched = cache(deep)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow if name in KINDS else pytest.mark.full)
        for name in DRAFTERS
    ],
)
def test_drafter_conforms(name: str) -> None:
    """At two depths; every ending inside a draft is tried at the deeper. Some drafts are right, or it would conform
    whatever was wrong with it."""
    shown = check_conforms(DRAFTERS[name], target_of(name), depths=(1, 4))
    assert shown.num_accepted > 0 or name in NEVER_RIGHT


@pytest.mark.full
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafter_conforms_at_every_depth(name: str) -> None:
    check_drafter(DRAFTERS[name], target_of(name))


def steps(make_drafter: Callable[[int], object], depth: int, budget: int) -> int:
    request = (PROMPTS[0], replace(GREEDY, max_tokens=budget))
    return decode(target(), make_drafter(depth), [request]).num_steps


@pytest.mark.parametrize("name", ["perfect", "perfect-tree", "draft-model-is-target", "draft-model-is-target-tree"])
def test_a_drafter_that_is_always_right_needs_the_fewest_steps(name: str) -> None:
    """12 tokens at K = 3 are three steps of 4, after one of prefill: nothing that was right is rejected.

    This also guards the drafter's own cache: a stale column in it would show here and nowhere else.
    """
    assert steps(DRAFTERS[name], 3, 12) == 4
    assert steps(DRAFTERS[name], 3, 13) == 5


@pytest.mark.parametrize("name", ["none", "always-wrong", "always-wrong-tree"])
def test_a_drafter_that_is_always_wrong_needs_a_step_per_token(name: str) -> None:
    assert steps(DRAFTERS[name], 3, 12) == 13


# -- what a drafter knows of a row: nobody else's, and gone with it ------------------------------------------------

KNOWING: dict[str, Callable[[], Drafter]] = {
    name: partial(DRAFTERS[name], 4)
    for name in (
        *("ngram-tree", "nasd-tree", "nasd-single-random", "jacobi", "jacobi-from-prompt", "lookahead", "suffix"),
        *("token-recycling", "token-recycling-vocabulary"),
    )
}
STORED = ((0, 1, 2, 3, 4, 5), (7, 2, 9, 9), (5, 6, 8))
KNOWING["rest"] = lambda: made("rest", 3, stored())
OTHERS: dict[str, Callable[[], Drafter]] = {
    "layer-skip": layer_skip,
    "union": lambda: UnionDrafter([KNOWING["suffix"](), KNOWING["lookahead"](), KNOWING["token-recycling"]()], 12),
    "first": lambda: FirstDrafter([KNOWING["ngram-tree"](), KNOWING["jacobi"]()]),
}
REQUESTS = tuple(
    (PROMPTS[i], SamplingParams(max_tokens=12, temperature=temperature, seed=5))
    for i, temperature in ((0, 0.0), (4, 0.9), (3, 0.0))
)


@cache
def stored() -> Datastore:
    return datastore_of([*STORED, *PROMPTS])


def run(drafter: Drafter, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Row]:
    engine = Engine(target(), drafter)
    rows = [row for prompt, params in requests for row in engine.add_request(prompt, params)]
    list(engine.run())
    return rows


def counts(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    return [
        (tuple(row.output_ids), row.stats.num_steps, row.stats.num_draft_tokens, row.stats.num_accepted_draft_tokens)
        for row in rows
    ]


@cache
def alone(name: str) -> list[tuple[Any, ...]]:
    """Every request by itself, each with a new drafter."""
    return [counts(run(KNOWING[name](), [request]))[0] for request in REQUESTS]


@pytest.mark.sample(4)
@pytest.mark.parametrize("method", KNOWING)
def test_neighbours_and_predecessors_change_no_draft(method: str) -> None:
    """A row drafts the same number of tokens alone, in a batch, and with a drafter that has had the batch before."""
    drafter = KNOWING[method]()
    assert counts(run(drafter, REQUESTS)) == alone(method)
    assert counts(run(drafter, REQUESTS[::-1])) == alone(method)[::-1]


class OneByOne(eagle_heads.HandsOn):
    """Hands rows on one at a time."""

    def start(self, rows: Sequence[Row], chunks: Sequence[PromptChunk]) -> None:
        for row, chunk in zip(rows, chunks, strict=True):
            self.drafter.start([row], [chunk])

    def propose(self, rows: Sequence[Row], budgets: Sequence[DraftSize]) -> list[DraftTree]:
        return [self.drafter.propose([row], [budget])[0] for row, budget in zip(rows, budgets, strict=True)]

    def observe(self, rows: Sequence[Row], results: Sequence[StepResult]) -> None:
        for row, result in zip(rows, results, strict=True):
            self.drafter.observe([row], [result])


@pytest.mark.parametrize("method", KNOWING)
def test_rows_that_start_together_are_told_apart(method: str) -> None:
    """Samples of one prompt."""
    samples = (PROMPTS[0], SamplingParams(max_tokens=10, temperature=0.9, seed=5, n=3))
    assert counts(run(KNOWING[method](), [samples])) == counts(run(OneByOne(KNOWING[method]()), [samples]))


@pytest.mark.sample(3)
@pytest.mark.parametrize("method", [*KNOWING, *OTHERS])
def test_nothing_is_left_of_rows_that_have_ended(method: str) -> None:
    """Neither state nor ids, in a drafter that lives on, its parts and their policies; one of the rows is aborted."""
    drafter = {**KNOWING, **OTHERS}[method]()
    engine = Engine(target(), drafter)
    rows = [
        row
        for number, (prompt, params) in enumerate(REQUESTS)
        for row in engine.add_request(prompt, params, str(number))
    ]
    for row in rows:
        row.id += FIRST_ROW_ID
    engine.step()
    known = states_of(rows)
    engine.step()
    known += states_of(rows)
    assert len(known) >= len(rows) or method == "layer-skip"  # which knows a row by the cache of the target alone
    engine.abort("1")
    while engine.has_unfinished:
        engine.step()
        known += states_of(rows)
    assert [row.state for row in rows] == [{}] * len(rows)
    check_no_state(drafter)
    gc.collect()
    assert [state() for state in known if state() is not None] == []


def states_of(rows: Iterable[Row]) -> list[weakref.ref[Any]]:
    """What is known of rows now, as far as that can be referred to weakly."""
    states = [state for row in rows for state in row.state.values()]
    return [weakref.ref(state) for state in states if not isinstance(state, (int, list, tuple))]
