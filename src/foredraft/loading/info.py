"""Facts about a loaded model, for messages and for `foredraft info`."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from foredraft import zoo
from foredraft.config.engine import Promise
from foredraft.config.keywords import whole_number
from foredraft.config.sampling import MODEL_DEFAULTS, SamplingParams
from foredraft.errors import ConfigError, told
from foredraft.loading.packed_copy import PackedCopy
from foredraft.model.lm import CausalLM
from foredraft.native.threads import threads_note

LARGEST_BITS = 12
"""Most bits per weight, scales included, at which weights count as multiplied in quantised form."""
logger = logging.getLogger("foredraft")


@dataclass(frozen=True)
class Loaded:
    """A loaded model.

    Args:
      model: the model.
      name: its name in messages.
      is_owned: whether the library loaded the model, so that no other code uses its weights.
      tokenizer: its tokenizer, if it is known.
      num_parameters, weight_bytes: size before an execution mode changes the weights. Tied weights count once.
      stored_dtype: dtype of the checkpoint, if it is known and the library loaded it.
      quantization: rounding of the linear layers, or "stored".
      types: quantisation types of stored weights, and those that had to be dequantised.
      packed_copy: place for a cached copy of its packed weights, if the user asked for one.
      is_from_copy: whether the packed weights were read from that copy.
    """

    model: PreTrainedModel = field(repr=False)
    name: str
    is_owned: bool
    tokenizer: PreTrainedTokenizerBase | None = field(repr=False)
    num_parameters: int
    weight_bytes: int
    stored_dtype: torch.dtype | None = None
    quantization: str | None = None
    types: str | None = None
    packed_copy: PackedCopy | None = None
    is_from_copy: bool = False

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        name: str,
        is_owned: bool,
        tokenizer: PreTrainedTokenizerBase | None = None,
        stored_dtype: torch.dtype | None = None,
        quantization: str | None = None,
    ) -> Loaded:
        """Describe a model, with its size counted now."""
        size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        num_parameters = sum(weight.numel() for weight in model.parameters())
        return cls(model, name, is_owned, tokenizer, num_parameters, size, stored_dtype, quantization)


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a loaded model and its execution.

    Args:
      num_parameters, weight_bytes: size with tied weights counted once and packed copies not counted.
      quantization: rounding of the linear layers, if any; "stored" for weights in the format of their file.
      weight_types: quantisation types of stored weights.
      bits_per_weight: bits per weight of the linear layers, scales included; None if they are not packed.
      step_bytes: bytes of packed weights, all of which every step reads.
      kv_cache_dtype: dtype of keys and values.
      supports_trees: whether the model can verify trees, as tested when it was loaded. A model that cannot verify
        chains is refused.
      packed_copy, packed_copy_bytes: file with a copy of the packed weights and its size, if there is one.
    """

    name: str
    architecture: str
    num_parameters: int
    weight_bytes: int
    dtype: str
    device: str
    execution: str
    quantization: str | None
    weight_types: str | None
    bits_per_weight: float | None
    step_bytes: int
    kv_cache_dtype: str
    supports_trees: bool
    vocab_size: int
    context_length: int | None
    packed_copy: str | None = None
    packed_copy_bytes: int = 0


def describe(loaded: Loaded, lm: CausalLM) -> ModelInfo:
    """Describe a model and its adapter."""
    copy = loaded.packed_copy
    num_bytes = 0 if copy is None else copy.num_bytes
    return ModelInfo(
        name=loaded.name,
        architecture=type(loaded.model).__name__,
        num_parameters=loaded.num_parameters,
        weight_bytes=loaded.weight_bytes,
        dtype=str(lm.dtype).removeprefix("torch."),
        device=str(lm.device),
        execution=lm.execution.describe(),
        quantization=lm.quantization,
        weight_types=loaded.types,
        bits_per_weight=lm.execution.bits_per_weight,
        step_bytes=lm.execution.packed_bytes,
        kv_cache_dtype=str(lm.kv_dtype or lm.dtype).removeprefix("torch."),
        supports_trees=lm.supports_trees,
        vocab_size=lm.vocab_size,
        context_length=lm.max_context,
        packed_copy=str(copy.file) if copy is not None and num_bytes else None,
        packed_copy_bytes=num_bytes,
    )


