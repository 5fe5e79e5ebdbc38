"""Models whose linear layers multiply by integer weights. The rounded model *is* the model that is decoded.

Weights are rounded to 8 or 4 bits when a model is loaded, and the original weights are not used afterwards. A step
reads at most half as many bytes as in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from foredraft.config.keywords import did_you_mean
from foredraft.errors import ConfigError
from foredraft.model.execution.execution import Execution
from foredraft.model.execution.experts import packable_experts, packed_experts, stacks_of
from foredraft.model.execution.forwards import replace_forward, replacement
from foredraft.model.execution.packing import (
    PackedLinear,
    PackedProduct,
    PackedRows,
    dense_weight,
    release,
    unpacked_weight,
)
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
from foredraft.model.support import model_name
from foredraft.native.codes import Kind, StoredCodes, Unrounded
from foredraft.native.packed_matmul import CodesMatrix
from foredraft.progress import counting

Rounding: TypeAlias = Callable[[torch.Tensor], Unrounded]
"""Function that rounds a weight (out, in)."""

ROUNDINGS: dict[str, Rounding] = {
    "int8": partial(Unrounded.of, bits=8),
    "int4": partial(Unrounded.of, bits=4, group=32, has_zeros=True),
}
"""Roundings by name. Every one of them rounds output embeddings to 8 bits."""

ACTIVATIONS = {"int8": 1}
"""Bytes that activations of integer weights are rounded to, by value of ``activations``. Without the option, 2."""
STORED, DEQUANTIZED = "stored", "dequantized"
"""Values of ``weights``: multiply by the integer weights in the model's file, or convert them to the dtype."""


def check_weights(weights: str | None, quantization: str | None) -> None:
    """Check the ``weights`` option.

    Raises: ConfigError for an unknown value, and for stored weights together with ``quantization``.
    """
    if weights not in (None, STORED, DEQUANTIZED):
        raise ConfigError(
            f"weights is {weights!r}; use {STORED!r}, {DEQUANTIZED!r} for weights converted to the dtype, or None, "
            f"which is {STORED!r} for a GGUF file on a CPU with kernels"
        )
    if weights == STORED and quantization is not None:
        raise ConfigError(
            f"weights={weights!r} multiplies by the integers in the file, and quantization={quantization!r} would "
            "round them again; use only one of the two"
        )


def check_quantization(name: str | None) -> None:
    """Check the ``quantization`` option.

    Raises: ConfigError for an unknown value.
    """
    if name is not None and name not in ROUNDINGS:
        raise ConfigError(
            f"quantization is {name!r}; {did_you_mean(str(name), ROUNDINGS)} None means no rounding. For weights "
            "that another library has quantised, load the model with transformers and pass the model."
        )


def check_activations(name: str | None) -> None:
    """Check the ``activations`` option.

    Raises: ConfigError for an unknown value.
    """
    if name is not None and name not in ACTIVATIONS:
        raise ConfigError(
            f"activations is {name!r}; {did_you_mean(str(name), ACTIVATIONS)} None rounds the inputs of integer "
            "weights to 16 bits"
        )


def round_activations(model: PreTrainedModel, name: str | None) -> None:
    """Round the inputs of all layers with integer weights to fewer bits than 16.

    Args:
      model: a model whose layers multiply by integer weights, see `quantize_weights` and `take_codes`.
      name: a key of `ACTIVATIONS`; None changes nothing.

    Raises: ConfigError for an unknown name, or if no layer multiplies by integer weights.
    """
    check_activations(name)
    if name is None:
        return
    forwards = map(replacement, model.modules())
    matrices = [each.product.matrix for each in forwards if isinstance(each, PackedLinear)]
    codes = [matrix for matrix in matrices if isinstance(matrix, CodesMatrix)]
    if not codes:
        raise ConfigError(
            f"activations is {name!r}, but no layer of {model_name(model)} multiplies by integer weights; use it on an "
            "x86 CPU with a GGUF file or with quantization='int8' or 'int4', or leave it out"
        )
    for matrix in codes:
        matrix.round_activations(ACTIVATIONS[name])


