"""Rows keep their bits: plain and speculative decoding give the very logits of each other, whatever runs beside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch

from architectures import ARCHITECTURES, target_model
from foredraft.config.engine import EngineConfig, Guarantee
from foredraft.config.sampling import SamplingParams
from foredraft.drafters.none import EmptyDrafter
from foredraft.engine.drafter import Drafter
from foredraft.engine.engine import Engine
from foredraft.model.lm import CausalLM
from foredraft.native import library as native
from foredraft.native.abi import MOST_NODES
from foredraft.testing import PerfectDrafter, WrongDrafter, decode, strengthen, toy_model
from harness import first_attention, random_ids

GREEDY = SamplingParams(max_tokens=20, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=20, temperature=0.8, top_p=0.95, seed=5)
DEFAULT = EngineConfig(output_logits=True)
BORDERS = (5, 245, 500, 1010)
"""Prompts whose outputs cross the first column, and multiples of 256 and 512 columns."""

needs_kernels = pytest.mark.skipif(native.library() is None, reason="no kernels here")


@cache
def long_lm(name: str, dtype: torch.dtype, execution: str = "auto") -> CausalLM:
    """A tiny model with room for long prompts and heads as wide as real ones, where its family lets them be."""
    config = ARCHITECTURES[name].config()
    config.update({key: 2048 for key in ("max_position_embeddings", "n_positions") if hasattr(config, key)})
    config._attn_implementation = first_attention(name)
    torch.manual_seed(0)
    model = type(target_model(name, first_attention(name)))(config)
    return CausalLM(strengthen(model).to(dtype).eval(), execution=execution, probe=False)


def run(
    lm: CausalLM, drafter: Drafter, prompts: Sequence[Sequence[int]], params: SamplingParams, config: EngineConfig
) -> list[tuple[list[int], torch.Tensor]]:
    """Tokens and raw logits (N, V) of every prompt."""
    engine = Engine(lm, drafter, config)
    rows = [engine.add_request(prompt, params)[0] for prompt in prompts]
    logits: dict[int, list[torch.Tensor]] = {row.id: [] for row in rows}
    for outputs in engine.run():
        for output in outputs:
            assert output.logits is not None
            logits[output.row.id].append(torch.as_tensor(output.logits))
    if type(drafter) is PerfectDrafter:
        assert sum(row.stats.num_accepted_draft_tokens for row in rows) > 0
    return [(row.output_ids, torch.cat(logits[row.id])) for row in rows]


def drafters(texts: list[list[int]], vocab_size: int) -> dict[str, Drafter]:
    """Right to their end in different depths, and always wrong."""
    kinds = (PerfectDrafter, 4), (PerfectDrafter, 40), (WrongDrafter, 6)
    return {f"{kind.name} {depth}": kind(texts, depth, vocab_size=vocab_size) for kind, depth in kinds}


def check_bits(lm: CausalLM, prompts: Sequence[Sequence[int]], params: SamplingParams, config: EngineConfig) -> None:
    """Every drafter gives the logits of plain decoding alone to the last bit: in a batch, and each by turns alone."""
    plain = [run(lm, EmptyDrafter(), [prompt], params, config)[0] for prompt in prompts]
    texts = [[*prompt, *tokens] for prompt, (tokens, _) in zip(prompts, plain, strict=True)]
    every = drafters(texts, lm.vocab_size)
    for name, drafter in {"none": EmptyDrafter(), **every}.items():
        for i, ((tokens, logits), want) in enumerate(
            zip(run(lm, drafter, prompts, params, config), plain, strict=True)
        ):
            assert tokens == want[0], (name, i)
            assert torch.equal(logits, want[1]), (name, i)
    for i, prompt in enumerate(prompts):
        ((tokens, logits),) = run(lm, [*every.values()][i % len(every)], [prompt], params, config)
        assert tokens == plain[i][0], i
        assert torch.equal(logits, plain[i][1]), i


PROMPTS = [random_ids(length, 40 + length) for length in BORDERS]
LONG = ("llama", "gpt2", "qwen3", "gemma3", "mistral-filled", "gpt-neox", "olmo2", "granite")


@pytest.mark.sample(2)
@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "params"),
    [
        pytest.param(name, dtype, params, marks=() if place == turn % 4 else pytest.mark.full)
        for turn, name in enumerate(LONG)
        for place, (dtype, params) in enumerate(product([torch.bfloat16, torch.float32], [GREEDY, SAMPLED]))
    ],
    ids=lambda value: f"{value.temperature}" if isinstance(value, SamplingParams) else str(value),
)
def test_logits_are_those_of_plain_decoding(name: str, dtype: torch.dtype, params: SamplingParams) -> None:
    """Over prompts whose outputs cross 256, 512 and 1,024 columns, in batches that rows leave, and alone."""
    lm = long_lm(name, dtype)
    assert lm.guarantee("default").kind == "bit-identical", lm.guarantee("default").reason
    check_bits(lm, PROMPTS, params, DEFAULT)


@pytest.mark.sample(2)
@needs_kernels
@pytest.mark.parametrize(
    ("name", "dtype"), list(product(["llama", "gpt2"], [torch.bfloat16, torch.float16, torch.float32])), ids=str
)
def test_logits_of_short_texts_are_those_of_plain_decoding(name: str, dtype: torch.dtype) -> None:
    check_bits(long_lm(name, dtype), PROMPTS[:2], replace(GREEDY, max_tokens=12), DEFAULT)


@needs_kernels
def test_a_draft_of_more_nodes_is_cut_where_bits_are_promised() -> None:
    """100 tokens drafted: 64 nodes are verified by default, all of them when nothing is promised."""
    lm = long_lm("llama", torch.float32)
    assert lm.guarantee("relaxed") == Guarantee("up to rounding", "exactness is relaxed")
    params = replace(GREEDY, max_tokens=128, ignore_eos=True)
    (tokens,) = decode(lm, EmptyDrafter(), [([3, 1, 4], params)]).outputs.values()
    perfect = PerfectDrafter([[3, 1, 4, *tokens]], 100, vocab_size=lm.vocab_size)
    steps = {}
    for exactness in ("default", "relaxed"):
        trace = decode(lm, perfect, [([3, 1, 4], params)], config=EngineConfig(exactness=exactness))
        assert trace.outputs["0.0"] == tokens
        steps[exactness] = trace.num_steps - 1  # one reads the prompt
    assert steps == {"default": 128 // MOST_NODES, "relaxed": 2}


ALIKE = [random_ids(length, 7 + i) for i, length in enumerate((34, 40, 90, 37, 40, 3, 2, 39, 150, 35))]
"""Prompts of which some are padded to one width."""


@pytest.mark.parametrize("execution", ["packed", "eager"])
def test_prompts_are_read_together(execution: str) -> None:
    """Ten prompts, of which one has a single token, which a step verifies."""
    if execution == "packed" and native.library() is None:
        pytest.skip("no kernels here")
    lm = CausalLM(toy_model().float(), execution=execution, probe=False)
    prompts = [[token % lm.vocab_size for token in prompt[:9]] for prompt in ALIKE[:-1]] + [[1]]
    engine = Engine(lm, EmptyDrafter(), replace(DEFAULT, max_num_seqs=10, max_model_len=96, prefill_chunk_size=64))
    for prompt in prompts:
        engine.add_request(prompt, replace(GREEDY, max_tokens=20))
    found = 0
    while len(engine.decoding_rows) < len(prompts):
        before = engine.profile.num_prefill_tokens
        engine.step()
        found += engine.profile.num_prefill_tokens > before
    assert found == 1
