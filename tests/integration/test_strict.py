"""Rows keep their bits: plain and speculative decoding give the very logits of each other, whatever runs beside."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cache, partial
from itertools import product

import pytest
import torch
from torch import nn

from architectures import ARCHITECTURES, target_model
from foretoken.config.engine import EngineConfig
from foretoken.config.sampling import SamplingParams
from foretoken.drafters.none import EmptyDrafter
from foretoken.engine.drafter import Drafter
from foretoken.engine.engine import Engine
from foretoken.model.execution.packing import packed_dtype
from foretoken.model.lm import CausalLM
from foretoken.testing import PerfectDrafter, WrongDrafter, decode, strengthen, toy_model
from harness import first_attention, random_ids

GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95, seed=5)
STRICT = EngineConfig(exactness="strict", output_logits=True)
BORDERS = (5, 245, 500, 1010)
"""Prompts whose outputs cross the first column, and multiples of 256 and 512 columns."""

has_native_bfloat16 = packed_dtype(torch.bfloat16) == torch.bfloat16


@cache
def long_lm(name: str, dtype: torch.dtype, execution: str = "auto") -> CausalLM:
    """A tiny model with room for long prompts and heads as wide as real ones, where its family lets them be."""
    config = ARCHITECTURES[name].config()
    config.update({key: 2048 for key in ("max_position_embeddings", "n_positions") if hasattr(config, key)})
    config._attn_implementation = first_attention(name)
    torch.manual_seed(0)
    model = type(target_model(name, first_attention(name)))(config)
    return CausalLM(strengthen(model).to(dtype).eval(), execution=execution, probe=False, packs_all=True)


def run(
    lm: CausalLM, drafter: Drafter, prompts: Seq[Seq[int]], params: SamplingParams, config: EngineConfig
) -> list[tuple[list[int], torch.Tensor]]:
    """Tokens and raw logits (N, V) of every prompt."""
    engine = Engine(lm, drafter, config)
    rows = [engine.add_request(prompt, params)[0] for prompt in prompts]
    logits: dict[int, list[torch.Tensor]] = {row.id: [] for row in rows}
    for outputs in engine.run():
        for output in outputs:
            assert output.logits is not None
            logits[output.row.id].append(torch.as_tensor(output.logits))
    return [(row.output_ids, torch.cat(logits[row.id])) for row in rows]


def drafters(texts: list[list[int]], vocab_size: int) -> dict[str, Drafter]:
    """Right to their end in different depths, and always wrong."""
    return {
        f"{kind.name} {depth}": kind(texts, depth, vocab_size=vocab_size)
        for kind, depth in ((PerfectDrafter, 1), (PerfectDrafter, 4), (PerfectDrafter, 15), (WrongDrafter, 6))
    }


def check_bits(lm: CausalLM, prompts: Seq[Seq[int]], params: SamplingParams, config: EngineConfig) -> None:
    """Every drafter, in a batch and alone, gives the logits of plain decoding alone to the last bit."""
    plain = [run(lm, EmptyDrafter(), [prompt], params, config)[0] for prompt in prompts]
    texts = [[*prompt, *tokens] for prompt, (tokens, _) in zip(prompts, plain, strict=True)]
    for name, drafter in {"none": EmptyDrafter(), **drafters(texts, lm.vocab_size)}.items():
        together = run(lm, drafter, prompts, params, config)
        alone = [run(lm, drafter, [prompt], params, config)[0] for prompt in prompts]
        for how, found in (("together", together), ("alone", alone)):
            for i, ((tokens, logits), (want_tokens, want)) in enumerate(zip(found, plain, strict=True)):
                assert tokens == want_tokens, (name, how, i)
                assert torch.equal(logits, want), (name, how, i)


PROMPTS = [random_ids(length, 40 + length) for length in BORDERS]


@pytest.mark.slow
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "gemma3", "mistral-filled", "gpt-neox", "olmo2", "granite"])
def test_strict_logits_are_those_of_plain_decoding(name: str, dtype: torch.dtype, params: SamplingParams) -> None:
    """Over prompts whose outputs cross 256, 512 and 1,024 columns, in batches that rows leave, and alone."""
    lm = long_lm(name, dtype)
    facts = lm.kernel_facts(STRICT.strict_width)
    if facts.bucket is None:
        pytest.fail(f"{name} in {dtype}: {facts.reason}")
    check_bits(lm, PROMPTS, params, STRICT)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_strict_logits_of_short_texts_are_those_of_plain_decoding(name: str) -> None:
    check_bits(long_lm(name, torch.bfloat16), PROMPTS[:2], replace(GREEDY, max_tokens=12), STRICT)


@pytest.mark.skipif(not has_native_bfloat16, reason="the default keeps bits where the CPU computes in bfloat16")
def test_the_default_keeps_bits_of_chains_in_half_precision() -> None:
    check_bits(long_lm("llama", torch.bfloat16), PROMPTS[:2], GREEDY, EngineConfig(output_logits=True))


ALIKE = [random_ids(length, 7 + i) for i, length in enumerate((34, 40, 90, 37, 40, 3, 2, 39, 150, 35))]
"""Prompts of which some are padded to one width."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_prompts_that_are_read_together_leave_what_they_leave_alone(name: str, dtype: torch.dtype) -> None:
    check_bits(long_lm(name, dtype), ALIKE, replace(GREEDY, max_tokens=6), replace(STRICT, prefill_chunk_size=64))


