"""Acceptance: which drafted tokens stay, and which token the target adds. Pure functions.

    rule        drafts                                          exactness
    match       any tree                                        lossless; equal tokens under keyed noise
    rejection   chain or tree sampled from a known distribution          lossless in distribution
    block       chain sampled from a known distribution                  lossless in distribution, accepts more
    typical     any tree                                        lossy: likely tokens become likelier

In docstrings p is the target's distribution and q the drafter's, both at one node. A rule reads the distributions of
the nodes that it visits and of no others. All uniforms lie in [0, 1) and all tests are strict (``u * q < p``), so a
token outside the target's support is never emitted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from foredraft.config.acceptance import TypicalLimits
from foredraft.errors import ProbabilityError, ShapeError, TreeError
from foredraft.sampling.noise import Purpose, stream_key, uniform
from foredraft.tree import DraftTree

TargetProbs = Callable[[int], Tensor] | Tensor
"""The target's distribution per node: a function node -> (V,), or a tensor (N, V)."""


@dataclass(frozen=True)
class Verdict:
    """The target's decision on a draft.

    Args:
      path: accepted nodes, root first.
      next_token: the target's own token after them: the bonus, or the recovered token after a rejection. -1
        where the target's probabilities are no distribution (NaN, or no token possible).
    """

    path: tuple[int, ...]
    next_token: int

    @property
    def num_accepted(self) -> int:
        return len(self.path) - 1


class VerifyNoise(Protocol):
    """Randomness of `rejection` and `block`, independent of the noise that drew the draft.

    ``depth`` is that of the node whose successor is at stake, 0 for the root. Different arguments, and the
    two methods at equal arguments, give independent numbers.
    """

    def uniform(self, depth: int, sibling: int) -> float:
        """A uniform in [0, 1) for the ``sibling``-th child of the visited node at ``depth``."""
        ...

    def draw(self, depth: int, probs: Tensor) -> int:
        """A token from the distribution ``probs`` (V,), for the successor of the visited node at ``depth``."""
        ...


def match(tree: DraftTree, choose_at: Callable[[int], int]) -> Verdict:
    """Follow the target's own tokens through the tree.

    Source: sample-and-match, folklore; SpecInfer's naive sampling (Miao et al. 2023, arXiv:2305.09781).

    Args:
      tree: any draft; its probabilities are not looked at.
      choose_at: the target's token after a node. Called once for every visited node and for no other.

    Exactness: lossless for any draft that was made without looking at the choices; equal to plain decoding
    token by token when the choice at a node depends on nothing but the tokens before it.
    Randomness: that of ``choose_at``.
    """
    path = [0]
    while True:
        token = choose_at(path[-1])
        child = tree.child(path[-1], token)
        if child is None:
            return Verdict(tuple(path), token)
        path.append(child)


def walk(tree: DraftTree) -> Generator[int, int, Verdict]:
    """`match` one node at a time, so that many trees can be walked in step.

    Yields a visited node, is sent the target's token there, and returns the verdict.
    """
    path = [0]
    while True:
        token = yield path[-1]
        child = tree.child(path[-1], token)
        if child is None:
            return Verdict(tuple(path), token)
        path.append(child)


def rejection(tree: DraftTree, target_probs: TargetProbs, noise: VerifyNoise) -> Verdict:
    """Accept a drafted token x with probability min(1, p(x) / q(x)), else draw from the residual.

    Source: speculative sampling (Leviathan et al. 2022, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318)
    on chains; recursive rejection without replacement (Jeon et al. 2024, arXiv:2402.14160) on trees: after a
    rejected sibling p becomes its residual and q loses that sibling. A tree without ``probs`` is a
    deterministic draft, every sibling a point mass; trying them one by one is then the same distribution as one draw
    from p that is matched.

    Args:
      tree: a draft whose children of node i were drawn in order, without replacement, from ``probs[i]``
        (float32 or float64, summing to one), none of them dropped for its value.
      target_probs: the processed distribution per node, (V,) each.
      noise: randomness that the drafter has not seen.

    Raises: ProbabilityError when a drafted token has q(x) = 0; ShapeError when p and q differ in size.
    Exactness: lossless in distribution; ``match`` is the rule that also keeps the tokens.
    Randomness: one uniform per tested sibling, one draw per call.
    """
    law_at = laws_of(tree, target_probs)
    if tree.probs is None:
        return match(tree, lambda node: noise.draw(tree.depths[node], law_at(node)))
    path = [0]
    while True:
        child, law = _descend(tree, path[-1], law_at(path[-1]), noise)
        if child is None:
            return Verdict(tuple(path), noise.draw(tree.depths[path[-1]], law))
        path.append(child)


