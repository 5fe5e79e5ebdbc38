"""A model whose linear layers multiply by weights in whole numbers: what is decoded *is* that model.

Weights are rounded when a model is loaded, to 8 or to 4 bits; from then on nothing knows the ones that they came from.
A step reads a half of what it reads of bfloat16, or less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from foredraft.config.keywords import did_you_mean
from foredraft.errors import ConfigError
from foredraft.model.execution.execution import Execution
from foredraft.model.execution.forwards import replacement
from foredraft.model.execution.packing import PackedLinear, PackedProduct, dense_weight, release, unpacked_weight
from foredraft.model.execution.sharing import (
    gives_rows,
    groups,
    make_ready,
    packed_output,
    read_rows,
    shared_storages,
    tied_embedding,
)
from foredraft.model.independence import has_plain_weight
from foredraft.native.codes import Kind, StoredCodes, Unrounded
from foredraft.native.packed_matmul import CodesMatrix

Rounding: TypeAlias = Callable[[torch.Tensor], Unrounded]
"""How a weight (out, in) is rounded."""

ROUNDINGS: dict[str, Rounding] = {
    "int8": partial(Unrounded.of, bits=8),
    "int4": partial(Unrounded.of, bits=4, group=32, has_zeros=True),
}
"""By name; output embeddings are rounded to 8 bits by any."""

STORED = "stored"
"""Weights that are multiplied as their file holds them."""


def check_weights(weights: str | None, quantization: str | None) -> None:
    """Raises: ConfigError for unknown weights, and for stored ones that are to be rounded once more."""
    if weights not in (None, STORED):
        raise ConfigError(f"weights is {weights!r}; known is {STORED!r}, and None for weights as the dtype has them")
    if weights is not None and quantization is not None:
        raise ConfigError(
            f"weights={weights!r} multiplies by the numbers in the file, and quantization={quantization!r} would round "
            "them once more; give one of the two"
        )


def check_quantization(name: str | None) -> None:
    """Raises: ConfigError for an unknown one."""
    if name is not None and name not in ROUNDINGS:
        raise ConfigError(
            f"quantization is {name!r}; {did_you_mean(str(name), ROUNDINGS)} None rounds nothing. Weights that were "
            "quantised elsewhere are loaded with transformers; pass the model."
        )


@torch.inference_mode()
def quantize_weights(
    model: PreTrainedModel,
    name: str | None,
    *,
    dtype: torch.dtype | None = None,
    release_originals: bool = False,
    earlier: Execution | None = None,
) -> list[PackedProduct]:
    """Round the linear layers of a model, and let them multiply by what they are rounded to.

    Norms and biases stay as they are, and so do input embeddings, unless they are tied to the output embedding: then
    their rows are those of its rounded weight.

    Args:
      model: a shadow, or a model that nobody else holds; its layers are changed in place.
      name: one of `ROUNDINGS`; None, or `STORED` for a model that has its codes already, leaves everything as it is.
      dtype: that everything else is converted to, and layers take and give; for models that nobody else holds.
      release_originals: free weights once they are rounded, layer by layer.
      earlier: of another shadow of the same model; its products are taken over where weights are still the same.

    Returns: one product for layers that are given the same input.
    Raises: ConfigError for an unknown name, or a model without a linear layer that can be rounded.
    """
    if name is None or name == STORED:
        return []
    check_quantization(name)
    layers = list(roundable(model))
    if not layers and not any(isinstance(replacement(layer), PackedLinear) for layer in model.modules()):
        raise ConfigError(f"quantization is {name!r}, and {type(model).__name__} has no plain linear layer to round")
    known = {id(product.layers[0].weight): product for product in ([] if earlier is None else earlier.products)}
    tied = tied_embedding(model)
    leaving = make_ready(model, layers, tied) if release_originals else None
    made = []
    for group in groups(model, layers) if layers else []:
        rounding = rounding_of(model, group[0], name)
        earlier_product = known.get(id(group[0].weight))
        made.append(PackedProduct(group, earlier_product, _rounder(rounding), dtype, leaving).put_in())
    if tied is not None:
        read_rows(model, tied)
    if dtype is not None:
        _convert(model, dtype)
        for product in made:
            product.settle()
    return made


@torch.inference_mode()
def take_codes(model: PreTrainedModel, stored: Mapping[nn.Module, StoredCodes], *, dtype: torch.dtype) -> None:
    """Let linear layers multiply by the whole numbers that a file holds of them, and free their own weights.

    Args:
      model: that nobody else holds; its layers hold what the codes stand for, in any dtype.
      stored: by layer. Those that are given the same input, and have codes of one kind, become one product.
      dtype: that everything else is converted to, and layers take and give.
    """
    tied = tied_embedding(model)
    if tied is not None and model.get_output_embeddings() not in stored:
        tied = None
    leaving = make_ready(model, stored, tied)
    made = []
    for group in groups(model, list(stored)):
        alike: dict[Kind, list[nn.Module]] = {}
        for layer in group:
            alike.setdefault(stored[layer].form.kind, []).append(layer)
        made += [PackedProduct(each, None, stored.__getitem__, dtype, leaving).put_in() for each in alike.values()]
    _convert(model, dtype)
    if tied is None and _has_rows_of_output(model):
        tied = model.get_input_embeddings()
        release([tied.weight], dtype)
    if tied is not None:
        read_rows(model, tied)
    for product in made:
        product.settle()


def _has_rows_of_output(model: PreTrainedModel) -> bool:
    """Whether an input embedding of its own holds what the codes of the output embedding stand for."""
    output, embedding = packed_output(model), model.get_input_embeddings()
    codes = None if output is None else output.product.matrix
    if output is None or not isinstance(codes, CodesMatrix) or not gives_rows(embedding):
        return False
    weight: torch.Tensor = embedding.weight
    return (weight.dtype, *weight.shape) == (output.product.dtype, codes.fields.outputs, codes.fields.inputs) and all(
        torch.equal(codes.rows(rows, weight.dtype), weight[rows])
        for rows in torch.split(torch.arange(len(weight)), 1024)
    )


@torch.inference_mode()
def round_weights(model: PreTrainedModel, name: str) -> None:
    """Write into a model the weights that `quantize_weights` lets it multiply by: any code then computes with these.

    Args:
      model: that nobody else holds; an output embedding that is tied to what gives more than rows gets a weight of its
        own.
    """
    check_quantization(name)
    tied = tied_embedding(model)
    shared = shared_storages(model) - (set() if tied is None else {tied.weight.data_ptr()})
    for layer in list(roundable(model)):
        weight: nn.Parameter = layer.weight  # type: ignore[assignment]
        dense = rounding_of(model, layer, name)(dense_weight(layer)).codes().dense().to(weight.dtype)
        dense = dense.t() if isinstance(layer, Conv1D) else dense
        if weight.data_ptr() in shared:
            layer.weight = nn.Parameter(dense.contiguous(), requires_grad=False)
            model.config.tie_word_embeddings = False
        else:
            weight.data = dense.contiguous()


def roundable(model: nn.Module) -> Iterator[nn.Module]:
    """Linear layers over floats whose forward is their class's own."""
    for layer in model.modules():
        is_own = type(layer) in (nn.Linear, Conv1D) and replacement(layer) is None
        if is_own and type(layer.weight) is nn.Parameter and layer.weight.is_floating_point():
            yield layer