def test_prompts_of_about_one_length_are_read_in_one_forward() -> None:
    """Tokens to read, without the pending one: 33 to 39 make one forward, 1 and 2, 89 and 149 one each."""
    lm = lm_that_rounds()
    assert lm.kernel_facts(STRICT.strict_width).bucket is not None
    engine = Engine(lm, EmptyDrafter(), replace(STRICT, max_num_seqs=len(ALIKE)))
    for prompt in ALIKE:
        engine.add_request([token % lm.vocab_size for token in prompt], replace(GREEDY, max_tokens=20))
    num_reads = 0
    while engine.num_running < len(ALIKE) or len(engine.decoding_rows) < len(ALIKE):
        before = engine.profile.num_prefill_tokens
        engine.step()
        num_reads += engine.profile.num_prefill_tokens > before
    assert num_reads == 4


# -- kernels whose habits are known ------------------------------------------------------------------------------


def lm_that_rounds(*, few: int = 0, many: int = 1 << 30, odd: bool = False) -> CausalLM:
    """A toy whose linear layers round otherwise in calls of few, many or an odd number of rows."""
    lm = CausalLM(toy_model(), execution="eager", probe=False)

    def run(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        rows = x.shape[:-1].numel()
        is_other = rows < few or rows >= many or (odd and rows % 2 == 1)
        # one row at a time, in steps far coarser than the rounding of attention
        out = torch.stack([nn.functional.linear(row, layer.weight) for row in x.flatten(0, -2)])
        return (out * 2**16 + 0.3 * is_other).round().div(2**16).view(*x.shape[:-1], -1)

    for layer in lm.shadow.modules():
        if isinstance(layer, nn.Linear):
            layer.forward = partial(run, layer=layer)
    return lm


TOY_PROMPTS = [[3, 1, 4, 1, 5], [7], [2, 7, 1, 8, 2, 8, 1, 8], [9, 9, 8]] * 3


@pytest.mark.parametrize("habits", [{"few": 3}, {"many": 20}, {"few": 4, "many": 24}, {"odd": True}], ids=str)
def test_strict_mode_goes_around_the_habits_of_kernels(habits: dict[str, int]) -> None:
    """Few rows are padded, many are split; where no range helps, every step runs at one shape."""
    lm = lm_that_rounds(**habits)
    assert (lm.kernel_facts(8).bucket is None) == ("odd" in habits)
    config = EngineConfig(exactness="strict", strict_width=8, max_num_seqs=12, max_model_len=64, prefill_chunk_size=16)
    requests = [(prompt, replace(GREEDY, max_tokens=10)) for prompt in TOY_PROMPTS]
    plain = decode(lm, EmptyDrafter(), requests, config=config)
    texts = [[*prompt, *plain.outputs[f"{i}.0"]] for i, prompt in enumerate(TOY_PROMPTS)]
    for kind, depth in product((PerfectDrafter, WrongDrafter), (1, 4, 7)):
        trace = decode(lm, kind(texts, depth, vocab_size=lm.vocab_size), requests, config=config)
        assert trace.outputs == plain.outputs, (kind, depth)
    for i in (0, 1):
        alone = decode(lm, PerfectDrafter(texts, 4, vocab_size=lm.vocab_size), [requests[i]], config=config)
        assert alone.outputs["0.0"] == plain.outputs[f"{i}.0"]


def test_without_it_such_kernels_change_logits() -> None:
    """The control: the same kernels at free shapes."""
    lm, prompts = lm_that_rounds(few=3), TOY_PROMPTS[:1]
    config = EngineConfig(exactness="relaxed", output_logits=True)
    ((tokens, logits),) = run(lm, EmptyDrafter(), prompts, GREEDY, config)
    perfect = PerfectDrafter([[*prompts[0], *tokens]], 4, vocab_size=lm.vocab_size)
    ((_, drafted),) = run(lm, perfect, prompts, GREEDY, config)
    assert not torch.equal(drafted, logits)


def test_longer_drafts_end_at_the_width() -> None:
    """Ten tokens drafted, seven verified: the rest is proposed again."""
    lm = lm_that_rounds()
    config = EngineConfig(exactness="strict", strict_width=8)
    (tokens,) = decode(lm, EmptyDrafter(), [([3, 1, 4], GREEDY)], config=config).outputs.values()
    perfect = PerfectDrafter([[3, 1, 4, *tokens]], 10, vocab_size=lm.vocab_size)
    trace = decode(lm, perfect, [([3, 1, 4], GREEDY)], config=config)
    assert trace.outputs["0.0"] == tokens
    assert trace.num_steps == 1 + 3  # prefill; 24 tokens in steps of 8
