"""Layouts of checkpoints whose linear layers are whole numbers: which a checkpoint has, and the codes of its layers.

A layer ``NAME`` of GPTQ and AWQ has, over words of int32 that hold 32 / bits numbers, the first in the lowest bits:

- GPTQ: ``NAME.qweight`` (inputs / numbers, outputs), ``NAME.qzeros`` (groups, outputs / numbers), ``NAME.scales``
  (groups, outputs), and ``NAME.g_idx`` (inputs), the group of every input. Zero points are stored 1 too small, and as
  they are in ``gptq_v2``.
- AWQ (``gemm``): ``NAME.qweight`` (inputs, outputs / 8), ``NAME.qzeros`` and ``NAME.scales`` as above. The eight
  outputs of a word lie in the order 0, 2, 4, 6, 1, 3, 5, 7, and zero points are stored as they are.

One of torchao has ``NAME._weight_qdata`` (outputs, inputs) in int8, a number of 4 or 8 bits with its sign in each;
``NAME._weight_scale`` and ``NAME._weight_zero_point`` (outputs, groups), of which a weight is (number - zero) * scale.

Source: AutoGPTQ and GPTQModel (layers in torch, and conversion between both formats), AutoAWQ (gemm layers); torchao
0.18 (``Int8Tensor``, ``IntxUnpackedToInt8Tensor``, and ``flatten_tensor_state_dict``, with which transformers 5 writes
them). Its other tensors are laid out for one kernel each; before version 2 of a configuration they were pickled.
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
    """A layout.

    Args:
      method: its name in ``quantization_config``.
      mark: part that every layer in codes has.
      parts: of a layer, of which it may lack some.
      optional: those of them that all layers of a scheme may lack.
      why_not_plain: of ``quantization_config`` tells what else a checkpoint asks for than whole numbers for weights.
      read: gives the codes of a layer, of ``quantization_config``, its name, and its parts.
      scheme_of: gives the number of the scheme of a layer, and what that states of optional parts.
    """

    method: str
    mark: str
    parts: tuple[str, ...]
    why_not_plain: Callable[[Mapping[str, Any]], str]
    read: Callable[[Mapping[str, Any], str, Mapping[str, torch.Tensor]], compressed.Read]
    optional: tuple[str, ...] = ()
    scheme_of: SchemeOf = lambda settings, name, parts: (0, {})


_WORDS = ("weight_packed", "qweight", "qzeros")
"""Parts that hold several numbers in each of theirs."""


def settings_of(config: Any) -> dict[str, Any]:
    """Settings by which the weights of a checkpoint are quantised; empty where they are not.

    Raises: CheckpointError for a method that has no name.
    """
    given = getattr(config, "quantization_config", None)
    found = {} if given is None else dict(given if isinstance(given, Mapping) else given.to_dict())
    method = found.get("quant_method")
    if method is not None and not isinstance(method, str):
        raise CheckpointError(
            f"quantization_config in config.json has the quant_method {method!r}, which is no name; download it again"
        )
    return found


def method_of(config: Any) -> str:
    """Method by which the weights of a checkpoint are quantised; empty where they are not."""
    return str(settings_of(config).get("quant_method") or "")


def codes_of(settings: Mapping[str, Any], name: str, parts: Mapping[str, torch.Tensor]) -> compressed.Read:
    """The weight of a layer.

    Raises: CheckpointError for parts that do not fit one another, UnsupportedModelError for what has no kernel.
    """
    try:
        _check_kinds(parts)
        return LAYOUTS[settings["quant_method"]].read(settings, name, parts)
    except ForedraftError:
        raise
    except (KeyError, RuntimeError, ValueError, IndexError, TypeError) as error:
        shapes = ", ".join(f"{part} {tuple(tensor.shape)}" for part, tensor in sorted(parts.items()))
        detail = f"there is no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())[:100]
        raise CheckpointError(
            f"the weights of {name} do not fit one another ({shapes}; {detail}): the file "
            "is damaged; download or copy it again"
        ) from None


def check_optional(
    location: str, settings: Mapping[str, Any], layers: Mapping[str, Mapping[str, torch.Tensor]]
) -> None:
    """Check that layers of one scheme have the same parts: without its zero points a layer has other weights.

    Args:
      layers: parts by layer, which `codes_of` has read.

    Raises: CheckpointError for a layer without a part that others of its scheme have, and for a part that the settings
      state and no layer has, unless writers are known to have left it out.
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
            held = f"{len(names) - len(lacking)} other layers of the same scheme have theirs"
        elif layout.method != compressed.METHOD or not compressed.may_lack(settings, part):
            held = "config.json states that these layers have theirs"
        else:
            logger.warning(
                "config.json of %s states that its layers have %s, and none has. Writers of compressed-tensors leave "
                "it out where it has no effect, so it is read that way; if it was lost instead, texts are wrong.",
                location,
                part,
            )
            continue
        raise CheckpointError(
            f"{location} lacks {lacking[0]}.{part} ({len(lacking)} of {len(names)} layers), and {held}: without it, "
            "the weights would be others. The file is damaged or incomplete; download or save the checkpoint again"
        )


