"""Models that are kept quantised: run as they are where every row is computed by itself, else refused for what they do.

Small stand-ins for the layers of other libraries, and the libraries themselves where they are installed.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from foredraft import LLM, speculate
from foredraft.errors import ConfigError, UnsupportedModelError
from foredraft.model.execution.packing import packable
from foredraft.model.independence import quantised_layers
from foredraft.model.lm import CausalLM, Nodes
from foredraft.testing import toy_model
from generated import generated

IDS = torch.tensor([[10, 11, 12, 13]])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def dense_model(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Large enough for packed weights."""
    return toy_model(512, seed=1, dtype=dtype, scale=0.1, hidden_size=256, intermediate_size=1024)


def replaced(model: PreTrainedModel, new: Callable[[nn.Linear], nn.Module]) -> PreTrainedModel:
    """The model with other linears in its decoder; the head stays."""
    for parent in list(model.model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, new(child))
    return model.eval()


def plain(model: PreTrainedModel) -> list[int]:
    return generated(model, IDS[0].tolist(), 20)


def drafted(model: PreTrainedModel, **options: Any) -> list[int]:
    return generated(model, IDS[0].tolist(), 20, custom_generate=speculate(**{"method": "ngram", **options}))


def assert_decoded_as_it_is(model: PreTrainedModel, **options: Any) -> None:
    """The text of plain ``generate``; in bfloat16, where near-ties may fall otherwise, its logits."""
    found = drafted(model, **options)
    assert found
    if model.lm_head.weight.dtype == torch.float32:
        assert found == plain(model)
    lm = CausalLM(model, execution=options.get("execution", "auto"))
    want = model(IDS).logits.float()
    got = lm.forward(Nodes.from_chains(IDS.tolist()), lm.new_cache(1)).float()
    assert (got - want).norm() / want.norm() < 0.05


def rounded(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (values / scale).round().clamp(-127, 127) * scale


class Quantised(nn.Module):
    """Weights in int8, one scale per output feature; inputs as they are."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach().float()
        self.scale = nn.Parameter(weight.abs().amax(dim=1, keepdim=True) / 127, requires_grad=False)
        self.weight = nn.Parameter((weight / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.rounded(x), (self.weight.float() * self.scale).to(x.dtype))

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        return x


class RoundedByRow(Quantised):
    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        return rounded(x, x.abs().amax(dim=-1, keepdim=True) / 127)


class RoundedTogether(Quantised):
    """As torch's dynamic int8 rounds."""

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        return rounded(x, x.abs().max() / 127)


class RoundedButForOutliers(Quantised):
    """As LLM.int8() rounds: all rows say together which columns are not rounded."""

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        is_outlier = (x.abs() >= 6.0).flatten(0, -2).any(dim=0)
        return torch.where(is_outlier, x, rounded(x, x.abs().amax(dim=-1, keepdim=True) / 127))


class RoundedWhenFew(RoundedByRow):
    """As kernels for GGUF blocks round: one for up to eight rows, another one for more."""

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        return super().rounded(x) if x[..., 0].numel() <= 8 else x


class SetUpByForward(Quantised):
    """Keeps its scale on the tensor until the first forward takes it away, as bitsandbytes does for int8."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self.weight.own_scale, self.scale = self.scale.data, None
        self.taken: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight.own_scale is not None:
            self.taken, self.weight.own_scale = self.weight.own_scale, None
        return F.linear(x, (self.weight.float() * self.taken).to(x.dtype))


class Wrapper(torch.Tensor):
    """A weight that only looks like floats: its values are codes, as those of torchao's subclasses are."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, dtype: torch.dtype) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype)

    def __init__(self, codes: torch.Tensor, dtype: torch.dtype) -> None:
        self.codes = codes

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.linear:
            x, weight, *bias = args
            return F.linear(x, weight.codes.to(x.dtype) / 128, *bias, **(kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].dtype)
        raise NotImplementedError(str(function))


def with_wrapped_weights(linear: nn.Linear) -> nn.Linear:
    wrapped = Wrapper((linear.weight.detach() * 128).round().to(torch.int8), linear.weight.dtype)
    linear.weight = nn.Parameter(wrapped, requires_grad=False)
    return linear


# -- accepted ----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize(("new", "dtype"), [(Quantised, torch.bfloat16), (with_wrapped_weights, torch.float32)])
def test_quantised_weights_run_as_they_are(new: Callable[[nn.Linear], nn.Module], dtype: torch.dtype) -> None:
    """And linears beside them are packed as ever. The first version packed what only looked like floats."""
    model = replaced(dense_model(dtype), new)
    assert list(packable(model)) == [model.lm_head]
    want = plain(model)
    for execution in ("auto", "eager"):
        assert_decoded_as_it_is(model, execution=execution)
    llm = LLM(model, "ngram")
    assert llm.generate([{"prompt_token_ids": IDS[0].tolist()}], {"max_tokens": 20, "temperature": 0.0})
    assert llm.model_info.execution.endswith("14 quantised layers left as they are)")
    assert plain(model) == want


def test_inputs_that_every_row_rounds_for_itself_are_accepted() -> None:
    assert_decoded_as_it_is(replaced(dense_model(torch.bfloat16), RoundedByRow))


@pytest.mark.sample(1)
@pytest.mark.parametrize("new", [RoundedByRow, Quantised])
def test_who_rounds_inputs_is_held_to_that_rounding_and_says_so(new: type[Quantised]) -> None:
    """Held to that of float32, it depended on the machine whether some input was moved by a step."""
    lm = CausalLM(replaced(dense_model(), new))
    rounds = new is RoundedByRow
    assert lm.probe is not None
    assert all((check.noise > 1e-3) == rounds for check in lm.probe.checks)
    assert ("rounds its inputs" in lm.guarantee("default").reason) == rounds


def test_a_quantised_model_drafts_for_itself_with_what_it_has() -> None:
    """`quantized_self` makes 4-bit copies of floats; where there are none, it says so."""
    model = replaced(dense_model(), Quantised)
    with pytest.raises(ConfigError, match="no linear"):
        LLM(model, "quantized_self")
    assert drafted(model, method="layer_skip", exit_layer=1) == plain(model)


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("new", "dtype"), [(RoundedTogether, torch.bfloat16), (RoundedButForOutliers, torch.float32)])
def test_rows_that_are_rounded_together_are_refused(new: type[Quantised], dtype: torch.dtype) -> None:
    model = replaced(dense_model(dtype), new)
    want = plain(model)
    with pytest.raises(UnsupportedModelError, match="with a scale shared by all rows of a forward pass") as refusal:
        drafted(model)
    assert f"{new.__module__}.{new.__name__}" in str(refusal.value)
    assert "weight-only" in str(refusal.value)
    assert plain(model) == want


