"""Loading of a GGUF file as a model of `transformers`.

The configuration, the names of weights and the order of their rows are those of transformers' own reader. That reader
silently ignores some contents of a file: scaled rotary positions, and tensors that its model class does not have. This
module adds them or refuses the file with the reason.
"""

from __future__ import annotations

import math
import re
import struct
import tempfile
from collections import Counter
from collections.abc import Collection, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig

from foredraft.errors import CheckpointError, ConfigError, UnsupportedModelError
from foredraft.extras import install_command
from foredraft.gguf import missing_packages
from foredraft.gguf.header import INPUT, PLAIN, Header, TensorInfo, aligned
from foredraft.gguf.metadata import check_metadata
from foredraft.gguf.weights import read_weights, type_name
from foredraft.model.building import build, fill, without_weights
from foredraft.model.execution.rounding import take_codes
from foredraft.progress import no_warnings

_ROPE_FREQS = "rope_freqs.weight"
_BLOCK = re.compile(r"blk\.(\d+)\.")
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def stored_dtype(header: Header) -> torch.dtype:
    """Return the dtype of most weights. Quantised weights count as bfloat16."""
    sizes: Counter[torch.dtype] = Counter()
    for tensor in header.tensors:
        sizes[PLAIN.get(tensor.type_id, torch.bfloat16)] += tensor.num_elements
    return sizes.most_common(1)[0][0] if sizes else torch.bfloat16


def check_readable(header: Header) -> None:
    """Check everything that can be checked without reading weights.

    Raises: ConfigError for missing packages, CheckpointError for a damaged or truncated file, UnsupportedModelError for
      tensor types that cannot be dequantised.
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
            f"{header.path} contains tensors of type {kind} ({names[0]}, {len(names)} in all), which gguf "
            f"{version('gguf')} cannot dequantise; convert the model to another type, such as Q8_0 or F16"
        )
    check_metadata(header)
    _check_blocks(header)
    for file in header.files:
        _check_places(file)
        end = max((_end(tensor) for tensor in file.tensors), default=0) + file.data_start
        if end > file.num_bytes:
            raise CheckpointError(
                f"{file.path} ends after {file.num_bytes} bytes, but its tensors need {end}: it is truncated. Download "
                "or copy it again"
            )


_VOCABULARY = frozenset(f"tokenizer.ggml.{name}" for name in ("tokens", "scores", "token_type", "merges"))


def config_of(header: Header) -> Any:
    """Load the configuration of the model with the code of `transformers`.

    That code reads a copy of the header without the vocabulary, since it takes half a minute for a large one.

    Raises: CheckpointError, UnsupportedModelError, and exceptions of `transformers` for a file that it cannot read.
    """
    with tempfile.TemporaryDirectory(prefix="foredraft-") as folder:
        _write_header(header, Path(folder, header.path.name), without=_VOCABULARY)
        with no_warnings():  # a vocabulary that is missing
            config = AutoConfig.from_pretrained(folder, gguf_file=header.path.name, local_files_only=True)
    rows = next((tensor.shape[0] for tensor in header.tensors if tensor.name == INPUT and tensor.shape), None)
    if header.of_architecture("vocab_size") is None and rows is not None:
        config.vocab_size = rows
    for key, attribute in _EXPERT_SIZES.items():
        if header.of_architecture(key) is not None and hasattr(config, attribute):
            setattr(config, attribute, header.of_architecture(key))
    _check_base(config, header)
    _scale_positions(config, header)
    config.name_or_path = str(header.path.parent)
    return config


def _write_header(header: Header, file: Path, *, without: Collection[str]) -> None:
    """Write a GGUF file with the metadata and tensors of a model, except for some entries and all contents."""
    kept = [place for key, place in header.entries.items() if key not in without]
    with file.open("wb") as made:
        for part in header.files:
            ranges = [part.tensors_at]
            with part.path.open("rb") as stream:
                if not made.tell():
                    made.write(stream.read(8) + struct.pack("<QQ", len(header.tensors), len(kept)))
                    ranges = [*kept, part.tensors_at]
                for first, last in ranges:
                    stream.seek(first)
                    made.write(stream.read(last - first))
        most = max(part.num_bytes - part.data_start for part in header.files)
        made.truncate(aligned(made.tell(), header.alignment) + most)  # takes no space on the disk


@torch.no_grad()
def load(
    header: Header, dtype: torch.dtype, structure: Any = None, *, as_stored: bool = False
) -> tuple[Any, str | None]:
    """Load the model, in evaluation mode. Call `check_readable` first.

    Args:
      header: header of the file.
      dtype: dtype of the weights.
      structure: the model on the meta device, made from the result of `config_of`, if it was built before.
      as_stored: make linear layers multiply by the quantised blocks of the file, on this CPU, instead of dequantising
        them.

    Returns: the model; and a readable list of the types that stay quantised and of those that are dequantised, None if
      all are.
    Raises: CheckpointError, UnsupportedModelError, and exceptions of `transformers` for a file that it cannot read;
      ConfigError if no matrix in the file has a type with a kernel.
    """
    structure = without_weights(config_of(header)) if structure is None else structure
    _check_sizes(structure, header)
    weights = read_weights(header, structure, dtype, as_stored=as_stored)
    model, missing = structure, list[str]()
    if not fill(structure, weights.state, dtype):
        model, missing, _ = build(type(structure), structure.config, weights.state, dtype)
    _check_complete(model, missing, header)
    model.name_or_path = model.config.name_or_path = structure.config.name_or_path
    if ends := end_token_ids(header):
        model.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]
    if as_stored:
        take_codes(model, weights.codes_by_layer(model), weights.codes_by_experts(model), dtype=dtype)
    return model, weights.types if as_stored else None


def end_token_ids(header: Header) -> list[int]:
    """Return every token that ends a text, a turn or a message."""
    keys = (f"tokenizer.ggml.{key}_token_id" for key in ("eos", "eot", "eom"))
    return list(dict.fromkeys(int(header.metadata[key]) for key in keys if key in header.metadata))


def _not_dequantised(header: Header) -> dict[str, list[str]]:
    """Return the names of tensors whose type the installed gguf package cannot dequantise, by type."""
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
    """Raise CheckpointError for rows that are not whole blocks, and for tensors that overlap or leave gaps."""
    import gguf

    before = None
    for tensor in sorted(header.tensors, key=lambda tensor: tensor.offset):
        elements = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.type_id)][0]
        if tensor.shape and tensor.shape[-1] % elements:
            wrong = f"{tensor.name} has rows of {tensor.shape[-1]}, but {type_name(tensor)} has blocks of {elements}"
        elif before is not None and _end(before) > tensor.offset and tensor.num_elements:
            wrong = f"{before.name} overlaps {tensor.name}"
        elif before is not None and aligned(_end(before), header.alignment) < tensor.offset:  # llama.cpp refuses it too
            wrong = f"{before.name} ends at {_end(before)}, but {tensor.name} begins at {tensor.offset}"
        else:
            before = tensor
            continue
        raise CheckpointError(f"{header.path} is damaged in its header ({wrong}); download or copy it again")


def _check_blocks(header: Header) -> None:
    """Raise CheckpointError for more layers than have tensors. The loader would first create modules for all layers."""
    stated = header.of_architecture("block_count")
    held = {found[1] for tensor in header.tensors if (found := _BLOCK.match(tensor.name))}
    if isinstance(stated, int) and stated > len(held):
        raise CheckpointError(
            f"{header.path} states {stated} layers ({header.architecture}.block_count), but contains tensors of "
            f"{len(held)}: it is damaged in its header; download or copy it again"
        )


def _end(tensor: TensorInfo) -> int:
    """Return the offset of the first byte after a tensor, relative to the beginning of the data."""
    import gguf

    elements, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.type_id)]
    return tensor.offset + tensor.num_elements // elements * num_bytes


# -- contents that transformers ignores ---------------------------------------------------------------------------


_EXPERT_SIZES = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Attributes of a config by the entries that state their values."""

