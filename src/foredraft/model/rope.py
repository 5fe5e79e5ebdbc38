"""Rotary positions whose frequencies depend on sequence length. They are fixed in a shadow so that no forward pass
changes them.

Dynamic NTK has other frequencies for every length beyond the context, and the module keeps them afterwards. A shadow
has the frequencies of sequences within the context. Longrope has two sets: one for sequences up to its original
context, and one for longer ones. A shadow has both and chooses by position: position p of a longer sequence is
``border + p``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

DYNAMIC, LONGROPE = "dynamic", "longrope"
_FIXED = "fixed"
"""Rotary type that transformers does not change in a forward pass."""


class RangedRope(nn.Module):
    """Rotary positions with two sets of frequencies.

    Args:
      short, long: modules for positions before the border, and from the border on, where positions start at 0 again.
      border: first position of the second set.
    """

    def __init__(self, short: nn.Module, long: nn.Module, border: int) -> None:
        super().__init__()
        self.short, self.long, self.border = short, long, border

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **options: Any) -> Any:
        """Return cosines and sines (B, N, D) of positions (B, N)."""
        is_long = position_ids >= self.border
        short = self.short(x, position_ids.masked_fill(is_long, 0), *args, **options)
        long = self.long(x, (position_ids - self.border).clamp(min=0), *args, **options)
        return tuple(torch.where(is_long[..., None], after, before) for before, after in zip(short, long, strict=True))


@torch.no_grad()
def fix_ropes(model: nn.Module, border: int | None) -> bool:
    """Fix the rotary frequencies of a shadow.

    Args:
      border: original context of longrope; None for models of other types.

    Returns: True if positions from the border on belong to longer sequences.
    """
    has_long = False
    for parent, name, child in list(_ropes(model)):
        if any(DYNAMIC in kind for kind in _kinds(child)):
            parent._modules[name] = _fixed(child, 0)
        elif border is not None and LONGROPE in _kinds(child):
            ranged = RangedRope(_fixed(child, 0), _fixed(child, border), border)
            if not _is_right(ranged, child):
                return False
            parent._modules[name], has_long = ranged, True
    return has_long


def _ropes(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield modules whose frequencies depend on length: parent, name and module."""
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None and any(kind == LONGROPE or DYNAMIC in kind for kind in _kinds(child)):
                yield parent, name, child


def _kinds(module: nn.Module) -> set[str]:
    found = getattr(module, "rope_type", None)
    kinds = found.values() if isinstance(found, dict) else [found]
    return {kind for kind in kinds if isinstance(kind, str)}


def _run(module: nn.Module, positions: list[int]) -> list[Any]:
    """Return cosines and sines, for each attention type with its own frequencies."""
    device = next((buffer.device for buffer in module.buffers()), None)
    ids, states = torch.tensor([positions], device=device), torch.zeros(1, 1, 1, device=device)
    of_kinds = getattr(module, "rope_type", None)
    options = [{"layer_type": kind} for kind in of_kinds] if isinstance(of_kinds, dict) else [{}]
    return [module(states, ids, **each) for each in options]


def _fixed(module: nn.Module, position: int) -> nn.Module:
    """Return a copy that always uses the frequencies of sequences of length ``position`` or more."""
    fixed: Any = copy.deepcopy(module)
    kinds = fixed.rope_type
    for prefix in (f"{kind}_" for kind in kinds) if isinstance(kinds, dict) else ("",):
        first = getattr(fixed, f"{prefix}original_inv_freq", None)
        if first is not None:  # some versions of transformers keep the frequencies of an earlier longer sequence
            fixed.register_buffer(f"{prefix}inv_freq", first.clone(), persistent=False)
    _run(fixed, [position])
    fixed.rope_type = dict.fromkeys(kinds, _FIXED) if isinstance(kinds, dict) else _FIXED
    return fixed  # type: ignore[no-any-return]


def _is_right(ranged: RangedRope, module: nn.Module) -> bool:
    """Return whether both sets of frequencies equal those of the module itself, which may choose them differently."""
    border = ranged.border
    last = border - 1
    for given, position, other in ((last, last, 0), (border, 0, border), (2 * border, border, 0)):
        want = _run(copy.deepcopy(module), [position, other])
        got = [ranged.short, ranged.long][given >= border]
        for ours, theirs in zip(_run(got, [position]), want, strict=True):
            if not all(torch.equal(mine, own[:, :1]) for mine, own in zip(ours, theirs, strict=True)):
                return False
    return True