def test_few_rows_that_are_rounded_otherwise_than_many_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="computes few rows differently from many"):
        CausalLM(replaced(dense_model(), RoundedWhenFew))


def test_one_layer_is_enough() -> None:
    model = dense_model()
    model.model.layers[1].mlp.down_proj = RoundedTogether(model.model.layers[1].mlp.down_proj)
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.1\.mlp\.down_proj of the llama model"):
        CausalLM(model)


@pytest.mark.filterwarnings("ignore")
def test_torchs_dynamic_int8_is_refused_for_what_it_does() -> None:
    """The first version said that the model ignored positions or masks."""
    quantization = pytest.importorskip("torch.ao.quantization")  # deprecated in favour of torchao
    model = quantization.quantize_dynamic(dense_model(), {nn.Linear}, dtype=torch.qint8)
    want = plain(model)
    with pytest.raises(
        UnsupportedModelError, match=r"torch\.ao\S+Linear.* with a scale shared by all rows of a forward pass"
    ):
        drafted(model)
    assert plain(model) == want


def test_layers_that_the_first_forward_sets_up_are_left_to_their_owner() -> None:
    """A shadow shares their tensors: what it takes from them, the owner's layers would miss."""
    model = replaced(dense_model(), SetUpByForward)
    for _ in range(2):
        with pytest.raises(
            UnsupportedModelError, match=r"q_proj\.weight of the llama model is set up by the first forward"
        ):
            drafted(model)
    want = plain(model)
    assert drafted(model) == want == plain(model)


def test_plain_models_are_not_tried() -> None:
    assert not list(quantised_layers(dense_model()))


# -- GGUF blocks that transformers keeps -------------------------------------------------------------------------------

BLOCK = 32
Q8_0 = 8


def as_blocks(weight: torch.Tensor) -> torch.Tensor:
    """(rows, columns) of floats as (rows, bytes): per 32 values a scale in float16 and 32 codes of one byte."""
    groups = weight.detach().float().unflatten(1, (-1, BLOCK))
    scales = (groups.abs().amax(-1, keepdim=True) / 127).half()
    codes = (groups / scales.float()).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([scales.view(torch.uint8), codes.view(torch.uint8)], dim=-1).flatten(1)


