"""Drafts that grow level by level, for any source of logits: a smaller model, the target, or heads."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from math import exp, inf, log
from typing import Protocol

import torch

from foredraft.config.acceptance import RULES
from foredraft.drafters.parts.candidates import Candidates, Path, Scored
from foredraft.engine.drafter import DraftSize, StepResult
from foredraft.engine.row import Row
from foredraft.heads.vocabulary import DraftVocabulary
from foredraft.methods.lengths import NOTHING, LengthPolicy
from foredraft.methods.rank_tree import RankTree
from foredraft.sampling import noise
from foredraft.sampling.processors import Sampler
from foredraft.tree import DraftPlan, DraftTree

SHARPNESS = 1.5
"""First exponent of the drafter's distribution, which is then normalised, for estimating acceptance by a greedy target.

A greedy target takes its likeliest token however flat its distribution is. Therefore the first choice of a good drafter
is right more often than its probability, and the first choice of a poor drafter less often. Outcomes adjust the
exponent.
"""
RATE = 0.05  # change of the sharpness per unit of difference between an outcome and its estimate
FLATTEST, SHARPEST = 0.5, 4.0


@dataclass(eq=False)
class GrowingDraft:
    """Tree of one row while it grows.

    Args:
      row: row of the draft; node 0 is its pending token.
      cap: largest number of levels below the root; 0 for no draft.
      plan: plan of the length policy; None without a policy.
      max_nodes: largest number of nodes, root included.
      num_branches: largest number of children per node.
      beam_width: largest number of nodes per level that are expanded.
      least: lowest score of a node that is expanded.
      shape: static tree to fill; None for a dynamic tree.

    Attributes:
      tokens, parents, depths: token, parent and depth of every node.
      scores: sum of the scores along each node's path; higher is likelier, and never above the parent's score.
      probs: for some nodes, the distribution (V,) that their children were drawn from, if the acceptance rule needs
        it.
      frontier: nodes to expand next, the best one first.
      spots: for each node, the node of the static tree that it fills.
      child_of: child node by parent and token.
      column_of: cache column of each node that was fed to a model, counted from the end of the row; see `FedNodes`.
    """

    row: Row
    cap: int
    max_nodes: int = sys.maxsize
    num_branches: int = 1
    beam_width: int = 1
    least: float = -inf
    shape: RankTree | None = None
    plan: DraftPlan | None = None
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    scores: list[float] = field(default_factory=lambda: [0.0])
    probs: dict[int, torch.Tensor] = field(default_factory=dict)
    frontier: list[int] = field(default_factory=lambda: [0])
    spots: list[int] = field(default_factory=lambda: [0])
    child_of: dict[tuple[int, int], int] = field(default_factory=dict)
    column_of: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tokens = [self.row.pending]

    @property
    def room(self) -> int:
        """Number of nodes that may be added."""
        return self.max_nodes - len(self.tokens)

    def width(self, node: int) -> int:
        """Return the largest number of children of a node."""
        return self.num_branches if self.shape is None else len(self.shape.children[self.spots[node]])

    def add(self, parent: int, token: int, score: float = 0.0) -> int:
        """Add a child with a score of its own, at most 0, and return its index."""
        self.child_of[parent, token] = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.scores.append(self.scores[parent] + score)
        return len(self.tokens) - 1

    def child(self, parent: int | None, token: int) -> int | None:
        """Return the child with this token, added if new; None if it would be too deep or the parent is None."""
        if parent is None or self.depths[parent] >= self.cap:
            return None
        node = self.child_of.get((parent, token))
        return self.add(parent, token) if node is None else node

    def add_path(self, tokens: Iterable[int], max_nodes: int = sys.maxsize) -> None:
        """Add a continuation of the root until the draft has ``max_nodes`` nodes; existing nodes are reused."""
        node: int | None = 0
        for token in tokens:
            if len(self.tokens) >= max_nodes and (node, token) not in self.child_of:
                return
            node = self.child(node, token)

    def fill(self, parent: int, tokens: Iterable[int]) -> None:
        """Add the children of a node of the static tree, best first. Children that have children themselves join the
        frontier.
        """
        if self.shape is not None:
            for spot, token in zip(self.shape.children[self.spots[parent]], tokens, strict=False):
                node = self.add(parent, token)
                self.spots.append(spot)
                if self.shape.children[spot]:
                    self.frontier.append(node)

    def take_frontier(self) -> list[int]:
        """Return the nodes to expand, and start an empty frontier for their children."""
        frontier, self.frontier = self.frontier, []
        return frontier

    def path(self, node: int) -> list[int]:
        """Return the nodes on the path to ``node``, root excluded."""
        nodes = []
        while node > 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def path_tokens(self, node: int) -> tuple[int, ...]:
        return tuple(self.tokens[i] for i in self.path(node))

    def columns_along(self, tokens: Iterable[int]) -> list[int]:
        """Return the cache columns, counted from the end of the row, of the fed nodes along a path of tokens from the
        root.
        """
        node, columns = 0, []
        for token in tokens:
            node = self.child_of.get((node, token), -1)
            if node not in self.column_of:
                break
            columns.append(self.column_of[node])
        return columns

    def can_gain(self, least_mass: float) -> bool:
        """Return whether children of the frontier could be among the best nodes, and have at least this total
        probability.

        A child's score is at most its parent's, and ties keep the earlier node. If the best score in the frontier does
        not exceed the last of the best nodes, no further child can be among them.
        """
        scores = [self.scores[node] for node in self.frontier]
        if sum(map(exp, scores)) < least_mass:
            return False
        ranked = sorted(self.scores[1:], reverse=True)
        return len(ranked) < self.max_nodes - 1 or self.max_nodes < 2 or max(scores) > ranked[self.max_nodes - 2]

    def best(self, max_nodes: int) -> list[int]:
        """Return the nodes with the highest scores in ascending order, root included; ties keep the earlier node.

        A node's score is at most its parent's, and parents come first, so the chosen nodes form a tree.
        """
        others = sorted(range(1, len(self.tokens)), key=self.scores.__getitem__, reverse=True)
        return [0, *sorted(others[: max_nodes - 1])]

    def tree(self, source: str, *, has_chances: bool = False, is_whole: bool = False) -> DraftTree:
        """Return the whole draft as a `DraftTree`.

        Args:
          source: name of the drafter.
          has_chances: True if the scores are log-probabilities that the paths are accepted.
          is_whole: True if the tree must not be cut.
        """
        table = None
        scores = tuple(map(exp, self.scores)) if has_chances else None
        if self.probs:
            blank = torch.zeros_like(next(iter(self.probs.values())))
            table = torch.stack([self.probs.get(node, blank) for node in range(max(self.probs) + 1)])
        return DraftTree(
            tuple(self.tokens), tuple(self.parents), table, scores, source, plan=self.plan, is_whole=is_whole
        )


def growing(drafts: Sequence[GrowingDraft]) -> list[GrowingDraft]:
    """Return the drafts that may have tokens, in the order of their slots."""
    return sorted((draft for draft in drafts if draft.cap > 0), key=lambda draft: draft.row.slot)


class Expander(Protocol):
    """Source of the logits after the nodes of growing drafts, which may store state per node, as node indices are
    stable.
    """

    def open(self, drafts: Sequence[GrowingDraft]) -> torch.Tensor:
        """Return logits (B, V) after the pending token of every row."""
        ...

    def expand(self, drafts: Sequence[GrowingDraft]) -> torch.Tensor:
        """Return logits (M, V) after all frontier nodes, draft by draft, each in the order of its frontier."""
        ...


class Growth:
    """Rules by which drafts grow. The rules decide which nodes get children, which children are kept, and which of
    these are expanded next.

    A drafter owns one `Growth` and passes it an `Expander`. Every level costs one call of the expander, for all rows
    together. The shape of a dynamic tree depends on the expander's logits. In a static tree only the tokens are
    unknown: the r-th child of a node is its r-th best successor.

    Args:
      target_vocab_size: width to which the drafter's logits are cut or padded.
      policy: length policy of dynamic trees, which decides before every level whether to go on.
      num_branches: number of children per node; 1 drafts chains.
      beam_width: number of nodes that are expanded per level; ``num_branches`` by default.
      reranks: True to keep all children while the draft grows under "match", and to choose the best ``max_nodes`` of
        them at the end. If False, only the expanded nodes are kept.
      tree: static tree. The most valuable nodes that fit the draft size of a row are filled.
      max_depth: largest number of levels of a static tree below the root; None for all levels.
      sample_method: "probabilistic" draws from the processed distribution of the drafter, "greedy" takes its likeliest
        tokens.
      acceptance: acceptance rule of the engine. Under "match" siblings are the Gumbel-top-k of the drafter's
        distribution with the target's noise, so the best one is the target's draw from that distribution. Under rules
        that need a distribution, siblings are drawn from a separate stream and stay in draw order. No sibling is
        dropped, and the tree contains the distribution of the siblings. A dynamic tree expands only first draws. Under
        other rules siblings are the likeliest tokens.
      max_nodes: largest number of nodes of a draft, root included; None for no limit beyond depth and branches, or for
        the whole static tree.
      vocabulary: tokens of the columns of the drafter's logits, if they do not cover the target's vocabulary.
      least_mass: with reranking, the smallest total probability of the nodes to expand; a level below it costs more
        than it can gain. 0 for no minimum.
      sharpness: exponent of the drafter's distribution in acceptance estimates for a greedy target. If None, the
        exponent is fitted so that the first choices of drafts are right as often as estimated.

    Attributes:
      sharpness: current exponent.

    Source: beams of siblings as in SpecInfer (Miao et al. 2023, arXiv:2305.09781); reranking by the probability of the
    path as in EAGLE-2 (Li et al. 2024, arXiv:2406.16858); static trees as in Medusa (Cai et al. 2024,
    arXiv:2401.10774); Gumbel-top-k (Kool et al. 2019, arXiv:1903.06059) for siblings. Deviation: if the target draws
    with the same noise, nodes are ranked by the shares of siblings under that noise.
    """

    def __init__(
        self,
        *,
        target_vocab_size: int,
        policy: LengthPolicy | None = None,
        num_branches: int = 1,
        beam_width: int | None = None,
        reranks: bool = False,
        tree: RankTree | None = None,
        max_depth: int | None = None,
        sample_method: str = "probabilistic",
        acceptance: str = "match",
        max_nodes: int | None = None,
        vocabulary: DraftVocabulary | None = None,
        least_mass: float = 0.0,
        sharpness: float | None = None,
    ) -> None:
        rule = RULES[acceptance]
        self.policy = policy or LengthPolicy(0)
        self.tree = tree
        self.takes_trees = True
        self.least_mass = least_mass
        self._learns = sharpness is None and reranks
        self._num_branches = num_branches
        self._beam_width = beam_width or num_branches
        self._reranks = reranks
        self._max_depth = max_depth
        self._max_nodes = max_nodes
        self._is_greedy = sample_method == "greedy" or not (rule.shares_noise or rule.needs_probs)
        self._needs_probs = rule.needs_probs and not self._is_greedy
        self._shares_noise = rule.shares_noise
        self._candidates = Candidates(target_vocab_size, vocabulary, is_greedy=self._is_greedy)
        self.sharpness = sharpness or SHARPNESS
        self._shapes: dict[tuple[int, int, bool], RankTree] = {}

    @property
    def columns(self) -> tuple[int, torch.Tensor | None]:
        """Number of logit columns to use, and their tokens; see `Candidates`."""
        return self._candidates.columns

    @property
    def drafts_chains(self) -> bool:
        """True if no draft ever branches."""
        return self.tree is None and (not self.takes_trees or self._num_branches == self._beam_width == 1)

    @property
    def is_unconditional(self) -> bool:
        """True if drafts depend only on the expander and the row's sampler: they are reranked, and no policy ends them
        early.
        """
        return self._reranks and self._shares_noise and self.policy.looks_at == NOTHING

    def ranks_by_scores(self, sampler: Sampler) -> bool:
        """Return whether tokens are ranked by logits, or by noise and the result of temperature, top-k, top-p and
        min-p alone.
        """
        if sampler.is_processed:
            return False
        return sampler.is_greedy or (sampler.warper.has_shortcut and not self._is_greedy)

    # -- drafts ------------------------------------------------------------------------------------------------

    def begin(self, row: Row, budget: DraftSize, reach: int = sys.maxsize) -> GrowingDraft:
        """Return an empty draft for one row. The depth limit is the smallest of those of the policy, the draft size and
        the drafter (``reach``).
        """
        allowed = DraftSize.of(budget)
        if self.tree is not None:
            shape = self._shape(self.tree, allowed, reach)
            return GrowingDraft(row, shape.depth, shape=shape)
        plan = DraftPlan(self.policy.longest(row))
        return GrowingDraft(
            row,
            cap=min(plan.gamma, allowed.depth, reach),
            plan=plan,
            max_nodes=allowed.max_nodes(self._max_nodes),
            num_branches=allowed.width(self._num_branches) if self.takes_trees else 1,
            beam_width=allowed.width(self._beam_width) if self.takes_trees else 1,
            least=log(allowed.least) if self._reranks and allowed.least > 0.0 else -inf,
        )

    def _shape(self, tree: RankTree, budget: DraftSize, reach: int) -> RankTree:
        """Return the part of a static tree within the draft size."""
        depth = min(budget.depth, reach, tree.depth if self._max_depth is None else self._max_depth)
        key = min(depth, tree.depth), min(budget.max_nodes(self._max_nodes), len(tree))
        chains_only = budget.chains_only or not self.takes_trees
        if (*key, chains_only) not in self._shapes:
            self._shapes[*key, chains_only] = tree.within(DraftSize(*key, chains_only))
        return self._shapes[*key, chains_only]

    def use(self, tree: RankTree) -> None:
        """Fill another static tree from now on, all of it."""
        self.tree, self._max_nodes, self._shapes = tree, None, {}

    def grow(self, drafts: Sequence[GrowingDraft], expander: Expander) -> None:
        """Grow drafts to their end; drafts with a cap of 0 do not change, but are passed to the expander."""
        self._extend(drafts, expander.open(drafts), 0)
        for level in range(1, max(draft.cap for draft in drafts)):
            for draft in drafts:
                if not self._is_open(draft, level) or (self._reranks and not draft.can_gain(self.least_mass)):
                    draft.frontier = []
            if not any(draft.frontier for draft in drafts):
                break
            self._extend(drafts, expander.expand(drafts), level)

    def argmax_depths(self, drafts: Sequence[GrowingDraft]) -> list[int] | None:
        """Return the lengths of the drafts if `grow` would only add chains of the largest logits, else None."""
        if not self.drafts_chains or self._reranks or self._is_greedy or self.policy.looks_at != NOTHING:
            return None
        if not all(draft.row.sampler.is_argmax for draft in drafts):
            return None
        return [min(draft.cap, draft.room) for draft in drafts]

    def finish(self, draft: GrowingDraft, source: str) -> DraftTree:
        """Return the finished draft."""
        tree = draft.tree(source, has_chances=self._reranks)
        return tree.restricted(draft.best(draft.max_nodes)) if self._reranks else tree

    def end(self, row: Row, result: StepResult) -> None:
        """Record the outcome of a step."""
        self.policy.update(row, result.tree.depth, result.num_accepted)
        if self._learns and len(result.tree) > 1 and row.sampler.is_greedy:
            self._follow(result.tree, result.emitted[0])

    def _follow(self, tree: DraftTree, emitted: int) -> None:
        """Raise the exponent if first choices are right more often than estimated, else lower it."""
        if tree.scores is not None:
            first = max(tree.children[0], key=tree.scores.__getitem__)
            error = (emitted == tree.tokens[first]) - tree.scores[first]
            self.sharpness = min(max(self.sharpness + RATE * error, FLATTEST), SHARPEST)

    # -- one level ---------------------------------------------------------------------------------------------

    def _is_open(self, draft: GrowingDraft, level: int) -> bool:
        return bool(draft.frontier) and level < draft.cap and (self._reranks or draft.room > 0)

    def _extend(self, drafts: Sequence[GrowingDraft], logits: torch.Tensor, level: int) -> None:
        """Add the children of the frontier, and make the next frontier from them."""
        starts = list(accumulate((len(draft.frontier) for draft in drafts), initial=0))
        growing = self._growing(drafts, logits, level, starts)
        picks = [_Pick.of(drafts[i], node, starts[i] + j) for i in growing for j, node in enumerate(drafts[i].frontier)]
        for draft in drafts:
            draft.frontier = []
        pools: dict[GrowingDraft, list[_Candidate]] = {}
        for pick, (scored, probs) in zip(picks, self._successors(picks, logits), strict=True):
            draft, node = pick.draft, pick.node
            if probs is not None:
                draft.probs[node] = probs
            if draft.shape is not None:
                draft.fill(node, [token for token, _ in scored])
            else:
                pool = pools.setdefault(draft, [])
                pool += [(draft.scores[node] + score, node, token, score) for token, score in scored]
        for draft, pool in pools.items():
            self._add(draft, pool)

    def _growing(
        self, drafts: Sequence[GrowingDraft], logits: torch.Tensor, level: int, starts: Sequence[int]
    ) -> list[int]:
        """Return the indices of drafts that get another level. The policy sees the distribution at the best frontier
        node.
        """
        growing = [i for i, draft in enumerate(drafts) if self._is_open(draft, level)]
        if not growing or not self.policy.looks(level):
            return growing
        picks = [_Pick.of(drafts[i], drafts[i].frontier[0], starts[i]) for i in growing]
        samplers, paths, _ = _places(picks)
        of_picks = self._candidates.log_probs(_picked(logits, picks), samplers, paths)
        for i, log_probs in zip(growing, of_picks, strict=True):
            draft = drafts[i]
            if draft.plan is not None:
                self.policy.stop(draft.row, draft.plan, level, log_probs)
                draft.cap = min(draft.cap, draft.plan.gamma)
        return [i for i in growing if level < drafts[i].cap]

    def _add(self, draft: GrowingDraft, pool: list[_Candidate]) -> None:
        """Keep the best children of a level, and put the best of these into the frontier."""
        if self._is_sampled(draft.row):  # draws must not be dropped by value: all stay, the first one is expanded
            draft.frontier = [draft.add(node, token) for _, node, token, _ in pool][:1]
            return
        pool.sort(key=lambda candidate: -candidate[0])
        staying = pool if self._reranks else pool[: min(draft.beam_width, draft.room)]
        nodes = [draft.add(node, token, score) for _, node, token, score in staying]
        draft.frontier = [node for node in nodes[: draft.beam_width] if draft.scores[node] >= draft.least]

    def fill(self, drafts: Sequence[GrowingDraft], logits: torch.Tensor) -> None:
        """Fill static trees whose logits depend on the depth alone.

        All nodes of a level have the same candidates. Draws are also correct, because only one node per level can be
        reached, and the choices that lead to it are independent of the draws. Processors see the row without the draft.

        Args:
          drafts: drafts to fill.
          logits: (B, D, V) after the nodes of depth 0, 1, ... of every draft.
        """
        picks = [
            _Pick(draft, 0, i * logits.shape[1] + depth, (), depth, draft.shape.widest(depth), level.start)
            for i, draft in enumerate(drafts)
            if draft.shape is not None
            for depth, level in enumerate(draft.shape.levels[:-1])
        ]
        found = iter(self._successors(picks, logits.flatten(0, 1)))
        for draft in drafts:
            for scored, probs in islice(found, draft.cap):
                for node in draft.take_frontier():
                    draft.fill(node, [token for token, _ in scored])
                    if probs is not None:
                        draft.probs[node] = probs

    # -- successors of nodes -----------------------------------------------------------------------------------

    def _successors(self, picks: Sequence[_Pick], logits: torch.Tensor) -> list[tuple[Scored, torch.Tensor | None]]:
        """Return the successors of every node, the best or first drawn one first, and the distribution from which they
        were drawn.
        """
        found: dict[int, tuple[Scored, torch.Tensor | None]] = {}
        for is_sampled in (False, True):
            group = [i for i, pick in enumerate(picks) if self._is_sampled(pick.draft.row) == is_sampled]
            some = [picks[i] for i in group]
            if some:
                successors = self._drawn if is_sampled else self._best
                found |= zip(group, successors(some, _picked(logits, some)), strict=True)
        return [found[i] for i in range(len(picks))]

    def _is_sampled(self, row: Row) -> bool:
        """Return whether the row's drafts are draws from a distribution that the acceptance rule needs."""
        return self._needs_probs and not row.sampler.is_greedy

    def _best(self, picks: Sequence[_Pick], logits: torch.Tensor) -> list[tuple[Scored, None]]:
        """Return the best successors under the target's noise, or the likeliest ones."""
        places = _places(picks)
        if self.drafts_chains:
            return [([(token, 0.0)] if token >= 0 else [], None) for token in self._candidates.only(logits, *places)]
        most = self._num_branches if self.tree is None else max(pick.width for pick in picks)
        found = self._candidates.best(logits, *places, most, self.sharpness if self._reranks else None)
        return [(scored[: pick.width], None) for pick, scored in zip(picks, found, strict=True)]

    def _drawn(self, picks: Sequence[_Pick], logits: torch.Tensor) -> list[tuple[Scored, torch.Tensor]]:
        """Draw successors without replacement from the drafter's distribution, from a stream that the target never
        uses.
        """
        found = []
        samplers, paths, _ = _places(picks)
        for pick, log_probs in zip(picks, self._candidates.whole(logits, samplers, paths), strict=True):
            row, probs = pick.draft.row, log_probs.exp()
            own = noise.KeyedNoise(row.seed, row.num_steps, len(row.token_ids))
            tokens = own.draft(pick.depth, probs, min(pick.width, pick.draft.room), pick.branch)
            found.append(([(token, 0.0) for token in tokens], probs))
        return found

    def ranked(self, logits: torch.Tensor, sampler: Sampler, positions: Sequence[int], k: int) -> list[list[int]]:
        """Return the k best successors at positions of a row, best first, as they would fill a tree."""
        places = [sampler] * len(positions), [()] * len(positions), positions
        return [[token for token, _ in scored] for scored in self._candidates.best(logits, *places, k)]


