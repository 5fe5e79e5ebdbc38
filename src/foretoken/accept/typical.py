"""Typical acceptance: drafted tokens stay where the target finds them likely enough. It changes the law of the text."""

from __future__ import annotations

import math

from torch import Tensor

from foretoken.accept.rules import TargetProbs, Verdict, laws_of
from foretoken.config.acceptance import TypicalLimits
from foretoken.tree import DraftTree

_ENTROPY_FLOOR = 1e-5
"""Added to probabilities inside of the logarithm, as published."""


def typical(tree: DraftTree, target_probs: TargetProbs, limits: TypicalLimits | None = None) -> Verdict:
    """The longest path on which every token is likely enough under the target, then the target's likeliest token.

    Source: Medusa (Cai et al. 2024, arXiv:2401.10774), typical acceptance, in the form that its code runs: a child x of
    a node with law p is taken if p(x) > min(threshold, alpha exp(-H(p))); among paths of equal length the one with the
    largest sum of log p stays; the token after it is the argmax. Deviation: paths are followed from parent to child,
    so that padding can never be accepted.

    Args:
      tree: any draft; its probabilities are not looked at.
      target_probs: the processed law per node, (V,) each: a function of the node, or (N, V).

    Exactness: lossy: likely tokens become more likely, and without a draft nothing is ever sampled. Greedy rows keep
    their tokens: the engine decodes them by `match`.
    Randomness: none. The same prompt always gives the same text.
    """
    limits = limits or TypicalLimits()
    law_at = laws_of(tree, target_probs)
    reached: dict[int, tuple[int, float]] = {0: (0, 0.0)}  # by accepted node, its depth and the sum of log p
    best = 0
    for node, children in enumerate(tree.children):
        if node not in reached or not children:
            continue
        law = law_at(node)
        bound = threshold(law, limits)
        depth, score = reached[node]
        for child in children:
            probability = float(law[tree.tokens[child]])
            if probability > bound:
                reached[child] = (depth + 1, score + math.log(probability))
                best = max(best, child, key=lambda one: (*reached[one], -one))
    return Verdict(tree.path(best), _argmax(law_at(best)))


def threshold(law: Tensor, limits: TypicalLimits) -> float:
    """min(threshold, alpha exp(-H)) of a law (V,), with H = -sum p log(p + 1e-5)."""
    probs = law.double()
    entropy = -float((probs * (probs + _ENTROPY_FLOOR).log()).sum())
    return min(limits.threshold, limits.alpha * math.exp(-entropy))


def _argmax(law: Tensor) -> int:
    """The likeliest token, of equal ones the lowest; -1 where the law is none."""
    best = int(law.argmax())
    return best if math.isfinite(float(law[best])) else -1
