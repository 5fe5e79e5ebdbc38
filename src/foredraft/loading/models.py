"""Loading of models and tokenizers by name, with a typed error for every failure."""

from __future__ import annotations

import copy
import os
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.quantizers import AutoHfQuantizer
from transformers.utils import cached_file

from foredraft import zoo
from foredraft.errors import CheckpointError, ConfigError, UnsupportedModelError
from foredraft.gguf import model as gguf_model
from foredraft.gguf.blocks import TYPES
from foredraft.gguf.header import Header, part_names, read_header
from foredraft.gguf.tokenizer import read_tokenizer
from foredraft.loading.checkpoint_errors import as_checkpoint_error, check_shards
from foredraft.loading.identity import files_of, identity_of
from foredraft.loading.info import Loaded
from foredraft.loading.layouts import LAYOUTS, method_of, settings_of
from foredraft.loading.sources import TOKENIZER_FILES, ZOO, Source, has_tokenizer, resolve
from foredraft.loading.stored import load_codes
from foredraft.machine import collector_paused
from foredraft.model.building import WithoutCompiler, without_weights
from foredraft.model.dtypes import check_dtype, choose_dtype, stored_dtype
from foredraft.model.execution.rounding import DEQUANTIZED, STORED, check_quantization, check_weights, quantize_weights
from foredraft.model.lm import CausalLM
from foredraft.model.support import check_unwrapped, model_name
from foredraft.native.library import KINDS, library
from foredraft.native.threads import keep_to_quota
from foredraft.progress import no_progress_bars

_SINGLE_AND_HALF = (torch.float32, torch.bfloat16, torch.float16)


@collector_paused()
def load_model(
    model: str | os.PathLike[str] | PreTrainedModel,
    *,
    part: str = "target",
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    gguf_file: str | None = None,
    quantization: str | None = None,
    weights: str | None = None,
    widest_dtype: torch.dtype | None = None,
    with_tokenizer: bool = True,
    max_model_len: int | None = None,
) -> Loaded:
    """Load a model by name, or prepare one that is loaded already.

    Args:
      model: a directory, a hub id, ``zoo:NAME``, a GGUF file, or a loaded model, which keeps its dtype and device.
      part: "target" or "draft", for a model of the zoo.
      dtype: "auto" is the checkpoint's dtype where that is not slower, else float32 (`choose_dtype`).
      device: "auto" is the GPU if there is one, else the CPU.
      revision: branch, tag or commit of a hub id.
      trust_remote_code: run modelling code from the checkpoint.
      gguf_file: name of a GGUF file in the directory or at the hub id, which is read instead of other weights.
      quantization: "int8" or "int4": round linear layers to 8 or 4 bits. The adapter rounds a model that is loaded
        already.
      weights: "stored": multiply by the quantised weights of a GGUF file in their own format. "dequantized": convert
        them to the dtype. None: as stored if the file is quantised and this is a CPU with kernels.
      widest_dtype: dtype that "auto" uses instead of any wider one.
      with_tokenizer: load the tokenizer of the model as well.
      max_model_len: length of sequences that the model must have a context for; refused before weights are read.

    Raises: CheckpointError, UnsupportedModelError, ConfigError.
    """
    keep_to_quota()
    check_quantization(quantization)
    check_weights(weights, quantization)
    if isinstance(model, torch.nn.Module):
        model = check_unwrapped(model)
        _check_kept(model, dtype, device, gguf_file, weights)
        return Loaded.of(model, model_name(model), False, quantization=quantization)
    check_dtype(dtype)
    place = choose_device(device)
    source = resolve(model, part=part, revision=revision, trust_remote_code=trust_remote_code, gguf_file=gguf_file)
    front = _header(source) if source.is_gguf else _config(source)
    _check_context(source, front, max_model_len)
    if weights is None and quantization is None and isinstance(front, Header):
        weights = STORED if _can_run_stored(front, dtype, place) else None
    weights = None if weights == DEQUANTIZED else weights
    is_whole = method_of(front) in LAYOUTS and _reads_codes(source, front, weights, quantization)
    blocks = None if weights is None or is_whole else _blocks(source, front)
    if isinstance(front, Header):
        gguf_model.check_readable(front)
        stored: torch.dtype | None = gguf_model.stored_dtype(front)
    else:
        if not is_whole:
            check_shards(source, front)
        stored = stored_dtype(front, source.location, source.revision, is_local=source.is_local)
    structure = cache(partial(_without_weights, source, front))
    chosen = choose_dtype(dtype, place, stored, widest_dtype, structure)
    tokenizer = load_tokenizer_of(source, part, front) if with_tokenizer else None
    types = None
    if is_whole:
        with as_checkpoint_error(source, "weights"):
            loaded, types = load_codes(source.location, source.revision, front, chosen)
    elif isinstance(front, Header):
        with as_checkpoint_error(source, "model"):
            loaded, types = gguf_model.load(front, chosen, structure(), as_stored=blocks is not None)
    elif blocks is not None:
        with as_checkpoint_error(source, "model"):
            loaded, types = gguf_model.load(blocks, chosen, as_stored=True)
        with suppress(OSError):  # the one of the converted model says more
            loaded.generation_config = GenerationConfig.from_pretrained(source.location)
    else:
        # Weights that will be rounded are read in the checkpoint's dtype, since a copy in another dtype is not needed.
        as_stored = stored if quantization is not None and stored in _SINGLE_AND_HALF else chosen
        loaded = _load_weights(source, front, as_stored)
    loaded = loaded.to(place).eval()
    found = Loaded.of(loaded, source.name, True, tokenizer, stored, quantization)
    if not trust_remote_code:
        parts = front if isinstance(front, Header) else blocks
        files = {*files_of(source), *(part.path for part in (() if parts is None else parts.files))}
        found = replace(found, identity=identity_of(files))
    if types is not None:
        return replace(found, quantization=STORED, types=types)
    if quantization is not None:
        quantize_weights(found.model, quantization, dtype=chosen, release_originals=True)
    return found


