"""Rotary positions whose frequencies change with the length of a text: every text has those that transformers gives it
alone, whatever ran before and whatever runs beside it; and what is beyond that is refused by the name of the type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM, PreTrainedModel

from foredraft import LLM, SamplingParams, speculate
from foredraft.errors import ConfigError, ContextLengthError
from foredraft.model.lm import CausalLM
from foredraft.model.nodes import Nodes
from foredraft.testing import strengthen
from generated import generated

BORDER, CONTEXT = 48, 256
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def longrope(**changes: Any) -> PreTrainedModel:
    factors = {"short_factor": [1.0] * 8, "long_factor": [1.0 + 2 * place for place in range(8)]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": BORDER, **factors}
    config = Phi3Config(
        **SIZES,
        max_position_embeddings=CONTEXT,
        original_max_position_embeddings=BORDER,
        rope_parameters=rope,
        **changes,
    )
    return strengthen(Phi3ForCausalLM(config)).eval()


def dynamic(context: int = BORDER) -> PreTrainedModel:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    config = LlamaConfig(**SIZES, max_position_embeddings=context, rope_parameters=rope)
    return strengthen(LlamaForCausalLM(config)).double().eval()


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(1, 64, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def said(llm: LLM, prompts: list[list[int]], count: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=count, detokenize=False)
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]


# -- longrope --------------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("method", ["none", "ngram", "suffix", "token_recycling", "layer_skip", "sparse_kv"])
def test_prompts_over_the_border_have_the_long_factors_throughout(method: str) -> None:
    """Beside shorter ones in one batch, with prompts that are read in chunks, and drafts that are trees."""
    model = longrope().double()
    prompts = [prompt(100), prompt(20, 1), (prompt(9, 2) * 20)[:140], prompt(BORDER + 1, 3)]
    wanted = [generated(model, ids, 24) for ids in prompts]
    llm = LLM(model, {"method": method, **({"exit_layer": 1} if method == "layer_skip" else {})}, prefill_chunk_size=32)
    assert said(llm, prompts, 24) == wanted
    assert said(llm, prompts, 24) == wanted  # from kept prefixes
    assert llm.model_info.context_length == CONTEXT


def test_beginnings_of_short_and_of_long_prompts_are_kept_apart() -> None:
    """The same tokens have other keys."""
    model, whole = longrope().double(), prompt(120)
    llm = LLM(model, "ngram", prefill_chunk_size=16)
    for ids in (whole[:40], whole, whole[:32], whole[:90]):
        assert said(llm, [ids], 8) == [generated(model, ids, 8)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("execution", ["auto", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_over_the_border_are_those_of_the_model(execution: str, dtype: torch.dtype) -> None:
    """Through the native program as well, whose angles are looked up by position."""
    model, ids = longrope().to(dtype), prompt(90)
    lm = CausalLM(model, execution=execution)
    cache = lm.new_cache(2)
    cache.offsets[0] = lm.offset_of(len(ids))
    assert (cache.offsets[0], lm.offset_of(BORDER)) == (BORDER, 0)
    lm.forward(Nodes.from_chains([ids[:-4], ids[:20]]), cache, keep=slice(0, 0))
    cache.commit([range(len(ids) - 4), range(20)])
    logits = lm.forward(Nodes.from_chains([ids[-4:], ids[20:24]]), cache).float()
    with torch.inference_mode():
        for row, text in ((0, ids), (1, ids[:24])):
            want = model(torch.tensor([text]), use_cache=False).logits[0, -4:].float()
            error = float((logits[row] - want).norm() / want.norm())
            assert error < (1e-4 if dtype == torch.float32 else 0.05)
    if execution == "auto" and lm.execution.kernels is not None:
        assert lm.execution.program is not None, lm.execution.why_no_program


def test_the_model_itself_is_left_alone() -> None:
    """Its frequencies change with every forward of its own; those of the shadow never do."""
    model = longrope().double()
    before = model.model.rotary_emb.inv_freq.clone()
    CausalLM(model)
    assert torch.equal(model.model.rotary_emb.inv_freq, before)
    generated(model, prompt(100), 2)
    assert said(LLM(model, "ngram"), [prompt(20)], 8) == [generated(model, prompt(20), 8)]


def test_a_text_that_begins_before_the_border_ends_there(caplog: pytest.LogCaptureFixture) -> None:
    model = longrope().double()
    llm = LLM(model, "ngram")
    (output,) = llm.generate([prompt(40)], SamplingParams(temperature=0, max_tokens=20, detokenize=False))
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (BORDER - 40, "length")
    with pytest.raises(ContextLengthError, match=r"48 tokens and the context 48.*longrope.*up to 256 tokens"):
        said(llm, [prompt(BORDER)], 4)
    with pytest.raises(ContextLengthError, match=r"the context 256.*longrope"):
        said(llm, [prompt(CONTEXT)], 4)
    with pytest.raises(
        ConfigError, match=r"max_model_len is 500, but .* a context of 256; lower max_model_len \(.*longrope"
    ):
        LLM(model, "ngram", max_model_len=500)
    assert said(LLM(model, "ngram", max_model_len=120), [prompt(110)], 20) == [generated(model, prompt(110), 10)]
    assert len(generated(model, prompt(40), 20, custom_generate=speculate("ngram"))) == BORDER - 40
    assert "filled the 48 tokens" in caplog.text
    assert "a longer prompt uses the long factors from the start, up to 256 tokens" in caplog.text


@pytest.mark.parametrize("lengths", [(100, 70), (100, 20)])
def test_inside_generate_a_batch_has_the_factors_of_its_longest_prompt(lengths: tuple[int, int]) -> None:
    """As in transformers, whose forward over a batch has one set; scores over padding, too."""
    model, width = longrope().double(), max(lengths)
    model.generation_config.eos_token_id = 7
    ids = torch.tensor([[0] * (width - length) + prompt(length, length) for length in lengths])
    mask = torch.tensor([[0] * (width - length) + [1] * length for length in lengths])
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 40, "do_sample": False}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    wanted = model.generate(ids, **options)
    found = model.generate(ids, **options, custom_generate=speculate("ngram"))
    assert torch.equal(found.sequences, wanted.sequences)
    for ours, theirs in zip(found.logits, wanted.logits, strict=True):
        assert torch.allclose(ours.double(), theirs.double(), atol=1e-4)


# -- dynamic NTK -----------------------------------------------------------------------------------------------------


def test_texts_within_the_context_are_the_same_whatever_ran_before() -> None:
    """Frequencies of a longer text stay behind in the model; a model that had run one could not be loaded."""
    fresh, used = dynamic(), dynamic()
    generated(used, prompt(100), 10)
    wanted = generated(fresh, prompt(20), 24)
    for model in (fresh, used):
        assert said(LLM(model, "ngram"), [prompt(20)], 24) == [wanted]
        generated(model, prompt(100), 4)
        assert said(LLM(model, "ngram"), [prompt(20)], 24) == [wanted]


def test_the_end_of_the_context_names_the_type(caplog: pytest.LogCaptureFixture) -> None:
    """Raising the context in the config gives other texts, so nobody is told to."""
    model = dynamic()
    with pytest.raises(ContextLengthError, match=r"the context 48: .*dynamic NTK, whose frequencies change with every"):
        said(LLM(model, "ngram"), [prompt(60)], 4)
    with pytest.raises(ConfigError, match=r"max_model_len is 100, but .*dynamic NTK"):
        LLM(model, "ngram", max_model_len=100)
    assert len(generated(model, prompt(40), 20, custom_generate=speculate("ngram"))) == BORDER - 40
    assert "dynamic NTK" in caplog.text
    assert "raise max_position_embeddings" not in caplog.text
