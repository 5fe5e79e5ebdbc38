"""Reading and writing of compressed-tensors checkpoints in which only weights are quantised, to integers.

A layer ``NAME`` has these tensors:

- ``NAME.weight_packed`` (codes of 4 or 8 bits in int32, the first in the lowest bits) and ``NAME.weight_shape``, or
  ``NAME.weight`` in int8;
- ``NAME.weight_scale`` (outputs, groups);
- ``NAME.weight_zero_point``, if codes are not symmetric about 0. It is packed along the outputs if codes are packed;
- ``NAME.weight_g_idx``, the group of every input (-1 for groups of neighbours), if inputs are grouped by activation
  order.

Source: compressed-tensors (vllm-project/compressed-tensors), formats pack-quantized, int-quantized, naive-quantized.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from foredraft.errors import UnsupportedModelError
from foredraft.native.codes import Codes
from foredraft.native.packed_matmul import CODES_SPAN

METHOD = "compressed-tensors"
FORMATS = ("pack-quantized", "int-quantized", "naive-quantized")
ZEROS, GROUPS = "weight_zero_point", "weight_g_idx"
PARTS = ("weight_packed", "weight_shape", "weight_scale", ZEROS, GROUPS, "weight")
"""Names of the tensors of a quantised layer."""
VERSION = "0.12.1"
"""Version of compressed-tensors that is stored in written checkpoints."""
_WORD = 32
_UNTOLD = [{"weights": {"num_bits": bits}} for bits in (4, 8)]
"""Schemes assumed for a checkpoint that states none."""


def why_not_plain(settings: Mapping[str, Any]) -> str:
    """Return the reason why a checkpoint has more than integer weights and cannot be read; empty if it can."""
    schemes = list((settings.get("config_groups") or {}).values())
    formats = {settings.get("format"), *(scheme.get("format") or settings.get("format") for scheme in schemes)}
    for found in sorted(map(str, formats - {*FORMATS, "mixed-precision"})):
        return f"its format is {found}, but only {', '.join(FORMATS)} are supported"
    for key in ("kv_cache_scheme", "transform_config"):
        if settings.get(key):
            return f"it has a {key}"
    if (settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
        return "its weights are sparse"
    for scheme in schemes:
        weights = scheme.get("weights") or {}
        if scheme.get("input_activations") or scheme.get("output_activations"):
            return "it rounds activations, too"
        bits = whole_number(weights, "num_bits")
        if weights.get("type", "int") != "int" or bits not in (4, 8):
            return f"its weights are {weights.get('type')} of {bits} bits, but only int of 4 or 8 bits is supported"
        if weights.get("strategy") not in ("tensor", "channel", "group"):
            return f"its scales are by {weights.get('strategy')}, but only by tensor, channel or group are supported"
    return ""


def whole_number(settings: Mapping[str, Any], key: str) -> int | None:
    """Return an integer setting; None if it is not set.

    Raises: ValueError for a value of another type.
    """
    value = settings.get(key)
    if value is not None and type(value) is not int:
        raise ValueError(f"{key} is {value!r} and should be a whole number, written without quotes")
    return value


# -- codes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Read:
    """Weight of a quantised layer.

    Args:
      codes: integer weights with scales and zero points.
      order: permutation of the inputs in the codes; None if they are in their own order.
    """

    codes: Codes
    order: torch.Tensor | None = None

    def dense(self) -> torch.Tensor:
        """Return the dequantised weight, float32 (out, in)."""
        dense = self.codes.dense()
        return dense if self.order is None else dense[:, self.order.argsort()]


def read(settings: Mapping[str, Any], name: str, parts: Mapping[str, torch.Tensor]) -> Read:
    """Read the codes of a layer.

    Args:
      settings: ``quantization_config`` of the checkpoint.
      name: name of the layer.
      parts: its tensors by the names in `PARTS`.

    Raises: KeyError, RuntimeError, ValueError, IndexError for tensors that do not fit together,
      UnsupportedModelError for group sizes without a kernel.
    """
    scales, zeros, packed = parts["weight_scale"], parts.get(ZEROS), parts.get("weight_packed")
    (outputs, inputs), count, columns = _sizes(parts)
    scales = scales.reshape(-1, 1).expand(outputs, 1) if scales.numel() == 1 else scales.view(outputs, -1)
    number, bits, size = _scheme(settings, name, inputs, count, columns)
    order = None
    numbers = parts["weight"].view(torch.uint8) ^ 128 if packed is None else unpacked(packed, bits, inputs, 1)
    if numbers.shape != (outputs, inputs):
        raise ValueError(f"{outputs} outputs, but {len(numbers)} rows of codes")
    if zeros is not None and zeros.dtype == torch.int32:
        zeros = unpacked(zeros, bits, outputs, 0)
    elif zeros is not None:
        zeros = zeros.expand(scales.shape).reshape(scales.shape).to(torch.int16).add(2 ** (bits - 1)).to(torch.uint8)
    zeros = None if zeros is None else whole_zeros(zeros.view(scales.shape), bits)
    if zeros is not None and _schemes(settings)[number]["weights"].get("symmetric") is True:
        raise ValueError("config.json states that its codes are symmetric, but its zero points are not in the middle")
    groups = parts.get(GROUPS)
    if groups is not None and not bool((groups == -1).all()):
        of_groups, order = orders(name, groups, size)
        scales, zeros = scales[:, of_groups], None if zeros is None else zeros[:, of_groups]
        numbers = numbers if order is None else numbers[:, order].contiguous()
    return Read(by_groups(name, numbers, bits, scales, zeros, size), order)


def scheme_of(settings: Mapping[str, Any], name: str, parts: Mapping[str, torch.Tensor]) -> tuple[int, dict[str, bool]]:
    """Return the index of a layer's scheme, and whether the scheme states zero points and an input order."""
    (_, inputs), count, columns = _sizes(parts)
    number, *_ = _scheme(settings, name, inputs, count, columns)
    weights = _schemes(settings)[number]["weights"]
    stated = {ZEROS: not weights["symmetric"]} if isinstance(weights.get("symmetric"), bool) else {}
    return number, stated | {GROUPS: weights.get("actorder") in ("group", "dynamic", True)}