def adapter_of(
    loaded: Loaded, execution: str, kv_cache_dtype: str = "auto", activations: str | None = None
) -> CausalLM:
    """Return the adapter of a loaded model."""
    return CausalLM(
        loaded.model,
        execution=execution,
        release_originals=loaded.is_owned,
        quantization=loaded.quantization,
        kv_cache_dtype=kv_cache_dtype,
        activations=activations,
        weights=loaded.identity,
        name=loaded.name,
    )


def is_zoo(model: object) -> bool:
    """Whether the name is that of a model of the zoo, whose manifest lists the included drafters."""
    return isinstance(model, str) and model.startswith(ZOO)


def load_tokenizer(tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Load a tokenizer by name, or return the one given."""
    if isinstance(tokenizer, (str, os.PathLike)):
        source = resolve(tokenizer, part="tokenizer")
        found = load_tokenizer_of(source, "tokenizer")
        if found is None:
            raise CheckpointError(f"{source.name} contains no tokenizer (looked for {', '.join(TOKENIZER_FILES)})")
        return found
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ConfigError(f"tokenizer is {type(tokenizer).__name__}; give a directory, a hub id or a loaded tokenizer")
    return tokenizer


def load_tokenizer_of(source: Source, part: str = "target", front: Any = None) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a model; None if its directory contains none.

    Args:
      source: location of the model.
      part: "tokenizer" for a tokenizer that was given by itself.
      front: header of its GGUF file, if it was read before.
    """
    if source.is_gguf:
        return read_tokenizer(front if isinstance(front, Header) else _header(source))
    if source.name.startswith(ZOO):
        source = Source(str(zoo.path(source.name.split(" ")[0], "tokenizer")), source.name)
    if source.is_local and not has_tokenizer(source.location):
        return None
    with as_checkpoint_error(source, "tokenizer"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source.location, **source.options)
    return tokenizer


def tokenizer_beside(model: PreTrainedModel) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer from the directory of a loaded model; None if there is none. Makes no request to the hub."""
    location = str(getattr(model, "name_or_path", "") or "")
    return load_tokenizer_of(Source(location, location)) if location and os.path.isdir(location) else None


def choose_device(device: str | torch.device | None) -> torch.device:
    """Return the device to load to; "auto" and None mean the GPU if there is one, else the CPU."""
    if device is None or device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device is {device!r}: {error}; write cpu, cuda or cuda:0") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {device!r}, but torch sees no GPU on this machine; use cpu")
    return chosen


def _check_kept(
    model: PreTrainedModel,
    dtype: str | torch.dtype,
    device: str | torch.device | None,
    gguf_file: str | None,
    weights: str | None,
) -> None:
    """Refuse options that would convert or move a loaded model, which belongs to the caller."""
    if weights is not None:
        raise ConfigError(f"weights is {weights!r}, but the model is loaded already; give its GGUF file instead")
    if gguf_file is not None:
        raise ConfigError(f"gguf_file is {gguf_file!r}, but the model is loaded already; give a directory or a hub id")
    if dtype != "auto" and choose_dtype(dtype, model.device) != model.dtype:
        raise ConfigError(
            f"dtype is {dtype!r}, but the loaded model is in {model.dtype}; convert it with model.to(...)"
        )
    if device not in (None, "auto") and not is_on(model.device, choose_device(device)):
        raise ConfigError(
            f"device is {device!r}, but the loaded model is on {model.device}; move it with model.to(...)"
        )


def is_on(own: torch.device, wanted: torch.device) -> bool:
    """Whether a model is on the given device. A device without an index matches any of its type."""
    return own.type == wanted.type and wanted.index in (None, own.index)


def _config(source: Source) -> Any:
    """Load the configuration and refuse an encoder-decoder model."""
    with as_checkpoint_error(source, "configuration"):
        config = AutoConfig.from_pretrained(source.location, **source.options)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{source.name} is an encoder-decoder model ({config.model_type}); foredraft decodes only causal language "
            "models"
        )
    return config


def _check_context(source: Source, front: Any, max_model_len: int | None) -> None:
    """Refuse a limit beyond every context of the model. Some models have less, which the engine finds out."""
    if isinstance(front, Header):
        context = front.of_architecture("context_length")
    else:
        context = getattr(front.get_text_config(decoder=True), "max_position_embeddings", None)
    if isinstance(context, int) and context < (max_model_len or 0):
        raise ConfigError(
            f"max_model_len is {max_model_len}, but {source.name} has a context of {context}; lower max_model_len"
        )


def _load_weights(source: Source, config: Any, dtype: torch.dtype) -> Any:
    """Load the model in this dtype and check that the checkpoint contains every weight."""
    method, quiet = method_of(config), no_progress_bars() if source.name.startswith(ZOO) else nullcontext()
    if method and not AutoHfQuantizer.supports_quant_method(settings_of(config)):  # codes would be read as weights
        raise UnsupportedModelError(
            f"{source.name} has weights in the layout of {method}, which neither foredraft nor transformers "
            f"{transformers.__version__} can read; load the original model with quantization='int8'"
        )
    with as_checkpoint_error(source, "weights", method), quiet, WithoutCompiler():
        model, report = AutoModelForCausalLM.from_pretrained(
            source.location, config=config, dtype=dtype, output_loading_info=True, **source.options
        )
    missing = sorted(report["missing_keys"])
    marks = (*(f".{layout.mark}" for layout in LAYOUTS.values()), ".weight_scale_inv")
    codes = sorted(name for name in report["unexpected_keys"] if name.endswith(marks))
    if codes and not method:
        raise CheckpointError(
            f"{source.name} contains quantised weights ({codes[0]}, ...), but its config.json does not say "
            "how they were made: add a quantization_config with quant_method, bits and group_size (from "
            "quantize_config.json or quant_config.json, if the directory contains one)"
        )
    if missing:
        raise CheckpointError(
            f"{source.name} lacks {len(missing)} weights of its configuration ({', '.join(missing[:3])}, ...), which "
            "would have random values; download or save the checkpoint again"
        )
    return model


def _reads_codes(source: Source, config: Any, weights: str | None, quantization: str | None) -> bool:
    """Whether foredraft reads the codes of a checkpoint in one of `LAYOUTS`; transformers reads all other settings.

    Raises: ConfigError if the codes should be rounded once more, UnsupportedModelError if ``weights`` is set and
      foredraft cannot read the codes, CheckpointError for damaged settings.
    """
    layout, settings = LAYOUTS[method_of(config)], settings_of(config)
    try:
        reason = layout.why_not_plain(settings)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"quantization_config in config.json of {source.name} is not valid for {layout.method} ({error}); download "
            "or copy config.json again"
        ) from None
    if reason and weights is not None:
        raise UnsupportedModelError(
            f"weights is {weights!r}, and foredraft cannot read {layout.method} weights of {source.name}: {reason}. "
            "Leave weights out, or load the original model with quantization='int8'"
        )
    if not reason and quantization is not None:
        raise ConfigError(
            f"quantization is {quantization!r}, but the weights of {source.name} are integers already; leave it out"
        )
    return not reason


def _can_run_stored(header: Header, dtype: str | torch.dtype, device: torch.device) -> bool:
    """Whether kernels on this device multiply by quantised weights of the file."""
    has_kernels = device.type == "cpu" and library() is not None
    chosen = torch.float32 if dtype == "auto" else choose_dtype(dtype, device)
    return has_kernels and chosen in KINDS and any(tensor.type_id in TYPES for tensor in header.tensors)


def _blocks(source: Source, front: Any) -> Header:
    """Read the header of a model's GGUF file; for a model of the zoo, of the file that it was converted from.

    Raises: ConfigError, UnsupportedModelError for a model without such a file.
    """
    if isinstance(front, Header):
        return front
    if method := method_of(front):
        raise UnsupportedModelError(
            f"weights is {STORED!r}, but the layout {method} of {source.name} is not supported; leave weights out, or "
            "load the original model with quantization='int4'"
        )
    file = zoo.stored_file(source.name) if source.name.startswith(ZOO) else None
    if file is None:
        raise ConfigError(
            f"weights is {STORED!r}, but {source.name} has no GGUF file; leave weights out, or use quantization='int8'"
        )
    header = read_header(file)
    gguf_model.check_readable(header)
    return header


def _header(source: Source) -> Header:
    """Read the header of a GGUF file, which is downloaded if it is on the hub."""
    if source.gguf_file is None:
        return read_header(source.location)
    with as_checkpoint_error(source, "GGUF file"):
        files = [
            cached_file(source.location, name, revision=source.revision or "main")
            for name in part_names(source.gguf_file)
        ]
    return read_header(files[0])


def _config_of(source: Source, header: Header) -> Any:
    """Return the configuration of a GGUF file's model."""
    with as_checkpoint_error(source, "model"):
        return gguf_model.config_of(header)


def _without_weights(source: Source, front: Any) -> Any:
    """Build the modules of a model on the meta device, without weights.

    Raises: CheckpointError, UnsupportedModelError.
    """
    config = _config_of(source, front) if isinstance(front, Header) else copy.deepcopy(front)
    vars(config).pop("quantization_config", None)
    with as_checkpoint_error(source, "configuration"):
        return without_weights(config, trust_remote_code=source.trust_remote_code)
