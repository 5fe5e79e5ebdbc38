"""Choice of the dtype in which a model is loaded: the requested one, or the checkpoint's if that is not slower."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils import cached_file

from foredraft.errors import ConfigError
from foredraft.model.execution.packing import cpu_has_bfloat16
from foredraft.model.independence import other_products
from foredraft.native.library import library

DTYPES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "float32": torch.float32,
    "fp32": torch.float32,
    "float": torch.float32,
    "float64": torch.float64,
    "double": torch.float64,
}
KV_DTYPES = {"auto": None, "bfloat16": torch.bfloat16, "int8": torch.int8}
"""Dtypes of keys and values; None is the dtype of the model."""
_SAFETENSORS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def check_kv_cache_dtype(name: str) -> None:
    """Check the ``kv_cache_dtype`` option.

    Raises: ConfigError for an unknown value.
    """
    if name not in KV_DTYPES:
        of_floats = "foredraft has no kernel for fp8; 'int8' has the same size. " if "fp8" in str(name) else ""
        raise ConfigError(
            f"kv_cache_dtype is {name!r}; {of_floats}Choose auto (the dtype of the model), bfloat16 or int8"
        )


def kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype to which keys and values of a model are rounded; None for no rounding.

    Args:
      name: a key of `KV_DTYPES`.
      dtype: dtype of the model.

    Raises: ConfigError for an unknown name, and for a dtype that saves no memory with this model.
    """
    check_kv_cache_dtype(name)
    chosen = KV_DTYPES[name]
    if chosen == dtype:
        return None
    if chosen is not None and chosen.itemsize >= dtype.itemsize:
        raise ConfigError(
            f"kv_cache_dtype is {name!r}, which is not smaller than the model's {str(dtype).removeprefix('torch.')}; "
            "leave it out, or use 'int8'"
        )
    return chosen


def choose_dtype(
    dtype: str | torch.dtype,
    device: torch.device,
    stored: torch.dtype | None = None,
    widest: torch.dtype | None = None,
    structure: Callable[[], nn.Module] | None = None,
) -> torch.dtype:
    """Return the dtype to load in.

    Args:
      dtype: a dtype, its name, or "auto". "auto" keeps single and double precision as stored. "auto" keeps half
        precision if the device computes in it, and uses float32 otherwise. On a CPU that does not compute in bfloat16,
        "auto" keeps bfloat16 if the library's own kernels multiply all weights. These kernels read half the bytes and
        sum in float32.
      stored: dtype of the checkpoint; None if unknown.
      widest: largest dtype that "auto" may return.
      structure: function that returns the modules to be loaded, on any device; None if that is not possible.

    Raises: ConfigError for an unknown name.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        is_kept = stored is not None and (computes_in(device, stored) or _reads_half(device, stored, structure))
        chosen = stored if stored is not None and is_kept else torch.float32
        return widest if widest is not None and chosen.itemsize > widest.itemsize else chosen
    check_dtype(dtype)
    return DTYPES[dtype]


def check_dtype(dtype: str | torch.dtype) -> None:
    """Check the name of a dtype.

    Raises: ConfigError for an unknown name.
    """
    if not isinstance(dtype, torch.dtype) and dtype != "auto" and dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; choose auto or one of {', '.join(DTYPES)}")


def computes_in(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the device multiplies in this dtype natively, without conversion."""
    if dtype in (torch.float32, torch.float64):
        return True
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    if device.type == "cpu":
        return dtype == torch.bfloat16 and cpu_has_bfloat16()
    if device.type == "cuda" and dtype == torch.bfloat16 and torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return True


def _reads_half(device: torch.device, dtype: torch.dtype, structure: Callable[[], nn.Module] | None) -> bool:
    """Return whether the library's kernels multiply every weight of a bfloat16 model on this CPU."""
    if device.type != "cpu" or dtype != torch.bfloat16 or structure is None or library() is None:
        return False
    # torch's own products (experts, layers of other classes) are two to five times slower in bfloat16 on such CPUs
    model = structure()
    linears = (layer for layer in model.modules() if isinstance(layer, nn.Linear))
    return not other_products(model) and all(type(layer) is nn.Linear for layer in linears)


def stored_dtype(config: Any, location: str, revision: str | None = None, *, is_local: bool) -> torch.dtype | None:
    """Return the dtype of a checkpoint, from its config or else from most of its weights; None if unknown."""
    for stored in (config.get_text_config(decoder=True).dtype, config.dtype):
        if isinstance(stored, torch.dtype):
            return stored
    options = {"revision": revision or "main", "local_files_only": is_local}
    file = _cached(location, "model.safetensors", options)
    if file is None:
        shard = _first_shard(_cached(location, "model.safetensors.index.json", options))
        file = None if shard is None else _cached(location, shard, options)
    return None if file is None else _dtype_in(file)


def _cached(location: str, name: str, options: dict[str, Any]) -> Path | None:
    try:
        file = cached_file(location, name, _raise_exceptions_for_missing_entries=False, **options)
    except OSError:  # loading the weights reports the error
        return None
    return None if file is None else Path(file)


def _first_shard(index: Path | None) -> str | None:
    if index is None:
        return None
    try:
        return str(min(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError):
        return None


def _dtype_in(file: Path) -> torch.dtype | None:
    """Return the dtype of most weights in a safetensors file."""
    try:
        with file.open("rb") as stream:
            entries = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    except (OSError, ValueError, OverflowError, MemoryError):  # damaged; loading the weights reports it
        return None
    sizes: Counter[torch.dtype] = Counter()
    for name, entry in entries.items():
        if name != "__metadata__" and entry["dtype"] in _SAFETENSORS:
            sizes[_SAFETENSORS[entry["dtype"]]] += math.prod(entry["shape"])
    return sizes.most_common(1)[0][0] if sizes else None
