"""Checkpoints of torchao, as transformers saves them in safetensors, whose weights alone are whole numbers: read.

A layer ``NAME`` has ``NAME._weight_qdata`` (outputs, inputs) in int8, a number of 4 or 8 bits with its sign in each;
``NAME._weight_scale`` and ``NAME._weight_zero_point`` (outputs, groups), of which a weight is (number - zero) * scale.

Source: torchao 0.18 (``Int8Tensor``, ``IntxUnpackedToInt8Tensor``, and ``flatten_tensor_state_dict``, with which
transformers 5 writes them). Its other tensors are laid out for one kernel each; before version 2 of a configuration
they were pickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from foretoken.loading.compressed import Read, by_groups, whole_zeros

METHOD = "torchao"
MARK = "_weight_qdata"
PARTS = (MARK, "_weight_scale", "_weight_zero_point")
"""Of a layer."""
_BITS = {"int4": 4, "int8": 8}
_PLAIN = ("Int8WeightOnlyConfig", "IntxWeightOnlyConfig")
_GRAINS = ("PerRow", "PerGroup", "PerAxis")


def why_not_plain(settings: Mapping[str, Any]) -> str:
    """What else than whole numbers for weights such a checkpoint asks for; empty where that is nothing."""
    given = settings.get("quant_type")
    chosen = given.get("default") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(chosen, Mapping):
        return f"its quant_type is {given!r}, and a configuration for all layers is read"
    if len(given) > 1 or chosen.get("_type") not in _PLAIN:
        others = [str(name) for name in given if name != "default"]
        found = (
            f"{others[0]} has a configuration of its own" if others else f"its configuration is {chosen.get('_type')}"
        )
        return f"{found}, and {' or '.join(_PLAIN)} for all layers is read"
    if chosen.get("_version", 1) < 2:
        return f"its configuration has version {chosen.get('_version', 1)}, which is pickled; 2 is read"
    data = chosen.get("_data") or {}
    packing = (data.get("intx_packing_format") or {}).get("_data", "UNPACKED_TO_INT8")
    if packing != "UNPACKED_TO_INT8":
        return f"its numbers are in the format {packing}, and UNPACKED_TO_INT8 is read"
    if _bits(settings) is None:
        return f"its weights are {data['weight_dtype'].get('_data')}; int4 or int8 is read"
    grain = data.get("granularity") or {}
    if grain.get("_type", "PerRow") not in _GRAINS or (grain.get("_data") or {}).get("axis", 0) != 0:
        return f"its scales are {grain.get('_type')}, and {', '.join(_GRAINS)} (axis 0) are read"
    return ""


def read(settings: Mapping[str, Any], name: str, parts: Mapping[str, torch.Tensor]) -> Read:
    """The codes of a layer.

    Raises: KeyError, RuntimeError, ValueError for parts that do not fit one another, UnsupportedModelError for groups
      without a kernel.
    """
    numbers, scales, bits = parts[MARK], parts["_weight_scale"], _bits(settings)
    zeros = parts.get("_weight_zero_point", torch.zeros(scales.shape, dtype=torch.int8))
    if bits is None or numbers.dtype != torch.int8 or zeros.dtype != torch.int8 or numbers.ndim != 2:
        raise ValueError(f"numbers in {numbers.dtype}, zeros in {zeros.dtype}")
    half = 2 ** (bits - 1)
    if zeros.shape != scales.shape or scales.shape[0] != len(numbers) or numbers.shape[1] % scales.shape[1]:
        raise ValueError(f"{numbers.shape[1]} inputs in {scales.shape[1]} groups")
    for each in (numbers, zeros):
        if int(each.min()) < -half or int(each.max()) >= half:
            raise ValueError(f"numbers of more than {bits} bits")
    codes, of_zeros = ((each.to(torch.int16) + half).to(torch.uint8) for each in (numbers, zeros))
    size = numbers.shape[1] // scales.shape[1]
    return Read(by_groups(name, codes, bits, scales, whole_zeros(of_zeros, bits), size))


def _bits(settings: Mapping[str, Any]) -> int | None:
    """Of a number; None for other kinds."""
    data = settings["quant_type"]["default"].get("_data") or {}
    return _BITS.get((data.get("weight_dtype") or {}).get("_data", "int8"))
