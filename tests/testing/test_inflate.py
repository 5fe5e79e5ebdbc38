"""`inflate` grows a model without changing its function: with a cache, in batches, for every supported class."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from foredraft import zoo
from foredraft.errors import ConfigError, UnsupportedModelError
from foredraft.model.support import cache_argument
from foredraft.testing.inflation import inflate, inflated_from

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "rms_norm_eps": 1e-3,  # large, so that an epsilon that is not corrected shows
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "llama tied": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "llama biased": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)),
    "mistral window": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=4)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16)),
}


def strong(name: str) -> torch.nn.Module:
    """A model whose norms, biases and weights are all away from their initial values."""
    torch.manual_seed(5)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


@torch.no_grad()
def logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, use_cache=False).logits


@torch.no_grad()
def cached_logits(model: torch.nn.Module, ids: torch.Tensor, cut: int) -> torch.Tensor:
    head = model(input_ids=ids[:, :cut], use_cache=True)
    cache = {cache_argument(model): head[cache_argument(model)]}
    tail = model(input_ids=ids[:, cut:], **cache, use_cache=True)
    return torch.cat([head.logits, tail.logits], dim=1)


def exact_norms(model: torch.nn.Module) -> torch.nn.Module:
    """transformers computes RMSNorm in float32 whatever the dtype; the algebra is under test, not that rounding."""

    def normalise(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return module.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)

    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = partial(normalise, module)
    return model


IDS = torch.randint(0, 61, (3, 17), generator=torch.Generator().manual_seed(1))


@pytest.mark.sample(15)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("extra", [{}, {"num_layers": 5}, {"vocab_size": 200}], ids=["width", "depth", "vocabulary"])
def test_same_function_in_float64(name: str, extra: dict[str, int]) -> None:
    """Every correction is exact: 1e-10 in float64, where an uncorrected epsilon or scale shows at 1e-3 and above."""
    model = exact_norms(strong(name).double())
    bigger = exact_norms(inflate(model, hidden_size=112, intermediate_size=80, **extra))
    expected, found = logits(model, IDS), logits(bigger, IDS)
    torch.testing.assert_close(found[..., :61], expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(cached_logits(bigger, IDS, 9)[..., :61], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_every_old_parameter_still_matters(name: str) -> None:
    """The comparison above would also pass if a layer were dead in both: perturb each and see the logits move."""
    bigger = inflate(strong(name).double(), hidden_size=64, intermediate_size=96)
    before = logits(bigger, IDS)
    for label, parameter in bigger.named_parameters():
        if label.endswith("k_proj.bias"):
            continue  # a key bias before the rotary embedding may cancel in places; the weights cover the keys
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter[(0,) * parameter.ndim] += 1.0
        if not label.endswith("embed_tokens.weight"):
            assert (logits(bigger, IDS) - before).abs().max() > 1e-9, label
        with torch.no_grad():
            parameter.copy_(kept)


def test_added_tokens_never_win() -> None:
    """Real logits may all be negative, so a zero row would win; the added ones lie below -500 and have no mass."""
    model = strong("llama tied")
    bigger = inflate(model, hidden_size=64, intermediate_size=48, vocab_size=300)
    found = logits(bigger, IDS)
    assert found.shape[-1] == 300
    assert found[..., 61:].max() < -500
    assert torch.equal(found.argmax(-1), logits(model, IDS).argmax(-1))
    assert float(found.softmax(-1)[..., 61:].sum()) == 0.0
    assert torch.isfinite(logits(bigger, torch.tensor([[250, 61, 299]]))).all()


def test_shape_label_class_and_independence() -> None:
    model = strong("llama tied")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    bigger = inflate(model, hidden_size=128, intermediate_size=96, num_layers=3)
    assert type(bigger) is LlamaForCausalLM
    config = bigger.config
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (128, 96, 3)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (16, 8, 8)
    assert bigger.lm_head.weight is bigger.model.embed_tokens.weight
    assert inflated_from(model) is None
    assert inflated_from(bigger) == {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 61,
    }  # fmt: skip
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.config.hidden_size == 32


def test_saved_and_loaded_again(tmp_path) -> None:
    model = strong("llama tied")
    bigger = inflate(model, hidden_size=64, intermediate_size=96, vocab_size=100)
    bigger.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert torch.equal(logits(again, IDS), logits(bigger, IDS))
    assert inflated_from(again) == inflated_from(bigger)


def test_inflating_twice_keeps_the_function() -> None:
    """Two spare channels, two lots of added tokens: all still right."""
    model = exact_norms(strong("qwen2").double())
    once = inflate(model, hidden_size=64, intermediate_size=48, vocab_size=80)
    twice = exact_norms(inflate(once, hidden_size=96, intermediate_size=64, vocab_size=90))
    found = logits(twice, IDS)
    torch.testing.assert_close(found[..., :61], logits(model, IDS), rtol=0, atol=1e-10)
    assert found[..., 61:].max() < -500


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden_size": 16, "intermediate_size": 48}, "hidden_size=16 is below the model's 32"),
        ({"hidden_size": 64, "intermediate_size": 47}, "intermediate_size=47 is below the model's 48"),
        ({"hidden_size": 40, "intermediate_size": 48}, "multiple of 16, such as 48"),
        ({"hidden_size": 64, "intermediate_size": 48, "num_layers": 0}, "num_layers=0 is below the model's 2"),
        ({"hidden_size": 64, "intermediate_size": 48, "num_layers": 1}, "num_layers=1 is below the model's 2"),
        ({"hidden_size": 64, "intermediate_size": 48, "vocab_size": 60}, "vocab_size=60 is below"),
        ({"hidden_size": 32, "intermediate_size": 48, "vocab_size": 90}, "hidden_size above 32"),
    ],
)
def test_refused_sizes(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        inflate(strong("llama"), **arguments)


def test_refused_class() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=8))
    with pytest.raises(UnsupportedModelError, match="a model of type gpt2 cannot be inflated"):
        inflate(model, hidden_size=16, intermediate_size=32)


def test_the_shipped_drafter_inflated_gives_the_same_logits() -> None:
    """Trained weights, float32, a width that is no power of two apart: within 1e-4."""
    _, drafter, tokenizer = zoo.load("tiny")
    bigger = inflate(drafter, hidden_size=384, intermediate_size=704)
    ids = torch.tensor([tokenizer.encode("<|user|>Tell me a story about a dog.\n<|assistant|>Once there was a dog")])
    assert (logits(bigger, ids) - logits(drafter, ids)).abs().max() < 1e-4