def block(tree: DraftTree, target_probs: TargetProbs, noise: VerifyNoise) -> Verdict:
    """Accept the longest prefix whose own test passes, whatever became of the shorter ones.

    Source: block verification (Sun et al. 2024, arXiv:2403.10444, algorithm 2).

    Args:
      tree: a chain whose token i + 1 was drawn from ``probs[i]``; a chain without ``probs`` is a
        deterministic draft, for which the rule is `rejection`.
      target_probs: the processed distribution per node, (V,) each; all nodes are visited.
      noise: randomness that the drafter has not seen.

    Raises: TreeError for anything but a chain; ProbabilityError when a drafted token has q(x) = 0.
    Exactness: lossless in distribution; in expectation no rule for chains accepts more.
    Randomness: at most one uniform per drafted token, one draw per call.
    """
    if not tree.is_chain:
        raise TreeError(f"block verification takes chains, not parents {tree.parents}; use match or rejection")
    if tree.probs is None:
        return rejection(tree, target_probs, noise)
    laws = laws_of(tree, target_probs)
    weights, thresholds = block_thresholds(tree, laws)
    last = len(thresholds) - 1
    while last > 0 and not noise.uniform(last - 1, 0) < thresholds[last]:
        last -= 1
    law = laws(last)
    if last < tree.num_draft_tokens:
        law = residual(law, tree.probs[last], weights[last])
    return Verdict(tuple(range(last + 1)), noise.draw(last, law))


def block_thresholds(tree: DraftTree, law_at: Callable[[int], Tensor]) -> tuple[list[float], list[float]]:
    """Weights w_i and acceptance thresholds h_i of the prefixes of a chain; entry 0 stands for the empty one.

    w_0 = 1, w_i = min(1, w_{i-1} p(x_i) / q(x_i)); h_i = S_i / (S_i + 1 - w_i) with S_i the total of
    max(w_i p - q, 0) at node i, and h_K = w_K. Both lists end before the first weight of zero, since every
    later threshold is zero too.
    """
    assert tree.probs is not None
    weights, thresholds = [1.0], [1.0]
    for node, token in enumerate(tree.tokens[1:], 1):
        draft_prob = _draft_prob(tree.probs[node - 1], token)
        weight = min(weights[-1] * float(law_at(node - 1)[token]) / draft_prob, 1.0)
        if not weight > 0.0:
            break
        threshold = weight
        if node < tree.num_draft_tokens:
            surplus = float(_surplus(law_at(node), tree.probs[node], weight).sum())
            rest = surplus + 1.0 - weight
            threshold = 1.0 if rest == 0.0 else surplus / rest
        weights.append(weight)
        thresholds.append(threshold)
    return weights, thresholds


def residual(target_probs: Tensor, draft_probs: Tensor, weight: float = 1.0) -> Tensor:
    """norm(max(weight * p - q, 0)): the distribution (V,) of the token after a rejection, float64.

    Where nothing is left, p equals q up to rounding and a rejection has no probability; the answer is p
    itself.

    Raises: ShapeError when p and q differ in size.
    """
    surplus = _surplus(target_probs, draft_probs, weight)
    total = float(surplus.sum())
    return surplus.mul_(1.0 / total) if total > 0.0 else target_probs.double()


def without(draft_probs: Tensor, token: int) -> Tensor:
    """q given that ``token`` has been drawn already: its entry zero, the others renormalised; float64.

    All zero when q was a point mass: nothing more can be drawn from it.
    """
    rest = draft_probs.to(torch.float64, copy=True)
    rest[token] = 0.0
    total = float(rest.sum())
    return rest.mul_(1.0 / total) if total > 0.0 else rest


def _descend(tree: DraftTree, node: int, law: Tensor, noise: VerifyNoise) -> tuple[int | None, Tensor]:
    """The accepted child of a node, or None and the distribution of the recovered or bonus token."""
    siblings = tree.children[node]
    if not siblings:
        return None, law
    assert tree.probs is not None
    draft = tree.probs[node]
    for index, child in enumerate(siblings):
        token = tree.tokens[child]
        draft_prob = _draft_prob(draft, token)
        if noise.uniform(tree.depths[node], index) * draft_prob < float(law[token]):
            return child, law
        law = residual(law, draft)
        if child != siblings[-1]:
            draft = without(draft, token)
    return None, law


def _draft_prob(draft: Tensor, token: int) -> float:
    """q(token), which is positive for a drawn token."""
    prob = float(draft[token])
    if not prob > 0.0:
        raise ProbabilityError(
            f"token {token} was drafted with probability {prob} under its own law; pass the law it was drawn "
            "from, after temperature, top-k, top-p and any restriction, or no law for a deterministic draft"
        )
    return prob


