"""Which dtype a model is loaded in: as asked, or the checkpoint's own where that is no slower."""

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
"""Of keys and values; None is that of the model."""
_SAFETENSORS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def check_kv_cache_dtype(name: str) -> None:
    """Raises: ConfigError for an unknown one."""
    if name not in KV_DTYPES:
        of_floats = "no kernel here reads floats of 8 bits; 'int8' takes as many bytes. " if "fp8" in str(name) else ""
        raise ConfigError(
            f"kv_cache_dtype is {name!r}; {of_floats}Known are auto, the dtype of the model, bfloat16 and int8"
        )


def kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype | None:
    """What keys and values of a model are rounded to; None where they stay as they are.

    Args:
      name: a key of `KV_DTYPES`.
      dtype: of the model.

    Raises: ConfigError for an unknown name, and for one that saves nothing beside this model.
    """
    check_kv_cache_dtype(name)
    chosen = KV_DTYPES[name]
    if chosen == dtype:
        return None
    if chosen is not None and chosen.itemsize >= dtype.itemsize:
        raise ConfigError(
            f"kv_cache_dtype is {name!r}, and the model runs in {str(dtype).removeprefix('torch.')}, which takes "
            "as many bytes for more digits; leave it out, or use 'int8'"
        )
    return chosen


def choose_dtype(
    dtype: str | torch.dtype,
    device: torch.device,
    stored: torch.dtype | None = None,
    widest: torch.dtype | None = None,
    structure: Callable[[], nn.Module] | None = None,
) -> torch.dtype:
    """The dtype to load in.

    Args:
      dtype: a dtype, its name, or "auto": single and double precision as they are stored, half precision as it is
        stored where the device computes in it, and float32 otherwise. A CPU that does not compute in bfloat16 keeps it
        where kernels of the library multiply all weights: these read half the bytes, and sum in float32.
      stored: of the checkpoint; None where it is not known.
      widest: what "auto" takes instead of anything wider.
      structure: gives modules as they will be loaded, on any device; None where they cannot be had.

    Raises: ConfigError.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        is_kept = stored is not None and (computes_in(device, stored) or _reads_half(device, stored, structure))
        chosen = stored if stored is not None and is_kept else torch.float32
        return widest if widest is not None and chosen.itemsize > widest.itemsize else chosen
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; choose auto or one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def computes_in(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products in this dtype are the device's own, not converted ones."""
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
    """Whether kernels of the library multiply every weight of a model on a CPU that has no bfloat16 products."""
    if device.type != "cpu" or dtype != torch.bfloat16 or structure is None or library() is None:
        return False
    # torch's own products, of experts and of layers of another class, take two to five times as long in bfloat16 there
    model = structure()
    linears = (layer for layer in model.modules() if isinstance(layer, nn.Linear))
    return not other_products(model) and all(type(layer) is nn.Linear for layer in linears)


def stored_dtype(config: Any, location: str, revision: str | None = None, *, is_local: bool) -> torch.dtype | None:
    """The dtype of a checkpoint: as its config says, else as most of its weights are; None where it is unknown."""
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
    except OSError:  # loading the weights will say what is wrong
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
    """The dtype of most weights in a safetensors file."""
    try:
        with file.open("rb") as stream:
            entries = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    except (OSError, ValueError, OverflowError, MemoryError):  # damaged: loading the weights will say so
        return None
    sizes: Counter[torch.dtype] = Counter()
    for name, entry in entries.items():
        if name != "__metadata__" and entry["dtype"] in _SAFETENSORS:
            sizes[_SAFETENSORS[entry["dtype"]]] += math.prod(entry["shape"])
    return sizes.most_common(1)[0][0] if sizes else None