def may_lack(settings: Mapping[str, Any], part: str) -> bool:
    """Whether the writer of a checkpoint may have omitted a part that the settings state, for all layers.

    Versions before 0.9.3 omit zero points that are all in the middle. All versions omit an input order that has no
    effect.
    """
    version = [int(number) for number in re.findall(r"\d+", str(settings.get("version") or ""))[:3]]
    return part != ZEROS or not version or version < [0, 9, 3]


def _sizes(parts: Mapping[str, torch.Tensor]) -> tuple[tuple[int, int], int, int | None]:
    """Return (outputs, inputs), number of groups, and int32 words per output (None if codes are not packed)."""
    packed = parts.get("weight_packed")
    outputs, inputs = parts["weight"].shape if packed is None else parts["weight_shape"].tolist()
    scales = parts["weight_scale"]
    count = 1 if scales.numel() == 1 else scales.view(outputs, -1).shape[1]
    return (outputs, inputs), count, None if packed is None else packed.shape[1]


def _schemes(settings: Mapping[str, Any]) -> list[Any]:
    return list((settings.get("config_groups") or {}).values()) or _UNTOLD


def _scheme(
    settings: Mapping[str, Any], name: str, inputs: int, count: int, columns: int | None = None
) -> tuple[int, int, int]:
    """Find the scheme of a layer: index of the scheme, bits of a code, and inputs of a group (the last may be smaller).

    A scheme that names the layer has priority over one for all linear layers, which has priority over the rest.

    Args:
      settings: ``quantization_config`` of the checkpoint.
      name: name of the layer.
      inputs: number of inputs.
      count: number of groups of inputs.
      columns: int32 words of every output; None if every code has an element of its own.

    Raises: ValueError if no scheme fits.

    Example:
        >>> scheme = {"weights": {"num_bits": 4, "group_size": 32}}
        >>> _scheme({"config_groups": {"a": scheme}}, "up", 72, 3, 9)
        (0, 4, 32)
    """
    schemes = _schemes(settings)
    targets = [scheme.get("targets") or () for scheme in schemes]
    order = [(not _names(each, name), "Linear" not in each, number) for number, each in enumerate(targets)]
    for *_, number in sorted(order):
        bits, size = (whole_number(schemes[number]["weights"], key) for key in ("num_bits", "group_size"))
        size = inputs if count == 1 else size or inputs // count
        if bits and -(-inputs // max(size, 1)) == count and columns in (None, -(-inputs * bits // _WORD)):
            return number, bits if columns else 8, size
    said = sorted({str((scheme.get("weights") or {}).get("group_size")) for scheme in schemes})
    raise ValueError(f"{inputs} inputs in {count} groups, but the schemes have groups of {', '.join(said)}")


def _names(targets: Any, name: str) -> bool:
    """Whether the targets of a scheme contain a layer, by its full name or a pattern.

    Example:
        >>> _names(["re:.*up_proj"], "layers.0.up_proj"), _names(["Linear"], "layers.0.up_proj")
        (True, False)
    """
    return any(each == name or (each[:3] == "re:" and re.match(each[3:], name) is not None) for each in targets)


def orders(name: str, groups: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the orders of groups and inputs in which each group's inputs are contiguous; None for unmoved inputs.

    Args:
      name: name of the layer, for messages.
      groups: group of every input.
      size: inputs of a group; the last group may be smaller.

    Raises: UnsupportedModelError for groups of several sizes.

    Example:
        >>> [order.tolist() for order in orders("up", torch.tensor([1, 0, 0, 1]), 2)]
        [[0, 1], [1, 2, 0, 3]]
    """
    groups, inputs = groups.long(), len(groups)
    order, first = groups.argsort(stable=True), groups[::size]
    if not torch.equal(groups[order], torch.arange(inputs) // size):
        raise refusal(f"inputs of {name} are in groups of several sizes (g_idx), which is not supported")
    if torch.equal(first.repeat_interleave(size)[:inputs], groups):
        return first, None
    return torch.arange(len(first)), order


def whole_zeros(zeros: torch.Tensor, bits: int) -> torch.Tensor | None:
    """Return zero points; None if all are the code in the middle."""
    return None if bool((zeros == 2 ** (bits - 1)).all()) else zeros.contiguous()


def by_groups(
    name: str, numbers: torch.Tensor, bits: int, scales: torch.Tensor, zeros: torch.Tensor | None, group: int
) -> Codes:
    """Build codes with scales and zeros (outputs, groups), each for ``group`` inputs.

    Raises: UnsupportedModelError for group sizes without a kernel.
    """
    if scales.shape[1] == 1:  # kernels with zeros need groups; one group, padded with zeros, covers all inputs
        group = 0 if zeros is None else -(-numbers.shape[1] // CODES_SPAN) * CODES_SPAN
    if group % 16 or (group > CODES_SPAN and group % CODES_SPAN):
        raise refusal(f"{group} inputs of {name} share a scale, but kernels need multiples of 16 up to 64, or of 64")
    scales = scales.to(torch.float16 if scales.dtype == torch.float16 else torch.float32)
    return Codes(numbers, bits, scales.contiguous(), zeros, group)


def refusal(reason: str) -> UnsupportedModelError:
    """Return the error for a checkpoint that foredraft cannot read, with the remedy."""
    return UnsupportedModelError(f"{reason}; load the original model and quantise it with quantization='int8'")


def parts_of(codes: Codes) -> dict[str, torch.Tensor]:
    """Return the tensors of codes in this layout, packed.

    Raises: ValueError for zeros that are not integers.
    """
    outputs, inputs = codes.numbers.shape
    parts = {
        "weight_packed": packed(codes.numbers, codes.bits, 1),
        "weight_shape": torch.tensor([outputs, inputs]),
        "weight_scale": codes.scales.contiguous(),
    }
    if codes.zeros is not None:
        if codes.kind[2] != "whole":
            raise ValueError("its zeros are not integers")
        parts["weight_zero_point"] = packed(codes.zeros, codes.bits, 0)
    return parts


def packed(numbers: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Pack uint8 codes into int32, 32 / bits in each word, along a dimension that is padded with zeros.

    Example:
        >>> packed(torch.tensor([[1, 2, 3]], dtype=torch.uint8), 8, 1).tolist() == [[1 + 2 * 256 + 3 * 65536]]
        True
    """
    count = _WORD // bits
    rows = numbers if dim == 1 else numbers.t()
    filled = F.pad(rows, (0, -rows.shape[1] % count)).view(len(rows), -1, count).to(torch.int64)
    words = (filled << torch.arange(count) * bits).sum(-1)
    words = (words - (words >> (_WORD - 1) << _WORD)).to(torch.int32)  # two's complement
    return words.contiguous() if dim == 1 else words.t().contiguous()


def unpacked(words: torch.Tensor, bits: int, size: int, dim: int) -> torch.Tensor:
    """Unpack ``size`` codes along the dimension; the inverse of `packed`."""
    rows = words if dim == 1 else words.t()
    numbers = rows[..., None] >> torch.arange(_WORD // bits, dtype=torch.int32) * bits & (1 << bits) - 1
    found = numbers.to(torch.uint8).flatten(1)[:, :size]
    return found.contiguous() if dim == 1 else found.t().contiguous()