@torch.inference_mode()
def quantize_weights(
    model: PreTrainedModel,
    name: str | None,
    *,
    dtype: torch.dtype | None = None,
    release_originals: bool = False,
    earlier: Execution | None = None,
) -> list[PackedProduct]:
    """Round the linear layers and experts of a model, and make them multiply by the rounded weights.

    Norms, biases and routers stay as they are. So do input embeddings, except for one tied to the output embedding,
    whose rows are then those of the rounded weight.

    Args:
      model: a shadow, or a model that no other code uses; its layers are changed in place.
      name: one of `ROUNDINGS`. None changes nothing, and neither does `STORED`, whose integers are already in place.
      dtype: dtype to which everything else is converted, and of the layers' inputs and outputs; only for models that no
        other code uses.
      release_originals: free weights once they are rounded, layer by layer.
      earlier: execution of another shadow of the same model; its products are reused where weights are unchanged.

    Returns: one product for each set of layers with the same input.
    Raises: ConfigError for an unknown name, or a model without a linear layer that can be rounded.
    """
    if name is None or name == STORED:
        return []
    check_quantization(name)
    layers, experts = list(roundable(model)), list(packable_experts(model))
    if not layers and not any(isinstance(replacement(layer), PackedLinear) for layer in model.modules()):
        raise ConfigError(
            f"quantization is {name!r}, but {model_name(model)} has no linear layer with floating-point weights to "
            "round; leave the option out"
        )
    known = {id(product.layers[0].weight): product for product in ([] if earlier is None else earlier.products)}
    tied = tied_embedding(model)
    stacks = {each: stacks_of(each) for each in experts}
    every = [stack for named in stacks.values() for parts in named.values() for stack in parts]
    leaving = make_ready(model, [*layers, *every], tied) if release_originals else None
    made = []
    with counting("rounding weights", _num_weights([*layers, *every])) as advance:

        def rounded(group: Sequence[nn.Module]) -> PackedProduct:
            of_group, earlier_product = rounder(rounding_of(model, group[0], name)), known.get(id(group[0].weight))
            made.append(PackedProduct(group, earlier_product, of_group, dtype, leaving))
            advance(made[-1].num_weights)
            return made[-1]

        for group in groups(model, layers) if layers else []:
            rounded(group).put_in()
        for each, named in stacks.items():
            replace_forward(each, packed_experts(each, named, lambda stack: rounded([stack])))
    if tied is not None:
        read_rows(model, tied)
    if dtype is not None:
        _convert(model, dtype)
        for product in made:
            product.settle()
    return made


@torch.inference_mode()
def take_codes(
    model: PreTrainedModel,
    stored: Mapping[nn.Module, StoredCodes],
    of_experts: Mapping[nn.Module, Mapping[str, Sequence[StoredCodes]]] | None = None,
    *,
    dtype: torch.dtype,
) -> None:
    """Make linear layers and experts multiply by the integers that a file stores for them, and free their own weights.

    Args:
      model: a model that no other code uses; the weights of these layers are not read.
      stored: integer weights by layer. Layers with the same input and the same kind of integers become one product. For
        an input embedding that is not tied, rows are read from its own integers.
      of_experts: integer weights by packable experts and name of their parameter. Several weights (E * outputs, in) of
        one parameter are the parts of every expert, one after another. A parameter that is missing is packed as floats.
      dtype: dtype to which everything else is converted, and of the layers' inputs and outputs.
    """
    given = of_experts or {}
    stacks = {
        each: stacks_of(each, {name: len(parts) for name, parts in named.items()}) for each, named in given.items()
    }
    codes: dict[nn.Module, StoredCodes] = {**stored}
    for each, named in given.items():
        for name, parts in named.items():
            codes |= zip(stacks[each][name], parts, strict=True)
    embedding, tied = model.get_input_embeddings(), tied_embedding(model)
    if tied is not None and model.get_output_embeddings() not in stored:
        tied = None
    every = [stack for named in stacks.values() for parts in named.values() for stack in parts]
    leaving = make_ready(model, [*stored, *every], tied)
    made = []
    with counting("packing weights", _num_weights([*stored, *every])) as advance:

        def packed(layers: Sequence[nn.Module]) -> PackedProduct:
            of_layers = codes.__getitem__ if layers[0] in codes else None
            made.append(PackedProduct(layers, None, of_layers, dtype, leaving))
            advance(made[-1].num_weights)
            return made[-1]

        for group in groups(model, [layer for layer in stored if layer is not embedding]):
            alike: dict[Kind, list[nn.Module]] = {}
            for layer in group:
                alike.setdefault(stored[layer].form.kind, []).append(layer)
            for same in alike.values():
                packed(same).put_in()
        if embedding in stored:
            replace_forward(embedding, PackedRows(PackedLinear(packed([embedding])), embedding))
        for experts, of_each in stacks.items():
            replace_forward(experts, packed_experts(experts, of_each, lambda stack: packed([stack])))
    _convert(model, dtype)
    if tied is None and _has_rows_of_output(model):
        tied = model.get_input_embeddings()
        release([tied.weight], dtype)
    if tied is not None:
        read_rows(model, tied)
    for product in made:
        product.settle()


