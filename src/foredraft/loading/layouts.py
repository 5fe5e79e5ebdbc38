"""Layouts of checkpoints with integer codes for linear layers: detection of the layout, and the codes of each layer.

A layer ``NAME`` of GPTQ and AWQ has these tensors, whose int32 words contain 32 / bits codes each, the first in the
lowest bits:

- GPTQ: ``NAME.qweight`` (inputs / codes per word, outputs), ``NAME.qzeros`` (groups, outputs / codes per word),
  ``NAME.scales`` (groups, outputs), and ``NAME.g_idx`` (inputs), the group of every input. Zero points are stored minus
  1 in ``gptq`` and unchanged in ``gptq_v2``.
- AWQ (``gemm``): ``NAME.qweight`` (inputs, outputs / 8), with ``NAME.qzeros`` and ``NAME.scales`` as above. The eight
  outputs of a word are in the order 0, 2, 4, 6, 1, 3, 5, 7, and zero points are stored unchanged.

A layer of torchao has ``NAME._weight_qdata`` (outputs, inputs) in int8, with one signed code of 4 or 8 bits in each,
and ``NAME._weight_scale`` and ``NAME._weight_zero_point`` (outputs, groups). A weight is (code - zero) * scale.

Source: AutoGPTQ and GPTQModel (layers in torch, and conversion between both formats), AutoAWQ (gemm layers); torchao
0.18 (``Int8Tensor``, ``IntxUnpackedToInt8Tensor``, and ``flatten_tensor_state_dict``, with which transformers 5 writes
them). The layouts of torchao's other tensors each suit one kernel. Configurations before version 2 were pickled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from foredraft.errors import CheckpointError, ForedraftError
from foredraft.loading import compressed
from foredraft.loading.compressed import Read, by_groups, orders, refusal, unpacked, whole_number, whole_zeros

logger = logging.getLogger("foredraft")

SchemeOf = Callable[[Mapping[str, Any], str, Mapping[str, torch.Tensor]], tuple[int, Mapping[str, bool]]]


@dataclass(frozen=True)
class Layout:
    """Names, readers and checks of one layout.

    Args:
      method: its name in ``quantization_config``.
      mark: part that every quantised layer has.
      parts: all parts of a layer, some of which may be absent.
      why_not_plain: function that returns the reason why a checkpoint with this ``quantization_config`` has more than
        integer weights and cannot be read, or an empty string.
      read: function that returns the codes of a layer, given ``quantization_config``, its name and its parts.
      optional: parts that may be absent in all layers of a scheme.
      scheme_of: function that returns the index of a layer's scheme, and which optional parts the scheme states.
    """

    method: str
    mark: str
    parts: tuple[str, ...]
    why_not_plain: Callable[[Mapping[str, Any]], str]
    read: Callable[[Mapping[str, Any], str, Mapping[str, torch.Tensor]], compressed.Read]
    optional: tuple[str, ...] = ()
    scheme_of: SchemeOf = lambda settings, name, parts: (0, {})


_WORDS = ("weight_packed", "qweight", "qzeros")
"""Parts whose elements contain several codes each."""


def settings_of(config: Any) -> dict[str, Any]:
    """Return the quantisation settings of a checkpoint; empty if it is not quantised.

    Raises: CheckpointError if the name of the method is not a string.
    """
    given = getattr(config, "quantization_config", None)
    found = {} if given is None else dict(given if isinstance(given, Mapping) else given.to_dict())
    method = found.get("quant_method")
    if method is not None and not isinstance(method, str):
        raise CheckpointError(
            f"quantization_config in config.json has the quant_method {method!r}, which is not a name; download it "
            "again"
        )
    return found


def method_of(config: Any) -> str:
    """Return the quantisation method of a checkpoint; empty if it is not quantised."""
    return str(settings_of(config).get("quant_method") or "")


def codes_of(settings: Mapping[str, Any], name: str, parts: Mapping[str, torch.Tensor]) -> compressed.Read:
    """Read the weight of a layer.

    Raises: CheckpointError for parts that do not fit together, UnsupportedModelError for weights without a kernel.
    """
    try:
        _check_kinds(parts)
        return LAYOUTS[settings["quant_method"]].read(settings, name, parts)
    except ForedraftError:
        raise
    except (KeyError, RuntimeError, ValueError, IndexError, TypeError) as error:
        shapes = ", ".join(f"{part} {tuple(tensor.shape)}" for part, tensor in sorted(parts.items()))
        detail = f"{error} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())[:100]
        raise CheckpointError(
            f"the weights of {name} do not fit together ({shapes}; {detail}): the file "
            "is damaged; download or copy it again"
        ) from None


def check_optional(
    location: str, settings: Mapping[str, Any], layers: Mapping[str, Mapping[str, torch.Tensor]]
) -> None:
    """Check that all layers of a scheme have the same parts, since a layer without its zero points has other weights.

    Args:
      location: directory or hub id, for messages.
      settings: ``quantization_config`` of the checkpoint.
      layers: parts by layer, which `codes_of` has read.

    Raises: CheckpointError for a layer without a part that other layers of its scheme have, and for a part that the
      settings state and no layer has, unless writers are known to omit it.
    """
    layout = LAYOUTS[settings["quant_method"]]
    schemes: dict[int, list[str]] = {}
    stated: dict[int, Mapping[str, bool]] = {}
    for layer, parts in layers.items():
        number, stated[number] = layout.scheme_of(settings, layer, parts)
        schemes.setdefault(number, []).append(layer)
    for (number, names), part in product(schemes.items(), layout.optional):
        lacking = [name for name in names if part not in layers[name]]
        if not lacking or not stated[number].get(part, len(lacking) < len(names)):
            continue
        if len(lacking) < len(names):
            held = f"{len(names) - len(lacking)} other layers of the same scheme have it"
        elif layout.method != compressed.METHOD or not compressed.may_lack(settings, part):
            held = "config.json states that these layers have it"
        else:
            logger.warning(
                "config.json of %s states that its layers have %s, but none has. Writers of compressed-tensors omit it "
                "where it has no effect, so foredraft assumes that; if it was lost instead, the output is wrong.",
                location,
                part,
            )
            continue
        raise CheckpointError(
            f"{location} lacks {lacking[0]}.{part} ({len(lacking)} of {len(names)} layers), but {held}: without it, "
            "the weights would be wrong. The file is damaged or incomplete; download or save the checkpoint again"
        )


def _check_kinds(parts: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError for codes of a dtype that no layout has, and for scales that are not finite."""
    for part, tensor in parts.items():
        if part.endswith(("scale", "scales")):
            if not tensor.is_floating_point():
                raise ValueError(f"{part} in {tensor.dtype}")
            if not bool(tensor.isfinite().all()):
                raise ValueError(f"{part} is NaN or infinite")
        elif part in _WORDS and tensor.dtype != torch.int32:
            raise ValueError(f"{part} in {tensor.dtype}")


