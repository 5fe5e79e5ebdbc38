"""Acceptance: which drafted tokens stay, and which token the target adds.

    rule        drafts                                             exactness
    match       any tree                                           lossless; the same tokens as plain decoding
    standard    tree, deterministic or drawn from known ``probs``  lossless in distribution (`rejection`)
    block       chain, deterministic or drawn from ``probs``       lossless in distribution, accepts more
    typical     any tree                                           lossy: likely tokens become likelier

`accept` applies a rule to the rows of a batch. The rules are pure functions of the draft, the target's distributions
and the noise. In docstrings p is the target's distribution and q the drafter's, both at one node. A rule reads only the
distributions of the nodes that it visits. Uniforms are in [0, 1) and comparisons are strict (``u * q < p``), so a token
outside the target's support is never emitted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from foredraft.config.acceptance import BLOCK, RULES, STANDARD, TYPICAL, TypicalLimits
from foredraft.devices import upload
from foredraft.errors import ShapeError, TreeError
from foredraft.model.nodes import Logits, NodeLogits
from foredraft.sampling.distribution import argmax, choose, choose_at, probs
from foredraft.sampling.noise import Purpose, stream_key, uniform
from foredraft.tree import DraftTree

if TYPE_CHECKING:
    from foredraft.engine.row import Row

Choices = list[tuple[int, ...]]
"""The target's own token after every node of every row; -1 for a node without a usable distribution."""

TargetProbs = Callable[[int], Tensor]
"""The target's distribution after a node: float64 (V,), as `foredraft.sampling.distribution.probs` returns it."""


@dataclass(frozen=True)
class Verdict:
    """The target's decision on a draft.

    Args:
      path: accepted nodes, root first.
      next_token: the target's own token after ``path``. The next token is the bonus, or the recovered token after a
        rejection. The next token is -1 if the target's probabilities are not a distribution (NaN, or no token
        possible).
    """

    path: tuple[int, ...]
    next_token: int

    @property
    def num_accepted(self) -> int:
        return len(self.path) - 1


# -- the rows of a batch -----------------------------------------------------------------------------------------------


def accept(
    rule: str,
    rows: Sequence[Row],
    trees: Sequence[DraftTree],
    logits: Logits,
    choices: Choices | None = None,
    limits: TypicalLimits | None = None,
) -> list[Verdict]:
    """Apply an acceptance rule to the draft of every row. Greedy rows are matched under every rule.

    Args:
      rule: a name of `foredraft.config.acceptance.RULES`.
      logits: logits of the nodes of these rows; further rows are ignored.
      choices: result of an earlier call of `choose_all`; None to make the choices now.
      limits: thresholds of the rule "typical".

    Returns: one verdict per row. A row without a usable distribution has ``next_token`` -1.
    """
    matched: Sequence[int] = range(len(rows))
    if not RULES[rule].keeps_tokens:
        matched = [i for i, row in enumerate(rows) if row.sampler.is_greedy]
    if choices is None and len(matched) == len(rows) and logits.device.type != "cpu":
        choices = choose_all(rows, trees, logits)  # one round trip instead of one per level
    drawn: dict[int, Verdict] = {}
    if choices is None and len(matched) > 1:
        sampled = [i for i in matched if not rows[i].sampler.is_argmax]
        drawn = _match_together(rows, trees, logits, sampled)
    verdicts = []
    for i, (row, tree) in enumerate(zip(rows, trees, strict=True)):
        if i not in matched:
            verdicts.append(_accept_sampled(rule, row, tree, logits[i], limits))
        elif choices is not None:
            verdicts.append(match(tree, choices[i].__getitem__))
        else:
            verdicts.append(drawn.get(i) or _match_row(row, tree, logits[i]))
    return verdicts