def _surplus(target_probs: Tensor, draft_probs: Tensor, weight: float) -> Tensor:
    """max(weight * p - q, 0), a fresh float64 tensor (V,)."""
    if target_probs.shape != draft_probs.shape:
        raise ShapeError(
            f"target law of shape {tuple(target_probs.shape)} and draft law of {tuple(draft_probs.shape)}: "
            "both must cover the target's vocabulary"
        )
    weighted = target_probs.double() if weight == 1.0 else target_probs.double().mul(weight)
    return (weighted - draft_probs.double()).relu_()


def laws_of(tree: DraftTree, target_probs: TargetProbs) -> Callable[[int], Tensor]:
    """The target's distributions by node, each fetched once, when its node is visited.

    Raises: ShapeError for a table of another number of nodes.
    """
    if not isinstance(target_probs, Tensor):
        return cache(target_probs)
    if target_probs.ndim != 2 or target_probs.shape[0] != len(tree):
        shape = tuple(target_probs.shape)
        raise ShapeError(f"target laws of shape {shape} for a tree of {len(tree)} nodes; want (N, V)")
    return target_probs.__getitem__


_ENTROPY_FLOOR = 1e-5
"""Added to probabilities inside of the logarithm, as published."""


def typical(tree: DraftTree, target_probs: TargetProbs, limits: TypicalLimits | None = None) -> Verdict:
    """The longest path on which every token is likely enough under the target, then the target's likeliest token.

    Source: Medusa (Cai et al. 2024, arXiv:2401.10774), typical acceptance, in the form that its code runs: a child x of
    a node with distribution p is taken if p(x) > min(threshold, alpha exp(-H(p))); among paths of equal length the one
    with the largest sum of log p stays; the token after it is the argmax. Deviation: paths are followed from parent to
    child, so that padding can never be accepted.

    Args:
      tree: any draft; its probabilities are not looked at.
      target_probs: the processed distribution per node, (V,) each: a function of the node, or (N, V).

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
    """min(threshold, alpha exp(-H)) of a distribution (V,), with H = -sum p log(p + 1e-5)."""
    probs = law.double()
    entropy = -float((probs * (probs + _ENTROPY_FLOOR).log()).sum())
    return min(limits.threshold, limits.alpha * math.exp(-entropy))


def _argmax(law: Tensor) -> int:
    """The likeliest token, of equal ones the lowest; -1 if there is none."""
    best = int(law.argmax())
    return best if math.isfinite(float(law[best])) else -1


_STRETCH = 256  # tokens summed at once when a distribution is inverted; about the square root of a vocabulary


class RejectionNoise:
    """Keyed noise for one step of one row: a pure function of (seed, step, position, purpose).

    Position alone is not enough: after a rejection the same position is drafted again.

    Args:
      seed: of the row.
      step: number of the step in its row.
      first_position: absolute position of the token after the pending one.
    """

    def __init__(self, seed: int, step: int, first_position: int) -> None:
        self._seed = seed
        self._step = step
        self._first_position = first_position

    def uniform(self, depth: int, sibling: int) -> float:
        return self._uniform(depth, Purpose.ACCEPT, sibling)

    def draw(self, depth: int, probs: Tensor) -> int:
        return inverse(probs, self._uniform(depth, Purpose.RESIDUAL))

    def _uniform(self, depth: int, purpose: Purpose, index: int = 0) -> float:
        return uniform(stream_key(self._seed, self._step, self._first_position + depth, purpose), index)


def inverse(probs: Tensor, uniform: float) -> int:
    """The token at the fraction ``uniform``, 0..1, of the mass of ``probs`` (V,); -1 where they hold NaN or no mass.

    Sums whole stretches of the vocabulary first, then looks inside one. (1, 0, 3) at 0.2 is 0, at 0.25 and above 2.
    """
    stretches = pad(probs.double(), (0, -len(probs) % _STRETCH)).view(-1, _STRETCH)
    ends = stretches.sum(1).cumsum(0)
    if not float(ends[-1]) > 0.0:
        return -1
    mark = uniform * float(ends[-1])
    stretch = _first_beyond(ends, mark)
    start = float(ends[stretch - 1]) if stretch else 0.0
    return stretch * _STRETCH + _first_beyond(stretches[stretch].cumsum(0), mark - start)


def _first_beyond(ends: Tensor, mark: float) -> int:
    """Index of the first running total above ``mark``; of the last that grew, where rounding left none above it."""
    index = int(torch.searchsorted(ends, mark, right=True))
    return index if index < len(ends) else int(torch.searchsorted(ends, float(ends[-1])))
