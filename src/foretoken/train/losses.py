"""The losses of learned drafters, each as its paper has it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.train.output import DistilledOutput


@dataclass(frozen=True)
class Part:
    """What one head, or one step of drafting, adds to the loss.

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
    law: Tensor,
    rows: Tensor,
    weights: Tensor,
    counts: Seq[int],
    variation: float = 0.0,
) -> list[Part]:
    """Soft cross entropy against the target's law, of several heads or steps one after the other, summed.

    Args:
      states: (M, H), what the output layer reads.
      weight: (V_d, H), the output layer.
      law: (N, V_d), logits of the target.
      rows: int64 (M,), the row of the law for each place.
      weights: (M,), 0 at places that do not count.
      counts: how many places every head or step has; M together.
      variation: share of total variation in the loss; the rest is cross entropy.
    """
    losses, is_right = DistilledOutput.apply(states, weight, law, rows, variation)  # type: ignore[no-untyped-call]
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
