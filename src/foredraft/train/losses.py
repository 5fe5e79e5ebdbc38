"""The losses of learned drafters, each as its paper has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_ELEMENTS = 400_000
"""Logits of a block on a CPU, in float32 about 1.6 MB: what the second-level cache of a core holds."""

BLOCK_ELEMENTS_ELSEWHERE = 1 << 26
"""And on an accelerator, where every call takes longer than the numbers of such a block."""


@dataclass(frozen=True)
class Part:
    """Share of one head, or of one step of drafting, in the loss.

    Args:
      loss: sum over places, a scalar with gradients.
      num_places: that have a token to draft, whether it can be drafted or not.
      num_right: at how many of these the likeliest token is the target's (or that of the text).
    """

    loss: Tensor
    num_places: int
    num_right: int


def distilled(
    states: Tensor,
    weight: Tensor,
    target_logits: Tensor,
    rows: Tensor,
    weights: Tensor,
    counts: Sequence[int],
    variation: float = 0.0,
) -> list[Part]:
    """Soft cross entropy against the target's distribution, of several heads or steps one after the other, summed.

    Args:
      states: (M, H), what the output layer reads.
      weight: (V_d, H), the output layer.
      target_logits: (N, V_d), logits of the target.
      rows: int64 (M,), the row of the distribution for each place.
      weights: (M,), 0 at places that do not count.
      counts: how many places every head or step has; M together.
      variation: share of total variation in the loss; the rest is cross entropy.
    """
    losses, is_right = DistilledOutput.apply(states, weight, target_logits, rows, variation)  # type: ignore[no-untyped-call]
    kept = (losses * weights.to(losses.dtype)).split(list(counts))
    right = (is_right & (weights > 0)).split(list(counts))
    return [Part(loss.sum(), len(loss), int(hits.sum())) for loss, hits in zip(kept, right, strict=True)]


def hard(logits: Tensor, labels: Tensor) -> Part:
    """Cross entropy against the tokens of the text, summed.

    Args:
      logits: (M, V).
      labels: int64 (M,), rows of the vocabulary; -1 does not count.
    """
    wide = logits.to(logits.dtype if logits.element_size() == 8 else torch.float32)
    loss = F.cross_entropy(wide, labels, ignore_index=-1, reduction="sum")
    own = wide.detach().gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    is_right = (own >= wide.detach().amax(-1)) & (labels >= 0)
    return Part(loss, len(labels), int(is_right.sum()))


def feature_regression(outputs: Tensor, features: Tensor) -> Tensor:
    """Smooth L1 between predicted and true features, mean over their numbers and sum over places: (M, H) -> scalar.

    Source: EAGLE (Li et al. 2024, arXiv:2401.15077).
    """
    wide = outputs.to(outputs.dtype if outputs.element_size() == 8 else torch.float32)
    return F.smooth_l1_loss(wide, features.to(wide.dtype), reduction="none").mean(-1).sum()


# -- output layer and soft cross entropy in one ------------------------------------------------------------------------


class DistilledOutput(torch.autograd.Function):
    """Cross entropy of ``states @ weight.T`` against distributions, by place, with its gradient computed on the way.

    With l = states @ weight.T, q = softmax(l) and p = softmax(target_logits): log sum exp(l) - p . l, whose gradient by
    l is q - p. A share of it may be total variation instead, sum |q - p| / 2, whose gradient is q (s - s . q) / 2 with
    s = sign(q - p). The upstream gradient is one number per place, so it can be multiplied in later.
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, target_logits: Tensor, places: Tensor, variation: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """
        Args:
          states: (M, H).
          weight: (V_d, H).
          target_logits: (N, V_d) of the distributions.
          places: int64 (M,), the distribution of each place.
          variation: share of total variation.
        Returns: losses (M,) in float32 or wider; bool (M,), whether the likeliest token is that of the distribution.
        """
        wide = torch.float64 if states.dtype == torch.float64 else torch.float32
        narrow = weight.dtype if not weight.requires_grad or wide == torch.float64 else states.dtype
        logits = states.to(narrow) @ weight.detach().to(narrow).T
        elements = BLOCK_ELEMENTS if logits.device.type == "cpu" else BLOCK_ELEMENTS_ELSEWHERE
        size = max(1, elements // logits.shape[1])
        losses = torch.empty(len(logits), dtype=wide, device=logits.device)
        right = torch.empty(len(logits), dtype=torch.bool, device=logits.device)
        for start in range(0, len(logits), size):
            block = slice(start, start + size)
            own, target = logits[block].to(wide), target_logits[places[block]].to(wide)
            target_top = target.max(-1)
            target = (target - target_top.values[:, None]).exp_()
            target /= target.sum(-1, keepdim=True)
            top = own.amax(-1, keepdim=True)
            right[block] = own.gather(-1, target_top.indices[:, None])[:, 0] >= top[:, 0]
            expected = torch.linalg.vecdot(target, own)
            own = (own - top).exp_()
            total = own.sum(-1, keepdim=True)
            losses[block] = (total.log() + top)[:, 0] - expected
            own /= total
            if variation:
                apart, by_variation = _varied(own, target)
                losses[block] = (1 - variation) * losses[block] + variation * apart
                logits[block] = own.sub_(target).mul_(1 - variation).add_(by_variation, alpha=variation)
                continue
            logits[block] = own.sub_(target)  # from here on the gradient
        ctx.save_for_backward(logits @ weight.detach().to(narrow), *((logits, states) if weight.requires_grad else ()))
        ctx.mark_non_differentiable(right)
        return losses, right

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _right: Tensor) -> tuple[Tensor | None, ...]:
        by_states, *others = ctx.saved_tensors
        by_weight = None
        if others:
            by_logits, states = others
            by_weight = by_logits.T @ (states * upstream[:, None]).to(by_logits.dtype)
        return (by_states * upstream[:, None]).to(by_states.dtype), by_weight, None, None, None


def _varied(own: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Total variation of distributions (M, V_d), and its gradient by the logits of the first: (M,) and (M, V_d)."""
    apart = own - target
    sign = apart.sign()
    gradient = 0.5 * own * (sign - torch.linalg.vecdot(sign, own)[:, None])
    return apart.abs_().sum(-1) / 2, gradient
