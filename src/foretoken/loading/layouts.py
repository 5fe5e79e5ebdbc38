"""Layouts of checkpoints whose linear layers are whole numbers: which a checkpoint has, and the codes of its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from foretoken.errors import CheckpointError, ForetokenError
from foretoken.loading import compressed, gptq, torchao


@dataclass(frozen=True)
class Layout:
    """A layout.

    Args:
      method: its name in ``quantization_config``.
      mark: part that every layer in codes has.
      parts: of a layer, of which it may lack some.
      why_not_plain: of ``quantization_config`` tells what else a checkpoint asks for than whole numbers for weights.
      read: gives the codes of a layer, of ``quantization_config``, its name, and its parts.
    """

    method: str
    mark: str
    parts: tuple[str, ...]
    why_not_plain: Callable[[Mapping[str, Any]], str]
    read: Callable[[Mapping[str, Any], str, Mapping[str, torch.Tensor]], compressed.Read]


_WORDS = ("weight_packed", "qweight", "qzeros")
"""Parts that hold several numbers in each of theirs."""

LAYOUTS = {
    each.method: each
    for each in (
        Layout(compressed.METHOD, "weight_scale", compressed.PARTS, compressed.why_not_plain, compressed.read),
        Layout("gptq", "qweight", gptq.PARTS, gptq.why_not_gptq, gptq.read_gptq),
        Layout("awq", "qweight", gptq.PARTS, gptq.why_not_awq, gptq.read_awq),
        Layout(torchao.METHOD, torchao.MARK, torchao.PARTS, torchao.why_not_plain, torchao.read),
    )
}


def settings_of(config: Any) -> dict[str, Any]:
    """How the weights of a checkpoint are quantised; empty where they are not.

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
    """By what the weights of a checkpoint are quantised; empty where they are not."""
    return str(settings_of(config).get("quant_method") or "")


def codes_of(settings: Mapping[str, Any], name: str, parts: Mapping[str, torch.Tensor]) -> compressed.Read:
    """The weight of a layer.

    Raises: CheckpointError for parts that do not fit one another, UnsupportedModelError for what has no kernel.
    """
    try:
        _check_kinds(parts)
        return LAYOUTS[settings["quant_method"]].read(settings, name, parts)
    except ForetokenError:
        raise
    except (KeyError, RuntimeError, ValueError, IndexError, TypeError) as error:
        shapes = ", ".join(f"{part} {tuple(tensor.shape)}" for part, tensor in sorted(parts.items()))
        raise CheckpointError(
            f"the weights of {name} do not fit one another ({shapes}; {' '.join(str(error).split())[:100]}): the file "
            "is damaged; download or copy it again"
        ) from None


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
