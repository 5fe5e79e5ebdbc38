"""Checks of a ``generate`` call. Arguments that ``generate`` does not pass on are read from the caller's frame. Options
that foredraft does not support are refused by name, with the remedy."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, QuantizedCache
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import (
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from foredraft.errors import ConfigError, UnsupportedModelError
from foredraft.model.support import CACHE_ARGUMENTS, model_name

_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__
_MAX_FRAMES = 16  # limit on wrapper functions between ``generate`` and the callable
_WITHOUT = "or call generate without custom_generate"
_MODES = {
    GenerationMode.BEAM_SEARCH: f"beam search (num_beams) is not speculative decoding; set num_beams=1, {_WITHOUT}",
    GenerationMode.BEAM_SAMPLE: f"beam sampling (num_beams) is not speculative decoding; set num_beams=1, {_WITHOUT}",
    GenerationMode.GROUP_BEAM_SEARCH: f"group beam search is not speculative decoding; set num_beams=1, {_WITHOUT}",
    GenerationMode.CONSTRAINED_BEAM_SEARCH: (
        f"constrained beam search (constraints, force_words_ids) is not speculative decoding; leave it out, {_WITHOUT}"
    ),
    GenerationMode.CONTRASTIVE_SEARCH: (
        f"contrastive search (penalty_alpha) re-ranks with hidden states; leave penalty_alpha out, {_WITHOUT}"
    ),
    GenerationMode.DOLA_GENERATION: f"DoLa (dola_layers) needs logits of early layers; leave it out, {_WITHOUT}",
    GenerationMode.ASSISTED_GENERATION: (
        "transformers' own assisted generation (assistant_model, prompt_lookup_num_tokens, assistant_early_exit, "
        "use_mtp) and custom_generate exclude each other; give the drafter to speculate(...): "
        "speculate(method='draft_model', model=assistant) or speculate(method='ngram')"
    ),
}
_STATEFUL = {
    UnbatchedClassifierFreeGuidanceLogitsProcessor: "guidance_scale (classifier-free guidance)",
    SynthIDTextWatermarkLogitsProcessor: "SynthID watermarking",
}
_KNOWN_KWARGS = frozenset(
    {
        "attention_mask",
        "position_ids",
        *CACHE_ARGUMENTS,
        "cache_params",  # passed by state-space models, which the adapter refuses later with its own message
        "use_cache",
        "cache_position",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
    }
)
_REMEDIES = {
    "inputs_embeds": "give input_ids: drafts are tokens, and the model computes their embeddings",
    "token_type_ids": "leave it out (tokenizer(..., return_token_type_ids=False))",
}
_ENCODED = "mm_encoder_outputs"
_MEDIA = ("pixel", "image", "video", "audio", "input_features")
"""Parts of the names of inputs that are not text."""
_TOKEN_KINDS = ("token_type_ids", "mm_token_type_ids")
_BY_PLACE = {
    "adapter_names": (
        "selects an adapter for every row of the batch",
        "select one adapter for the whole batch by set_adapter",
    ),
    "alora_offsets": ("switches activated adapters on at a position in the text", "disable the activated adapter"),
    "task_ids": ("selects a task for every row of the batch", "generate without task_ids"),
}
"""Arguments that PEFT passes to layers through hooks during a call, by name. Each entry has the effect and a remedy."""


@dataclass(frozen=True)
class GenerateArguments:
    """Arguments of the running ``generate`` call; all empty if no such call is running.

    Args:
      streamer: streamer of the call, which has received the prompt already.
      assistant_model, synced_gpus: values given by the user.
      cache: cache given by the user under any of its names.
      tensors: names of other inputs that the user gave as tensors.
    """

    streamer: Any = None
    assistant_model: Any = None
    synced_gpus: bool | None = None
    cache: Any = None
    tensors: tuple[str, ...] = ()

    @classmethod
    def find(cls) -> GenerateArguments:
        """Read the arguments from the frame of the ``generate`` call up the stack."""
        frame = sys._getframe(1)
        for _ in range(_MAX_FRAMES):
            if frame.f_code is _GENERATE:
                known = frame.f_locals
                given = known.get("kwargs", {})
                return cls(
                    known.get("streamer"),
                    known.get("assistant_model"),
                    known.get("synced_gpus"),
                    given_cache(given),
                    tuple(name for name, value in given.items() if isinstance(value, (torch.Tensor, list))),
                )
            if frame.f_back is None:
                break
            frame = frame.f_back
        return cls()


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """Return the key-value cache among keyword arguments, or None; `transformers` 5.24 renamed the argument."""
    return next((arguments[name] for name in CACHE_ARGUMENTS if arguments.get(name) is not None), None)


def check_model(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError for an encoder-decoder model, and if a wrapper changes the model's inputs.

    PEFT wrappers call ``generate`` of the model inside and replace one of its methods or add hooks to its layers.
    """
    prepare = vars(model).get("prepare_inputs_for_generation")
    if prepare is not None and getattr(prepare, "__func__", None) is not type(model).prepare_inputs_for_generation:
        raise UnsupportedModelError(
            f"prepare_inputs_for_generation of {model_name(model)} was replaced (prompt tuning and prefix "
            "tuning do so to put virtual tokens before the text), but drafts are verified without it; call generate "
            "without custom_generate"
        )
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            for name in _BY_PLACE.keys() & getattr(hook, "keywords", {}).keys():
                effect, remedy = _BY_PLACE[name]
                raise UnsupportedModelError(
                    f"{name} {effect}, but foredraft changes the order of rows and tokens within a step; {remedy}, "
                    f"{_WITHOUT}"
                )
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{model_name(model)} is an encoder-decoder model, and foredraft decodes only causal language models; "
            "call generate without custom_generate"
        )