def choose_all(rows: Sequence[Row], trees: Sequence[DraftTree], logits: Logits) -> Choices:
    """Return, for every node of every row, the token that decoding would emit after it, in one call for all rows."""
    starts = (listed := _listed(logits)).starts
    best: list[int] = []
    if any(row.sampler.is_argmax for row in rows):
        best = argmax(listed.values[: starts[len(rows)]]).tolist()
    sampled = [i for i, row in enumerate(rows) if not row.sampler.is_argmax]
    paths = [(i, trees[i].path(node)) for i in sampled for node in range(len(trees[i]))]
    drawn = iter(_choose_together(rows, trees, listed, paths) if paths else ())
    return [
        tuple(best[starts[i] : starts[i] + len(tree)] if row.sampler.is_argmax else [next(drawn) for _ in tree.tokens])
        for i, (row, tree) in enumerate(zip(rows, trees, strict=True))
    ]


def _choose_together(
    rows: Sequence[Row], trees: Sequence[DraftTree], logits: Logits, paths: Sequence[tuple[int, Sequence[int]]]
) -> list[int]:
    """Return the target's own token after the last node of each path (row index, nodes), in one call."""
    listed = _listed(logits)
    places = [listed.starts[i] + path[-1] for i, path in paths]
    if places == list(range(len(places))):  # without a copy
        picked = listed.values[: len(places)]
    elif listed.device.type == "cpu":
        picked = torch.stack([listed.values[place] for place in places])  # faster than an index
    else:
        picked = listed.values[upload([torch.tensor(places, device="cpu")], listed.device)[0]]
    drafted = [[trees[i].tokens[node] for node in path[1:]] for i, path in paths]
    positions = [len(rows[i].token_ids) + len(path) - 1 for i, path in paths]
    tokens: list[int] = choose(picked, [rows[i].sampler for i, _ in paths], drafted, positions).tolist()
    return tokens


def _listed(logits: Logits) -> NodeLogits:
    """Return the logits of all nodes as one list. A table (B, N, V) is reshaped without a copy, padding included."""
    if isinstance(logits, NodeLogits):
        return logits
    return NodeLogits(logits.flatten(0, 1), [logits.shape[1]] * logits.shape[0])


def _accept_sampled(rule: str, row: Row, tree: DraftTree, logits: Tensor, limits: TypicalLimits | None) -> Verdict:
    """Apply a rule other than `match` to a row that samples; ``logits`` (N, V) are the logits of the row's N nodes."""

    def target_probs(node: int) -> Tensor:
        return probs(logits[node : node + 1], [row.sampler], [tree.path_tokens(node)])[0]

    if rule == TYPICAL.name:
        return typical(tree, target_probs, limits)
    return BY_DRAFT[rule](tree, target_probs, RejectionNoise(row.seed, row.num_steps, len(row.token_ids)))


# -- match: the default ------------------------------------------------------------------------------------------------


def match(tree: DraftTree, choose_at: Callable[[int], int]) -> Verdict:
    """Follow the target's own tokens through the tree.

    Source: sample-and-match, folklore; SpecInfer's naive sampling (Miao et al. 2023, arXiv:2305.09781).

    Args:
      tree: any draft; its probabilities are not read.
      choose_at: function that returns the target's token after a node. ``choose_at`` is called once for every visited
        node and for no other.

    Exactness: lossless for any draft that was made without looking at the choices. Equal to plain decoding token by
    token if the choice at a node depends only on the tokens before it.
    Randomness: only the randomness of ``choose_at``.
    """
    path = [0]
    while True:
        token = choose_at(path[-1])
        child = tree.child(path[-1], token)
        if child is None:
            return Verdict(tuple(path), token)
        path.append(child)


def _match_row(row: Row, tree: DraftTree, logits: Tensor) -> Verdict:
    """`match` the tree of one row. Only the logits (N, V) of visited nodes are read."""
    sampler, length = row.sampler, len(row.token_ids)
    drafted: list[int] = []  # tokens chosen so far, all of them followed in the draft

    def choose_next(node: int) -> int:
        drafted.append(choose_at(logits, node, sampler, drafted, length + len(drafted)))
        return drafted[-1]

    return match(tree, choose_next)


