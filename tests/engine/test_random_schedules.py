"""Requests that come, go and are aborted at random times give the tokens that each gives alone."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch

import toy_heads
from drafting import made
from foredraft.config.engine import EngineConfig
from foredraft.config.sampling import SamplingParams
from foredraft.drafters.heads.medusa_hydra import MultiHeadDrafter
from foredraft.drafters.lm.draft_model import DraftModelDrafter
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.drafter import Drafter
from foredraft.engine.engine import Engine
from foredraft.engine.row import Row
from foredraft.methods.lengths import Heuristic
from foredraft.methods.rank_tree import RankTree
from foredraft.model.lm import CausalLM
from foredraft.testing import check_cache_lengths, perturbed, toy_model

VOCAB_SIZE = 64
EOS = (9, 33)


@cache
def target(dtype: torch.dtype) -> CausalLM:
    return CausalLM(toy_model(VOCAB_SIZE, dtype=dtype), execution="eager")


@cache
def small(dtype: torch.dtype) -> CausalLM:
    return CausalLM(perturbed(toy_model(VOCAB_SIZE, dtype=dtype), 0.08), execution="eager")


def random_drafter(rng: random.Random, dtype: torch.dtype) -> Drafter:
    depth = rng.randint(0, 6)
    kind = rng.choice(["model", "model", "model", "ngram", "nasd", "none", "medusa", "hydra"])
    if kind in ("medusa", "hydra"):
        heads = getattr(toy_heads, f"{kind}_heads")(rng.random() < 0.5)
        growth: dict[str, Any] = {"target_vocab_size": VOCAB_SIZE, "max_depth": min(depth, 4)}
        growth["tree"] = RankTree.published("zephyr_stage2").first(rng.randint(2, 24))
        heads = copy.deepcopy(heads).to(dtype)
        return MultiHeadDrafter(heads, 2, **growth)
    if kind == "ngram":
        return made("ngram", depth, prompt_lookup_min=1, num_prompt_lookup_candidates=rng.randint(1, 3))
    if kind == "nasd":
        return made("nasd", depth, num_draft_branches=rng.randint(1, 3))
    if kind == "none":
        return EmptyDrafter()
    return DraftModelDrafter(
        small(dtype),
        target_vocab_size=VOCAB_SIZE,
        num_speculative_tokens=depth,
        num_branches=rng.randint(1, 4),
        sample_method=rng.choice(["greedy", "probabilistic"]),
        policy=Heuristic(depth) if rng.random() < 0.3 else None,
    )


def random_params(rng: random.Random) -> SamplingParams:
    """A mixture of everything; most parameters are off most of the time."""

    def sometimes(value: float, off: float) -> float:
        return value if rng.random() < 0.25 else off

    return SamplingParams(
        n=rng.choice([1, 1, 1, 2, 3]),
        max_tokens=rng.choice([None, *range(1, 25)]) if rng.random() < 0.9 else 1,
        temperature=rng.choice([0.0, 0.5, 1.0, 1.5]),
        top_p=sometimes(0.8, 1.0),
        top_k=int(sometimes(12, 0)),
        min_p=sometimes(0.05, 0.0),
        typical_p=sometimes(0.9, 1.0),
        presence_penalty=sometimes(0.7, 0.0),
        frequency_penalty=sometimes(0.4, 0.0),
        repetition_penalty=sometimes(1.3, 1.0),
        no_repeat_ngram_size=int(sometimes(2, 0)),
        stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), rng.choice([0, 0, 2]))),
        ignore_eos=rng.random() < 0.5,
        logit_bias={rng.randrange(VOCAB_SIZE): rng.uniform(-3, 3)} if rng.random() < 0.3 else None,
        allowed_token_ids=rng.choice([None, None, None, rng.sample(range(VOCAB_SIZE), 8)]),
        logprobs=rng.choice([None, None, 2]),
        seed=rng.randrange(1 << 40),
    )


@dataclass
class Request:
    """What was asked, and how much of it has to be there in the end."""

    prompt: tuple[int, ...]
    params: SamplingParams
    rows: list[Row] = field(default_factory=list)
    is_aborted: bool = False

    def check(self, lm: CausalLM, config: EngineConfig) -> None:
        """The request alone, plain, gives the same; an aborted row the beginning of it."""
        engine = Engine(lm, EmptyDrafter(), config, eos_token_ids=EOS)
        want = engine.add_request(self.prompt, self.params)
        list(engine.run())
        for row, plain in zip(self.rows, want, strict=True):
            if self.is_aborted and row.finish_reason == "abort":
                assert row.output_ids == plain.output_ids[: row.num_output_tokens]
            else:
                assert row.output_ids == plain.output_ids
                assert (row.finish_reason, row.stop_reason) == (plain.finish_reason, plain.stop_reason)


def run_schedule(seed: int, lm: CausalLM, config: EngineConfig | None = None) -> list[Request]:
    rng = random.Random(seed)
    free = EngineConfig(max_num_seqs=rng.randint(1, 5), prefill_chunk_size=rng.randint(1, 9), max_model_len=48)
    engine = Engine(lm, random_drafter(rng, lm.dtype), config or free, eos_token_ids=EOS)
    requests: list[Request] = []
    num_wanted = rng.randint(4, 10)
    while len(requests) < num_wanted or engine.has_unfinished:
        if len(requests) < num_wanted and rng.random() < 0.4:
            pattern = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 6))]
            prompt = tuple((pattern * 5)[: rng.choice([1, 2, 5, 11, 24])])
            request = Request(prompt, random_params(rng))
            request.rows = engine.add_request(prompt, request.params, str(len(requests)))
            requests.append(request)
        if requests and rng.random() < 0.05:
            victim = rng.randrange(len(requests))
            requests[victim].is_aborted = True
            engine.abort(str(victim))
        before = lm.num_forwards
        is_working = engine.has_unfinished
        engine.step()
        assert lm.num_forwards - before == int(is_working)
        check_cache_lengths(engine)
    assert engine.num_running == engine.cache.num_rows == 0
    return requests


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed in (1, 6, 10) else pytest.mark.full) for seed in range(60)]
)
def test_a_random_schedule_changes_no_token(seed: int) -> None:
    lm = target(torch.float64)
    for request in run_schedule(seed, lm):
        request.check(lm, EngineConfig(max_model_len=48))
