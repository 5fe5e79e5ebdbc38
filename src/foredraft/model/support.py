"""Which models can be decoded exactly, inside of which wrappers, and what their configs say about positions, layers and
vocabulary."""

from __future__ import annotations

import inspect
import sys
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from foredraft.errors import ConfigError, UnsupportedModelError, UnsupportedStateError
from foredraft.model.execution.forwards import replace_forward, replacement
from foredraft.model.masks import FULL, SLIDING
from foredraft.model.rope import DYNAMIC, LONGROPE

_SHARING = "DummyLayer"
"""Attribute of transformers for the cache of a layer that attends to keys and values of an earlier one."""
CACHE_ARGUMENTS = ("cache", "past_key_values")
"""What the forward of a model calls its key-value cache: since transformers 5.24, and before it or in remote code."""


def unwrapped(model: Any) -> Any:
    """The model that ``torch.compile`` was given, which computes the same; everything else as it is."""
    while _is_compiled(model):
        model = model._orig_mod
    return model


def check_unwrapped(model: nn.Module) -> PreTrainedModel:
    """The model, where it is one of `transformers` or a compiled one.

    Raises: UnsupportedModelError, which says where inside a wrapper the model is.
    """
    model = unwrapped(model)
    if isinstance(model, PreTrainedModel):
        return model
    kind = type(model).__name__
    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            raise UnsupportedModelError(
                f"the model is a {kind} around a {type(module).__name__}; foredraft decodes the models of transformers "
                f"themselves, so give the one inside: model.{path}. Layers that were put into it, such as adapters, "
                "are part of it and are followed as they are switched; what the wrapper does to its inputs, such as "
                "the virtual tokens of prompt tuning, is not"
            )
    raise UnsupportedModelError(
        f"the model is a {kind}, which holds no model of transformers; load one by AutoModelForCausalLM"
    )


def take_out_compilation(model: nn.Module) -> None:
    """Let a shadow run what ``torch.compile`` was given: modules, and forwards that were replaced.

    A compiled forward is bound to the module of its owner, and its graphs are recompiled for every shape.
    """
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            parent._modules[name] = unwrapped(child)
    for module in model.modules():
        original = getattr(replacement(module), "_torchdynamo_orig_callable", None)
        if isinstance(original, MethodType) and original.__func__ is type(module).forward:
            replace_forward(module, None)


def _is_compiled(model: Any) -> bool:
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # there once anything was compiled; slow to import
    return dynamo is not None and isinstance(model, dynamo.OptimizedModule)


def cache_argument(model: PreTrainedModel) -> str:
    """The name under which the forward of a supported model takes its key-value cache."""
    parameters = inspect.signature(model.forward).parameters
    return next(argument for argument in CACHE_ARGUMENTS if argument in parameters)


def check_supported(given: nn.Module) -> PreTrainedModel:
    """The model itself, where its state can be rolled back exactly; others are refused by name before anything runs.

    Raises: UnsupportedModelError, as `check_unwrapped` does; UnsupportedStateError.
    """
    model = check_unwrapped(given)
    name = type(model).__name__
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder model; foredraft decodes causal language models.")
    if model.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{name} has no output embedding that turns its states into logits of tokens; load the model by "
            "AutoModelForCausalLM."
        )
    empty = [path for path, parameter in model.named_parameters() if parameter.is_meta]
    if empty:
        raise UnsupportedModelError(
            f"{name} has no values for {len(empty)} of its weights ({empty[0]}, ...), which are on the meta device: "
            "they were never loaded, or were offloaded. Load the model onto one device by from_pretrained."
        )
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1:
        raise UnsupportedModelError(f"{name} is spread over {', '.join(devices)}; load it onto a single device.")
    for path, module in model.named_modules():
        if getattr(module, "merged", False) is True and getattr(module, "disable_adapters", False) is True:
            raise UnsupportedModelError(
                f"{path} of {name} has adapters that are both merged and disabled, and takes them out of its weights "
                "in the forward; call unmerge_adapter() before the adapters are disabled."
            )
    own_mask = next((path for path, buffer in model.named_buffers() if _hides_columns(buffer)), None)
    if own_mask is not None:
        raise UnsupportedModelError(
            f"{name} keeps a mask of its own ({own_mask}) that hides cache columns by their number, as local attention "
            "of GPT-Neo's kind: rows of a batch and nodes of a draft lie in other columns than their positions, so "
            "they would see other tokens than plain text does. Use a model whose window is masked by position."
        )
    parameters = inspect.signature(model.forward).parameters
    if not any(argument in parameters for argument in CACHE_ARGUMENTS):
        raise UnsupportedStateError(
            f"{name} keeps its state outside of a key-value cache (recurrent or convolutional), which cannot be "
            "rolled back after a rejected draft."
        )
    text_config = config.get_text_config(decoder=True)
    for index, layer in enumerate(DynamicCache(config=text_config).layers):
        kind = type(layer)
        if kind.__name__ == _SHARING:
            continue
        if kind not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise UnsupportedStateError(
                f"layer {index} of {name} keeps {kind.__name__} state, which cannot be rolled back exactly "
                "after a rejected draft. Models with attention layers only are supported."
            )
    unknown = sorted(set(layer_types(text_config)) - {FULL, SLIDING})
    if unknown:
        raise UnsupportedModelError(
            f"{name} has layers of type {', '.join(unknown)}, whose masks foredraft does not know."
        )
    if "position_ids" not in parameters:
        raise UnsupportedModelError(
            f"{name} takes no explicit position_ids (ALiBi or counted positions), so the nodes of a draft cannot be "
            "given their positions. Use a model with rotary or learned absolute positions."
        )
    return model


