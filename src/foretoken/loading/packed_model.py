"""A model whose layers run by packed products, as data: what it is besides its tensors, and the same model again."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from foretoken.loading.tensor_file import DTYPES
from foretoken.model.execution.forwards import replace_forward, replacement
from foretoken.model.execution.packing import PackedLinear, PackedProduct, PackedRows, dense_weight
from foretoken.model.lm import CausalLM
from foretoken.native.library import library
from foretoken.native.packed_matmul import PackedMatrix
from foretoken.native.taken import Facts
from foretoken.progress import no_progress_bars


def why_not_kept(lm: CausalLM, model: PreTrainedModel) -> str:
    """Why packed weights of a model cannot be kept; empty where they can be."""
    if not lm.execution.products:
        return "nothing of it is packed"
    if any(not isinstance(product.matrix, PackedMatrix) for product in lm.execution.products):
        return "some layers do not run by the library's own kernels"
    for each in (model, model.config):
        if not type(each).__module__.startswith("transformers."):
            return f"{type(each).__name__} is code of its own"
    dtypes = {tensor.dtype for tensor in (*lm.shadow.parameters(), *lm.shadow.buffers())}
    odd = [str(dtype) for dtype in dtypes - set(DTYPES.values())]
    return f"it holds tensors of {', '.join(odd)}" if odd else ""


def described(lm: CausalLM, model: PreTrainedModel) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What a model is besides its tensors, and these."""
    shadow, tensors = lm.shadow, dict[str, torch.Tensor]()
    released = {}
    for name, weight in shadow.named_parameters(remove_duplicate=False):
        if weight.numel() > 1 and not any(weight.stride()):
            released[name] = [list(weight.shape), str(weight.dtype).removeprefix("torch.")]
        else:
            tensors[f"of model {name}"] = weight.detach()
    tensors |= {f"of model {name}": buffer for name, buffer in shadow.named_buffers(remove_duplicate=False)}
    layers: dict[PackedProduct, dict[int, str]] = {}
    rows = []
    for name, module in shadow.named_modules():
        forward = replacement(module)
        if isinstance(forward, PackedLinear):
            layers.setdefault(forward.product, {})[forward.index] = name
        elif isinstance(forward, PackedRows):
            rows.append(name)
    products = []
    for number, (product, names) in enumerate(layers.items()):
        matrix = product.matrix
        assert isinstance(matrix, PackedMatrix)
        tensors |= {f"{number} {part}": tensor for part, tensor in matrix.parts.items()}
        tensors |= {f"{number} sums {place}": sums for place, sums in enumerate(product.all_sums)}
        products.append(
            {
                "layers": [names[index] for index in range(len(product.layers))],
                "sizes": product.sizes,
                "facts": asdict(Facts.of(matrix)),
                "parts": list(matrix.parts),
                "num_sums": len(product.all_sums),
                "dtype": str(product.dtype).removeprefix("torch."),
                "weight_dtype": str(product.weight_dtype).removeprefix("torch."),
                "is_released": product.is_released,
            }
        )
    generation, in_state = model.generation_config, shadow.state_dict().keys()
    about = {
        "model": [type(model).__module__, type(model).__name__],
        "config": [type(model.config).__module__, type(model.config).__name__],
        "settings": json.loads(model.config.to_json_string(use_diff=False)),
        "name_or_path": model.config.name_or_path,
        "generation": None if generation is None else json.loads(generation.to_json_string(use_diff=False)),
        "dtype": str(model.dtype).removeprefix("torch."),
        "released": released,
        "state": [name for name, _ in shadow.named_parameters() if name in in_state]
        + [name for name, _ in shadow.named_buffers() if name in in_state],
        "products": products,
        "rows": rows,
    }
    return about, tensors


@torch.inference_mode(False)
def model_of(about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> PreTrainedModel:
    """The model that `described` was given.

    Raises: many things, for a model that is built in another way now.
    """
    kernels = library()
    assert kernels is not None
    held = {name.removeprefix("of model "): tensor for name, tensor in tensors.items() if name.startswith("of model ")}
    for name, (shape, dtype) in about["released"].items():
        held[name] = torch.full((), torch.nan, dtype=DTYPES[dtype]).expand(shape)
    config = _class(about["config"]).from_dict(about["settings"])
    state = {name: held[name] for name in about["state"]}  # of tied ones the first
    with no_progress_bars():
        model: PreTrainedModel = _class(about["model"]).from_pretrained(
            None, config=config, state_dict=state, dtype=DTYPES[about["dtype"]]
        )
    _hold(model, held)
    model.config.name_or_path = model.name_or_path = about["name_or_path"]
    if about["generation"] is not None:
        model.generation_config = GenerationConfig.from_dict(about["generation"])
    for number, each in enumerate(about["products"]):
        facts, parts = Facts(**each["facts"]), {part: tensors[f"{number} {part}"] for part in each["parts"]}
        layers = [model.get_submodule(name) for name in each["layers"]]
        shapes = [tuple(dense_weight(layer).shape) for layer in layers]
        if shapes != [(size, facts.inputs) for size in each["sizes"]] or sum(each["sizes"]) != facts.outputs:
            raise ValueError(f"layers of {shapes} are not those of {facts}")
        PackedProduct.taken(
            layers,
            facts.matrix(kernels, parts),
            each["sizes"],
            [tensors[f"{number} sums {place}"] for place in range(each["num_sums"])],
            dtype=DTYPES[each["dtype"]],
            weight_dtype=DTYPES[each["weight_dtype"]],
            is_released=each["is_released"],
        ).put_in()
    for name in about["rows"]:
        replace_forward(model.get_submodule(name), PackedRows(replacement(model.get_output_embeddings())))
    return model.eval()


def _hold(model: nn.Module, held: Mapping[str, torch.Tensor]) -> None:
    """Let a model hold these very tensors."""
    own = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    if own.keys() != held.keys() or any(own[name].shape != held[name].shape for name in own):
        odd = sorted(own.keys() ^ held.keys()) or [name for name in own if own[name].shape != held[name].shape]
        raise ValueError(f"the model has another {odd[0]} than was kept")
    for name, tensor in own.items():
        tensor.data = held[name]


def _class(named: Sequence[str]) -> Any:
    """A class of transformers. Raises: ValueError for any other."""
    module, name = named
    if not module.startswith("transformers."):
        raise ValueError(f"{module} is no part of transformers")
    return getattr(importlib.import_module(module), name)
