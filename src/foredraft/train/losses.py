"""The losses of learned drafters, as defined in their papers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_ELEMENTS = 400_000
"""Number of logits per block on a CPU: about 1.6 MB in float32, which fits into the second-level cache of a core."""

BLOCK_ELEMENTS_ELSEWHERE = 1 << 26
"""Number of logits per block on an accelerator, where the overhead of a call outweighs the work on a smaller block."""


@dataclass(frozen=True)
class Part:
    """Contribution of one head, or of one step of drafting, to the loss.

    Args:
      loss: sum over positions, a scalar with gradients.
      num_places: number of positions with a token to draft, including tokens outside the draft vocabulary.
      num_right: number of these positions at which the most likely token is that of the target (or of the text).
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
    """Return summed cross entropies against the target's distribution, one part per head or step.

    Args:
      states: (M, H), input of the output layer, for the positions of all heads or steps one after the other.
      weight: (V_d, H), the output layer.
      target_logits: (N, V_d), logits of the target.
      rows: int64 (M,), row of ``target_logits`` for every position.
      weights: (M,), weight of every position; 0 if it does not count.
      counts: numbers of positions of every head or step, with the sum M.
      variation: share of total variation in the loss; the rest is cross entropy.
    """
    losses, is_right = DistilledOutput.apply(states, weight, target_logits, rows, variation)  # type: ignore[no-untyped-call]
    kept = (losses * weights.to(losses.dtype)).split(list(counts))
    right = (is_right & (weights > 0)).split(list(counts))
    return [Part(loss.sum(), len(loss), int(hits.sum())) for loss, hits in zip(kept, right, strict=True)]


def hard(logits: Tensor, labels: Tensor) -> Part:
    """Return the summed cross entropy against the tokens of the text.

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
    """Return smooth L1 between predicted and true features, (M, H) -> scalar: mean over H, and sum over positions.

    Source: EAGLE (Li et al. 2024, arXiv:2401.15077).
    """
    wide = outputs.to(outputs.dtype if outputs.element_size() == 8 else torch.float32)
    return F.smooth_l1_loss(wide, features.to(wide.dtype), reduction="none").mean(-1).sum()


# -- output layer and soft cross entropy in one ------------------------------------------------------------------------


class DistilledOutput(torch.autograd.Function):
    """Cross entropy of ``states @ weight.T`` against distributions, per position, with the gradient computed in
    forward.

    With l = states @ weight.T, q = softmax(l) and p = softmax(target_logits), the loss is log sum exp(l) - p . l, and
    its gradient with respect to l is q - p. A share of the loss may be total variation, sum |q - p| / 2, with the
    gradient q (s - s . q) / 2 for s = sign(q - p). The upstream gradient is one number per position, so backward can
    multiply by it.
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, target_logits: Tensor, places: Tensor, variation: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Compute the losses, and keep the gradient for `backward`.

        Args:
          states: (M, H).
          weight: (V_d, H).
          target_logits: (N, V_d), logits of the distributions.
          places: int64 (M,), row of ``target_logits`` for every position.
          variation: share of total variation.
        Returns: losses (M,) in float32 or wider; bool (M,), True where the most likely token is the distribution's.
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
            logits[block] = own.sub_(target)  # the buffer of logits now contains the gradient
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
    """Return the total variation of distributions (M, V_d), and its gradient for the logits of ``own``: (M,), (M,
    V_d)."""
    apart = own - target
    sign = apart.sign()
    gradient = 0.5 * own * (sign - torch.linalg.vecdot(sign, own)[:, None])
    return apart.abs_().sum(-1) / 2, gradient