def _check_kinds(parts: Mapping[str, torch.Tensor]) -> None:
    """Raises: ValueError for numbers of a kind that no layout has, and for scales that are not finite."""
    for part, tensor in parts.items():
        if part.endswith(("scale", "scales")):
            if not tensor.is_floating_point():
                raise ValueError(f"{part} in {tensor.dtype}")
            if not bool(tensor.isfinite().all()):
                raise ValueError(f"{part} is NaN or infinite")
        elif part in _WORDS and tensor.dtype != torch.int32:
            raise ValueError(f"{part} in {tensor.dtype}")


GPTQ_PARTS = ("qweight", "qzeros", "scales", "g_idx")
"""Of a layer."""
_GROUPS = ("group_size", "q_group_size")
_AWQ_BITS = 4
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word its eight outputs lie
_UNKNOWN = "its {} is {}, and {} is read"


def why_not_gptq(settings: Mapping[str, Any]) -> str:
    """Reason why a checkpoint is more than whole numbers for weights; empty where it is not."""
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


def gptq_scheme(
    settings: Mapping[str, Any], name: str, parts: Mapping[str, torch.Tensor]
) -> tuple[int, Mapping[str, bool]]:
    """The one scheme; inputs in the order of activations (``desc_act``) have a group each."""
    return 0, {"g_idx": bool(settings.get("desc_act"))}


def why_not_awq(settings: Mapping[str, Any]) -> str:
    """Reason why a checkpoint is more than whole numbers for weights; empty where it is not."""
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


TORCHAO = "torchao"
_QDATA = "_weight_qdata"
_ZERO = "_weight_zero_point"
TORCHAO_PARTS = (_QDATA, "_weight_scale", _ZERO)
"""Of a layer."""
_BITS = {"int4": 4, "int8": 8}
_PLAIN = ("Int8WeightOnlyConfig", "IntxWeightOnlyConfig")
_GRAINS = ("PerRow", "PerGroup", "PerAxis")


def why_not_torchao(settings: Mapping[str, Any]) -> str:
    """Reason why a checkpoint is more than whole numbers for weights; empty where it is not."""
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
    if _torchao_bits(settings) is None:
        return f"its weights are {data['weight_dtype'].get('_data')}; int4 or int8 is read"
    grain = data.get("granularity") or {}
    if grain.get("_type", "PerRow") not in _GRAINS or (grain.get("_data") or {}).get("axis", 0) != 0:
        return f"its scales are {grain.get('_type')}, and {', '.join(_GRAINS)} (axis 0) are read"
    return ""


def read_torchao(settings: Mapping[str, Any], name: str, parts: Mapping[str, torch.Tensor]) -> Read:
    """The codes of a layer.

    Raises: KeyError, RuntimeError, ValueError for parts that do not fit one another, UnsupportedModelError for groups
      without a kernel.
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
            raise ValueError(f"numbers of more than {bits} bits")
    codes, of_zeros = ((each.to(torch.int16) + half).to(torch.uint8) for each in (numbers, zeros))
    size = numbers.shape[1] // scales.shape[1]
    return Read(by_groups(name, codes, bits, scales, whole_zeros(of_zeros, bits), size))


def torchao_scheme(
    settings: Mapping[str, Any], name: str, parts: Mapping[str, torch.Tensor]
) -> tuple[int, Mapping[str, bool]]:
    """The one scheme; ``IntxUnpackedToInt8Tensor`` always has zero points, and ``Int8Tensor`` may."""
    is_intx = settings["quant_type"]["default"].get("_type") == "IntxWeightOnlyConfig"
    return 0, {_ZERO: True} if is_intx else {}


def _torchao_bits(settings: Mapping[str, Any]) -> int | None:
    """Bits of a number; None for other kinds."""
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
