"""Execution: a shadow that shares tensors, packed linears, grouped attention."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    Gemma2Config,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen3Config,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from foredraft.errors import ConfigError, UnsupportedModelError
from foredraft.model.execution import execution
from foredraft.model.execution.attention import GROUPED_SDPA, grouped_sdpa
from foredraft.model.execution.execution import apply_execution, choose_execution
from foredraft.model.execution.packing import PackedLinear, embedding_rows, embedding_weight, packs
from foredraft.model.lm import CausalLM, Nodes
from foredraft.model.reduced import shadow
from foredraft.native.library import library

can_pack = pytest.mark.skipif(not packs(torch.float32), reason="no kernels here")

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
CONFIGS = {
    "llama": LlamaConfig(**GROUPED),
    "llama-tied": LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**GROUPED, head_dim=8),
    "mixtral": MixtralConfig(**GROUPED, num_local_experts=4, sliding_window=None),
    "gemma2": Gemma2Config(**GROUPED, head_dim=8),
    "falcon": FalconConfig(**SIZES, alibi=False),
    "gpt2": GPT2Config(
        vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.3, bos_token_id=1
    ),
}
ROUNDING = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 6e-2}


def build(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name])).to(dtype).eval()
    if name == "mixtral" and dtype == torch.float64:
        model.set_experts_implementation("eager")  # the grouped product of torch has no float64
    return model


def logits_of(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


IDS = torch.tensor([[3, 17, 55, 4, 90, 21, 8], [60, 5, 5, 12, 33, 2, 71]])


class TestShadow:
    @pytest.mark.parametrize("name", CONFIGS)
    def test_shares_every_tensor_and_no_module(self, name: str) -> None:
        model = build(name)
        copied = shadow(model)
        assert [id(t) for t in copied.parameters()] == [id(t) for t in model.parameters()]
        assert [id(t) for t in copied.buffers()] == [id(t) for t in model.buffers()]
        assert not {id(m) for m in copied.modules()} & {id(m) for m in model.modules()}
        assert copied.config is not model.config
        assert copied.config is copied.get_decoder().config
        assert copied.generation_config is not model.generation_config

    @pytest.mark.sample(4)
    @can_pack
    @pytest.mark.parametrize("kind", ["packed", "eager"])
    @pytest.mark.parametrize("path", ["lm_head", "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"])
    def test_a_layer_may_have_hooks_that_change_what_it_reads_and_returns(self, path: str, kind: str) -> None:
        """The probe ran them twice, and said that packed kernels were wrong by half."""
        model = build("llama")
        want = logits_of(model, IDS)
        layer = model.get_submodule(path)
        layer.register_forward_pre_hook(lambda _module, args: (args[0] * 0.5 + 0.1,))
        layer.register_forward_hook(lambda _module, _args, output: -output)
        changed = logits_of(model, IDS)
        assert not torch.allclose(changed, want, atol=0.1)
        lm = CausalLM(model, execution=kind)
        got = lm.forward(Nodes.from_chains(IDS.tolist()), lm.new_cache(len(IDS)))
        assert torch.allclose(got, changed, atol=ROUNDING[torch.float32])

    def test_what_cannot_be_copied_is_refused(self) -> None:
        model = build("llama")
        model.owner = (step for step in range(3))  # a generator has no copy
        with pytest.raises(UnsupportedModelError, match="cannot be copied"):
            shadow(model)


class TestChoice:
    def test_auto_packs_on_cpus_only_what_can_be_packed(self) -> None:
        assert choose_execution("auto", "cpu", torch.float64) == "eager"
        assert choose_execution("auto", "cuda", torch.float32) == "eager"
        if packs(torch.float32):
            assert choose_execution("auto", torch.device("cpu"), torch.float32) == "packed"

    def test_an_unknown_kind_names_the_nearest(self) -> None:
        with pytest.raises(ConfigError, match="did you mean 'packed'"):
            choose_execution("pack", "cpu", torch.float32)
        with pytest.raises(ConfigError, match="known are auto, eager, packed, compiled"):
            choose_execution("fast", "cpu", torch.float32)

    def test_packed_off_the_cpu_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="execution='eager'"):
            choose_execution("packed", "cuda", torch.float32)


@can_pack
class TestMemory:
    def test_auto_runs_eagerly_and_says_so_when_memory_is_short(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = build("llama")
        monkeypatch.setattr(execution, "available_memory_bytes", lambda: 1000)
        assert apply_execution(shadow(model), "auto").kind == "eager"
        assert "execution='packed'" in caplog.text
        assert apply_execution(shadow(model), "packed").kind == "packed"
        monkeypatch.setattr(execution, "available_memory_bytes", lambda: None)
        assert apply_execution(shadow(model), "auto").kind == "packed"


@can_pack
class TestPacked:
    def test_other_dtypes_than_the_weights_are_refused(self) -> None:
        with pytest.raises(TypeError, match="float64"):
            PackedLinear.of(nn.Linear(8, 5))(torch.zeros(1, 8, dtype=torch.float64))

    def test_counts_what_it_packed(self) -> None:
        model = build("llama")
        execution = apply_execution(shadow(model), "packed")
        linears = [module for module in model.modules() if type(module) is nn.Linear]
        assert execution.num_packed_layers == len(linears) == 15
        least = 4 * sum(linear.weight.numel() for linear in linears)
        assert least <= execution.packed_bytes <= 1.1 * least  # outputs are filled up to whole vectors
        assert execution.describe().startswith("packed (15 layers in 9 products")

    def test_layers_that_somebody_wrapped_are_left_alone(self) -> None:
        """Quantised subclasses and forwards replaced on the instance (accelerate does) are not plain linears."""

        class Doubled(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return 2 * super().forward(x)

        model = build("llama")
        layers = model.model.layers
        layers[0].mlp.up_proj.__class__ = Doubled
        own_forward = layers[1].mlp.up_proj.forward
        layers[1].mlp.up_proj.forward = lambda x: -own_forward(x)
        want = logits_of(model, IDS)
        execution = apply_execution(shadow(model), "packed")
        with torch.inference_mode():
            got = execution.run(input_ids=IDS, use_cache=False).logits
        assert execution.num_packed_layers == 13
        assert relative_error(got, want) < 2e-5


@can_pack
class TestRelease:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("name", CONFIGS)
    def test_runs_on_packed_weights_alone(self, name: str, dtype: torch.dtype) -> None:
        model = build(name, dtype)
        want = logits_of(model, IDS)
        execution = apply_execution(shadow(model), "packed", release_originals=True)
        with torch.inference_mode():
            got = execution.run(input_ids=IDS, use_cache=False).logits
        assert execution.num_packed_layers > 0
        assert got.dtype == want.dtype == dtype
        assert relative_error(got, want) < ROUNDING[dtype]
        assert not execution.refresh_if_stale()

    def test_frees_the_weights_for_everybody_but_keeps_ties(self) -> None:
        """But for an embedding that only looks up rows: they are read from the packed output embedding."""
        free, tied, scaled, offset = build("llama"), *(build("llama-tied") for _ in range(3))
        scaled.model.embed_tokens.__class__ = Scaled
        offset.model.embed_tokens.__class__ = Offset
        for model in (free, tied, scaled, offset):
            apply_execution(shadow(model), "packed", release_originals=True)
            q_proj = model.model.layers[0].self_attn.q_proj.weight
            assert q_proj.shape == (32, 32)
            assert q_proj.untyped_storage().nbytes() == 4
            assert q_proj.isnan().all(), "code that reads past the packed copy must be found out"
        assert free.lm_head.weight.untyped_storage().nbytes() == 4
        assert offset.lm_head.weight is offset.model.embed_tokens.weight
        assert not offset.lm_head.weight.isnan().any()
        for model in (tied, scaled):
            assert model.lm_head.weight is model.model.embed_tokens.weight
            assert model.lm_head.weight.isnan().all() == (library() is not None)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.skipif(library() is None, reason="no kernels here")
    def test_rows_of_a_tied_embedding_keep_their_bits(self, dtype: torch.dtype) -> None:
        model = build("llama-tied", dtype)
        want = model.model.embed_tokens.weight.detach().clone()
        execution = apply_execution(shadow(model), "packed", release_originals=True)
        embedding = execution.model.get_input_embeddings()
        ids = torch.arange(len(want)).flip(0).repeat(2, 1)
        assert torch.equal(embedding(ids), want[ids])
        assert torch.equal(embedding_weight(embedding), want)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.skipif(library() is None, reason="no kernels here")
    def test_a_tied_embedding_that_scales_its_rows_keeps_its_bits_without_a_table(self, dtype: torch.dtype) -> None:
        """Gemma's class, whose scale is a buffer in another dtype, and which has a padding token."""
        model = gemma(dtype)
        original = model.get_input_embeddings()
        weight = original.weight.detach().clone()
        ids = torch.arange(len(weight)).flip(0).repeat(2, 1)
        want, logits = original(ids), logits_of(model, IDS)
        execution = apply_execution(shadow(model), "packed", release_originals=True)
        embedding = execution.model.get_input_embeddings()
        assert embedding.weight.isnan().all()
        assert torch.equal(embedding(ids), want)
        assert not torch.equal(embedding(ids), weight[ids])
        assert torch.equal(embedding_weight(embedding), weight)
        assert torch.equal(embedding_rows(embedding, ids), weight[ids])
        with torch.inference_mode():
            got = execution.run(input_ids=IDS, use_cache=False).logits
        assert relative_error(got, logits) < ROUNDING.get(dtype, 6e-2)


