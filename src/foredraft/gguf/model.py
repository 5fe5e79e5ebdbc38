"""From a GGUF file to a model of `transformers`, every weight dequantised, or to a refusal that says why.

`transformers` reads the weights; what it passes over in silence (scaled rotary positions, tensors it has no place for)
is added here or refused.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from foredraft.errors import CheckpointError, ConfigError, UnsupportedModelError
from foredraft.extras import install_command
from foredraft.gguf import missing_packages
from foredraft.gguf.header import Header, TensorInfo, aligned
from foredraft.gguf.metadata import check_metadata

_ROPE_FREQS = "rope_freqs.weight"
_BLOCK = re.compile(r"blk\.(\d+)\.")
_PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # type ids of tensors that are not in blocks
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def stored_dtype(header: Header) -> torch.dtype:
    """The dtype that most weights count as: their own, or bfloat16 where they are quantised."""
    sizes: Counter[torch.dtype] = Counter()
    for tensor in header.tensors:
        sizes[_PLAIN.get(tensor.type_id, torch.bfloat16)] += tensor.num_elements
    return sizes.most_common(1)[0][0] if sizes else torch.bfloat16


def type_name(tensor: TensorInfo) -> str:
    """Name in llama.cpp of the type of a tensor that `check_readable` has passed."""
    import gguf

    return gguf.GGMLQuantizationType(tensor.type_id).name


def is_quantised(tensor: TensorInfo) -> bool:
    """Whether its weights are in blocks."""
    return tensor.type_id not in _PLAIN


def check_readable(header: Header) -> None:
    """Check all that can be known without reading weights.

    Raises: ConfigError when packages are missing, CheckpointError for a file that ends early, UnsupportedModelError
      for types of tensors that cannot be dequantised.
    """
    missing = missing_packages()
    if missing:
        raise ConfigError(
            f"reading {header.path} needs {' and '.join(missing)}, which this environment lacks; install with: "
            f"{install_command('gguf')}"
        )
    unknown = _not_dequantised(header)
    if unknown:
        kind, names = next(iter(unknown.items()))
        raise UnsupportedModelError(
            f"{header.path} holds tensors of type {kind} ({names[0]}, {len(names)} in all), which gguf "
            f"{version('gguf')} cannot dequantise; convert the model to another type, such as Q8_0 or F16"
        )
    check_metadata(header)
    _check_places(header)
    _check_blocks(header)
    end = max((_end(tensor) for tensor in header.tensors), default=0) + header.data_start
    if end > header.num_bytes:
        raise CheckpointError(
            f"{header.path} ends after {header.num_bytes} bytes, and its tensors need {end}: it is truncated. Download "
            "or copy it again"
        )


def config_of(header: Header) -> Any:
    """The configuration of the model, which takes seconds to read: the vocabulary comes with it.

    Raises: CheckpointError, UnsupportedModelError, and what `transformers` raises for what it cannot read.
    """
    config = AutoConfig.from_pretrained(header.path.parent, **_where(header))
    _check_base(config, header)
    _scale_positions(config, header)
    return config


def _where(header: Header) -> dict[str, Any]:
    return {"gguf_file": header.path.name, "local_files_only": True}


def load(header: Header, dtype: torch.dtype, config: Any = None) -> Any:
    """The model, in this dtype and in evaluation mode. Call `check_readable` before.

    Args:
      config: of `config_of`, where that has been read already.

    Raises: CheckpointError, UnsupportedModelError, and what `transformers` raises for what it cannot read.
    """
    config, where = config_of(header) if config is None else config, _where(header)
    _check_sizes(config, header)
    with _obedient_progress_bar():
        model, report = AutoModelForCausalLM.from_pretrained(
            header.path.parent, config=config, dtype=dtype, output_loading_info=True, **where, **_unpacked()
        )
    _check_complete(model, sorted(report["missing_keys"]), header)
    ends = end_token_ids(header)
    if ends:
        model.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]
    return model.eval()


def end_token_ids(header: Header) -> list[int]:
    """Every token that ends a text, a turn or a message."""
    keys = (f"tokenizer.ggml.{key}_token_id" for key in ("eos", "eot", "eom"))
    return list(dict.fromkeys(int(header.metadata[key]) for key in keys if key in header.metadata))


@contextmanager
def _obedient_progress_bar() -> Iterator[None]:
    """Let the bar of the GGUF reader of `transformers` be hidden like all its others."""
    try:
        from transformers import modeling_gguf_pytorch_utils as reader
    except ImportError:  # a version that reads GGUF elsewhere
        yield
        return
    theirs = reader.tqdm
    reader.tqdm = logging.tqdm
    try:
        yield
    finally:
        reader.tqdm = theirs


def _unpacked() -> dict[str, Any]:
    """Arguments that make `transformers` dequantise: newer versions may keep the blocks, older ones cannot."""
    if not hasattr(transformers, "GgufConfig"):
        return {}
    return {"quantization_config": transformers.GgufConfig(dequantize=True)}


def _not_dequantised(header: Header) -> dict[str, list[str]]:
    """Names of tensors by type, for types that the installed gguf has no way to unpack."""
    import gguf
    import numpy as np

    found: dict[str, list[str]] = {}
    known: dict[int, str | None] = {}
    for tensor in header.tensors:
        if tensor.type_id not in known:
            try:
                kind = gguf.GGMLQuantizationType(tensor.type_id)
                gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
                known[tensor.type_id] = None
            except NotImplementedError:
                known[tensor.type_id] = kind.name
            except (ValueError, KeyError):
                known[tensor.type_id] = f"number {tensor.type_id}"
        name = known[tensor.type_id]
        if name is not None:
            found.setdefault(name, []).append(tensor.name)
    return found


def _check_places(header: Header) -> None:
    """Raises: CheckpointError for rows that are no whole blocks, and for tensors that lie over one another or apart."""
    import gguf

    before = None
    for tensor in sorted(header.tensors, key=lambda tensor: tensor.offset):
        elements = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.type_id)][0]
        if tensor.shape and tensor.shape[-1] % elements:
            wrong = f"{tensor.name} has rows of {tensor.shape[-1]}, and {type_name(tensor)} has blocks of {elements}"
        elif before is not None and _end(before) > tensor.offset and tensor.num_elements:
            wrong = f"{before.name} reaches into {tensor.name}"
        elif before is not None and aligned(_end(before), header.alignment) < tensor.offset:  # llama.cpp refuses it too
            wrong = f"{before.name} ends at {_end(before)}, and {tensor.name} begins at {tensor.offset}"
        else:
            before = tensor
            continue
        raise CheckpointError(f"{header.path} is damaged in its header ({wrong}); download or copy it again")


def _check_blocks(header: Header) -> None:
    """Raises: CheckpointError for more layers than there are tensors of: modules would be made of each first."""
    stated = header.of_architecture("block_count")
    held = {found[1] for tensor in header.tensors if (found := _BLOCK.match(tensor.name))}
    if isinstance(stated, int) and stated > len(held):
        raise CheckpointError(
            f"{header.path} states {stated} layers ({header.architecture}.block_count) and holds tensors of "
            f"{len(held)}: it is damaged in its header; download or copy it again"
        )


def _end(tensor: TensorInfo) -> int:
    """The byte after a tensor, from the beginning of the data."""
    import gguf

    elements, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.type_id)]
    return tensor.offset + tensor.num_elements // elements * num_bytes


# -- what transformers passes over -------------------------------------------------------------------------------


_DEFAULT_BASE = 10000.0
"""Base of rotary positions where a GGUF file states none."""


def _check_base(config: Any, header: Header) -> None:
    """Raises: CheckpointError where the base of rotary positions is left out and `transformers` takes another."""
    ropes = [config.rope_parameters or {}] if getattr(config, "rope_parameters", None) else []
    ropes += [rope for rope in (ropes[0].values() if ropes else ()) if isinstance(rope, dict)]
    bases = {float(rope["rope_theta"]) for rope in ropes if "rope_theta" in rope}
    if header.of_architecture("rope.freq_base") is None and not bases <= {_DEFAULT_BASE}:
        raise CheckpointError(
            f"{header.path} lacks {header.architecture}.rope.freq_base in its metadata, which means {_DEFAULT_BASE}, "
            f"and transformers {transformers.__version__} takes {max(bases)}: texts would be wrong. Convert the model "
            "again, or load the original one"
        )


def _scale_positions(config: Any, header: Header) -> None:
    """Put the scaling of rotary positions that the file states into the config.

    Llama 3.1 and later write it as a factor per frequency (``rope_freqs.weight``), from which the config's own numbers
    are found again.
    """
    kind = header.of_architecture("rope.scaling.type")
    scales = [header.of_architecture(key) for key in ("rope.scaling.factor", "rope.scale_linear")]
    if kind is None and any(scale not in (None, 0.0, 1.0) for scale in scales):  # llama.cpp takes it for linear
        kind = "linear"
    if kind not in (None, "none") and (config.rope_parameters or {}).get("rope_type", "default") == "default":
        raise UnsupportedModelError(
            f"{header.path} scales its rotary positions ({kind}), which transformers {transformers.__version__} does "
            "not read from GGUF: texts would be wrong. Load the original model"
        )
    factors = _rope_factors(header)
    if factors is None or all(abs(factor - 1) < 1e-6 for factor in factors):
        return
    rope = {**_LLAMA3_ROPE, "factor": float(round(max(factors), 4))}
    base = config.rope_parameters["rope_theta"]
    expected = llama3_factors(len(factors), base, **rope)
    if any(abs(mine - theirs) > 1e-3 * theirs for mine, theirs in zip(expected, factors, strict=True)):
        raise UnsupportedModelError(
            f"{header.path} scales its rotary positions by factors ({_ROPE_FREQS}) that are not those of Llama 3.1; "
            "load the original model"
        )
    config.rope_parameters = {**config.rope_parameters, "rope_type": "llama3", **rope}


def llama3_factors(
    num_frequencies: int,
    base: float,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: float,
) -> list[float]:
    """Llama 3.1's divisors of rotary frequencies: 1 for short waves, ``factor`` for long ones, smooth between.

    Example:
        >>> rope = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        >>> [round(value, 2) for value in llama3_factors(4, 500000.0, factor=8.0, **rope)]
        [1.0, 1.0, 1.68, 8.0]
    """
    factors = []
    for place in range(num_frequencies):
        wave = 2 * math.pi * base ** (place / num_frequencies)
        share = (original_max_position_embeddings / wave - low_freq_factor) / (high_freq_factor - low_freq_factor)
        share = min(1.0, max(0.0, share))
        factors.append(1 / ((1 - share) / factor + share))
    return factors


def _rope_factors(header: Header) -> list[float] | None:
    tensor = next((tensor for tensor in header.tensors if tensor.name == _ROPE_FREQS), None)
    if tensor is None:
        return None
    with header.path.open("rb") as stream:
        stream.seek(header.data_start + tensor.offset)
        data = bytearray(stream.read(4 * tensor.num_elements))
    return [float(value) for value in torch.frombuffer(data, dtype=torch.float32)]


def _check_sizes(config: Any, header: Header) -> None:
    """Raises: CheckpointError for a model of more weights than the file holds: memory would be taken for all first."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    wanted = sum(weight.numel() for weight in model.parameters())
    held = sum(tensor.num_elements for tensor in header.tensors)
    if wanted > held:
        raise CheckpointError(
            f"{header.path} holds {held} weights, and a model of the sizes that it states has {wanted}: it is damaged "
            "in its header, or lacks tensors; download or convert the model again"
        )


def _check_complete(model: Any, missing: list[str], header: Header) -> None:
    """Every weight of the model comes from the file, and every tensor of the file is in the model."""
    if missing:
        raise CheckpointError(
            f"{header.path} lacks {len(missing)} weights of its configuration ({', '.join(missing[:3])}, ...), which "
            "would start out random; download or convert the model again"
        )
    stored = sum(tensor.num_elements for tensor in header.tensors if tensor.name != _ROPE_FREQS)
    used = sum(weight.numel() for weight in model.parameters())
    if stored > used:
        raise UnsupportedModelError(
            f"{header.path} holds {stored} weights, and {type(model).__name__} of transformers "
            f"{transformers.__version__} has a place for {used} of them (biases, perhaps, or a second head): its texts "
            "would be wrong. Load the original model"
        )
