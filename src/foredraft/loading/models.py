"""From what a user names to models and tokenizers in memory, with typed errors for everything that can go wrong."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.quantizers import AutoHfQuantizer
from transformers.utils import cached_file

from foredraft import zoo
from foredraft.errors import CheckpointError, ConfigError, UnsupportedModelError
from foredraft.gguf import model as gguf_model
from foredraft.gguf.header import Header, read_header
from foredraft.gguf.stored import multiply_as_stored
from foredraft.gguf.tokenizer import read_tokenizer
from foredraft.loading.checkpoint_errors import as_checkpoint_error, check_shards
from foredraft.loading.info import Loaded, model_name
from foredraft.loading.layouts import LAYOUTS, method_of, settings_of
from foredraft.loading.packed_copy import PackedCopy
from foredraft.loading.sources import TOKENIZER_FILES, ZOO, Source, has_tokenizer, resolve
from foredraft.loading.stored import load_codes
from foredraft.model.dtypes import choose_dtype, stored_dtype
from foredraft.model.execution.rounding import STORED, check_quantization, check_weights, quantize_weights
from foredraft.model.lm import CausalLM
from foredraft.model.support import check_unwrapped
from foredraft.native.threads import keep_to_quota
from foredraft.progress import no_progress_bars

_SINGLE_AND_HALF = (torch.float32, torch.bfloat16, torch.float16)


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
    cache_packed: bool = False,
) -> Loaded:
    """Load a model, or take one that is loaded already.

    Args:
      model: a directory, a hub id, ``zoo:NAME``, a GGUF file, or a model, which keeps its dtype and device.
      part: "target" or "draft", of a model of the zoo.
      dtype: "auto" is the checkpoint's own where that is no slower, else float32 (`choose_dtype`).
      device: "auto" is the GPU where there is one.
      gguf_file: in the directory or at the hub id, to be read instead of other weights.
      quantization: "int8" or "int4": round linear layers to so many bits. A model that is loaded already is rounded by
        its adapter.
      weights: "stored": multiply by the quantised weights of a GGUF file as they lie in it.
      widest_dtype: what "auto" takes instead of anything wider.
      with_tokenizer: read the one beside the model too.
      cache_packed: take packed weights that were kept of it, or let `adapter_of` keep them; of a model on a CPU.

    Raises: CheckpointError, UnsupportedModelError, ConfigError.
    """
    keep_to_quota()
    check_quantization(quantization)
    check_weights(weights, quantization)
    if isinstance(model, torch.nn.Module):
        model = check_unwrapped(model)
        _check_kept(model, dtype, device, gguf_file, weights, cache_packed)
        return Loaded.of(model, model_name(model), False, quantization=quantization)
    source = resolve(model, part=part, revision=revision, trust_remote_code=trust_remote_code, gguf_file=gguf_file)
    place = choose_device(device)
    front = _header(source) if source.is_gguf else _config(source)
    is_whole = method_of(front) in LAYOUTS and _reads_codes(source, front, weights, quantization)
    blocks = None if weights is None or is_whole else _blocks(source, front)
    if isinstance(front, Header):
        gguf_model.check_readable(front)
        stored: torch.dtype | None = gguf_model.stored_dtype(front)
    else:
        if not is_whole:
            check_shards(source, front)
        stored = stored_dtype(front, source.location, source.revision, is_local=source.is_local)
    config_of = cache(partial(_config_of, source, front))
    chosen = choose_dtype(dtype, place, stored, widest_dtype, partial(_without_weights, source, config_of))
    tokenizer = load_tokenizer_of(source, part) if with_tokenizer else None
    copy = PackedCopy.of(source, blocks, place, chosen, quantization, weights) if cache_packed else None
    if copy is not None and (kept := copy.read()) is not None:
        found = Loaded.of(kept[0], source.name, True, tokenizer, stored)
        return replace(found, **kept[1], packed_copy=copy, is_from_copy=True)
    types = None
    if is_whole:
        with as_checkpoint_error(source, "weights"):
            loaded, types = load_codes(source.location, source.revision, front, chosen)
    elif isinstance(front, Header):
        loaded = _load_gguf(source, front, chosen, config_of())
    elif blocks is None or chosen == stored:
        # weights that are rounded are read as they lie in the file: they need no copy in another dtype first
        as_stored = stored if quantization is not None and stored in _SINGLE_AND_HALF else chosen
        loaded = _load_weights(source, front, as_stored)
    else:  # what was converted is what the blocks stand for in the dtype of the conversion alone
        loaded = _load_gguf(source, blocks, chosen)
    loaded = loaded.to(place).eval()
    found = replace(Loaded.of(loaded, source.name, True, tokenizer, stored, quantization), packed_copy=copy)
    if blocks is not None:
        types = multiply_as_stored(found.model, blocks, chosen)
    if types is not None:
        return replace(found, quantization=STORED, types=types)
    if quantization is not None:
        quantize_weights(found.model, quantization, dtype=chosen, release_originals=True)
    return found


def adapter_of(loaded: Loaded, execution: str, kv_cache_dtype: str = "auto") -> CausalLM:
    """The adapter of a model that was loaded; its packed weights are kept where that was asked for."""
    lm = CausalLM(
        loaded.model,
        execution=execution,
        release_originals=loaded.is_owned,
        quantization=loaded.quantization,
        kv_cache_dtype=kv_cache_dtype,
    )
    copy = loaded.packed_copy
    if copy is not None and not loaded.is_from_copy:
        names = ("num_parameters", "weight_bytes", "quantization", "types")
        copy.keep(lm, loaded.model, {name: getattr(loaded, name) for name in names})
    return lm


def is_zoo(model: object) -> bool:
    """Whether a model is named by the zoo, whose manifest says what it brings along."""
    return isinstance(model, str) and model.startswith(ZOO)


def load_tokenizer(tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A tokenizer by name, or the one given."""
    if isinstance(tokenizer, (str, os.PathLike)):
        source = resolve(tokenizer, part="tokenizer")
        found = load_tokenizer_of(source, "tokenizer")
        if found is None:
            raise CheckpointError(f"{source.name} holds no tokenizer (looked for {', '.join(TOKENIZER_FILES)})")
        return found
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ConfigError(f"tokenizer is {type(tokenizer).__name__}; give a directory, a hub id or a loaded tokenizer")
    return tokenizer


