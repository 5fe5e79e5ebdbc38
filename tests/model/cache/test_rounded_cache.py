"""Keys and values that are rounded when they are written: the model over such a cache is the one that is decoded."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from compiled_models import build
from foredraft import LLM, SamplingParams
from foredraft.engine.memory import bytes_per_token
from foredraft.errors import ConfigError
from foredraft.loading.info import load_line
from foredraft.model.cache.ragged import KVCache
from foredraft.model.cache.storage import restored, stored
from foredraft.model.execution.native_program import NativeProgram
from foredraft.model.lm import CausalLM
from foredraft.model.nodes import Nodes
from foredraft.native import library as native
from foredraft.tree import DraftTree
from harness import random_ids
from instruction_sets import limit_to

KINDS = ("bfloat16", "int8")
PAIRS = [(torch.float32, "bfloat16"), (torch.float32, "int8"), (torch.bfloat16, "int8"), (torch.float16, "int8")]
PROMPTS = [{"prompt_token_ids": [3 + token % 100 for token in random_ids(n, n)]} for n in (90, 5, 33, 70, 12)]
METHODS = (
    "ngram",
    {"method": "token_recycling", "max_draft_nodes": 12, "length_policy": "fixed"},
    {"method": "sparse_kv", "kv_selector": "snapkv", "kv_budget": 24, "kv_window": 8, "length_policy": "fixed"},
    {"method": "quantized_self", "num_speculative_tokens": 3, "length_policy": "fixed"},
    {"method": "draft_model", "num_speculative_tokens": 3, "length_policy": "fixed"},
)
needs_kernels = pytest.mark.skipif(native.library() is None, reason="no kernels here")


def texts(llm: LLM, temperature: float = 0.0, prompts: list[dict[str, list[int]]] = PROMPTS) -> list[list[int]]:
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=24, ignore_eos=True)
    return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False)]


def read(lm: CausalLM, chain: list[int], *, rounds: bool = True) -> tuple[torch.Tensor, KVCache]:
    cache = lm.new_cache(1, rounds=rounds)
    logits = lm.forward(Nodes.from_chains([chain]), cache)
    cache.commit([range(len(chain))])
    return logits, cache


# -- what is stored ----------------------------------------------------------------------------------------------------


def test_a_head_in_int8_is_multiples_of_its_own_scale() -> None:
    rows = stored(torch.tensor([[2.54, 1.0, -0.5, 0.0], [0.0, 0.0, 0.0, 0.0]]), torch.int8)
    assert rows[:, :4].tolist() == [[127, 50, -25, 0], [0, 0, 0, 0]]
    assert torch.allclose(restored(rows, torch.float32)[0], torch.tensor([2.54, 1.0, -0.5, 0.0]))
    assert not restored(rows, torch.float32)[1].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_number_stays_none(kind: str, bad: float) -> None:
    found = restored(stored(torch.tensor([[1.0, bad], [1.0, 2.0]]), getattr(torch, kind)), torch.float32)
    assert not found[0].isfinite().all()
    assert found[1].isfinite().all()


@pytest.mark.sample(1)
@needs_kernels
@pytest.mark.parametrize(("dtype", "kind"), PAIRS, ids=str)
def test_the_native_program_stores_what_torch_stores(dtype: torch.dtype, kind: str) -> None:
    """Of the first layer, whose keys and values depend on no attention; heads of odd sizes as well."""
    lm = CausalLM(build("llama", dtype), kv_cache_dtype=kind)
    assert lm.execution.program is not None
    chain = [token % lm.vocab_size for token in random_ids(40, 1)]
    (_, rounded), (_, plain) = (read(lm, chain, rounds=rounds) for rounds in (True, False))
    assert lm.execution.program.num_runs >= 2
    for name in ("keys", "values"):
        given, kept = (getattr(cache.layers[0], name)[:, :, : len(chain)] for cache in (plain, rounded))
        assert torch.equal(stored(given, getattr(torch, kind)), kept)


# -- what is computed --------------------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@needs_kernels
@pytest.mark.parametrize(("dtype", "kind"), PAIRS, ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_native_program_computes_what_modules_compute(
    name: str, dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers at the border of two roundings may fall either way: less than what rounding itself changes."""
    lm = CausalLM(build(name, dtype), kv_cache_dtype=kind)
    chain = [token % lm.vocab_size for token in random_ids(60, 1)]
    program = [read(lm, chain, rounds=rounds)[0].double() for rounds in (True, False)]
    monkeypatch.setattr(NativeProgram, "is_possible", False)
    modules = [read(lm, chain, rounds=rounds)[0].double() for rounds in (True, False)]
    error, usual = ((mine - theirs).norm() for mine, theirs in zip(program, modules, strict=True))
    assert error < 2 * usual + 0.5 * (modules[0] - modules[1]).norm()