def check_config(config: GenerationConfig, caller: GenerateArguments) -> None:
    """Raise ConfigError for a generation mode other than greedy decoding and sampling."""
    mode = config.get_generation_mode(caller.assistant_model)
    if mode in _MODES:
        raise ConfigError(_MODES[mode])
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        raise ConfigError(
            "output_attentions and output_hidden_states are not available, since a step runs over a whole draft; leave "
            "them out, or run the finished sequences through model(...) once"
        )
    if config.cache_implementation == "quantized":
        raise ConfigError(
            "cache_implementation='quantized' changes the output of the model, and drafts are verified with an exact "
            f"cache; leave it out, {_WITHOUT}"
        )


def check_inputs(model_kwargs: dict[str, Any], caller: GenerateArguments, *, is_multimodal: bool = False) -> None:
    """Raise ConfigError for inputs other than tokens and their mask, and for a cache that is not empty.

    Args:
      model_kwargs: arguments that ``generate`` prepared for the model.
      caller: arguments of the ``generate`` call.
      is_multimodal: whether the model contains a text model. If the model contains a text model, token types that are
        all 0 mean text.
    """
    if any(_is_filled(cache) for cache in (caller.cache, given_cache(model_kwargs))):
        raise ConfigError(
            "past_key_values is a filled cache, which foredraft cannot continue, since it verifies drafts with a cache "
            "of its own; leave it out and give the whole text as input_ids"
        )
    encoded = model_kwargs.get(_ENCODED) or {}  # transformers passes an empty one for text prompts
    if any(value is not None for value in encoded.values()):
        given = (name for name in caller.tensors if _is_of_media(name))
        raise _refusal(next(given, _ENCODED))
    for name, value in model_kwargs.items():
        if name in (*_KNOWN_KWARGS, _ENCODED) or value is None:
            continue
        if not (is_multimodal and name in _TOKEN_KINDS and isinstance(value, torch.Tensor) and not bool(value.any())):
            raise _refusal(name)


def _refusal(name: str) -> ConfigError:
    remedy = _REMEDIES.get(name, f"leave it out, {_WITHOUT}")
    reason = ": prompts are text, without pictures, video or sound" if name == _ENCODED or _is_of_media(name) else ""
    return ConfigError(f"{name} cannot be used with custom_generate=speculate(...){reason}; {remedy}")


def _is_of_media(name: str) -> bool:
    return any(part in name for part in _MEDIA)


def _is_filled(cache: Any) -> bool:
    """Whether decoding with this cache would differ from decoding without a cache."""
    if cache is None:
        return False
    if not isinstance(cache, Cache) or isinstance(cache, QuantizedCache):
        return True
    try:
        return bool(cache.get_seq_length() > 0)
    except ValueError:  # a cache of recurrent states, whose model the adapter refuses
        return False


def check_processors(processors: Any) -> None:
    """Raise ConfigError for processors whose result depends on earlier calls."""
    for processor in processors:
        for kind, name in _STATEFUL.items():
            if isinstance(processor, kind):
                raise ConfigError(
                    f"{name} keeps state between calls, and verification calls it with drafts that may be rejected "
                    f"later; leave it out, {_WITHOUT}"
                )


def check_processes(model: PreTrainedModel, synced_gpus: bool | None) -> None:
    """Raise ConfigError if several processes must make the same number of forward passes."""
    has_others = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    is_sharded = has_others and (is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model))
    if synced_gpus or (synced_gpus is None and is_sharded):
        raise ConfigError(
            "synced_gpus requires the same number of forward passes in every process, but drafts make it differ, so "
            f"the processes would wait for each other forever; gather the weights first, {_WITHOUT}"
        )