GPTQ_PARTS = ("qweight", "qzeros", "scales", "g_idx")
"""Names of the tensors of a layer."""
_GROUPS = ("group_size", "q_group_size")
_AWQ_BITS = 4
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # position in a word of each of its eight outputs
_UNKNOWN = "its {} is {}, but only {} is supported"


def why_not_gptq(settings: Mapping[str, Any]) -> str:
    """Return the reason why a checkpoint has more than integer weights and cannot be read; empty if it can."""
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
    return f"layers like {changes[0]} have settings of their own" if changes else ""


def read_gptq(settings: Mapping[str, Any], name: str, parts: Mapping[str, torch.Tensor]) -> Read:
    """Read the codes of a layer, and the order of its inputs in them.

    Raises: KeyError, RuntimeError, ValueError, IndexError for parts that do not fit together,
      UnsupportedModelError for zero points that readers interpret differently, and group sizes without a kernel.
    """
    bits, qweight, scales = int(settings["bits"]), parts["qweight"], parts["scales"]
    inputs, outputs = qweight.shape[0] * 32 // bits, qweight.shape[1]
    stored = unpacked(parts["qzeros"], bits, outputs, 1)
    if (settings.get("checkpoint_format") or settings.get("format")) != "gptq_v2":
        if int(stored.max()) == 2**bits - 1:  # readers disagree: the next number, 0, or a carry into the next code
            raise refusal(f"{name} has zero points of {2**bits}, which readers of gptq interpret differently")
        stored = stored + 1
    return _read(name, unpacked(qweight, bits, inputs, 0).t(), bits, scales, stored, settings, parts.get("g_idx"))


def gptq_scheme(
    settings: Mapping[str, Any], name: str, parts: Mapping[str, torch.Tensor]
) -> tuple[int, Mapping[str, bool]]:
    """Return the only scheme. Inputs in activation order (``desc_act``) have a group each in ``g_idx``."""
    return 0, {"g_idx": bool(settings.get("desc_act"))}


def why_not_awq(settings: Mapping[str, Any]) -> str:
    """Return the reason why a checkpoint has more than integer weights and cannot be read; empty if it can."""
    kind = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if kind != "gemm":
        return _UNKNOWN.format("version", kind, "gemm")
    bits, *_ = (whole_number(settings, key) for key in ("bits" if "bits" in settings else "w_bit", *_GROUPS))
    return "" if bits == _AWQ_BITS else _UNKNOWN.format("number of bits", bits, _AWQ_BITS)


def read_awq(settings: Mapping[str, Any], name: str, parts: Mapping[str, torch.Tensor]) -> Read:
    """Read the codes of a layer; see `read_gptq`."""
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
    """Build codes from numbers (outputs, inputs), scales and zeros (groups, outputs), and the group of every input."""
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