def load_tokenizer_of(source: Source, part: str = "target") -> PreTrainedTokenizerBase | None:
    """The tokenizer that lies beside a model; None where a directory holds none."""
    if source.is_gguf:
        return read_tokenizer(_header(source))
    if source.name.startswith(ZOO):
        source = Source(str(zoo.path(source.name.split(" ")[0], "tokenizer")), source.name)
    if source.is_local and not has_tokenizer(source.location):
        return None
    with as_checkpoint_error(source, "tokenizer"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source.location, **source.options)
    return tokenizer


def tokenizer_beside(model: PreTrainedModel) -> PreTrainedTokenizerBase | None:
    """The tokenizer in the directory a loaded model came from, if it is still there. Asks no hub."""
    location = str(getattr(model, "name_or_path", "") or "")
    return load_tokenizer_of(Source(location, location)) if location and os.path.isdir(location) else None


def choose_device(device: str | torch.device | None) -> torch.device:
    """The device to load to; "auto" and None mean the GPU where there is one."""
    if device is None or device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device is {device!r}: {error}; write cpu, cuda or cuda:0") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {device!r}, but torch sees no GPU here; use cpu")
    return chosen


def _check_kept(
    model: PreTrainedModel,
    dtype: str | torch.dtype,
    device: str | torch.device | None,
    gguf_file: str | None,
    weights: str | None,
    cache_packed: bool,
) -> None:
    """A loaded model is not converted or moved behind its owner's back."""
    if cache_packed:
        raise ConfigError("cache_packed keeps what is loaded by name, and the model is loaded already; leave it out")
    if weights is not None:
        raise ConfigError(f"weights is {weights!r}, and the model is loaded already; give its GGUF file")
    if gguf_file is not None:
        raise ConfigError(f"gguf_file is {gguf_file!r}, and the model is loaded already; give a directory or a hub id")
    if dtype != "auto" and choose_dtype(dtype, model.device) != model.dtype:
        raise ConfigError(
            f"dtype is {dtype!r}, but the loaded model is in {model.dtype}; convert it with model.to(...)"
        )
    if device not in (None, "auto") and not _is_on(model.device, choose_device(device)):
        raise ConfigError(
            f"device is {device!r}, but the loaded model is on {model.device}; move it with model.to(...)"
        )


def _is_on(own: torch.device, wanted: torch.device) -> bool:
    """Whether a model lies where it is wanted: on that very device, or on any of a kind where no number is said."""
    return own.type == wanted.type and wanted.index in (None, own.index)


def _config(source: Source) -> Any:
    """The configuration, of a model that can be decoded here at all."""
    with as_checkpoint_error(source, "configuration"):
        config = AutoConfig.from_pretrained(source.location, **source.options)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{source.name} is an encoder-decoder model ({config.model_type}); foredraft decodes causal language models"
        )
    return config