_Candidate = tuple[float, int, int, float]
"""Possible child: score of its path, parent, token, and its own score."""


@dataclass(frozen=True)
class _Pick:
    """Node that is about to get children.

    Args:
      draft: draft of the node.
      node: index of the node in the draft.
      index: row of the node's logits.
      path: draft tokens up to the node, as far as they are known.
      depth: depth of the node.
      width: number of children to add.
      branch: index that distinguishes nodes of equal depth if their children are draws.
    """

    draft: GrowingDraft
    node: int
    index: int
    path: tuple[int, ...]
    depth: int
    width: int
    branch: int

    @classmethod
    def of(cls, draft: GrowingDraft, node: int, index: int) -> _Pick:
        """Make the pick of a frontier node."""
        branch = 0 if draft.shape is None else draft.spots[node]
        return cls(draft, node, index, draft.path_tokens(node), draft.depths[node], draft.width(node), branch)


def _picked(logits: torch.Tensor, picks: Sequence[_Pick]) -> torch.Tensor:
    """Return the logits of the picked nodes, without a copy if all nodes are picked."""
    return logits if len(picks) == len(logits) else logits[[pick.index for pick in picks]]


def _places(picks: Sequence[_Pick]) -> tuple[list[Sampler], list[Path], list[int]]:
    """Return samplers and paths of the picked nodes, and the positions of their successors."""
    rows = [pick.draft.row for pick in picks]
    positions = [len(row.token_ids) + pick.depth for row, pick in zip(rows, picks, strict=True)]
    return [row.sampler for row in rows], [pick.path for pick in picks], positions
