"""Checkpoints in the layouts of GPTQ and AWQ whose weights alone are whole numbers: read.

A layer ``NAME`` has, over words of int32 that hold 32 / bits numbers, the first in the lowest bits:

- GPTQ: ``NAME.qweight`` (inputs / numbers, outputs), ``NAME.qzeros`` (groups, outputs / numbers), ``NAME.scales``
  (groups, outputs), and ``NAME.g_idx`` (inputs), the group of every input. Zero points are stored 1 too small, and as
  they are in ``gptq_v2``.
- AWQ (``gemm``): ``NAME.qweight`` (inputs, outputs / 8), ``NAME.qzeros`` and ``NAME.scales`` as above. The eight
  outputs of a word lie in the order 0, 2, 4, 6, 1, 3, 5, 7, and zero points are stored as they are.

Source: AutoGPTQ and GPTQModel (layers in torch, and conversion between both formats), AutoAWQ (gemm layers).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from foretoken.loading.compressed import Read, by_groups, orders, refusal, unpacked, whole_number, whole_zeros

PARTS = ("qweight", "qzeros", "scales", "g_idx")
"""Of a layer."""
_GROUPS = ("group_size", "q_group_size")
_AWQ_BITS = 4
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word its eight outputs lie
_UNKNOWN = "its {} is {}, and {} is read"


def why_not_gptq(settings: Mapping[str, Any]) -> str:
    """What else than whole numbers for weights such a checkpoint asks for; empty where that is nothing."""
    kind = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if kind not in ("gptq", "gptq_v2"):
        return _UNKNOWN.format("format", kind, "gptq or gptq_v2")
    bits, *_ = (whole_number(settings, key) for key in ("bits", *_GROUPS))
    if bits not in (4, 8):
        return _UNKNOWN.format("number of bits", bits, "4 or 8")
    if settings.get("is_marlin_format"):
        return "it is in Marlin's order"
    if settings.get("pack_dtype") not in (None, "int32"):
        return _UNKNOWN.format("pack_dtype", settings["pack_dtype"], "int32")
    changes = [name for name, each in (settings.get("dynamic") or {}).items() if each and not name.startswith("-:")]
    return f"layers like {changes[0]} are quantised otherwise" if changes else ""


def read_gptq(settings: Mapping[str, Any], name: str, parts: Mapping[str, torch.Tensor]) -> Read:
    """Codes of a layer, and the order of its inputs in them.

    Raises: KeyError, RuntimeError, ValueError, IndexError for parts that do not fit one another,
      UnsupportedModelError for zero points that readers disagree on, and groups without a kernel.
    """
    bits, qweight, scales = int(settings["bits"]), parts["qweight"], parts["scales"]
    inputs, outputs = qweight.shape[0] * 32 // bits, qweight.shape[1]
    stored = unpacked(parts["qzeros"], bits, outputs, 1)
    if (settings.get("checkpoint_format") or settings.get("format")) != "gptq_v2":
        if int(stored.max()) == 2**bits - 1:  # the next one, or 0, or carried into the neighbour
            raise refusal(f"{name} has zero points of {2**bits}, which readers of gptq take otherwise each")
        stored = stored + 1
    return _read(name, unpacked(qweight, bits, inputs, 0).t(), bits, scales, stored, settings, parts.get("g_idx"))


def why_not_awq(settings: Mapping[str, Any]) -> str:
    """What else than whole numbers for weights such a checkpoint asks for; empty where that is nothing."""
    kind = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if kind != "gemm":
        return _UNKNOWN.format("version", kind, "gemm")
    bits, *_ = (whole_number(settings, key) for key in ("bits" if "bits" in settings else "w_bit", *_GROUPS))
    return "" if bits == _AWQ_BITS else _UNKNOWN.format("number of bits", bits, _AWQ_BITS)


def read_awq(settings: Mapping[str, Any], name: str, parts: Mapping[str, torch.Tensor]) -> Read:
    """As `read_gptq`."""
    qweight, scales = parts["qweight"], parts["scales"]
    outputs = scales.shape[1]
    order = torch.arange(outputs).view(-1, 8)[:, list(_AWQ_ORDER)].flatten()
    numbers, stored = (unpacked(part, _AWQ_BITS, outputs, 1)[:, order] for part in (qweight, parts["qzeros"]))
    return _read(name, numbers.t(), _AWQ_BITS, scales, stored, settings, None)


def _read(
    name: str,
    numbers: torch.Tensor,
    bits: int,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    settings: Mapping[str, Any],
    groups: torch.Tensor | None,
) -> Read:
    """Of numbers (outputs, inputs), scales and zeros (groups, outputs), and the group of every input."""
    inputs, count = numbers.shape[1], len(scales)
    given = next((int(settings[key]) for key in _GROUPS if settings.get(key) is not None), -1)
    size = given if given > 0 else inputs
    if zeros.shape != scales.shape or count != -(-inputs // size) or scales.shape[1] != len(numbers):
        raise ValueError(f"{inputs} inputs in {count} groups of {size}")
    order = None
    if groups is not None:
        if len(groups) != inputs:
            raise ValueError(f"groups of {len(groups)} inputs")
        of_groups, order = orders(name, groups, size)
        scales, zeros = scales[of_groups], zeros[of_groups]
        numbers = numbers if order is None else numbers[:, order]
    codes = by_groups(name, numbers.contiguous(), bits, scales.t(), whole_zeros(zeros.t(), bits), size)
    return Read(codes, order)
