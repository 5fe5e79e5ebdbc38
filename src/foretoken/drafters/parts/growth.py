"""Grows drafts level by level with whatever can say what follows a node: a smaller model, the target itself, a head."""

from __future__ import annotations

import sys
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import inf, log
from typing import TYPE_CHECKING, Protocol

from foretoken.config.acceptance import RULES
from foretoken.drafters.lengths import NOTHING, LengthPolicy
from foretoken.drafters.parts.candidates import SHARPNESS, Candidates, Places
from foretoken.drafters.parts.draft import GrowingDraft
from foretoken.engine.drafter import Budget, StepResult
from foretoken.engine.sequence import Sequence
from foretoken.errors import ConfigError
from foretoken.lazy import Lazy
from foretoken.tree import DraftTree

if TYPE_CHECKING:
    import torch

    from foretoken.heads.vocabulary import DraftVocabulary
    from foretoken.law import noise
else:
    torch = Lazy("torch")
    noise = Lazy("foretoken.law.noise")


class Expander(Protocol):
    """Says what follows the nodes of growing drafts. State per node is its own: nodes keep their numbers."""

    def open(self, drafts: Seq[GrowingDraft]) -> torch.Tensor:
        """Logits (B, 1, V) after the pending token of every row."""
        ...

    def expand(self, drafts: Seq[GrowingDraft]) -> torch.Tensor:
        """Logits (B, F, V) after the nodes of every frontier, in its order; rows with a smaller one are padded."""
        ...


@dataclass(frozen=True)
class Argmaxes:
    """Chains of likeliest tokens, of which nobody asks anything but how long they are.

    Args:
      depths: tokens of every draft.
      num_columns: of logits that count.
      names: int64 (V,), the tokens that these stand for; None for their own numbers.
    """

    depths: list[int]
    num_columns: int
    names: torch.Tensor | None


