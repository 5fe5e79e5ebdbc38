"""Grows drafts level by level with whatever can say what follows a node: a smaller model, the target itself, heads."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from math import inf, log
from typing import Protocol

import torch

from foredraft.config.acceptance import RULES
from foredraft.drafters.parts.candidates import SHARPNESS, Candidates, Parents, Scored
from foredraft.drafters.parts.draft import GrowingDraft
from foredraft.engine.drafter import DraftSize, StepResult
from foredraft.engine.row import Row
from foredraft.heads.vocabulary import DraftVocabulary
from foredraft.methods.lengths import NOTHING, Fixed, LengthPolicy
from foredraft.methods.rank_tree import RankTree, TreeShape
from foredraft.sampling import noise
from foredraft.sampling.processors import Sampler
from foredraft.tree import DraftPlan, DraftTree


class Expander(Protocol):
    """Says what follows the nodes of growing drafts. State per node is its own: nodes keep their numbers."""

    def open(self, drafts: Sequence[GrowingDraft]) -> torch.Tensor:
        """Logits (B, V) after the pending token of every row."""
        ...

    def expand(self, drafts: Sequence[GrowingDraft]) -> torch.Tensor:
        """Logits (M, V) after the nodes of all frontiers, draft by draft, each in its order."""
        ...


class Growth:
    """How drafts grow: which nodes get children, which of these stay, and which of these are expanded in turn.

    A drafter has one and lends it an `Expander`. Every level costs one call of it, for all rows together. A dynamic
    tree takes shape by what the expander says; of a static one every node is known beforehand but its token: the r-th
    child of a node is the r-th best successor.

    Args:
      target_vocab_size: what the drafter's logits are cut or padded to.
      policy: of dynamic trees; decides before every level whether to go on.
      num_branches: siblings per node; 1 drafts chains.
      beam_width: nodes that are expanded per level; ``num_branches`` by default.
      reranks: under "match", let all children stay while the draft grows, and choose the best ``max_nodes`` of them all
        in the end; otherwise only the nodes that are expanded stay.
      tree: static, whose most valuable nodes within the budget of a row are filled.
      max_depth: of a static tree, levels below the root at most; None for all of them.
      sample_method: "probabilistic" draws from the processed distribution of the drafter, "greedy" takes its likeliest
        tokens.
      acceptance: the rule of the engine. Under "match" siblings are the Gumbel-top-k of the drafter's distribution with
        the noise of the target, so the best one is what the target would draw from that distribution. Under rules that
        need a distribution they are draws from a stream of their own, in draw order, none of them dropped, and the tree
        carries their distribution; of a dynamic tree first draws alone are expanded. Under others they are the
        likeliest.
      max_nodes: limit of a draft, root included; None for what depth and branches amount to, or all of the tree.
      vocabulary: tokens that the columns of the drafter's logits stand for, where these are not all.
      least_mass: with reranking, the sum of the chances of the nodes that would be expanded next, below which a level
        costs more than it can bring; 0 for any.
      sharpness: power to which the drafter's distribution is raised where chances are those of a greedy target; None
        learns by which the first choices of drafts are right as often as they are said to be.

    Source: beams of siblings as in SpecInfer (Miao et al. 2023, arXiv:2305.09781); reranking by the probability of the
    path as in EAGLE-2 (Li et al. 2024, arXiv:2406.16858); static trees as in Medusa (Cai et al. 2024,
    arXiv:2401.10774); Gumbel-top-k (Kool et al. 2019, arXiv:1903.06059) for siblings. Deviation: where the target draws
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
        self.policy = policy or Fixed(0)
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
        self._candidates = Candidates(
            target_vocab_size, vocabulary, is_greedy=self._is_greedy, sharpness=sharpness or SHARPNESS
        )
        self._shapes: dict[tuple[int, int, bool], TreeShape] = {}

    @property
    def sharpness(self) -> float:
        """Power to which the drafter's distribution is raised at present."""
        return self._candidates.sharpness

    @property
    def columns(self) -> tuple[int, torch.Tensor | None]:
        """How many columns of logits count, and their tokens; see `Candidates`."""
        return self._candidates.columns

    @property
    def drafts_chains(self) -> bool:
        """Whether no draft ever branches."""
        return self.tree is None and (not self.takes_trees or self._num_branches == self._beam_width == 1)

    @property
    def is_unconditional(self) -> bool:
        """Whether drafts depend on the expander and their row's sampler alone: reranked, and as long as they may be."""
        return self._reranks and self._shares_noise and self.policy.looks_at == NOTHING

    def ranks_by_scores(self, sampler: Sampler) -> bool:
        """Whether tokens are ranked by logits, or by noise and what temperature, top-k, top-p and min-p leave."""
        if sampler.is_processed:
            return False
        return sampler.is_greedy or (sampler.warper.has_shortcut and not self._is_greedy)

    # -- the life of a draft -----------------------------------------------------------------------------------

    def begin(self, row: Row, budget: DraftSize, reach: int = sys.maxsize) -> GrowingDraft:
        """An empty draft for one row, as deep as policy, budget and the drafter's own ``reach`` allow."""
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

    def _shape(self, tree: RankTree, budget: DraftSize, reach: int) -> TreeShape:
        """What of a static tree there is room for."""
        depth = min(budget.depth, reach, tree.depth if self._max_depth is None else self._max_depth)
        key = min(depth, tree.depth), min(budget.max_nodes(self._max_nodes), len(tree))
        chains_only = budget.chains_only or not self.takes_trees
        if (*key, chains_only) not in self._shapes:
            self._shapes[*key, chains_only] = tree.within(DraftSize(*key, chains_only))
        return self._shapes[*key, chains_only]

    def use(self, tree: RankTree) -> None:
        """Fill another tree from now on, all of it."""
        self.tree, self._max_nodes, self._shapes = tree, None, {}

    def grow(self, drafts: Sequence[GrowingDraft], expander: Expander) -> None:
        """Grow drafts to their end. Those with a cap of 0 stay as they are, but the expander is shown them."""
        self._extend(drafts, expander.open(drafts), 0)
        for level in range(1, max(draft.cap for draft in drafts)):
            for draft in drafts:
                if not self._is_open(draft, level) or (self._reranks and not draft.can_gain(self.least_mass)):
                    draft.frontier = []
            if not any(draft.frontier for draft in drafts):
                break
            self._extend(drafts, expander.expand(drafts), level)

    def argmax_depths(self, drafts: Sequence[GrowingDraft]) -> list[int] | None:
        """Lengths of drafts where `grow` would add chains of the largest logits and nobody asks for more, else None."""
        if not self.drafts_chains or self._reranks or self._is_greedy or self.policy.looks_at != NOTHING:
            return None
        if not all(draft.row.sampler.is_argmax for draft in drafts):
            return None
        return [min(draft.cap, draft.room) for draft in drafts]

    def finish(self, draft: GrowingDraft, source: str) -> DraftTree:
        """The draft that is proposed."""
        tree = draft.tree(source, has_chances=self._reranks)
        return tree.restricted(draft.best(draft.max_nodes)) if self._reranks else tree

    def end(self, row: Row, result: StepResult) -> None:
        """Take in the outcome of a step."""
        self.policy.update(row, result.tree.depth, result.num_accepted)
        if self._learns and len(result.tree) > 1 and row.sampler.is_greedy:
            self._candidates.follow(result.tree, result.emitted[0])

    # -- one level ---------------------------------------------------------------------------------------------

    def _is_open(self, draft: GrowingDraft, level: int) -> bool:
        return bool(draft.frontier) and level < draft.cap and (self._reranks or draft.room > 0)

    def _extend(self, drafts: Sequence[GrowingDraft], logits: torch.Tensor, level: int) -> None:
        """Add the children of the frontier, and make the next frontier of them."""
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
        """Drafts with a further level. The policy sees the distribution at the first node of the frontier, the best."""
        growing = [i for i, draft in enumerate(drafts) if self._is_open(draft, level)]
        if not growing or not self.policy.looks(level):
            return growing
        picks = [_Pick.of(drafts[i], drafts[i].frontier[0], starts[i]) for i in growing]
        of_picks = self._candidates.log_probs(_picked(logits, picks), _parents(picks))
        for i, log_probs in zip(growing, of_picks, strict=True):
            draft = drafts[i]
            if draft.plan is not None:
                self.policy.stop(draft.row, draft.plan, level, log_probs)
                draft.cap = min(draft.cap, draft.plan.gamma)
        return [i for i in growing if level < drafts[i].cap]

    def _add(self, draft: GrowingDraft, pool: list[_Candidate]) -> None:
        """Let the best children of a level stay, the best of which are expanded next."""
        if self._is_sampled(draft.row):  # none may be dropped for its value: all stay, the first draw is expanded
            draft.frontier = [draft.add(node, token) for _, node, token, _ in pool][:1]
            return
        pool.sort(key=lambda candidate: -candidate[0])
        staying = pool if self._reranks else pool[: min(draft.beam_width, draft.room)]
        nodes = [draft.add(node, token, score) for _, node, token, score in staying]
        draft.frontier = [node for node in nodes[: draft.beam_width] if draft.scores[node] >= draft.least]

    def fill(self, drafts: Sequence[GrowingDraft], logits: torch.Tensor) -> None:
        """Fill static trees where what follows a node depends on its depth alone.

        All nodes of a level have the same candidates; of draws, too, since only one of them can be reached, by choices
        that the draws have no part in. What processors look at is the text without the draft.

        Args:
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

    # -- what follows nodes ------------------------------------------------------------------------------------

    def _successors(self, picks: Sequence[_Pick], logits: torch.Tensor) -> list[tuple[Scored, torch.Tensor | None]]:
        """Tokens after every node, the best or the first drawn one first, and the distribution that draws are from."""
        found: dict[int, tuple[Scored, torch.Tensor | None]] = {}
        for is_sampled in (False, True):
            group = [i for i, pick in enumerate(picks) if self._is_sampled(pick.draft.row) == is_sampled]
            some = [picks[i] for i in group]
            if some:
                successors = self._drawn if is_sampled else self._best
                found |= zip(group, successors(some, _picked(logits, some)), strict=True)
        return [found[i] for i in range(len(picks))]

    def _is_sampled(self, row: Row) -> bool:
        """Whether the children of this row's nodes are draws from a distribution that the acceptance rule asks for."""
        return self._needs_probs and not row.sampler.is_greedy

    def _best(self, picks: Sequence[_Pick], logits: torch.Tensor) -> list[tuple[Scored, None]]:
        """By the target's own noise, or the likeliest."""
        parents = _parents(picks)
        if self.drafts_chains:
            return [([(token, 0.0)] if token >= 0 else [], None) for token in self._candidates.only(logits, parents)]
        most = self._num_branches if self.tree is None else max(pick.width for pick in picks)
        found = self._candidates.best(logits, parents, most, as_chances=self._reranks)
        return [(scored[: pick.width], None) for pick, scored in zip(picks, found, strict=True)]

    def _drawn(self, picks: Sequence[_Pick], logits: torch.Tensor) -> list[tuple[Scored, torch.Tensor]]:
        """Draws without replacement from the drafter's own distribution, from a stream that the target never uses."""
        found = []
        for pick, log_probs in zip(picks, self._candidates.whole(logits, _parents(picks)), strict=True):
            row, probs = pick.draft.row, log_probs.exp()
            own = noise.KeyedNoise(row.seed, row.num_steps, len(row.token_ids))
            tokens = own.draft(pick.depth, probs, min(pick.width, pick.draft.room), pick.branch)
            found.append(([(token, 0.0) for token in tokens], probs))
        return found

    def ranked(self, logits: torch.Tensor, parents: Parents, k: int) -> list[list[int]]:
        """The k best successors of nodes, best first, as they would fill a tree."""
        found = self._candidates.best(logits, parents, k, as_chances=False)
        return [[token for token, _ in scored] for scored in found]


_Candidate = tuple[float, int, int, float]
"""Score of the path, parent, token and own score of a child that may stay."""


@dataclass(frozen=True)
class _Pick:
    """A node that is about to get children.

    Args:
      index: of its logits in their list.
      path: draft tokens up to the node, as far as they are known.
      depth: of the node.
      width: how many children it gets.
      branch: tells nodes of equal depth apart, whose children are draws.
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
        """A node of the frontier."""
        branch = 0 if draft.shape is None else draft.spots[node]
        return cls(draft, node, index, draft.path_tokens(node), draft.depths[node], draft.width(node), branch)


def _picked(logits: torch.Tensor, picks: Sequence[_Pick]) -> torch.Tensor:
    """Logits of the picked nodes, without a copy where these are all."""
    return logits if len(picks) == len(logits) else logits[[pick.index for pick in picks]]


def _parents(picks: Sequence[_Pick]) -> Parents:
    """Samplers and paths of the picked nodes, and the positions of the tokens that follow them."""
    rows = [pick.draft.row for pick in picks]
    positions = [len(row.token_ids) + pick.depth for row, pick in zip(rows, picks, strict=True)]
    return Parents([row.sampler for row in rows], [pick.path for pick in picks], positions)