def _match_together(
    rows: Sequence[Row], trees: Sequence[DraftTree], logits: Logits, numbers: Sequence[int]
) -> dict[int, Verdict]:
    """`match` the trees of several rows level by level: one call per level draws the tokens of all rows."""
    paths = {i: [0] for i in numbers}
    verdicts = {}
    while paths:
        tokens = _choose_together(rows, trees, logits, list(paths.items()))
        for i, token in zip(list(paths), tokens, strict=True):
            child = trees[i].child(paths[i][-1], token)
            if child is None:
                verdicts[i] = Verdict(tuple(paths.pop(i)), token)
            else:
                paths[i].append(child)
    return verdicts


# -- standard and block: drafts with the distribution they were sampled from -------------------------------------------


class VerifyNoise(Protocol):
    """Randomness of `rejection` and `block`, independent of the noise that drew the draft.

    ``depth`` is the depth of the node whose successor is decided, 0 for the root. Numbers for different arguments are
    independent, and so are the numbers of the two methods for equal arguments.
    """

    def uniform(self, depth: int, sibling: int) -> float:
        """Return a uniform in [0, 1) for the ``sibling``-th child of the visited node at ``depth``."""
        ...

    def draw(self, depth: int, probs: Tensor) -> int:
        """Draw a token from the distribution ``probs`` (V,) as successor of the visited node at ``depth``."""
        ...


def rejection(tree: DraftTree, target_probs: TargetProbs, noise: VerifyNoise) -> Verdict:
    """Accept a drafted token x with probability min(1, p(x) / q(x)), else draw from the residual.

    Source: speculative sampling (Leviathan et al. 2022, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318) on
      chains; recursive rejection without replacement (Jeon et al. 2024, arXiv:2402.14160) on trees. After a rejected
      sibling, p becomes its residual and q loses that sibling. A tree without ``probs`` is a deterministic draft, in
      which every sibling is a point mass. One test per sibling then has the same distribution as matching a single draw
      from p against all siblings.

    Args:
      tree: a draft in which the children of node i were drawn in order, without replacement, from ``probs[i]`` (float32
        or float64, summing to one). No child may have been dropped because of its token.
      target_probs: the processed distribution after a node, (V,).
      noise: randomness that the drafter has not seen.

    Raises: TreeError when a drafted token has q(x) = 0; ShapeError when p and q differ in size.
    Exactness: lossless in distribution. Only the rule ``match`` also keeps the tokens of plain decoding.
    Randomness: one uniform per tested sibling, one draw per call.
    """
    if tree.probs is None:
        return match(tree, lambda node: noise.draw(tree.depths[node], target_probs(node)))
    path: list[int] = []
    child: int | None = 0
    while child is not None:
        path.append(child)
        child, left = _test_children(tree, child, target_probs(child), noise)
    return Verdict(tuple(path), noise.draw(len(path) - 1, left))


def _test_children(tree: DraftTree, node: int, target: Tensor, noise: VerifyNoise) -> tuple[int | None, Tensor]:
    """Return the accepted child of a node, or None, and the distribution of the recovered or bonus token."""
    siblings = tree.children[node]
    if not siblings:
        return None, target
    assert tree.probs is not None
    draft = tree.probs[node]
    for index, child in enumerate(siblings):
        token = tree.tokens[child]
        if noise.uniform(tree.depths[node], index) * _draft_prob(draft, token) < float(target[token]):
            return child, target
        target = residual(target, draft)
        if child != siblings[-1]:
            draft = without(draft, token)
    return None, target