@pytest.mark.sample(5)
@needs_kernels
@pytest.mark.parametrize(("dtype", "kind"), PAIRS, ids=str)
@pytest.mark.parametrize("instruction", list(native.OPTIONS))
def test_heads_of_64_are_read_alike_by_every_instruction_set(
    instruction: str, dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns that fill vectors, and some behind them; float32 differs by the order of its sums alone."""
    widest = native.instruction_set()
    if widest is None or list(native.OPTIONS).index(instruction) < list(native.OPTIONS).index(widest):
        pytest.skip("this machine does not run it")
    limit_to(instruction, monkeypatch)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=160, hidden_size=192, intermediate_size=96, num_hidden_layers=1, num_attention_heads=3,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=256, initializer_range=0.1,
    )  # fmt: skip
    lm = CausalLM(LlamaForCausalLM(config).to(dtype).eval(), kv_cache_dtype=kind)
    assert instruction in lm.execution.describe()
    chain = random_ids(53, 1)
    program = read(lm, chain)[0].double()
    monkeypatch.setattr(NativeProgram, "is_possible", False)
    modules = read(lm, chain)[0].double()
    bound = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.015}[dtype]
    assert (program - modules).norm() < bound * modules.norm()


@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_accepted_path_is_as_if_it_had_been_read(name: str, kind: str) -> None:
    """By modules over stock kernels, whose keys and values are rounded and restored; windows that fill, and experts."""
    lm = CausalLM(build(name), execution="eager", kv_cache_dtype=kind)
    chain = [token % lm.vocab_size for token in random_ids(30, 1)]
    cache = read(lm, chain)[1]
    lm.forward(Nodes.from_trees([DraftTree((7, 8, 9, 4, 5), (-1, 0, 0, 1, 2))]), cache)
    cache.commit([[0, 2, 4]])
    cache.reorder([0, 0])
    cache.rollback([32], 1)
    cache.remove(0)
    after = lm.forward(Nodes.from_chains([[5]]), cache)[0, 0]
    fresh = read(lm, [*chain, 7, 9, 5])[0][0, -1]
    exact = read(lm, [*chain, 7, 9, 5], rounds=False)[0][0, -1]
    assert (after - fresh).norm() < 0.5 * (exact - fresh).norm()


# -- texts -------------------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_leave_every_text_as_it_is(kind: str) -> None:
    """Chains, trees, views and votes, weights of few bits, a second model; greedy and sampled, one row and five."""
    llm = LLM("zoo:tiny", dtype="float32", kv_cache_dtype=kind)
    plain = {temperature: [texts(llm, temperature, [prompt])[0] for prompt in PROMPTS] for temperature in (0.0, 1.0)}
    for number, method in enumerate(["none", *METHODS]):
        other, temperature = llm.with_speculative_config(method), float((number + (kind == "int8")) % 2)
        if other.guarantee.keeps_bits:
            assert plain[temperature] == texts(other, temperature), other.speculative_config.title


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_takes_over_a_beginning_as_it_was_rounded(kind: str) -> None:
    llm = LLM("zoo:tiny", dtype="float32", kv_cache_dtype=kind, prefill_chunk_size=16, num_cached_prefixes=4)
    prompt = PROMPTS[0]["prompt_token_ids"]
    longer = [{"prompt_token_ids": [*prompt, *texts(llm, prompts=PROMPTS[:1])[0][:5]]}]
    reused = texts(llm, prompts=longer)
    fresh = LLM("zoo:tiny", dtype="float32", kv_cache_dtype=kind, prefill_chunk_size=16)
    assert reused == texts(fresh, prompts=longer)


# -- what is said of it ------------------------------------------------------------------------------------------------


def test_the_plan_counts_what_is_stored() -> None:
    model = build("llama", torch.float32)
    kinds = [CausalLM(model, kv_cache_dtype=kind) for kind in ("auto", "bfloat16", "int8")]
    plain, half, bytes_of = (bytes_per_token(lm) for lm in kinds)
    size = model.config.hidden_size // model.config.num_attention_heads
    assert plain == 4 * model.config.num_hidden_layers * 2 * model.config.num_key_value_heads * size
    assert (half, bytes_of) == (plain // 2, plain // 4 // size * (size + 4))


def test_a_changed_model_keeps_its_cache() -> None:
    model = build("llama", torch.float32)
    lm = CausalLM(model, kv_cache_dtype="int8")
    model.lm_head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=True)
    assert lm.refresh()
    assert read(lm, [1, 2])[1].layers[0].keys.dtype == torch.int8


def test_what_cannot_be_stored_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype is 'fp8_e4m3'; .*'int8' has the same size"):
        LLM("zoo:tiny", kv_cache_dtype="fp8_e4m3")
    with pytest.raises(ConfigError, match=r"'float32'; Choose auto.*, bfloat16 or int8"):
        LLM("zoo:tiny", kv_cache_dtype="float32")
    with pytest.raises(ConfigError, match=r"not smaller than the model's float16.*use 'int8'"):
        CausalLM(build("llama", torch.float16), kv_cache_dtype="bfloat16")


def test_it_is_told_when_a_model_is_loaded() -> None:
    info = LLM("zoo:tiny", dtype="float32", kv_cache_dtype="int8").model_info
    assert info.kv_cache_dtype == "int8"
    assert "keys and values in int8" in load_line(info)
    assert LLM("zoo:tiny", dtype="float32").model_info.kv_cache_dtype == "float32"