class Scaled(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 3.0


class Offset(nn.Embedding):
    """Looks at the tokens for more than their rows."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + (input == 0)[..., None]


def gemma(dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Gemma3TextConfig(vocab_size=96, num_hidden_layers=2, head_dim=16, pad_token_id=90, **sizes)
    return Gemma3ForCausalLM(config).to(dtype).eval()


class TestGroupedAttention:
    @pytest.mark.parametrize("num_queries", [1, 2, 7])
    @pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
    @pytest.mark.parametrize("kind", ["bool", "additive", "batch-shared", "none"])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_equals_sdpa_of_transformers(
        self, dtype: torch.dtype, kind: str, num_kv_heads: int, num_queries: int
    ) -> None:
        """Keys are a view of a larger buffer, values have a width of their own (MLA), masks are ragged."""
        torch.manual_seed(1)
        module = nn.Module()
        module.num_key_value_groups, module.is_causal = 4 // num_kv_heads, True
        rows, columns = 3, 11
        query = torch.randn(rows, num_queries, 4, 8, dtype=dtype).transpose(1, 2)
        key = torch.randn(rows, num_kv_heads, 32, 8, dtype=dtype)[:, :, :columns]
        value = torch.randn(rows, num_kv_heads, 32, 5, dtype=dtype)[:, :, :columns]
        mask = None
        if kind != "none":
            mask = torch.rand(1 if kind == "batch-shared" else rows, 1, num_queries, columns) < 0.6
            mask[..., 0] = True
            if kind == "additive":
                mask = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
        want, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
        got, weights = grouped_sdpa(module, query, key, value, mask, scaling=0.3)
        assert weights is None
        assert got.shape == (rows, num_queries, 4, 5)
        assert got.is_contiguous()
        assert relative_error(got, want) < (1e-12 if dtype == torch.float64 else 1e-5)

    def test_what_is_unusual_goes_to_transformers(self) -> None:
        module = nn.Module()
        module.num_key_value_groups, module.is_causal = 2, True
        torch.manual_seed(1)
        query, key = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 5, 8)
        mask = torch.zeros(1, 4, 3, 5)  # one for every head
        mask[:, 1, :, 2] = -1e9
        bias = torch.randn(1, 4, 3, 5)
        for arguments in ({"position_bias": bias}, {"is_causal": True}):
            want, _ = sdpa_attention_forward(module, query, key, key, None, **arguments)
            assert torch.equal(grouped_sdpa(module, query, key, key, None, **arguments)[0], want)
        want, _ = sdpa_attention_forward(module, query, key, key, mask)
        assert torch.equal(grouped_sdpa(module, query, key, key, mask)[0], want)
        shared = mask[:, 1:2]
        want, _ = sdpa_attention_forward(module, query, key, key, shared, position_bias=bias)
        assert torch.equal(grouped_sdpa(module, query, key, key, shared, position_bias=bias)[0], want)
        try:
            want, _ = sdpa_attention_forward(module, query, key, key, shared, softcap=1.0)
        except ValueError as refusal:  # as newer transformers do
            with pytest.raises(ValueError, match=str(refusal)[:20]):
                grouped_sdpa(module, query, key, key, shared, softcap=1.0)
        else:
            assert torch.equal(grouped_sdpa(module, query, key, key, shared, softcap=1.0)[0], want)

    def test_a_kernel_may_lay_out_its_result_otherwise(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """CUDA's for float32 turns rows and heads; what was a view of them failed there, and with it every head."""
        module = nn.Module()
        module.num_key_value_groups = 2
        torch.manual_seed(2)
        query, key, value = torch.randn(3, 4, 5, 8), torch.randn(3, 2, 7, 8), torch.randn(3, 2, 7, 8)
        mask = torch.rand(3, 1, 5, 7) < 0.7
        mask[..., 0] = True
        want, _ = grouped_sdpa(module, query, key, value, mask)
        own = F.scaled_dot_product_attention

        def turned(*args, **kwargs):
            return own(*args, **kwargs).transpose(1, 2).contiguous().transpose(1, 2)

        monkeypatch.setattr(F, "scaled_dot_product_attention", turned)
        got, _ = grouped_sdpa(module, query, key, value, mask)
        assert torch.equal(got, want)

    def test_copies_neither_keys_nor_values(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = nn.Module()
        module.num_key_value_groups = 4
        buffer = torch.randn(1, 2, 64, 8)
        seen: list[torch.Tensor] = []
        own = F.scaled_dot_product_attention

        def spy(query, key, value, *args, **kwargs):
            seen.extend((key, value))
            return own(query, key, value, *args, **kwargs)

        monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
        mask = torch.ones(1, 1, 5, 40, dtype=torch.bool)
        grouped_sdpa(module, torch.randn(1, 8, 5, 8), buffer[:, :, :40], buffer[:, :, :40], mask)
        assert [tensor.data_ptr() for tensor in seen] == [buffer.data_ptr()] * 2
        assert seen[0].shape == (1, 2, 40, 8)

    @can_pack
    @pytest.mark.parametrize(
        ("name", "implementation", "is_taken"),
        [
            ("llama", "sdpa", True),
            ("gpt2", "sdpa", True),
            ("llama", "eager", False),
            ("falcon", "sdpa", False),  # compares with "sdpa" in its own code
        ],
    )
    def test_is_taken_only_where_sdpa_goes_through_the_interface(
        self, name: str, implementation: str, is_taken: bool
    ) -> None:
        model = build(name)
        model.set_attn_implementation(implementation)
        copied = shadow(model)
        execution = apply_execution(copied, "packed")
        assert execution.uses_grouped_attention == is_taken
        assert (copied.config._attn_implementation == GROUPED_SDPA) == is_taken
        assert model.config._attn_implementation == implementation
