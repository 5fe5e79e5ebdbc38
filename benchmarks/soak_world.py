"""What `soak.py` soaks: a toy in float64 under every method, or a real model under a few."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from soaking import Fault, World

from foretoken import LLM, SamplingParams
from foretoken.config.engine import EngineConfig
from foretoken.config.speculative import SpeculativeConfig
from foretoken.drafters.context import DrafterContext, make_drafter
from foretoken.engine.arms import ArmsGovernor
from foretoken.engine.drafter import Drafter
from foretoken.engine.governing import AnyGovernor
from foretoken.engine.governor import Governor
from foretoken.engine.memory import bytes_per_token
from foretoken.engine.step_costs import StepCosts
from foretoken.heads.checkpoint import write_checkpoint
from foretoken.heads.eagle import EagleHead, EagleShape, default_streams
from foretoken.heads.eagle_layouts import write_eagle
from foretoken.heads.hydra import HydraHeads, HydraShape
from foretoken.heads.hydra_layout import write_hydra
from foretoken.heads.layers import LayerShape
from foretoken.heads.medusa import MedusaHeads, MedusaShape
from foretoken.heads.medusa_layout import write_medusa
from foretoken.model.lm import CausalLM
from foretoken.retrieval.documents import from_tokens
from foretoken.testing import perturbed, toy_model

VOCAB_SIZE = 64
EOS = (9, 33)
SPARSE: dict[str, Any] = {"kv_sinks": 2, "kv_refresh": 8, "num_speculative_tokens": 3}
METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {"prompt_lookup_min": 1},
    "nasd": {"shared": True},
    "suffix": {},
    "rest": {},
    "token_recycling": {},
    "jacobi": {},
    "lookahead": {},
    "draft_model": {"num_draft_branches": 2, "num_speculative_tokens": 3},
    "layer_skip": {"exit_layer": 1},
    "quantized_self": {},
    "sparse_kv": {"kv_budget": 24, **SPARSE},
    "sparse_kv/snapkv": {"kv_budget": 24, "kv_selector": "snapkv", "kv_window": 8, **SPARSE},
    "medusa": {},
    "hydra": {},
    "eagle": {},
    "eagle2": {},
    "eagle3": {},
    "auto": {"drafters": ["ngram", "suffix", "draft_model"]},
    "first": {"drafters": ["ngram", "draft_model"]},
    "union": {"drafters": ["token_recycling", "draft_model"]},
    "union/self": {"drafters": ["ngram", {"method": "sparse_kv", "kv_budget": 24, **SPARSE}]},
}
"""Methods and their keys; what follows a slash is only a title."""
GOVERNED = ("ngram", "draft_model", "auto", "eagle3", "sparse_kv")


class Letters:
    """A tokenizer: token i is a letter or a digit, and token 63 cannot be read."""

    LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 "

    def decode(self, token_ids: list[int], **_: Any) -> str:
        if VOCAB_SIZE - 1 in token_ids:
            raise Fault("token 63 cannot be read")
        return "".join(self.LETTERS[token] for token in token_ids)


def head_of(target: CausalLM, method: str, folder: Path) -> str:
    """A head with random weights, in a folder."""
    config = target.shadow.config
    size = config.hidden_size
    torch.manual_seed(0)
    if method == "medusa":
        write_medusa(MedusaHeads(MedusaShape(size, VOCAB_SIZE, 3)), folder)
    elif method == "hydra":
        write_hydra(HydraHeads(HydraShape(size, VOCAB_SIZE, 3)), folder)
    else:
        layer, depth = LayerShape(size, 2 * size, 4, 2, size // 4), config.num_hidden_layers
        streams = default_streams(depth) if method == "eagle3" else (depth,)
        shape = EagleShape(3 if method == "eagle3" else 1, layer, size, streams, depth)
        write_checkpoint(folder, *write_eagle(EagleHead(shape)))
    return str(folder)


def toy_world(rng: random.Random, folder: Path, methods: tuple[str, ...] = tuple(METHODS)) -> World:
    """A toy in float64, each method in an engine of its own, memory for about three of its longest rows."""
    target = CausalLM(toy_model(VOCAB_SIZE), execution="eager")
    draft = CausalLM(perturbed(toy_model(VOCAB_SIZE), 0.08, seed=2), execution="eager")
    from_tokens([[rng.randrange(VOCAB_SIZE) for _ in range(40)]], folder / "texts", vocab_size=VOCAB_SIZE)
    engines: dict[str, tuple[Drafter, AnyGovernor | None]] = {}
    for title in methods:
        keys, method = dict(METHODS[title]), title.split("/")[0]
        if method in ("medusa", "hydra", "eagle", "eagle2", "eagle3"):
            keys["model"] = head_of(target, method, folder / method)
        if method == "rest":
            keys["datastore"] = str(folder / "texts")
        drafter = make_drafter(SpeculativeConfig(method, **keys), DrafterContext(target, draft))
        engines[title] = drafter, governor(drafter) if title in GOVERNED else None
    limits: dict[str, Any] = {"max_model_len": 192, "prefill_chunk_size": 24, "contains_faults": True}
    plan = EngineConfig(max_num_seqs=6, max_kv_bytes=5 * 128 * bytes_per_token(target), **limits)
    alone = EngineConfig(max_num_seqs=1, **limits)
    return World(target, engines, Texts(rng), plan, alone, EOS, Letters())


def governor(drafter: Drafter) -> AnyGovernor:
    """One that finds more than a few nodes too dear, so that drafts are cut."""
    costs = StepCosts({1: 0.001, 8: 0.0012, 64: 0.004, 512: 0.032})
    return ArmsGovernor(drafter, costs) if drafter.arms else Governor(costs, divisible=drafter.is_divisible)


class Texts:
    """Makes prompts, which begin alike at times, and parameters of every kind."""

    def __init__(self, rng: random.Random) -> None:
        self._known = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 60))] for _ in range(6)]

    def __call__(self, rng: random.Random) -> tuple[list[int], SamplingParams]:
        pattern = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 6))]
        tail = (pattern * 30)[: rng.choice([1, 2, 5, 11, 30, 60, 100])]
        begun = rng.choice(self._known) if rng.random() < 0.5 else []
        prompt = [*begun[: rng.randint(0, len(begun))], *tail]
        return prompt, toy_params(rng, prompt)


def toy_params(rng: random.Random, prompt: list[int]) -> SamplingParams:
    """A mixture of everything; most parameters are off most of the time."""

    def sometimes(value: Any, off: Any, share: float = 0.2) -> Any:
        return value if rng.random() < share else off

    is_long = rng.random() < 0.25
    failing_at = len(prompt) + rng.randint(0, 20)

    def broken(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] >= failing_at:
            raise Fault("a processor has failed")
        return scores

    return SamplingParams(
        n=rng.choice([1, 1, 1, 1, 2, 3]),
        max_tokens=None if is_long else rng.choice([1, 2, 4, 8, 16, 32, 32]),
        temperature=rng.choice([0.0, 0.0, 0.5, 1.0, 1.5]),
        top_p=sometimes(0.8, 1.0),
        top_k=sometimes(12, 0),
        min_p=sometimes(0.05, 0.0),
        typical_p=sometimes(0.9, 1.0),
        presence_penalty=sometimes(0.7, 0.0),
        frequency_penalty=sometimes(0.4, 0.0),
        repetition_penalty=sometimes(1.3, 1.0),
        no_repeat_ngram_size=sometimes(2, 0),
        min_tokens=sometimes(1, 0),
        stop=() if is_long else sometimes(["ab", "Q", "7z"], ()),
        stop_token_ids=() if is_long else sometimes((3, 40), ()),
        bad_words_ids=sometimes([[5, 6], [11]], ()),
        ignore_eos=is_long or rng.random() < 0.5,
        logit_bias=sometimes({rng.randrange(VOCAB_SIZE): rng.uniform(-3, 3)}, None),
        logprobs=sometimes(2, None),
        logits_processors=sometimes([broken], (), 0.08),
        seed=rng.randrange(1 << 40),
    )


def model_world(name: str, methods: tuple[str, ...], size: str, folder: Path, **options: Any) -> World:
    """A model under a plan of this many bytes for each of its methods; prompts are pieces of files in a folder."""
    llm = LLM(name, **options)
    assert llm.tokenizer is not None
    texts = [llm.tokenizer(path.read_text(encoding="utf-8"))["input_ids"] for path in sorted(folder.glob("*.md"))]
    engines = {}
    for method in methods:
        drafting = llm.with_speculative_config(method).drafting
        drafter = drafting.new_drafter()
        engines[method] = drafter, drafting.governor(llm.target, drafter)
    plan = EngineConfig(max_num_seqs=8, max_model_len=2048, max_kv_bytes=size, contains_faults=True)
    alone = EngineConfig(max_num_seqs=1, max_model_len=2048, contains_faults=True)

    def request(rng: random.Random) -> tuple[list[int], SamplingParams]:
        text = rng.choice(texts)
        start, length = rng.randrange(max(1, len(text) - 64)), rng.choice([8, 32, 64, 200, 500, 1000])
        start = 0 if rng.random() < 0.3 else start  # prompts that begin alike
        prompt = text[start : start + length]
        temperature = rng.choice([0.0, 0.0, 0.7, 1.0])
        limits = {"max_tokens": rng.choice([8, 16, 32, 64, 128]), "seed": rng.randrange(1 << 40)}
        penalty = 1.1 if rng.random() < 0.2 else 1.0
        return prompt, SamplingParams(temperature=temperature, repetition_penalty=penalty, top_p=0.95, **limits)

    return World(llm.target, engines, request, plan, alone, tuple(llm._eos_token_ids), llm.tokenizer, is_exact=False)