def load_line(
    info: ModelInfo,
    method: str | None,
    *,
    stored_dtype: torch.dtype | None = None,
    is_dtype_chosen: bool = False,
    drafter: ModelInfo | None = None,
    heads: Iterable[str] = (),
    promise: str = "",
    threads: str = "",
) -> str:
    """Describe in one line the loaded model and how it will decode.

    Args:
      info: facts about the model.
      method: title of the drafting method; "none" if the user chose plain decoding, None if the user gave no method.
      stored_dtype: dtype of the checkpoint, if it is known.
      is_dtype_chosen: whether the user chose the dtype.
      drafter: facts about the draft model of the method ``draft_model``.
      heads: names of heads that draft.
      promise: guarantee for output with drafts, in words.
      threads: note on the number of threads; empty if it is the usual one.
    """
    dtype = info.dtype
    note = dtype_note(dtype, name_of(stored_dtype), info.device, is_chosen=is_dtype_chosen)
    parts = [f"{count(info.num_parameters)} parameters", f"{dtype} ({note})" if note else dtype]
    parts += [weights] if (weights := weights_note(info)) else []
    parts += [] if info.kv_cache_dtype == dtype else [f"keys and values in {info.kv_cache_dtype}"]
    parts.append(info.execution)
    if info.device != "cpu":
        parts.append(f"on {info.device}")
    elif threads:
        parts.append(threads)
    if method is None:
        parts.append("plain decoding (no speculative_config was given)")
    elif method == "none":
        parts.append("plain decoding")
    else:
        given = [f"the head {head}" for head in heads]
        if drafter is not None:
            given.append(f"{drafter.name}, {count(drafter.num_parameters)}")
        parts.append(f"method {method} with {' and '.join(given)}" if given else f"method {method}")
    return f"{info.name}: {', '.join(parts)}{'; ' if promise else ''}{promise}"


def weights_note(info: ModelInfo) -> str:
    """Describe rounded linear layers; empty if they are not rounded."""
    if info.quantization is None:
        return ""
    types = info.weight_types or ""
    if info.bits_per_weight is None or (info.bits_per_weight > LARGEST_BITS and "dequantised" not in types):
        size = "which run dequantised, since this machine has no kernel for them"
        return f"{info.quantization} weights ({types}), {size}" if types else f"{info.quantization} weights, {size}"
    size = f"{info.bits_per_weight:.2f} bits each, {info.step_bytes / 1e6:.0f} MB per step"
    return f"{info.quantization} weights ({types}; {size})" if types else f"{info.quantization} weights ({size})"


def dtype_note(used: str, stored: str | None, device: str = "cpu", *, is_chosen: bool) -> str:
    """Explain why a model runs in another dtype than its checkpoint; empty if it does not, or if that is unknown."""
    if stored is None or stored == used:
        return ""
    if is_chosen:
        return f"as requested; the checkpoint is {stored}"
    if used == "float32" and (stored, device) == ("float16", "cpu"):
        return "a float16 checkpoint, which foredraft computes in float32 on CPUs"
    if used == "float32":
        return f"a {stored} checkpoint, and this {'CPU' if device == 'cpu' else 'device'} has no {stored} arithmetic"
    return f"a {stored} checkpoint; dtype={stored!r} keeps it"