class Growth:
    """How drafts grow: which nodes get children, which of these stay, and which of these are expanded in turn.

    A drafter has one and lends it an `Expander`. Every level costs one call of it, for all rows together.

    Args:
      target_vocab_size: what the drafter's logits are cut or padded to.
      policy: decides before every level whether to go on.
      num_branches: siblings per node; 1 drafts chains.
      beam_width: nodes that are expanded per level; ``num_branches`` by default.
      reranks: let all children stay while the draft grows, and choose the best ``max_nodes`` of them all in the end;
        otherwise only the nodes that are expanded stay.
      sample_method: "probabilistic" draws from the processed law of the drafter, "greedy" takes its argmax.
      acceptance: the rule of the engine. Under "match" the draws share the target's noise; otherwise they come from
        a stream of their own, the tree carries their law, and only first draws are expanded.
      max_nodes: limit of a draft, root included; None for what depth and branches amount to.
      vocabulary: tokens that the columns of the drafter's logits stand for, where these are not all.
      least_mass: with reranking, the sum of the chances of the nodes that would be expanded next, below which a level
        costs more than it can bring; 0 for any.
      sharpness: power to which the drafter's law is raised where chances are those of a greedy target; None learns by
        which the first choices of drafts are right as often as they are said to be.

    Source: beams of siblings as in SpecInfer (Miao et al. 2023, arXiv:2305.09781); reranking by the probability of the
    path as in EAGLE-2 (Li et al. 2024, arXiv:2406.16858). Deviation: where the target draws with the same noise, by the
    shares of siblings under that noise.
    Raises: ConfigError when a number is out of range.
    """

    def __init__(
        self,
        *,
        target_vocab_size: int,
        policy: LengthPolicy,
        num_branches: int = 1,
        beam_width: int | None = None,
        reranks: bool = False,
        sample_method: str = "probabilistic",
        acceptance: str = "match",
        max_nodes: int | None = None,
        vocabulary: DraftVocabulary | None = None,
        least_mass: float = 0.0,
        sharpness: float | None = None,
    ) -> None:
        for name, value in (("num_draft_branches", num_branches), ("draft_beam_width", beam_width or 1)):
            if value < 1:
                raise ConfigError(f"{name} is {value}; it must be 1 or more")
        if reranks and (max_nodes is None or not RULES[acceptance].shares_noise):
            raise ConfigError("reranking drops nodes for their scores: it takes max_nodes, and acceptance='match'")
        self.policy = policy
        self.takes_trees = True
        self.least_mass = least_mass
        self._learns = sharpness is None and reranks
        self._num_branches = num_branches
        self._beam_width = beam_width or num_branches
        self._reranks = reranks
        self._max_nodes = max_nodes or sys.maxsize
        self._is_greedy = sample_method == "greedy"
        self._shares_noise = RULES[acceptance].shares_noise
        self._candidates = Candidates(
            target_vocab_size, vocabulary, is_greedy=self._is_greedy, sharpness=sharpness or SHARPNESS
        )

    @property
    def sharpness(self) -> float:
        """Power to which the drafter's law is raised at present."""
        return self._candidates.sharpness

    @property
    def drafts_chains(self) -> bool:
        """Whether no draft ever branches."""
        return not self.takes_trees or self._num_branches == self._beam_width == 1

    @property
    def is_unconditional(self) -> bool:
        """Whether the drafts of greedy rows depend on the expander alone: reranked, and as long as they may be."""
        policy = type(self.policy)
        asks = policy.go_on is not LengthPolicy.go_on or policy.keep_drafting is not LengthPolicy.keep_drafting
        return self._reranks and self._shares_noise and not asks and policy.looks_at == NOTHING

    # -- the life of a draft -----------------------------------------------------------------------------------

    def begin(self, row: Sequence, budget: Budget, reach: int = sys.maxsize) -> GrowingDraft:
        """An empty draft for one row, as deep as policy, budget and the drafter's own ``reach`` allow."""
        allowed = Budget.of(budget)
        return GrowingDraft(
            row,
            cap=min(self.policy.begin(row), allowed.depth, reach),
            max_nodes=allowed.max_nodes(self._max_nodes),
            num_branches=allowed.width(self._num_branches) if self.takes_trees else 1,
            beam_width=allowed.width(self._beam_width) if self.takes_trees else 1,
            least=log(allowed.least) if self._reranks and allowed.least > 0.0 else -inf,
        )

    def grow(self, drafts: Seq[GrowingDraft], expander: Expander) -> None:
        """Grow drafts to their end. Those with a cap of 0 stay as they are, but the expander is shown them."""
        self._extend(drafts, expander.open(drafts), 0)
        for level in range(1, max(draft.cap for draft in drafts)):
            for draft in drafts:
                goes_on = self._is_open(draft, level) and self.policy.go_on(draft.row, level)
                if not goes_on or (self._reranks and not draft.can_gain(self.least_mass)):
                    draft.frontier = []
            if not any(draft.frontier for draft in drafts):
                break
            self._extend(drafts, expander.expand(drafts), level)

    def argmaxes(self, drafts: Seq[GrowingDraft]) -> Argmaxes | None:
        """What `grow` would add to drafts, where that follows from the largest logits alone; else None."""
        keeps_all = type(self.policy).keep_drafting is LengthPolicy.keep_drafting and self.policy.looks_at == NOTHING
        if not self.drafts_chains or self._reranks or self._is_greedy or not keeps_all:
            return None
        if not all(draft.row.law.is_argmax for draft in drafts):
            return None
        depths = []
        for draft in drafts:
            depth, most = 1, min(draft.cap, draft.room)
            while depth < most and self.policy.go_on(draft.row, depth):
                depth += 1
            depths.append(min(depth, most))
        return Argmaxes(depths, *self._candidates.columns)

    def tree(self, draft: GrowingDraft, source: str) -> DraftTree:
        """The draft that is proposed."""
        tree = draft.tree(source, self.policy.take_plan(draft.row), has_chances=self._reranks)
        return tree.restricted(draft.best(draft.max_nodes)) if self._reranks else tree

    def end(self, row: Sequence, result: StepResult) -> None:
        """Take in the outcome of a step."""
        self.policy.end(row, result.tree.depth, result.num_accepted)
        if self._learns and len(result.tree) > 1 and row.law.is_greedy:
            self._candidates.follow(result.tree, result.emitted[0])

    def forget(self, rows: Seq[Sequence]) -> None:
        """Drop the state of rows that have finished."""
        for row in rows:
            self.policy.forget(row)

    # -- one level ---------------------------------------------------------------------------------------------

    def _is_open(self, draft: GrowingDraft, level: int) -> bool:
        return bool(draft.frontier) and level < draft.cap and (self._reranks or draft.room > 0)

    def _extend(self, drafts: Seq[GrowingDraft], logits: torch.Tensor, level: int) -> None:
        """Add the children of the frontier, and make the next frontier of them."""
        growing = self._growing(drafts, logits, level)
        picks = [_Pick(drafts[i], node, i, j) for i in growing for j, node in enumerate(drafts[i].frontier)]
        for draft in drafts:
            draft.frontier = []
        for is_sampled in (False, True):
            group = [pick for pick in picks if self._is_sampled(pick.draft.row) == is_sampled]
            if group:
                rows = _picked(logits, group)
                if is_sampled:
                    self._add_sampled(group, rows)
                elif self.drafts_chains:
                    self._add_only_children(group, rows)
                else:
                    self._add_best(group, rows)

    def _growing(self, drafts: Seq[GrowingDraft], logits: torch.Tensor, level: int) -> list[int]:
        """Drafts that get another level. The policy sees the law at the first node of the frontier, the best one."""
        growing = [i for i, draft in enumerate(drafts) if self._is_open(draft, level)]
        laws: Seq[torch.Tensor | None] = [None] * len(growing)
        if growing and self.policy.wants_log_probs(level):
            picks = [_Pick(drafts[i], drafts[i].frontier[0], i, 0) for i in growing]
            laws = list(self._candidates.log_probs(logits[growing, 0], places_of(picks)))
        return [i for i, law in zip(growing, laws, strict=True) if self.policy.keep_drafting(drafts[i].row, level, law)]

    def _is_sampled(self, row: Sequence) -> bool:
        """Whether the children of this row's nodes are draws from a law that the acceptance rule asks for."""
        return not (self._shares_noise or self._is_greedy or row.law.is_greedy)

    def _add_best(self, picks: Seq[_Pick], logits: torch.Tensor) -> None:
        """Children by the target's own noise, or the likeliest; the best nodes of every row are expanded next."""
        found: dict[int, list[tuple[float, _Pick, int, float]]] = {}
        children = self._candidates.best(logits, places_of(picks), self._num_branches, as_chances=self._reranks)
        for pick, scored in zip(picks, children, strict=True):
            for token, score in scored[: pick.draft.num_branches]:
                total = pick.draft.scores[pick.node] + score
                found.setdefault(pick.row_index, []).append((total, pick, token, score))
        for of_row in found.values():
            draft = of_row[0][1].draft
            of_row.sort(key=lambda candidate: -candidate[0])
            staying = of_row if self._reranks else of_row[: min(draft.beam_width, draft.room)]
            nodes = [draft.add(pick.node, token, score) for _, pick, token, score in staying]
            draft.frontier = [node for node in nodes[: draft.beam_width] if draft.scores[node] >= draft.least]

    def _add_only_children(self, picks: Seq[_Pick], logits: torch.Tensor) -> None:
        """One child per node: by the target's own noise, or the likeliest."""
        for pick, token in zip(picks, self._candidates.only(logits, places_of(picks)), strict=True):
            if token >= 0:
                pick.draft.frontier.append(pick.draft.add(pick.node, token))

    def _add_sampled(self, picks: Seq[_Pick], logits: torch.Tensor) -> None:
        """Draw children from the drafter's own law, without replacement, from a stream that the target never uses.

        None of them may be dropped for its value, so all stay and the first draw is the one that is expanded.
        """
        places = places_of(picks)
        laws = self._candidates.whole(logits, places)
        for pick, path, law in zip(picks, places.paths, laws, strict=True):
            draft, row = pick.draft, pick.draft.row
            own = noise.KeyedNoise(row.seed, row.num_steps, len(row.token_ids))
            probs = law.exp()
            tokens = own.draft(len(path), probs, min(draft.num_branches, draft.room))
            draft.frontier = [draft.add(pick.node, token) for token in tokens][:1]
            draft.laws[pick.node] = probs


@dataclass(frozen=True)
class _Pick:
    """A frontier node that is about to get children, and where its logits lie: row and column."""

    draft: GrowingDraft
    node: int
    row_index: int
    column: int


def _picked(logits: torch.Tensor, picks: Seq[_Pick]) -> torch.Tensor:
    """Logits (M, V) of the picked nodes, without a copy where these are all."""
    if len(picks) == logits.shape[0] * logits.shape[1]:
        return logits.flatten(0, 1)
    return logits[[pick.row_index for pick in picks], [pick.column for pick in picks]]


def places_of(picks: Seq[_Pick]) -> Places:
    """Laws and paths of the picked nodes, and the positions of the tokens that follow them."""
    paths = [pick.draft.path_tokens(pick.node) for pick in picks]
    positions = [len(pick.draft.row.token_ids) + len(path) for pick, path in zip(picks, paths, strict=True)]
    return Places([pick.draft.row.law for pick in picks], paths, positions)