def gguf_model(monkeypatch: pytest.MonkeyPatch, *, rounds_inputs: bool) -> PreTrainedModel:
    """What ``from_pretrained(gguf_file=...)`` makes where it finds kernels, with a kernel written in Python."""
    kernels = pytest.importorskip("transformers.integrations.gguf.kernels")
    modules = pytest.importorskip("transformers.integrations.gguf.utils")

    def mul_mat_vec(weight: torch.Tensor, x: torch.Tensor, ggml_type: int, out_features: int) -> torch.Tensor:
        dense = kernels.dequantize(weight, ggml_type, torch.float32).view(out_features, -1)
        groups = x.float().unflatten(1, (-1, BLOCK))
        if rounds_inputs:
            groups = rounded(groups, groups.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127)
        return groups.flatten(1) @ dense.T

    monkeypatch.setattr(kernels, "_gguf_kernel", SimpleNamespace(mul_mat_vec=mul_mat_vec))

    def blocks_of(linear: nn.Linear) -> nn.Module:
        layer = modules.GgufLinear(linear.in_features, linear.out_features, Q8_0)
        layer.weight.copy_(as_blocks(linear.weight))
        return layer

    with torch.no_grad():
        model = replaced(dense_model(), blocks_of)
        table = model.model.embed_tokens.weight
        model.model.embed_tokens = modules.GgufEmbedding(*table.shape, Q8_0, torch.float32)
        model.model.embed_tokens.weight.copy_(as_blocks(table))
    return model


def test_gguf_blocks_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding is kept in bytes, too, and says nothing of the dtype."""
    model = gguf_model(monkeypatch, rounds_inputs=False)
    lm = CausalLM(model)
    assert lm.dtype == torch.float32
    assert drafted(model) == plain(model)


def test_gguf_kernels_that_round_the_inputs_of_few_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers takes a kernel for up to eight rows and dequantises for more."""
    model = gguf_model(monkeypatch, rounds_inputs=True)
    with pytest.raises(UnsupportedModelError, match=r"GgufLinear.* few rows differently from many.* dequantised"):
        drafted(model)


# -- other libraries, where they are installed -------------------------------------------------------------------------


@DTYPES
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "IntxWeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_torchao_weights(config: str, dtype: torch.dtype) -> None:
    """They crashed: a subclass that looks like a float32 tensor was packed."""
    quantization = pytest.importorskip("torchao.quantization")
    model = dense_model(dtype)
    quantization.quantize_(model.model, getattr(quantization, config)())
    for execution in ("auto", "eager"):
        assert_decoded_as_it_is(model, execution=execution)


@pytest.mark.filterwarnings("ignore")
def test_torchao_inputs_rounded_by_row() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = dense_model(torch.bfloat16)
    quantization.quantize_(model.model, quantization.Int8DynamicActivationInt8WeightConfig())
    assert_decoded_as_it_is(model)


def bitsandbytes_model(kind: str, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    modules = pytest.importorskip("bitsandbytes").nn

    def new(linear: nn.Linear) -> nn.Module:
        layer = getattr(modules, kind)(linear.in_features, linear.out_features, bias=False, **options)
        layer.load_state_dict(linear.state_dict())
        return layer.to("cpu")

    return replaced(dense_model(dtype), new)


@DTYPES
@pytest.mark.filterwarnings("ignore")
def test_bitsandbytes_in_four_bits(dtype: torch.dtype) -> None:
    model = bitsandbytes_model("Linear4bit", dtype, compute_dtype=dtype, quant_type="nf4")
    assert_decoded_as_it_is(model)


@DTYPES
@pytest.mark.filterwarnings("ignore")
def test_bitsandbytes_in_eight_bits(dtype: torch.dtype) -> None:
    """Refused for its outliers; and the refusal leaves the model's own first forward to the model."""
    model = bitsandbytes_model("Linear8bitLt", dtype, has_fp16_weights=False, threshold=6.0)
    with pytest.raises(
        UnsupportedModelError, match=r"Linear8bitLt.* with a scale shared by all rows of a forward pass"
    ):
        drafted(model)
    assert plain(model) == plain(bitsandbytes_model("Linear8bitLt", dtype, has_fp16_weights=False, threshold=6.0))
    model = bitsandbytes_model("Linear8bitLt", dtype, has_fp16_weights=False, threshold=0.0)
    with pytest.raises(UnsupportedModelError, match="set up by the first forward"):
        drafted(model)
    plain(model)
    assert_decoded_as_it_is(model)


@DTYPES
@pytest.mark.filterwarnings("ignore")
def test_hqq(dtype: torch.dtype) -> None:
    quantize = pytest.importorskip("hqq.core.quantize")
    config = quantize.BaseQuantizeConfig(nbits=4, group_size=64)

    def new(linear: nn.Linear) -> nn.Module:
        return quantize.HQQLinear(linear, config, compute_dtype=dtype, device="cpu")

    model = replaced(dense_model(dtype), new)
    assert_decoded_as_it_is(model)


@DTYPES
@pytest.mark.filterwarnings("ignore")
def test_quanto(dtype: torch.dtype) -> None:
    quanto = pytest.importorskip("optimum.quanto")
    model = dense_model(dtype)
    quanto.quantize(model.model, weights=quanto.qint8)
    quanto.freeze(model.model)
    assert_decoded_as_it_is(model)
