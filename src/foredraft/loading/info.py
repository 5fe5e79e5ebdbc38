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
from foredraft.config.acceptance import AcceptanceRule
from foredraft.config.engine import Guarantee
from foredraft.config.keywords import whole_number
from foredraft.config.sampling import MODEL_DEFAULTS, SamplingParams
from foredraft.config.speculative import SpeculativeConfig
from foredraft.errors import ConfigError, error_in_words
from foredraft.model.lm import CausalLM
from foredraft.model.support import model_name
from foredraft.native.threads import threads_note

LARGEST_BITS = 12
"""Limit on bits per weight, scales included, up to which weights count as multiplied in quantised form."""
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
      identity: identity of the files that the library read the weights from (`foredraft.loading.identity`); None if it
        is not known, or the model's code is from its checkpoint.
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
    identity: str | None = None

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
      activations: "int8" if the inputs of integer weights are rounded to 8 bits; None for 16 bits.
      kv_cache_dtype: dtype of keys and values.
      supports_trees: whether the model can verify trees, as tested when it was loaded. A model that cannot verify
        chains is refused.
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
    activations: str | None
    kv_cache_dtype: str
    supports_trees: bool
    vocab_size: int
    context_length: int | None


def describe(loaded: Loaded, lm: CausalLM) -> ModelInfo:
    """Describe a model and its adapter."""
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
        activations=lm.activations,
        kv_cache_dtype=str(lm.kv_dtype or lm.dtype).removeprefix("torch."),
        supports_trees=lm.supports_trees,
        vocab_size=lm.vocab_size,
        context_length=lm.max_context,
    )


def load_line(info: ModelInfo, drafters: Sequence[str] = (), output: str = "") -> str:
    """Describe a loaded model in one line for people.

    Args:
      drafters: titles of the methods that draft; none for plain decoding.
      output: guarantee for the output, see `output_words`.

    Example:
        ``SmolLM2-135M-Instruct · bfloat16 · drafting: suffix + eagle3 · output: bit-identical to plain decoding``
    """
    precision = [info.dtype if info.device == "cpu" else f"{info.dtype} on {info.device}"]
    if info.quantization is not None:
        left = (info.weight_types or "").partition("; dequantised are ")[2]
        precision.append(f"{info.quantization} weights" + (f" (dequantised: {left})" if left else ""))
    precision += [] if info.activations is None else [f"{info.activations} activations"]
    precision += [] if info.kv_cache_dtype == info.dtype else [f"keys and values in {info.kv_cache_dtype}"]
    parts = [short_name(info.name), ", ".join(precision), f"drafting: {' + '.join(drafters) or 'none'}"]
    return " · ".join([*parts, f"output: {output}"] if drafters else parts)


def drafter_titles(config: SpeculativeConfig) -> list[str]:
    """Titles of the methods that draft: those that ``auto`` chooses from, and the parts of a combination.

    The parts of ``a>b`` are one title, since the order counts.
    """
    titles = [part.title for part in config.parts]
    return [" > ".join(titles)] if config.method == "first" else titles


def output_words(rule: AcceptanceRule, guarantee: Guarantee) -> str:
    """Guarantee for the output of a rule of acceptance, in words."""
    if not rule.is_lossless:
        return f"lossy ({rule.name} acceptance)"
    if not rule.keeps_tokens:
        return "same distribution as plain decoding"
    return "bit-identical to plain decoding" if guarantee.keeps_bits else "same tokens as plain decoding up to rounding"


def short_name(name: str) -> str:
    """Name of a model for people: the title of a zoo model, the last part of a path or hub id."""
    if name.startswith(zoo.PREFIX):
        manifest = zoo.manifest(name)
        return name if manifest.is_toy else manifest.title.partition(",")[0]
    return name if name.endswith(")") else os.path.basename(os.path.normpath(name))


def detail_line(
    info: ModelInfo,
    method: str | None,
    *,
    stored_dtype: torch.dtype | None = None,
    is_dtype_chosen: bool = False,
    drafter: ModelInfo | None = None,
    heads: Iterable[str] = (),
    guarantee: str = "",
    threads: str = "",
) -> str:
    """Describe in one line the parameters, precision, kernels, threads and drafters of a loaded model.

    Args:
      method: method of drafting; "none" if the user chose plain decoding, None if no method was given.
      stored_dtype: dtype of the checkpoint, if it is known.
      is_dtype_chosen: whether the user gave the dtype.
      drafter: model of the method ``draft_model``.
      heads: names of the heads that draft.
      guarantee: the guarantee for the output, in words.
      threads: note on the number of threads.
    """
    dtype = info.dtype
    note = dtype_note(dtype, name_of(stored_dtype), info.device, is_chosen=is_dtype_chosen)
    parts = [f"{count(info.num_parameters)} parameters", f"{dtype} ({note})" if note else dtype]
    parts += [weights] if (weights := weights_note(info)) else []
    parts += [] if info.activations is None else [f"{info.activations} activations"]
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
    return f"{info.name}: {', '.join(parts)}{'; ' if guarantee else ''}{guarantee}"


