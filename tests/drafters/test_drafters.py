"""Every drafter passes `check_drafter`. A new method is one line here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import eagle_heads
import toy_heads
from drafting import check_conforms, made
from foredraft.drafters.heads.eagle import EagleDrafter
from foredraft.drafters.heads.medusa_hydra import MultiHeadDrafter
from foredraft.drafters.lm.draft_model import DraftModelDrafter
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.drafter import Drafter
from foredraft.methods.lengths import Fixed, Heuristic
from foredraft.methods.rank_tree import RankTree
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
    decode,
)
from harness import drafted
from toys import VOCAB_SIZE, datastore_of, small, target


@cache
def plain_texts() -> tuple[tuple[int, ...], ...]:
    """Prompts with what plain decoding makes of them, greedy and sampled, with the samples of each."""
    texts = []
    for params in (GREEDY, SAMPLED):
        outputs = decode(target(), EmptyDrafter(), [(prompt, replace(params, n=3)) for prompt in PROMPTS]).outputs
        texts += [(*PROMPTS[int(key.split(".")[0])], *output) for key, output in outputs.items()]
    return tuple(texts)


def model_drafter(scale: float, num_branches: int = 1, **options: str) -> MakeDrafter:
    return lambda depth: DraftModelDrafter(
        small(scale),
        target_vocab_size=VOCAB_SIZE,
        num_speculative_tokens=depth,
        num_branches=num_branches,
        **options,
    )


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


def eagle_drafter(method: str) -> MakeDrafter:
    """Heads that know the toy target's texts: the published static tree, or a dynamic one of 9 nodes."""
    head = cache(lambda: eagle_heads.trained(3 if method == "eagle3" else 1))
    dynamic: dict[str, Any] = {"num_branches": 3, "reranks": True, "max_nodes": 9, "target_vocab_size": VOCAB_SIZE}

    def make(depth: int) -> Drafter:
        if method == "eagle":
            tree = RankTree.published("eagle")
            return EagleDrafter(head(), target(), tree=tree, target_vocab_size=VOCAB_SIZE, max_depth=depth)
        return EagleDrafter(head(), target(), policy=Fixed(depth), **dynamic)

    return make


DRAFTERS: dict[str, MakeDrafter] = {
    "none": lambda _: EmptyDrafter(),
    "draft-model": model_drafter(0.1),
    "draft-model-greedy": model_drafter(0.1, sample_method="greedy"),
    "draft-model-tree": model_drafter(0.1, 3),
    "draft-model-greedy-tree": model_drafter(0.1, 3, sample_method="greedy"),
    "draft-model-heuristic": lambda depth: DraftModelDrafter(
        small(0.1), target_vocab_size=VOCAB_SIZE, policy=Heuristic(depth)
    ),
    "draft-model-is-target": model_drafter(0.0),
    "draft-model-is-target-tree": model_drafter(0.0, 2),
    "draft-model-is-hopeless": model_drafter(5.0, 2),
    "ngram": lambda depth: made("ngram", depth, prompt_lookup_min=1),
    "ngram-tree": lambda depth: made("ngram", depth, prompt_lookup_min=1, num_prompt_lookup_candidates=3),
    "nasd": lambda depth: made("nasd", depth),
    "nasd-tree": lambda depth: made("nasd", depth, num_draft_branches=3),
    "nasd-without-filler": lambda depth: made("nasd", depth, filler_top_k=1),
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
    "medusa": heads_drafter("medusa"),
    "medusa-shared": heads_drafter("medusa-shared"),
    "hydra": heads_drafter("hydra"),
    "hydra++": heads_drafter("hydra++"),
    "hydra++-greedy": heads_drafter("hydra++", sample_method="greedy"),
    "eagle": eagle_drafter("eagle"),
    "eagle2": eagle_drafter("eagle2"),
    "eagle3": eagle_drafter("eagle3"),
    "perfect": lambda depth: PerfectDrafter(plain_texts(), depth, vocab_size=VOCAB_SIZE),
    "perfect-tree": lambda depth: PerfectDrafter(plain_texts(), depth, vocab_size=VOCAB_SIZE, num_branches=3),
    "always-wrong": lambda depth: WrongDrafter(plain_texts(), depth, vocab_size=VOCAB_SIZE),
    "always-wrong-tree": lambda depth: WrongDrafter(plain_texts(), depth, vocab_size=VOCAB_SIZE, num_branches=3),
}


QUICK = ("draft-model", "ngram", "nasd", "jacobi", "lookahead", "suffix", "rest", "token-recycling", "medusa")
KINDS = (
    *(*QUICK, "draft-model-tree", "ngram-tree", "nasd-shared", "suffix-shared", "token-recycling-shared"),
    *("hydra++", "eagle", "eagle3", "perfect", "always-wrong"),
)
"""What differs in kind; the others combine what these have, and conform in the whole matrix."""


def by_kind(names: Iterable[str]) -> list[Any]:
    """Parameters: others run in the whole matrix alone."""
    return [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow if name in KINDS else pytest.mark.full)
        for name in names
    ]


@pytest.mark.parametrize("name", by_kind(KINDS))
def test_drafter_conforms(name: str) -> None:
    """At two depths; every ending inside a draft is tried at the deeper."""
    check_conforms(DRAFTERS[name], target(), depths=(1, 5))


@pytest.mark.full
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafter_conforms_at_every_depth(name: str) -> None:
    check_drafter(DRAFTERS[name], target())


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


NEVER_RIGHT = ("none", "always-wrong", "always-wrong-tree", "draft-model-is-hopeless")


@pytest.mark.parametrize("name", by_kind(name for name in DRAFTERS if name not in NEVER_RIGHT))
def test_what_conforms_is_accepted_too(name: str) -> None:
    """Or it would conform whatever was wrong with it."""
    requests = [(prompt, replace(GREEDY, max_tokens=40)) for prompt in PROMPTS]
    drafted(decode(target(), DRAFTERS[name](4), requests))


@pytest.mark.parametrize("name", ["none", "always-wrong", "always-wrong-tree"])
def test_a_drafter_that_is_always_wrong_needs_a_step_per_token(name: str) -> None:
    assert steps(DRAFTERS[name], 3, 12) == 13
