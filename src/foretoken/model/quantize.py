"""Linear layers with 4-bit weights, for drafts that need not be exact."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from foretoken.errors import ConfigError
from foretoken.model.execution.forwards import replace_forward, replacement
from foretoken.model.execution.packing import PackedLinear, dense_weight
from foretoken.model.independence import has_plain_weight
from foretoken.native.codes import Codes
from foretoken.native.library import library
from foretoken.native.packed_matmul import CodesMatrix

GROUP_SIZES = (32, 64, 128, 256)  # what torch's kernels know
ROWS_PER_BLOCK = 16  # the kernel takes output features in blocks of this size


class Int4Linear:
    """The forward of one `nn.Linear` or `Conv1D` over a 4-bit copy of its weight.

    By a kernel of the library's own, or by torch's, which rounds activations to bfloat16, its fast type.

    Attributes:
      matrix: of the library's own kernel; None without.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, group_size: int) -> None:
        codes = Codes.rounded(weight, 4, group_size, has_zeros=True)
        self._group_size = group_size
        self._num_out = weight.shape[0]
        kernels = library()
        self.matrix: CodesMatrix | None = None
        if kernels is not None:
            self.matrix = CodesMatrix(codes, bias, kernels)
            return
        self._codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.numbers.int(), 1)
        scales = codes.scales.float()
        pairs = torch.stack([scales, codes.begins + 8 * scales], dim=-1)  # torch's codes begin at -8
        self._scales_and_zeros = pairs.transpose(0, 1).contiguous().to(torch.bfloat16)  # (in / group, out, 2)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out) in the dtype of the input."""
        if self.matrix is not None:
            return self.matrix(x.float()).to(x.dtype)
        rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
        product: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            rows, self._codes, self._group_size, self._scales_and_zeros
        )
        result: torch.Tensor = product.to(x.dtype).view(*x.shape[:-1], self._num_out)
        return result if self._bias is None else result + self._bias

    @property
    def num_bytes(self) -> int:
        if self.matrix is not None:
            return self.matrix.num_bytes
        tensors = (self._codes, self._scales_and_zeros)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def quantize_linears(model: PreTrainedModel, group_size: int, *, with_head: bool = False) -> int:
    """Let every linear of a shadow that the kernel can take run over 4-bit weights; how many did.

    The output embedding stays as it is: its rounding falls on the logits unsmoothed, and costs a draft more agreement
    with the target than that of all layers together (measured on zoo:tiny: 0.82 of the tokens with it, 0.91 without).

    Args:
      model: a shadow; its layers are changed in place.
      group_size: inputs that share a scale and a zero point.
      with_head: quantise the output embedding too; it reads less where the vocabulary is most of the model.

    Raises: ConfigError as `quantizable`.
    """
    layers = quantizable(model, group_size, with_head=with_head)
    for layer in layers:
        replace_forward(layer, Int4Linear(_weight_of(layer), layer.bias, group_size))  # type: ignore[arg-type]
    return len(layers)


def quantizable(model: PreTrainedModel, group_size: int, *, with_head: bool = False) -> list[nn.Module]:
    """The linears that `quantize_linears` would change.

    Raises: ConfigError for a group size that the kernel does not know, a model that is not on the CPU, or no linear of
      a shape that the kernel takes.
    """
    if group_size not in GROUP_SIZES:
        raise ConfigError(f"quantization_group_size is {group_size}; choose one of {', '.join(map(str, GROUP_SIZES))}")
    device = model.get_input_embeddings().weight.device
    if device.type != "cpu":
        raise ConfigError(f"quantized_self has 4-bit kernels for CPUs, and the model is on {device}; use layer_skip")
    head = None if with_head else model.get_output_embeddings()
    layers = [layer for layer in _linears(model) if layer is not head and _fits(layer, group_size)]
    if not layers:
        raise ConfigError(
            f"no linear of {type(model).__name__} has inputs in groups of {group_size} and outputs in blocks of "
            f"{ROWS_PER_BLOCK}; try a smaller quantization_group_size, or another method"
        )
    return layers


def _fits(layer: nn.Module, group_size: int) -> bool:
    shape: torch.Size = layer.weight.shape  # type: ignore[assignment]
    num_out, num_in = reversed(shape) if isinstance(layer, Conv1D) else shape
    return num_in % group_size == 0 and num_out % ROWS_PER_BLOCK == 0


def _linears(model: nn.Module) -> Iterator[nn.Module]:
    """Linears over floats, of models' own classes too (Falcon's), whose forward is their class's, or packed."""
    for layer in model.modules():
        is_own = isinstance(replacement(layer), (PackedLinear, type(None)))
        if is_own and (has_plain_weight(layer) or isinstance(layer, Conv1D)):
            yield layer


def _weight_of(layer: nn.Module) -> torch.Tensor:
    """(out, in), also where packing has released the original."""
    forward = replacement(layer)
    if isinstance(forward, PackedLinear):
        return forward.dense()
    return dense_weight(layer).contiguous()