def rounding_of(model: PreTrainedModel, layer: nn.Module, name: str) -> Rounding:
    """How a layer is rounded. The rounding of an output embedding falls on the logits unsmoothed."""
    return ROUNDINGS["int8" if layer is model.get_output_embeddings() else name]


def _rounder(rounding: Rounding) -> Callable[[nn.Module], Unrounded]:
    """The weight of a linear layer, still to be rounded, as `PackedProduct` takes it."""
    return lambda layer: rounding(dense_weight(layer))


def _convert(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Parameters that were not released, and stay the same objects, in another dtype; tied ones once."""
    for weight in model.parameters():
        is_released = weight.numel() > 1 and not any(weight.stride())
        if weight.is_floating_point() and weight.dtype != dtype and not is_released:
            weight.data = weight.data.to(dtype)
    model.config.dtype = dtype


GROUP_SIZES = (32, 64, 128, 256)


def quantize_linears(model: PreTrainedModel, group_size: int, *, with_head: bool = False) -> int:
    """Let every linear of a shadow whose inputs are whole groups run over 4-bit weights; how many did.

    The output embedding stays as it is: its rounding falls on the logits unsmoothed, and costs a draft more agreement
    with the target than that of all layers together (measured on zoo:tiny: 0.82 of the tokens with it, 0.91 without).

    Args:
      model: a shadow; its layers are changed in place.
      group_size: inputs that share a scale and a zero point.
      with_head: quantise the output embedding too; it reads less where the vocabulary is most of the model.

    Raises: ConfigError as `quantizable`.
    """

    def rounded(layer: nn.Module) -> Unrounded:
        return Unrounded.of(unpacked_weight(layer), 4, group_size, has_zeros=True)

    layers = quantizable(model, group_size, with_head=with_head)
    for layer in layers:
        PackedProduct([layer], codes=rounded).put_in()
    return len(layers)


def quantizable(model: PreTrainedModel, group_size: int, *, with_head: bool = False) -> list[nn.Module]:
    """The linears that `quantize_linears` would change.

    Raises: ConfigError for another group size than those of `GROUP_SIZES`, a model that is not on the CPU, or no linear
      with whole groups.
    """
    if group_size not in GROUP_SIZES:
        raise ConfigError(f"quantization_group_size is {group_size}; choose one of {', '.join(map(str, GROUP_SIZES))}")
    device = model.get_input_embeddings().weight.device
    if device.type != "cpu":
        raise ConfigError(f"quantized_self has 4-bit kernels for CPUs, and the model is on {device}; use layer_skip")
    head = None if with_head else model.get_output_embeddings()
    layers = [layer for layer in _linears(model) if layer is not head and _num_inputs(layer) % group_size == 0]
    if not layers:
        raise ConfigError(
            f"no linear of {type(model).__name__} has inputs in groups of {group_size}; try a smaller "
            "quantization_group_size, or another method"
        )
    return layers


def _num_inputs(layer: nn.Module) -> int:
    shape: torch.Size = layer.weight.shape  # type: ignore[assignment]
    return shape[0 if isinstance(layer, Conv1D) else 1]


def _linears(model: nn.Module) -> Iterator[nn.Module]:
    """Linears over floats, of models' own classes too (Falcon's), whose forward is their class's, or packed."""
    for layer in model.modules():
        is_own = isinstance(replacement(layer), (PackedLinear, type(None)))
        if is_own and (has_plain_weight(layer) or isinstance(layer, Conv1D)):
            yield layer