def _load_weights(source: Source, config: Any, dtype: torch.dtype) -> Any:
    """The model in this dtype; every weight comes from the checkpoint."""
    method, quiet = method_of(config), no_progress_bars() if source.name.startswith(ZOO) else nullcontext()
    if method and not AutoHfQuantizer.supports_quant_method(settings_of(config)):  # it would take codes for weights
        raise UnsupportedModelError(
            f"{source.name} has the layout of {method}, which neither foredraft nor transformers "
            f"{transformers.__version__} reads; load the model that it was made from, with quantization='int8'"
        )
    with as_checkpoint_error(source, "weights", method), quiet:
        model, report = AutoModelForCausalLM.from_pretrained(
            source.location, config=config, dtype=dtype, output_loading_info=True, **source.options
        )
    missing = sorted(report["missing_keys"])
    marks = (*(f".{layout.mark}" for layout in LAYOUTS.values()), ".weight_scale_inv")
    codes = sorted(name for name in report["unexpected_keys"] if name.endswith(marks))
    if codes and not method:
        raise CheckpointError(
            f"{source.name} holds rounded numbers for weights ({codes[0]}, ...), and its config.json does not say "
            "how they were made: add a quantization_config with quant_method, bits and group_size (those of "
            "quantize_config.json or quant_config.json, where one lies beside it)"
        )
    if missing:
        raise CheckpointError(
            f"{source.name} lacks {len(missing)} weights of its configuration ({', '.join(missing[:3])}, ...), which "
            "would start out random; download or save the checkpoint again"
        )
    return model


def _load_gguf(source: Source, header: Header, dtype: torch.dtype, config: Any = None) -> Any:
    """The model in a GGUF file, in this dtype."""
    with as_checkpoint_error(source, "model"):
        return gguf_model.load(header, dtype, config)


def _reads_codes(source: Source, config: Any, weights: str | None, quantization: str | None) -> bool:
    """Whether a checkpoint in one of `LAYOUTS` is read here; what is not plain is left to transformers.

    Raises: ConfigError where it should be rounded once more, UnsupportedModelError where stored weights are asked for,
      CheckpointError for settings that are damaged.
    """
    layout, settings = LAYOUTS[method_of(config)], settings_of(config)
    try:
        reason = layout.why_not_plain(settings)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"quantization_config in config.json of {source.name} is not that of {layout.method} ({error}); download "
            "or copy config.json again"
        ) from None
    if reason and weights is not None:
        raise UnsupportedModelError(
            f"weights is {weights!r}, and {source.name} is not plain {layout.method}: {reason}. Leave weights out, "
            "or load the model that it was made from with quantization='int8'"
        )
    if not reason and quantization is not None:
        raise ConfigError(
            f"quantization is {quantization!r}, and weights of {source.name} are whole numbers already; leave it out"
        )
    return not reason


def _blocks(source: Source, front: Any) -> Header:
    """The front of the GGUF file of a model; of the zoo, of the file that it comes from.

    Raises: ConfigError, UnsupportedModelError for a model without.
    """
    if isinstance(front, Header):
        return front
    if method := method_of(front):
        raise UnsupportedModelError(
            f"weights is {STORED!r}, and {source.name} has the layout of {method}, which is not read; leave "
            "weights out, or load the model that it was made from with quantization='int4'"
        )
    file = zoo.stored_file(source.name) if source.name.startswith(ZOO) else None
    if file is None:
        raise ConfigError(
            f"weights is {STORED!r}, and {source.name} has no GGUF file; leave weights out, or take quantization='int8'"
        )
    header = read_header(file)
    gguf_model.check_readable(header)
    return header


def _header(source: Source) -> Header:
    """The front of a GGUF file, which is fetched where it is at a hub."""
    location = source.location
    if source.gguf_file is not None:
        with as_checkpoint_error(source, "GGUF file"):
            location = cached_file(source.location, source.gguf_file, revision=source.revision or "main")
    return read_header(location)


def _config_of(source: Source, front: Any) -> Any:
    """The configuration as `transformers` has it; of a GGUF file it takes seconds to read."""
    if not isinstance(front, Header):
        return front
    with as_checkpoint_error(source, "model"):
        return gguf_model.config_of(front)


def _without_weights(source: Source, config_of: Callable[[], Any]) -> torch.nn.Module:
    """The modules of a model, which have no weights.

    Raises: CheckpointError, UnsupportedModelError.
    """
    config = copy.deepcopy(config_of())
    vars(config).pop("quantization_config", None)
    with as_checkpoint_error(source, "configuration"), torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config, trust_remote_code=source.trust_remote_code)
    return model