TORCHAO = "torchao"
_QDATA = "_weight_qdata"
_ZERO = "_weight_zero_point"
TORCHAO_PARTS = (_QDATA, "_weight_scale", _ZERO)
"""Names of the tensors of a layer."""
_BITS = {"int4": 4, "int8": 8}
_PLAIN = ("Int8WeightOnlyConfig", "IntxWeightOnlyConfig")
_GRAINS = ("PerRow", "PerGroup", "PerAxis")


def why_not_torchao(settings: Mapping[str, Any]) -> str:
    """Return the reason why a checkpoint has more than integer weights and cannot be read; empty if it can."""
    given = settings.get("quant_type")
    chosen = given.get("default") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(chosen, Mapping):
        return f"its quant_type is {given!r}, but only a configuration for all layers is supported"
    if len(given) > 1 or chosen.get("_type") not in _PLAIN:
        others = [str(name) for name in given if name != "default"]
        found = (
            f"{others[0]} has a configuration of its own" if others else f"its configuration is {chosen.get('_type')}"
        )
        return f"{found}, but only {' or '.join(_PLAIN)} for all layers is supported"
    if chosen.get("_version", 1) < 2:
        return f"its configuration has version {chosen.get('_version', 1)}, which is pickled; only 2 is supported"
    data = chosen.get("_data") or {}
    packing = (data.get("intx_packing_format") or {}).get("_data", "UNPACKED_TO_INT8")
    if packing != "UNPACKED_TO_INT8":
        return f"its codes are in the format {packing}, but only UNPACKED_TO_INT8 is supported"
    if _torchao_bits(settings) is None:
        return f"its weights are {data['weight_dtype'].get('_data')}, but only int4 and int8 are supported"
    grain = data.get("granularity") or {}
    if grain.get("_type", "PerRow") not in _GRAINS or (grain.get("_data") or {}).get("axis", 0) != 0:
        return f"its scales are {grain.get('_type')}, but only {', '.join(_GRAINS)} (axis 0) are supported"
    return ""


def read_torchao(settings: Mapping[str, Any], name: str, parts: Mapping[str, torch.Tensor]) -> Read:
    """Read the codes of a layer.

    Raises: KeyError, RuntimeError, ValueError for parts that do not fit together, UnsupportedModelError for group
      sizes without a kernel.
    """
    numbers, scales, bits = parts[_QDATA], parts["_weight_scale"], _torchao_bits(settings)
    zeros = parts.get(_ZERO, torch.zeros(scales.shape, dtype=torch.int8))
    if bits is None or numbers.dtype != torch.int8 or zeros.dtype != torch.int8 or numbers.ndim != 2:
        raise ValueError(f"numbers in {numbers.dtype}, zeros in {zeros.dtype}")
    half = 2 ** (bits - 1)
    if zeros.shape != scales.shape or scales.shape[0] != len(numbers) or numbers.shape[1] % scales.shape[1]:
        raise ValueError(f"{numbers.shape[1]} inputs in {scales.shape[1]} groups")
    for each in (numbers, zeros):
        if int(each.min()) < -half or int(each.max()) >= half:
            raise ValueError(f"codes of more than {bits} bits")
    codes, of_zeros = ((each.to(torch.int16) + half).to(torch.uint8) for each in (numbers, zeros))
    size = numbers.shape[1] // scales.shape[1]
    return Read(by_groups(name, codes, bits, scales, whole_zeros(of_zeros, bits), size))


def torchao_scheme(
    settings: Mapping[str, Any], name: str, parts: Mapping[str, torch.Tensor]
) -> tuple[int, Mapping[str, bool]]:
    """Return the only scheme. ``IntxUnpackedToInt8Tensor`` always has zero points, ``Int8Tensor`` may have them."""
    is_intx = settings["quant_type"]["default"].get("_type") == "IntxWeightOnlyConfig"
    return 0, {_ZERO: True} if is_intx else {}


def _torchao_bits(settings: Mapping[str, Any]) -> int | None:
    """Return the bits of a code; None for types other than int4 and int8."""
    data = settings["quant_type"]["default"].get("_data") or {}
    return _BITS.get((data.get("weight_dtype") or {}).get("_data", "int8"))


LAYOUTS = {
    each.method: each
    for each in (
        Layout(
            compressed.METHOD,
            "weight_scale",
            compressed.PARTS,
            compressed.why_not_plain,
            compressed.read,
            (compressed.ZEROS, compressed.GROUPS),
            compressed.scheme_of,
        ),
        Layout("gptq", "qweight", GPTQ_PARTS, why_not_gptq, read_gptq, ("g_idx",), gptq_scheme),
        Layout("awq", "qweight", GPTQ_PARTS, why_not_awq, read_awq),
        Layout(TORCHAO, _QDATA, TORCHAO_PARTS, why_not_torchao, read_torchao, (_ZERO,), torchao_scheme),
    )
}
