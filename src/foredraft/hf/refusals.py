"""Options of ``generate``: those that it does not pass on, read from the frame that calls, and those that this decoding
does not support, refused by name with what to do instead."""

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
from foredraft.model.support import CACHE_ARGUMENTS

_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__
_MAX_FRAMES = 16  # wrappers that may stand between ``generate`` and the callable
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
        "cache_params",  # of state-space models, which the adapter refuses for what they are
        "use_cache",
        "cache_position",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
    }
)
_REMEDIES = {
    "inputs_embeds": "give input_ids: drafts are tokens, and their embeddings are the model's",
    "token_type_ids": "leave them out (tokenizer(..., return_token_type_ids=False))",
}
_ENCODED = "mm_encoder_outputs"
_MEDIA = ("pixel", "image", "video", "audio", "input_features")
"""Parts of names of inputs that are not text."""
_TOKEN_KINDS = ("token_type_ids", "mm_token_type_ids")
_BY_PLACE = {
    "adapter_names": "gives every row of the batch an adapter of its own",
    "alora_offsets": "switches activated adapters on at a place in the text",
    "task_ids": "gives every row of the batch a task of its own",
}
"""Arguments that PEFT passes to its layers through hooks for the duration of a call, by name."""


@dataclass(frozen=True)
class GenerateArguments:
    """Arguments of the surrounding ``generate``; all of them empty where there is none.

    Args:
      streamer: it has the prompt already.
      assistant_model, synced_gpus: as given by the user.
      cache: as given by the user, by any of its names.
      tensors: names of other inputs that the user gave as tensors.
    """

    streamer: Any = None
    assistant_model: Any = None
    synced_gpus: bool | None = None
    cache: Any = None
    tensors: tuple[str, ...] = ()

    @classmethod
    def find(cls) -> GenerateArguments:
        """The ``generate`` that called whoever calls this."""
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
    """The key-value cache among keyword arguments, None without one; `transformers` 5.24 renamed it."""
    return next((arguments[name] for name in CACHE_ARGUMENTS if arguments.get(name) is not None), None)


def check_model(model: PreTrainedModel) -> None:
    """Raises: UnsupportedModelError for an encoder-decoder model, and for inputs that a wrapper changes.

    A wrapper of PEFT calls ``generate`` of the model inside, having replaced one of its methods or hooked its layers.
    """
    prepare = vars(model).get("prepare_inputs_for_generation")
    if prepare is not None and getattr(prepare, "__func__", None) is not type(model).prepare_inputs_for_generation:
        raise UnsupportedModelError(
            f"prepare_inputs_for_generation of this {type(model).__name__} is not its own (prompt tuning and prefix "
            "tuning put virtual tokens before the text by it), and drafts are verified without it; call generate "
            "without custom_generate"
        )
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            for name in _BY_PLACE.keys() & getattr(hook, "keywords", {}).keys():
                raise UnsupportedModelError(
                    f"{name} {_BY_PLACE[name]}, and in a step rows and tokens have other places than in plain "
                    "generation; leave it out, set the adapter for the whole call, or call generate without "
                    "custom_generate"
                )
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{type(model).__name__} is an encoder-decoder model; foredraft decodes causal language models, so call "
            "generate without custom_generate"
        )


def check_config(config: GenerationConfig, caller: GenerateArguments) -> None:
    """Raises: ConfigError for a way of generating that is not plain greedy decoding or sampling."""
    mode = config.get_generation_mode(caller.assistant_model)
    if mode in _MODES:
        raise ConfigError(_MODES[mode])
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        raise ConfigError(
            "output_attentions and output_hidden_states are not kept, since a step runs over a whole draft; leave them "
            "out, or run the finished sequences through model(...) once"
        )
    if config.cache_implementation == "quantized":
        raise ConfigError(
            "cache_implementation='quantized' changes what the model says, and drafts are verified over an exact "
            f"cache; leave it out, {_WITHOUT}"
        )


def check_inputs(model_kwargs: dict[str, Any], caller: GenerateArguments, *, is_multimodal: bool = False) -> None:
    """Raises: ConfigError for inputs beside tokens and their mask, and for a cache that holds anything.

    Args:
      is_multimodal: the model has a text model inside; kinds of tokens that are all 0 are those of text.
    """
    if any(_is_filled(cache) for cache in (caller.cache, given_cache(model_kwargs))):
        raise ConfigError(
            "a filled cache (past_key_values) cannot be continued, since drafts are verified over an exact cache of "
            "foredraft's own; leave them out and give the whole text as input_ids"
        )
    encoded = model_kwargs.get(_ENCODED) or {}  # transformers sets an empty one for every prompt of text
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
    """Whether decoding from this cache would differ from decoding without any."""
    if cache is None:
        return False
    if not isinstance(cache, Cache) or isinstance(cache, QuantizedCache):
        return True
    try:
        return bool(cache.get_seq_length() > 0)
    except ValueError:  # of recurrent states, whose model the adapter refuses
        return False


def check_processors(processors: Any) -> None:
    """Raises: ConfigError for processors whose result depends on earlier calls."""
    for processor in processors:
        for kind, name in _STATEFUL.items():
            if isinstance(processor, kind):
                raise ConfigError(
                    f"{name} keeps state from call to call, and drafts show it texts that may be rejected later; "
                    f"leave it out, {_WITHOUT}"
                )


def check_processes(model: PreTrainedModel, synced_gpus: bool | None) -> None:
    """Raises: ConfigError where several processes must make the same number of forwards."""
    has_others = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    is_sharded = has_others and (is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model))
    if synced_gpus or (synced_gpus is None and is_sharded):
        raise ConfigError(
            "synced_gpus asks every process for the same number of forwards, which drafts make different, so the "
            f"processes would wait for each other for ever; gather the weights first, {_WITHOUT}"
        )