def check_width(name: str, model: PreTrainedModel) -> None:
    """Refuse a target for heads: one that projects its last hidden states to another width (OPT-350m).

    Raises: UnsupportedModelError.
    """
    size, output = int(model.config.hidden_size), model.get_output_embeddings()
    read = getattr(output, "in_features", size)
    if read != size:
        raise UnsupportedModelError(
            f"layers of {name} pass on {size} numbers, and its output layer reads {read}; heads need one width for "
            "both: use a method without a head, such as 'suffix'"
        )


def shares_keys(config: Any) -> bool:
    """Whether some layers attend to keys and values of an earlier one, as those of Gemma 3n and 4 may."""
    return any(type(layer).__name__ == _SHARING for layer in DynamicCache(config=config).layers)


def compute_all_nodes(shadow: nn.Module) -> None:
    """Let layers that share keys run over all nodes: Gemma 4 gives them those alone whose logits are wanted.

    Nodes of a list lie elsewhere than at the end of their row, and features are wanted of all.
    """
    for module in shadow.modules():
        if "first_kv_shared_layer_idx" in vars(module):
            module.first_kv_shared_layer_idx = -1  # type: ignore[assignment]


def _hides_columns(buffer: torch.Tensor) -> bool:
    """Whether a buffer is a mask over columns that hides more than what comes later."""
    if buffer.dtype not in (torch.bool, torch.uint8) or buffer.dim() < 2 or buffer.shape[-1] != buffer.shape[-2]:
        return False
    visible = buffer.bool()
    return buffer.shape[-1] > 1 and torch.equal(visible, visible.tril()) and not bool(visible[..., -1, 0].all())


def check_autocast(device: torch.device) -> None:
    """Raises: ConfigError under autocast, which would round packed and other layers each in its own way."""
    if torch.is_autocast_enabled(device.type):
        raise ConfigError(
            "torch.autocast is on, and foredraft computes in the dtype of the model; leave the context, or load the "
            "model in that dtype"
        )


def exact_context_length(config: Any) -> int | None:
    """Positions up to which a text's logits do not depend on what else runs; None where the config states no limit.

    Longrope changes all frequencies once any position of a forward passes the original context, so a draft across
    that border would change tokens before it: texts that begin before the border end there.
    """
    length: int | None = getattr(config, "max_position_embeddings", None)
    border = longrope_border(config)
    return length if border is None else min(length or border, border)


def longrope_border(config: Any) -> int | None:
    """Original context of longrope, at which frequencies change; None for models of other types."""
    borders = [
        int(rope["original_max_position_embeddings"])
        for rope in _ropes(config)
        if rope.get("rope_type") == LONGROPE and rope.get("original_max_position_embeddings")
    ]
    return min(borders, default=None)


def beyond_context(config: Any, long_context: int | None) -> str:
    """Advice for texts beyond the context of a model, for messages.

    Args:
      long_context: context of prompts that are longer than the border of longrope; None where they do not run.
    """
    context = getattr(config, "max_position_embeddings", None)
    if (border := longrope_border(config)) is not None and border <= (context or border):
        if long_context is None:
            return (
                f"its rotary positions are longrope, whose frequencies change behind {border} tokens, and no others "
                "were found in this model; transformers alone goes on there"
            )
        return (
            f"its rotary positions are longrope: a text whose prompt has up to {border} tokens ends there, where all "
            "frequencies change, and a longer prompt runs with the long factors throughout, up to "
            f"{long_context} tokens"
        )
    if any(DYNAMIC in str(rope.get("rope_type")) for rope in _ropes(config)):
        return (
            f"its rotary positions are dynamic NTK, whose frequencies change with every token beyond {context}, so "
            "that drafts would change the tokens before them; transformers alone goes on there, as does a fixed type "
            "(linear, yarn) in rope_parameters"
        )
    return ""


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Parameters of rotary positions: those of all layers, and those of each kind of attention."""
    ropes = getattr(config, "rope_parameters", None) or {}
    return [ropes, *(rope for rope in ropes.values() if isinstance(rope, dict))]


def has_planes(config: Any) -> bool:
    """Whether positions of a model have several planes (time, height, width), which are alike for text."""
    return any("mrope_section" in rope for rope in _ropes(config))


def layer_types(config: Any) -> tuple[str, ...]:
    """Attention type of every layer, as `transformers` derives it from a text config."""
    listed = getattr(config, "layer_types", None)
    if listed is not None:
        return tuple(listed)
    kind = SLIDING if getattr(config, "sliding_window", None) is not None else FULL
    return (kind,) * int(config.num_hidden_layers)


def fit_vocabulary(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Logits (..., V) of a drafter over a target's vocabulary: padding tokens are cut off or impossible."""
    missing = vocab_size - logits.shape[-1]
    if missing <= 0:
        return logits[..., :vocab_size]
    return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
