"""How drafts grow: chains, beams, and the best nodes of a whole pool, against plain enumeration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.config.sampling import SamplingParams
from foredraft.config.speculative import SpeculativeConfig
from foredraft.drafters.parts.growth import SHARPNESS, GrowingDraft, Growth
from foredraft.engine.drafter import DraftSize, StepResult
from foredraft.engine.row import Row
from foredraft.engine.stopping import StopChecker
from foredraft.errors import ConfigError
from foredraft.methods.lengths import LengthPolicy
from foredraft.sampling.distribution import Sampler
from foredraft.sampling.noise import mix
from foredraft.tree import DraftTree

VOCAB_SIZE = 7


def row_of(row_id: int, text: Sequence[int], **params: float) -> Row:
    sampling = SamplingParams(**{"temperature": 0.0, **params})
    sampler = Sampler(sampling, vocab_size=VOCAB_SIZE, prompt_ids=list(text))
    checker = StopChecker(sampling, (), len(text), 100)
    return Row(row_id, "0", 0, list(text), len(text), sampling, 7, sampler, 100, checker)


class Oracle:
    """Logits that are a function of the text and of nothing else; it counts how often it is asked."""

    def __init__(self, seed: int, dtype: torch.dtype, spoilt: int | None = None) -> None:
        self._seed, self._dtype, self._spoilt = seed, dtype, spoilt
        self.num_calls = 0

    def logits(self, text: Sequence[int]) -> torch.Tensor:
        """Few different values, so that many nodes tie; NaN after one token."""
        if text[-1] == self._spoilt:
            return torch.full((VOCAB_SIZE,), math.nan, dtype=self._dtype)
        key = self._seed
        for token in text:
            key = mix(key, token)
        generator = torch.Generator().manual_seed(key % 2**63)
        return torch.randint(-2, 3, (VOCAB_SIZE,), generator=generator).to(self._dtype)

    def open(self, drafts: Sequence[GrowingDraft]) -> torch.Tensor:
        self.num_calls += 1
        return torch.stack([self.logits(draft.row.token_ids) for draft in drafts])

    def expand(self, drafts: Sequence[GrowingDraft]) -> torch.Tensor:
        self.num_calls += 1
        return torch.stack(
            [
                self.logits([*draft.row.token_ids, *draft.path_tokens(node)])
                for draft in drafts
                for node in draft.frontier
            ]
        )


def pool(oracle: Oracle, text: Sequence[int], depth: int, siblings: int, beam: int) -> dict[tuple[int, ...], float]:
    """Every candidate by its path, with its score, in the order in which they come up."""
    found: dict[tuple[int, ...], float] = {}
    frontier: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        level: list[tuple[float, tuple[int, ...]]] = []
        for path in frontier:
            # log_softmax rounds otherwise, and would break ties of different nodes its own way
            wide = (oracle.logits([*text, *path]).float() - oracle.logits([*text, *path]).float().amax()) * SHARPNESS
            sampler = wide.double() - math.log(float(np.exp(wide.numpy()).sum()))
            best = sorted(enumerate(sampler.tolist()), key=lambda candidate: -candidate[1])[
                :siblings
            ]  # equal ones by id
            for token, score in best:
                if score > -math.inf:  # NaN is not
                    level.append((found.get(path, 0.0) + score, (*path, token)))
        level.sort(key=lambda candidate: -candidate[0])
        found |= {path: score for score, path in level}
        frontier = [path for _, path in level[:beam]]
    return found


@pytest.mark.parametrize(("is_right", "power"), [(True, 4.0), (False, 0.5)])
def test_the_power_of_a_distribution_follows_how_often_first_choices_are_right(is_right: bool, power: float) -> None:
    keys = {
        "target_vocab_size": VOCAB_SIZE,
        "policy": LengthPolicy(1),
        "num_branches": 2,
        "reranks": True,
        "max_nodes": 4,
    }
    learned, fixed = Growth(**keys), Growth(**keys, sharpness=2.0)
    assert (learned.sharpness, fixed.sharpness) == (SHARPNESS, 2.0)
    row = row_of(0, [1, 2])
    tree = DraftTree((2, 5, 6), (-1, 0, 0), scores=(1.0, 0.3, 0.5))
    result = StepResult(tree, (0, 2) if is_right else (0,), (6, 9) if is_right else (7,))
    for growth in (learned, fixed):
        for _ in range(200):
            growth.end(row, result)
    assert (learned.sharpness, fixed.sharpness) == (power, 2.0)


CASES = {
    "seed": st.integers(0, 10**6),
    "depth": st.integers(1, 4),
    "siblings": st.integers(2, 4),
    "beam": st.integers(1, 4),
    "max_nodes": st.integers(2, 40),
    "dtype": st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    "spoilt": st.sampled_from([None, 2]),
}


@given(**CASES)
@settings(max_examples=150, deadline=None)
def test_reranking_keeps_the_likeliest_nodes_of_the_pool(
    seed: int, depth: int, siblings: int, beam: int, max_nodes: int, dtype: torch.dtype, spoilt: int | None
) -> None:
    """Two rows at once; ties go to what came up first, and nothing comes of a node whose logits are NaN."""
    oracle = Oracle(seed, dtype, spoilt)
    growth = Growth(
        target_vocab_size=VOCAB_SIZE,
        policy=LengthPolicy(depth),
        num_branches=siblings,
        beam_width=beam,
        reranks=True,
        max_nodes=max_nodes,
        sample_method="greedy",
    )
    rows = [row_of(0, [1, 2, 3]), row_of(1, [4])]
    drafts = [growth.begin(row, DraftSize(depth)) for row in rows]
    growth.grow(drafts, oracle)
    assert oracle.num_calls <= depth
    for row, draft in zip(rows, drafts, strict=True):
        candidates = pool(oracle, row.token_ids, depth, siblings, beam)
        by_score = sorted(candidates, key=lambda path: -candidates[path])  # stable
        tree = growth.finish(draft, "test")
        assert len(tree) == min(max_nodes, 1 + len(candidates))
        paths = [tree.path_tokens(node) for node in range(1, len(tree))]
        scores = sorted((candidates[path] for path in paths), reverse=True)
        assert scores == pytest.approx([candidates[path] for path in by_score[: len(paths)]], abs=1e-5)
        assert all(path[:-1] in {(), *paths} for path in paths)


@given(seed=CASES["seed"], siblings=CASES["siblings"], beam=CASES["beam"], depth=CASES["depth"])
@settings(max_examples=60, deadline=None)
def test_siblings_and_beam_are_limits_of_their_own(seed: int, siblings: int, beam: int, depth: int) -> None:
    """Without reranking, what stays is what is expanded: a beam per level, of at most so many siblings each."""
    growth = Growth(
        target_vocab_size=VOCAB_SIZE,
        policy=LengthPolicy(depth),
        num_branches=siblings,
        beam_width=beam,
        sample_method="greedy",
    )
    draft = growth.begin(row_of(0, [1, 2, 3]), DraftSize(depth))
    growth.grow([draft], Oracle(seed, torch.float64))
    tree = growth.finish(draft, "test")
    levels = [tree.depths.count(level) for level in range(1, depth + 1)]
    assert levels[0] == min(beam, siblings)
    assert all(count == min(beam, siblings * before) for before, count in pairwise(levels))
    assert max(map(len, tree.children)) <= siblings


@pytest.mark.parametrize("budget", [DraftSize(3, nodes=4), DraftSize(3, chains_only=True), DraftSize(2), DraftSize(0)])
@pytest.mark.parametrize("reranks", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_budget_is_kept_to_the_node(budget: DraftSize, reranks: bool, temperature: float) -> None:
    growth = Growth(
        target_vocab_size=VOCAB_SIZE,
        policy=LengthPolicy(9),
        num_branches=3,
        beam_width=2,
        reranks=reranks,
        max_nodes=20,
    )
    draft = growth.begin(row_of(0, [1, 2, 3], temperature=temperature, seed=5), budget)
    if draft.cap:
        growth.grow([draft], Oracle(3, torch.float64))
    tree = growth.finish(draft, "test")
    assert tree.depth <= budget.depth
    assert len(tree) <= budget.nodes
    assert tree.is_chain or not budget.chains_only
    assert tree.depth == budget.depth or reranks or len(tree) == budget.nodes


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"draft_rerank": True}, "max_draft_nodes is not set"),
        (
            {"draft_rerank": True, "max_draft_nodes": 8, "rejection_sample_method": "standard"},
            "draft_rerank drops the unlikely ones; use 'match'",
        ),
        ({"draft_beam_width": 0}, "draft_beam_width"),
    ],
)
def test_reranking_that_cannot_be_is_refused(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig(method="draft_model", model="zoo:tiny", num_draft_branches=3, **keys)
