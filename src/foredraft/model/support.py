"""Checks whether a model can be decoded exactly, and facts from its config about positions, layers and vocabulary."""

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
"""Class name in `transformers` of the cache placeholder for a layer that uses keys and values of an earlier one."""
CACHE_ARGUMENTS = ("cache", "past_key_values")
"""Names of the key-value cache argument of a model's forward: since transformers 5.24, and before or in remote code."""


def unwrapped(model: Any) -> Any:
    """Return the original model of a ``torch.compile`` wrapper, which computes the same; any other model as it is."""
    while _is_compiled(model):
        model = model._orig_mod
    return model


def check_unwrapped(model: nn.Module) -> PreTrainedModel:
    """Return the `transformers` model, also from inside a ``torch.compile`` wrapper.

    Raises: UnsupportedModelError for any other wrapper; the message says where the model is inside it.
    """
    model = unwrapped(model)
    if isinstance(model, PreTrainedModel):
        return model
    kind = type(model).__name__
    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            raise UnsupportedModelError(
                f"the model is a {kind} around {model_name(module)}; foredraft needs the transformers model itself, so "
                f"pass the inner one: model.{path}. Adapter layers inside it are kept, and switching them works. "
                "Changes that the wrapper makes to the inputs, such as the virtual tokens of prompt tuning, are lost"
            )
    raise UnsupportedModelError(
        f"the model is a {kind}, which contains no supported transformers model; load one with AutoModelForCausalLM"
    )


READABLE: dict[str, str] = {}
"""Names for messages by the folder of a model, for folders that were found by another name, such as zoo:NAME."""


def model_name(model: PreTrainedModel) -> str:
    """Return the name of a model for messages: zoo:NAME, its path or hub id, else its type ("the llama model")."""
    path = str(getattr(model, "name_or_path", "") or "")
    return READABLE.get(path, path) or f"the {model.config.model_type} model"


def take_out_compilation(model: nn.Module) -> None:
    """Remove ``torch.compile`` from the modules and replaced forwards of a shadow.

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
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # loaded once anything is compiled; slow to import
    return dynamo is not None and isinstance(model, dynamo.OptimizedModule)


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name of the key-value cache argument in the forward of a supported model."""
    parameters = inspect.signature(model.forward).parameters
    return next(argument for argument in CACHE_ARGUMENTS if argument in parameters)


def check_supported(given: nn.Module) -> PreTrainedModel:
    """Return the model itself if its state can be rolled back exactly; refuse it before anything runs otherwise.

    Raises: UnsupportedModelError, UnsupportedStateError; the message names the reason.
    """
    model = check_unwrapped(given)
    name = model_name(model)
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder model; foredraft decodes causal language models.")
    if model.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{name} has no output embedding that turns its hidden states into logits; load the model with "
            "AutoModelForCausalLM."
        )
    empty = [path for path, parameter in model.named_parameters() if parameter.is_meta]
    if empty:
        raise UnsupportedModelError(
            f"{name} has no values for {len(empty)} of its weights ({empty[0]}, ...), which are on the meta device: "
            "they were never loaded, or were offloaded. Load the model onto one device with from_pretrained."
        )
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1:
        raise UnsupportedModelError(f"{name} is spread over {', '.join(devices)}; load it onto a single device.")
    for path, module in model.named_modules():
        if getattr(module, "merged", False) is True and getattr(module, "disable_adapters", False) is True:
            raise UnsupportedModelError(
                f"{path} of {name} has adapters that are both merged and disabled; its forward would unmerge them, "
                "which changes the weights. Call unmerge_adapter() before you disable the adapters."
            )
    own_mask = next((path for path, buffer in model.named_buffers() if _hides_columns(buffer)), None)
    if own_mask is not None:
        raise UnsupportedModelError(
            f"{name} has its own attention mask ({own_mask}), which hides cache columns by column number, as local "
            "attention in GPT-Neo does. In a batch or a draft the column of a token differs from its position, so "
            "tokens would see the wrong context. Use a model whose window is masked by position."
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
                f"layer {index} of {name} keeps a recurrent, convolutional or compressed state, which cannot be "
                "rolled back exactly after a rejected draft. Models with attention layers only are supported."
            )
    unknown = sorted(set(layer_types(text_config)) - {FULL, SLIDING})
    if unknown:
        raise UnsupportedModelError(
            f"{name} has layers of type {', '.join(unknown)}, for which foredraft has no masks. Use a model with full "
            "or sliding-window attention."
        )
    if "position_ids" not in parameters:
        raise UnsupportedModelError(
            f"{name} takes no explicit position_ids (ALiBi or counted positions), so the nodes of a draft cannot be "
            "given their positions. Use a model with rotary or learned absolute positions."
        )
    return model