def block(tree: DraftTree, target_probs: TargetProbs, noise: VerifyNoise) -> Verdict:
    """Accept the longest prefix that passes its own test, even if shorter prefixes fail theirs.

    Source: block verification (Sun et al. 2024, arXiv:2403.10444, algorithm 2).

    Args:
      tree: a chain whose token i + 1 was drawn from ``probs[i]``. A chain without ``probs`` is a deterministic draft,
        for which the rule is `rejection`.
      target_probs: the processed distribution after a node, (V,); all nodes are visited.
      noise: randomness that the drafter has not seen.

    Raises: TreeError for a draft that is not a chain, and when a drafted token has q(x) = 0.
    Exactness: lossless in distribution; in expectation no rule for chains accepts more.
    Randomness: at most one uniform per drafted token, one draw per call.
    """
    if not tree.is_chain:
        raise TreeError(f"block verification takes chains, not parents {tree.parents}; use match or rejection")
    if tree.probs is None:
        return rejection(tree, target_probs, noise)
    target_probs = cache(target_probs)
    weights, thresholds = block_thresholds(tree, target_probs)
    last = len(thresholds) - 1
    while last > 0 and not noise.uniform(last - 1, 0) < thresholds[last]:
        last -= 1
    left = target_probs(last)
    if last < tree.num_draft_tokens:
        left = residual(left, tree.probs[last], weights[last])
    return Verdict(tuple(range(last + 1)), noise.draw(last, left))


BY_DRAFT = {STANDARD.name: rejection, BLOCK.name: block}
"""Rules that read the distribution of the draft, by name."""


def block_thresholds(tree: DraftTree, target_probs: TargetProbs) -> tuple[list[float], list[float]]:
    """Return weights w_i and acceptance thresholds h_i of the prefixes of a chain. Entry 0 belongs to the empty prefix.

    w_0 = 1, w_i = min(1, w_{i-1} p(x_i) / q(x_i)); h_i = S_i / (S_i + 1 - w_i) with S_i the total of max(w_i p - q, 0)
    at node i, and h_K = w_K. Both lists end before the first weight that is zero, because every later threshold is zero
    too.
    """
    assert tree.probs is not None
    weights, thresholds = [1.0], [1.0]
    for node, token in enumerate(tree.tokens[1:], 1):
        draft_prob = _draft_prob(tree.probs[node - 1], token)
        weight = min(weights[-1] * float(target_probs(node - 1)[token]) / draft_prob, 1.0)
        if not weight > 0.0:
            break
        threshold = weight
        if node < tree.num_draft_tokens:
            surplus = float(_surplus(target_probs(node), tree.probs[node], weight).sum())
            rest = surplus + 1.0 - weight
            threshold = 1.0 if rest == 0.0 else surplus / rest
        weights.append(weight)
        thresholds.append(threshold)
    return weights, thresholds


def residual(target_probs: Tensor, draft_probs: Tensor, weight: float = 1.0) -> Tensor:
    """Return norm(max(weight * p - q, 0)): the distribution (V,) of the token after a rejection, float64.

    If max(weight * p - q, 0) is zero everywhere, p equals q up to rounding and a rejection cannot happen. The function
    then returns p itself.

    Raises: ShapeError when p and q differ in size.
    """
    surplus = _surplus(target_probs, draft_probs, weight)
    total = float(surplus.sum())
    return surplus.mul_(1.0 / total) if total > 0.0 else target_probs.double()


def _surplus(target_probs: Tensor, draft_probs: Tensor, weight: float) -> Tensor:
    """Return max(weight * p - q, 0), a fresh float64 tensor (V,)."""
    if target_probs.shape != draft_probs.shape:
        raise ShapeError(
            f"target probabilities of shape {tuple(target_probs.shape)} and draft probabilities of "
            f"{tuple(draft_probs.shape)}: both must cover the target's vocabulary"
        )
    weighted = target_probs.double() if weight == 1.0 else target_probs.double().mul(weight)
    return (weighted - draft_probs.double()).relu_()