def _num_weights(layers: Iterable[nn.Module]) -> int:
    return sum(layer.weight.numel() for layer in layers)  # type: ignore[misc, operator]


def _has_rows_of_output(model: PreTrainedModel) -> bool:
    """Return whether a separate input embedding equals the dequantised output embedding."""
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
    """Replace the weights of a model by the dequantised weights of `quantize_weights`, so that any code computes with
    them.

    Args:
      model: a model that no other code uses. An output embedding gets its own weight if it is tied to a module that
        does more than look up rows.
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
    for experts in packable_experts(model):
        for stack in chain(*stacks_of(experts).values()):
            dense = ROUNDINGS[name](stack.dense()).codes().dense().to(stack.weight.dtype)
            stack.weight.data = dense.view(stack.weight.shape)


def roundable(model: nn.Module) -> Iterator[nn.Module]:
    """Yield linear layers over floats whose forward is that of their class."""
    for layer in model.modules():
        is_own = type(layer) in (nn.Linear, Conv1D) and replacement(layer) is None
        if is_own and type(layer.weight) is nn.Parameter and layer.weight.is_floating_point():
            yield layer


def rounding_of(model: PreTrainedModel, layer: nn.Module, name: str) -> Rounding:
    """Return the rounding of a layer. Output embeddings get 8 bits, since their rounding directly changes logits."""
    return ROUNDINGS["int8" if layer is model.get_output_embeddings() else name]


def rounder(rounding: Rounding) -> Callable[[nn.Module], Unrounded]:
    """Return a function for `PackedProduct` from a linear layer to its weight, which is still to be rounded."""
    return lambda layer: rounding(dense_weight(layer))


def _convert(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert the dtype of all parameters that were not released, in place; tied ones once."""
    for weight in model.parameters():
        is_released = weight.numel() > 1 and not any(weight.stride())
        if weight.is_floating_point() and weight.dtype != dtype and not is_released:
            weight.data = weight.data.to(dtype)
    model.config.dtype = dtype


GROUP_SIZES = (32, 64, 128, 256)


def quantize_linears(model: PreTrainedModel, group_size: int, *, with_head: bool = False) -> int:
    """Make every linear layer of a shadow whose inputs are whole groups run over 4-bit weights; return their number.

    The output embedding is left unchanged. Its rounding directly changes the logits, and lowers the agreement of a
    draft with the target more than that of all layers together (measured on zoo:tiny: 0.82 of the tokens agree with it,
    0.91 without it).

    Args:
      model: a shadow; its layers are changed in place.
      group_size: number of inputs that share a scale and a zero point.
      with_head: quantise the output embedding too; that reads less if the vocabulary is most of the model.

    Raises: the ConfigError of `quantizable`.
    """

    def rounded(layer: nn.Module) -> Unrounded:
        return Unrounded.of(unpacked_weight(layer), 4, group_size, has_zeros=True)

    layers = quantizable(model, group_size, with_head=with_head)
    for layer in layers:
        PackedProduct([layer], codes=rounded).put_in()
    return len(layers)


def quantizable(model: PreTrainedModel, group_size: int, *, with_head: bool = False) -> list[nn.Module]:
    """Return the linear layers that `quantize_linears` would change.

    Raises: ConfigError for a group size outside `GROUP_SIZES`, a model that is not on the CPU, or a model without a
      linear layer of whole groups.
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
            f"no linear layer of {model_name(model)} has a number of inputs divisible by {group_size}; try a "
            "smaller quantization_group_size, or another method"
        )
    return layers


def _num_inputs(layer: nn.Module) -> int:
    shape: torch.Size = layer.weight.shape  # type: ignore[assignment]
    return shape[0 if isinstance(layer, Conv1D) else 1]


def _linears(model: nn.Module) -> Iterator[nn.Module]:
    """Yield linear layers over floats, including models' own classes (Falcon's), that are unchanged or packed."""
    for layer in model.modules():
        is_own = isinstance(replacement(layer), (PackedLinear, type(None)))
        if is_own and (has_plain_weight(layer) or isinstance(layer, Conv1D)):
            yield layer
