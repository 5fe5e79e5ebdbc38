"""Facts about a model in memory, for messages and for `foredraft info`."""

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
"""Most bits of a weight, scales included, that is multiplied as it was rounded."""
logger = logging.getLogger("foredraft")


@dataclass(frozen=True)
class Loaded:
    """A model in memory.

    Args:
      is_owned: the library loaded it, so nobody else holds its weights.
      num_parameters, weight_bytes: counted before any execution mode touches the weights; tied ones once.
      stored_dtype: of the checkpoint, where that is known and the library loaded it.
      quantization: of linear layers: how they are rounded, or "stored".
      types: of stored weights, and of those that had to be dequantised.
      packed_copy: where its packed weights are kept, if that was asked for.
      is_from_copy: they were read there.
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
        """Count, and keep."""
        size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        num_parameters = sum(weight.numel() for weight in model.parameters())
        return cls(model, name, is_owned, tokenizer, num_parameters, size, stored_dtype, quantization)


@dataclass(frozen=True)
class ModelInfo:
    """A loaded model, and how it runs.

    Args:
      num_parameters, weight_bytes: tied weights once, packed copies not counted.
      quantization: that linear layers were rounded by, if they were; "stored" for weights as their file has them.
      weight_types: of stored weights.
      bits_per_weight: of linear layers, scales included; None where they do not run by packed weights.
      step_bytes: of packed weights, which every step reads.
      kv_cache_dtype: of keys and values.
      supports_trees: verdict of the probe; chains always pass, or the model is refused.
      packed_copy, packed_copy_bytes: where its packed weights are kept, and in how many bytes, if they are.
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
    """Describe in one line for people the model that was loaded and how it will decode.

    Args:
      method: how it drafts; "none" is plain decoding because the user asked for it, None because no method was given.
      stored_dtype: of the checkpoint, where it is known.
      is_dtype_chosen: the user named the dtype.
      drafter: of the method ``draft_model``.
      heads: names of heads that draft.
      promise: what holds of texts with drafts, in words.
      threads: how many, where that is worth saying.
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
    """Description of rounded linear layers; empty where they are not rounded."""
    if info.quantization is None:
        return ""
    types = info.weight_types or ""
    if info.bits_per_weight is None or (info.bits_per_weight > LARGEST_BITS and "dequantised" not in types):
        size = "which run dequantised for want of a kernel here"
        return f"{info.quantization} weights ({types}), {size}" if types else f"{info.quantization} weights, {size}"
    size = f"{info.bits_per_weight:.2f} bits each, {info.step_bytes / 1e6:.0f} MB by a step"
    return f"{info.quantization} weights ({types}; {size})" if types else f"{info.quantization} weights ({size})"


def dtype_note(used: str, stored: str | None, device: str = "cpu", *, is_chosen: bool) -> str:
    """Why a model runs in another dtype than its checkpoint has; empty where it does not, or where that is unknown."""
    if stored is None or stored == used:
        return ""
    if is_chosen:
        return f"as asked; the checkpoint is {stored}"
    if used == "float32" and (stored, device) == ("float16", "cpu"):
        return "a float16 checkpoint, which CPUs compute in float32 here"
    if used == "float32":
        return f"a {stored} checkpoint, and this {'CPU' if device == 'cpu' else 'device'} has no {stored} arithmetic"
    return f"a {stored} checkpoint; dtype={stored!r} keeps it"


def name_of(dtype: torch.dtype | None) -> str | None:
    """``torch.bfloat16`` -> ``bfloat16``."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


def count(number: int) -> str:
    """134,515,008 -> ``134.5 M``."""
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def model_name(model: PreTrainedModel) -> str:
    """Name of a loaded model in messages."""
    path = str(getattr(model, "name_or_path", "") or "")
    return f"{type(model).__name__} ({path})" if path else type(model).__name__


AUTO, NONE = "auto", "none"
"""The generation config beside the model, and none."""


def read_generation_config(given: str | os.PathLike[str] | GenerationConfig, model: PreTrainedModel) -> Any:
    """The config that a model's defaults of sampling and EOS are from; None for none.

    Args:
      given: "auto" for that of the model, "none" ("vllm"), a folder or hub id with a ``generation_config.json``, or a
        config.

    Raises: ConfigError for a path where there is none.
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
    """Defaults of requests that a generation config sets, by field of `SamplingParams`.

    Raises: ConfigError for a value that no request may have.
    """
    written = {} if config is None else config.to_diff_dict()
    found = {field: written[key] for key, field in MODEL_DEFAULTS.items() if written.get(key) is not None}
    try:
        checked = SamplingParams(**found)
    except ConfigError as error:
        raise ConfigError(
            f"the generation config of {name} cannot be used: {error}. Mend it, or pass generation_config='none' "
            "(--generation-config none)"
        ) from None
    return {field: getattr(checked, field) for field in found}


def announce_defaults(defaults: Mapping[str, Any], name: str) -> None:
    """Log the defaults of requests that are from a generation config; nothing where there are none."""
    if defaults:
        values = ", ".join(f"{field}={value:g}" for field, value in defaults.items())
        logger.info(
            "%s: requests that set nothing else use %s, from its generation config; generation_config='none' leaves "
            "it out",
            name,
            values,
        )


def eos_token_ids(model: PreTrainedModel, config: Any = None, tokenizer: Any = None) -> tuple[int, ...]:
    """EOS ids of the generation config, one of the tokenizer that is not among them last.

    Args:
      config: the generation config; by default that of the model.
      tokenizer: its EOS ends outputs, too, as in vLLM; None for the config alone.
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
    """Log in one line what was loaded and how it decodes; see `load_line`.

    Args:
      promise: of texts with drafts; None where there are none, or the rule of acceptance keeps no tokens.
      drafter, heads: that draft; see `load_line`.
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
    """Log what people should know of a model of the zoo and these methods."""
    for note in zoo.manifest(name).notes_about(methods):
        logger.info("%s: %s", name, note)