def name_of(dtype: torch.dtype | None) -> str | None:
    """Return the short name of a dtype: ``torch.bfloat16`` -> ``bfloat16``."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


def count(number: int) -> str:
    """Return a number of parameters in a readable form: 134,515,008 -> ``134.5 M``."""
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def model_name(model: PreTrainedModel) -> str:
    """Return the name of a loaded model for messages."""
    path = str(getattr(model, "name_or_path", "") or "")
    return f"{type(model).__name__} ({path})" if path else type(model).__name__


AUTO, NONE = "auto", "none"
"""Names for the generation config of the model, and for no generation config."""


def read_generation_config(given: str | os.PathLike[str] | GenerationConfig, model: PreTrainedModel) -> Any:
    """Return the generation config with the default sampling parameters and EOS; None for no config.

    Args:
      given: "auto" for the model's own, "none" (or "vllm") for no config, a folder or hub id with a
        ``generation_config.json``, or a config.
      model: the model.

    Raises: ConfigError if there is no config at the path.
    """
    if isinstance(given, GenerationConfig):
        return given
    if given == AUTO:
        return getattr(model, "generation_config", None)
    if given in (NONE, "vllm"):
        return None
    folder, name = os.path.expanduser(os.fspath(given)), "generation_config.json"
    if os.path.isfile(folder):
        folder, name = os.path.split(folder)
    try:
        return GenerationConfig.from_pretrained(folder, name)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"generation_config is {str(given)!r}: {told(error)}; give auto, none, or a folder with a "
            "generation_config.json"
        ) from None


def sampling_defaults(config: GenerationConfig | None, name: str) -> dict[str, Any]:
    """Return the request defaults that a generation config sets, by field of `SamplingParams`.

    Raises: ConfigError for a value that `SamplingParams` refuses.
    """
    written = {} if config is None else config.to_diff_dict()
    found = {field: written[key] for key, field in MODEL_DEFAULTS.items() if written.get(key) is not None}
    try:
        checked = SamplingParams(**found)
    except ConfigError as error:
        raise ConfigError(
            f"the generation config of {name} cannot be used: {error}. Correct it, or pass generation_config='none' "
            "(--generation-config none)"
        ) from None
    return {field: getattr(checked, field) for field in found}


def announce_defaults(defaults: Mapping[str, Any], name: str) -> None:
    """Log the request defaults from a generation config, if there are any."""
    if defaults:
        values = ", ".join(f"{field}={value:g}" for field, value in defaults.items())
        logger.info(
            "%s: default sampling parameters from its generation config: %s; pass generation_config='none' to ignore "
            "them",
            name,
            values,
        )


def eos_token_ids(model: PreTrainedModel, config: Any = None, tokenizer: Any = None) -> tuple[int, ...]:
    """Return the EOS ids of the generation config, followed by the tokenizer's EOS if it is another one.

    Args:
      model: the model.
      config: the generation config; by default the model's own.
      tokenizer: tokenizer whose EOS also ends outputs, as in vLLM; None for the config alone.
    """
    ids = _eos_of_config(model, getattr(model, "generation_config", None) if config is None else config)
    own = getattr(tokenizer, "eos_token_id", None)
    return (*ids, own) if type(own) is int and own >= 0 and own not in ids else ids


def _eos_of_config(model: PreTrainedModel, config: Any) -> tuple[int, ...]:
    eos = None if config is None else config.eos_token_id
    if eos is None:
        return ()
    ids: Iterable[Any] = eos if isinstance(eos, Iterable) else (eos,)
    try:
        return tuple(map(whole_number, ids))
    except TypeError:
        raise ConfigError(
            f"generation_config.eos_token_id of {model_name(model)} is {eos!r}; token ids are whole numbers, so set "
            "it to the id of a token, to a list of them, or to None"
        ) from None


def announce(
    info: ModelInfo,
    title: str | None,
    loaded: Loaded,
    promise: Promise | None,
    *,
    drafter: ModelInfo | None = None,
    heads: Iterable[str] = (),
    is_dtype_chosen: bool,
) -> None:
    """Log in one line the loaded model and how it decodes; see `load_line`.

    Args:
      promise: guarantee for output with drafts; None without drafts, or if the acceptance rule does not keep tokens.
      drafter, heads: facts about the draft model and names of heads; see `load_line`.
    """
    line = load_line(
        info,
        title,
        stored_dtype=loaded.stored_dtype,
        is_dtype_chosen=is_dtype_chosen,
        drafter=drafter,
        heads=heads,
        promise="" if promise is None else promise.describe(),
        threads=threads_note(),
    )
    logger.info("%s", line)


def announce_notes(name: str, methods: Sequence[str]) -> None:
    """Log the notes in the manifest of a zoo model about these methods."""
    for note in zoo.manifest(name).notes_about(methods):
        logger.info("%s: %s", name, note)