def check_width(name: str, model: PreTrainedModel) -> None:
    """Refuse a target for draft heads that projects its last hidden states to another width (OPT-350m).

    Raises: UnsupportedModelError.
    """
    size, output = int(model.config.hidden_size), model.get_output_embeddings()
    read = getattr(output, "in_features", size)
    if read != size:
        raise UnsupportedModelError(
            f"the layers of {name} have width {size}, and its output layer has input width {read}; draft heads need "
            "equal widths. Use a method without a head, such as 'suffix'"
        )


def shares_keys(config: Any) -> bool:
    """Return whether some layers attend to keys and values of an earlier layer, as in Gemma 3n and 4."""
    return any(type(layer).__name__ == _SHARING for layer in DynamicCache(config=config).layers)


def compute_all_nodes(shadow: nn.Module) -> None:
    """Make layers that share keys run over all nodes. Gemma 4 runs its last layers only over the nodes whose logits are
    needed.

    The context manager selects those nodes at the end of a row, where nodes of a flat list do not lie. Features are
    needed for all nodes.
    """
    for module in shadow.modules():
        if "first_kv_shared_layer_idx" in vars(module):
            module.first_kv_shared_layer_idx = -1  # type: ignore[assignment]


def _hides_columns(buffer: torch.Tensor) -> bool:
    """Return whether a buffer is a mask over columns that hides more than future columns."""
    if buffer.dtype not in (torch.bool, torch.uint8) or buffer.dim() < 2 or buffer.shape[-1] != buffer.shape[-2]:
        return False
    visible = buffer.bool()
    return buffer.shape[-1] > 1 and torch.equal(visible, visible.tril()) and not bool(visible[..., -1, 0].all())


def check_autocast(device: torch.device) -> None:
    """Refuse ``torch.autocast``, which would round packed layers and other layers differently.

    Raises: ConfigError.
    """
    if torch.is_autocast_enabled(device.type):
        raise ConfigError(
            "torch.autocast is on, and foredraft computes in the dtype of the model; leave the autocast context, or "
            "load the model in that dtype"
        )


def exact_context_length(config: Any) -> int | None:
    """Return the length up to which a sequence's logits do not depend on the other rows; None if the config has no
    limit.

    Longrope changes all frequencies once any position of a forward pass exceeds the original context. A draft across
    that limit would change tokens before it. A sequence whose prompt is within the limit therefore ends there.
    """
    length: int | None = getattr(config, "max_position_embeddings", None)
    border = longrope_border(config)
    return length if border is None else min(length or border, border)


def longrope_border(config: Any) -> int | None:
    """Return the original context of longrope, at which frequencies change; None for models of other types."""
    borders = [
        int(rope["original_max_position_embeddings"])
        for rope in _ropes(config)
        if rope.get("rope_type") == LONGROPE and rope.get("original_max_position_embeddings")
    ]
    return min(borders, default=None)


def beyond_context(config: Any, long_context: int | None) -> str:
    """Return advice for error messages about sequences longer than the context of a model; may be empty.

    Args:
      long_context: context of prompts longer than the longrope limit; None if such prompts cannot run.
    """
    context = getattr(config, "max_position_embeddings", None)
    if (border := longrope_border(config)) is not None and border <= (context or border):
        if long_context is None:
            return (
                f"its rotary positions are longrope, whose frequencies change after {border} tokens, and foredraft "
                "cannot reproduce the frequencies of longer sequences; use transformers alone for them"
            )
        return (
            f"its rotary positions are longrope, whose frequencies all change after {border} tokens: a sequence whose "
            f"prompt has up to {border} tokens ends there; a longer prompt uses the long factors from the start, up "
            f"to {long_context} tokens"
        )
    if any(DYNAMIC in str(rope.get("rope_type")) for rope in _ropes(config)):
        return (
            f"its rotary positions are dynamic NTK, whose frequencies change with every token beyond {context}, so "
            "drafts would change the tokens before them; for longer sequences use transformers alone, or set a fixed "
            "type (linear, yarn) in rope_parameters"
        )
    return ""


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Parameters of rotary positions: of the model as a whole, and of each attention type."""
    ropes = getattr(config, "rope_parameters", None) or {}
    return [ropes, *(rope for rope in ropes.values() if isinstance(rope, dict))]


def has_planes(config: Any) -> bool:
    """Return whether positions of a model have several planes (time, height, width), which are equal for text."""
    return any("mrope_section" in rope for rope in _ropes(config))


def layer_types(config: Any) -> tuple[str, ...]:
    """Return the attention type of every layer, as `transformers` derives it from a text config."""
    listed = getattr(config, "layer_types", None)
    if listed is not None:
        return tuple(listed)
    kind = SLIDING if getattr(config, "sliding_window", None) is not None else FULL
    return (kind,) * int(config.num_hidden_layers)


def fit_vocabulary(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Fit logits (..., V) of a drafter to the target's vocabulary: drop extra tokens, and give missing ones -inf."""
    missing = vocab_size - logits.shape[-1]
    if missing <= 0:
        return logits[..., :vocab_size]
    return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