def weights_note(info: ModelInfo) -> str:
    """Description of rounded linear layers; empty if they are not rounded."""
    if info.quantization is None:
        return ""
    types = info.weight_types or ""
    if info.bits_per_weight is None or (info.bits_per_weight > LARGEST_BITS and "dequantised" not in types):
        size = "which run dequantised because there is no kernel for them"
        return f"{info.quantization} weights ({types}), {size}" if types else f"{info.quantization} weights, {size}"
    size = f"{info.bits_per_weight:.2f} bits each, {info.step_bytes / 1e6:.0f} MB per step"
    return f"{info.quantization} weights ({types}; {size})" if types else f"{info.quantization} weights ({size})"


def dtype_note(used: str, stored: str | None, device: str = "cpu", *, is_chosen: bool) -> str:
    """Reason why a model runs in another dtype than its checkpoint; empty if it does not or if that is unknown."""
    if stored is None or stored == used:
        return ""
    if is_chosen:
        return f"as requested; the checkpoint is {stored}"
    if used == "float32" and (stored, device) == ("float16", "cpu"):
        return "the checkpoint is float16, which is computed in float32 on CPUs"
    if used == "float32":
        return (
            f"the checkpoint is {stored}, and this {'CPU' if device == 'cpu' else 'device'} has no {stored} arithmetic"
        )
    return f"the checkpoint is {stored}; dtype={stored!r} keeps it"


def name_of(dtype: torch.dtype | None) -> str | None:
    """Return the short name of a dtype: ``torch.bfloat16`` -> ``bfloat16``."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


def count(number: int) -> str:
    """Return a number of parameters in a readable form: 134,515,008 -> ``134.5 M``."""
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


AUTO, NONE = "auto", "none"
"""Names for the generation config of the model, and for no generation config."""


def named_generation_config(given: str | os.PathLike[str] | GenerationConfig) -> str | GenerationConfig:
    """Return the generation config of a path or hub id. "auto", "none", "vllm" and a config are returned unchanged.

    Raises: ConfigError if there is no config at the path.
    """
    if isinstance(given, GenerationConfig) or given in (AUTO, NONE, "vllm"):
        return given
    folder, name = os.path.expanduser(os.fspath(given)), "generation_config.json"
    if os.path.isfile(folder):
        folder, name = os.path.split(folder)
    if os.path.isabs(folder) and not os.path.isdir(folder):
        reason = "this folder does not exist"
    else:
        try:
            return GenerationConfig.from_pretrained(folder, name)
        except (OSError, ValueError) as error:
            reason = error_in_words(error)
    raise ConfigError(
        f"generation_config is {str(given)!r}: {reason}; give auto, none, or a folder with a generation_config.json"
    )


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
    """Log the sampling defaults from a generation config, if there are any."""
    if defaults:
        values = ", ".join(f"{field}={value:g}" for field, value in defaults.items())
        logger.info(
            "%s: sampling defaults from its generation config: %s (generation_config='none' ignores it)",
            short_name(name),
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
    guarantee: Guarantee | None,
    *,
    rule: AcceptanceRule,
    drafters: Sequence[str] = (),
    drafter: ModelInfo | None = None,
    heads: Iterable[str] = (),
    is_dtype_chosen: bool,
) -> None:
    """Log in one line which model was loaded and how it decodes (`load_line`), and details at level DEBUG.

    Args:
      guarantee: the guarantee for the output; None for plain decoding.
      rule: rule of acceptance.
      drafters: titles of the methods that draft.
      drafter, heads: see `detail_line`.
    """
    line = detail_line(
        info,
        title,
        stored_dtype=loaded.stored_dtype,
        is_dtype_chosen=is_dtype_chosen,
        drafter=drafter,
        heads=heads,
        guarantee="" if guarantee is None or not rule.keeps_tokens else guarantee.describe(),
        threads=threads_note(),
    )
    output = "" if guarantee is None else output_words(rule, guarantee)
    logger.info("%s", load_line(info, drafters if output else (), output))
    logger.debug("%s", line)


def announce_notes(name: str, methods: Sequence[str]) -> None:
    """Log the notes on a zoo model that concern these methods."""
    for note in zoo.manifest(name).notes_about(methods):
        logger.info("%s: %s", name, note)