_DEFAULT_BASE = 10000.0
"""Base of rotary positions if a GGUF file states none."""


def _check_base(config: Any, header: Header) -> None:
    """Raise CheckpointError if the file omits the base of rotary positions and `transformers` assumes another."""
    ropes = [config.rope_parameters or {}] if getattr(config, "rope_parameters", None) else []
    ropes += [rope for rope in (ropes[0].values() if ropes else ()) if isinstance(rope, dict)]
    bases = {float(rope["rope_theta"]) for rope in ropes if "rope_theta" in rope}
    if header.of_architecture("rope.freq_base") is None and not bases <= {_DEFAULT_BASE}:
        raise CheckpointError(
            f"{header.path} has no {header.architecture}.rope.freq_base in its metadata, which means {_DEFAULT_BASE}, "
            f"but transformers {transformers.__version__} uses {max(bases)}: the output would be wrong. Convert the "
            "model again, or load the original one"
        )


def _scale_positions(config: Any, header: Header) -> None:
    """Put the scaling of rotary positions that the file states into the config.

    Files of Llama 3.1 and later store one factor per frequency (``rope_freqs.weight``). The config's parameters are
    recovered from these factors.
    """
    kind = header.of_architecture("rope.scaling.type")
    scales = [header.of_architecture(key) for key in ("rope.scaling.factor", "rope.scale_linear")]
    if kind is None and any(scale not in (None, 0.0, 1.0) for scale in scales):  # llama.cpp treats it as linear
        kind = "linear"
    if kind not in (None, "none") and (config.rope_parameters or {}).get("rope_type", "default") == "default":
        raise UnsupportedModelError(
            f"{header.path} scales its rotary positions ({kind}), which transformers {transformers.__version__} does "
            "not read from GGUF: the output would be wrong. Load the original model"
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
    """Return Llama 3.1's divisors of rotary frequencies: 1 for short waves, ``factor`` for long ones, smooth between.

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
    file = header.files[tensor.part]
    with file.path.open("rb") as stream:
        stream.seek(file.data_start + tensor.offset)
        data = bytearray(stream.read(4 * tensor.num_elements))
    return [float(value) for value in torch.frombuffer(data, dtype=torch.float32)]


def _check_sizes(structure: Any, header: Header) -> None:
    """Raise CheckpointError if the model has more weights than the file, before memory for all is allocated."""
    wanted = sum(weight.numel() for weight in structure.parameters())
    held = sum(tensor.num_elements for tensor in header.tensors)
    if wanted > held:
        raise CheckpointError(
            f"{header.path} contains {held} weights, but a model with the stated sizes has {wanted}: it is damaged "
            "in its header, or lacks tensors; download or convert the model again"
        )


def _check_complete(model: Any, missing: Sequence[str], header: Header) -> None:
    """Check that every weight of the model is from the file, and that the model has every tensor of the file."""
    if missing:
        raise CheckpointError(
            f"{header.path} lacks {len(missing)} weights of its configuration ({', '.join(missing[:3])}, ...), which "
            "would have random values; download or convert the model again"
        )
    stored = sum(tensor.num_elements for tensor in header.tensors if tensor.name != _ROPE_FREQS)
    used = sum(weight.numel() for weight in model.parameters())
    if stored > used:
        raise UnsupportedModelError(
            f"{header.path} contains {stored} weights, but the {header.architecture} model of transformers "
            f"{transformers.__version__} has only {used} (without biases, perhaps, or a second head): its output "
            "would be wrong. Load the original model"
        )