def without(draft_probs: Tensor, token: int) -> Tensor:
    """Return q under the condition that ``token`` has been drawn: the entry of ``token`` is zero, and the others are
    renormalised; float64.

    The result is all zero if q was a point mass, since nothing more can be drawn from it.
    """
    rest = draft_probs.to(torch.float64, copy=True)
    rest[token] = 0.0
    total = float(rest.sum())
    return rest.mul_(1.0 / total) if total > 0.0 else rest


def _draft_prob(draft_probs: Tensor, token: int) -> float:
    """Return q(token), which is positive for a drawn token."""
    prob = float(draft_probs[token])
    if not prob > 0.0:
        raise TreeError(
            f"token {token} was drafted with probability {prob} under its own distribution; pass the distribution it "
            "was drawn from, after temperature, top-k, top-p and any restriction, or none for a deterministic draft"
        )
    return prob


# -- typical: lossy ----------------------------------------------------------------------------------------------------

_ENTROPY_FLOOR = 1e-5
"""Constant added to probabilities inside the logarithm, as published."""


def typical(tree: DraftTree, target_probs: TargetProbs, limits: TypicalLimits | None = None) -> Verdict:
    """Accept the longest path of tokens that are likely enough under the target, and then add the target's most likely
    token.

    Source: Medusa (Cai et al. 2024, arXiv:2401.10774), typical acceptance, as implemented in its code. A child x of a
    node with distribution p is accepted if p(x) > min(threshold, alpha exp(-H(p))). Among paths of equal length the one
    with the largest sum of log p wins. The token after it is the argmax. Deviation: paths are followed from parent to
    child, so padding can never be accepted.

    Args:
      tree: any draft; its probabilities are not read.
      target_probs: the processed distribution after a node, (V,).

    Exactness: lossy. Likely tokens become more likely, and without a draft nothing is ever sampled. Greedy rows keep
    their tokens, since `accept` decodes them by `match`.
    Randomness: none. The same prompt always gives the same output.
    """
    limits = limits or TypicalLimits()
    target_probs = cache(target_probs)
    reached: dict[int, tuple[int, float]] = {0: (0, 0.0)}  # accepted node -> its depth and sum of log p
    best = 0
    for node, children in enumerate(tree.children):
        if node not in reached or not children:
            continue
        target = target_probs(node)
        bound = threshold(target, limits)
        depth, score = reached[node]
        for child in children:
            probability = float(target[tree.tokens[child]])
            if probability > bound:
                reached[child] = (depth + 1, score + math.log(probability))
                best = max(best, child, key=lambda one: (*reached[one], -one))
    last = target_probs(best)
    likeliest = int(last.argmax())
    return Verdict(tree.path(best), likeliest if math.isfinite(float(last[likeliest])) else -1)


def threshold(target_probs: Tensor, limits: TypicalLimits) -> float:
    """Return min(threshold, alpha exp(-H)) of a distribution (V,), with H = -sum p log(p + 1e-5)."""
    target = target_probs.double()
    entropy = -float((target * (target + _ENTROPY_FLOOR).log()).sum())
    return min(limits.threshold, limits.alpha * math.exp(-entropy))


# -- keyed noise -------------------------------------------------------------------------------------------------------

_STRETCH = 256  # tokens summed at once when a distribution is inverted; about the square root of a vocabulary


class RejectionNoise:
    """Keyed noise for one step of one row: a pure function of (seed, step, position, purpose).

    Position alone is not enough, because the same position is drafted again after a rejection.

    Args:
      seed: seed of the row.
      step: index of the decode step in the row.
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
    """Return the token at which the running sum of ``probs`` (V,) passes the fraction ``uniform`` of their total.

    The result is -1 for NaN or a total of zero. Large blocks of the vocabulary are summed first; the search continues
    inside one of them. For (1, 0, 3), 0.2 gives token 0; 0.25 and more give token 2.
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
    """Return the index of the first running total above ``mark``; if rounding leaves none, of the last increase."""
    index = int(torch.searchsorted(ends, mark, right=True))
    return index if index < len(ends) else int(torch.searchsorted(ends, float(ends[-1])))
