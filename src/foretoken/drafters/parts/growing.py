"""Drafting with a language model: grows chains and trees level by level over a cache, whoever owns it."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from foretoken.config.acceptance import RULES
from foretoken.drafters.lengths import LengthPolicy
from foretoken.engine.drafter import Budget, Drafter
from foretoken.engine.sequence import Sequence
from foretoken.errors import ConfigError
from foretoken.lazy import Lazy
from foretoken.tree import DraftTree

if TYPE_CHECKING:
    import torch

    import foretoken.model.lm as lm
    from foretoken.law import noise, sampling
    from foretoken.model.cache.ragged import KVCache
    from foretoken.model.lm import CausalLM
else:
    torch = Lazy("torch")
    lm = Lazy("foretoken.model.lm")
    noise = Lazy("foretoken.law.noise")
    sampling = Lazy("foretoken.law.sampling")


@dataclass(eq=False)
class Draft:
    """A tree in the making, and the state of its row in the drafter's cache.

    The first ``trunk`` tokens of the sequence are in the cache. Drafted nodes that were fed lie after them:
    node i in column ``trunk + offset_of[i]``.
    """

    slot: int
    trunk: int = 0
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    laws: dict[int, torch.Tensor] = field(default_factory=dict)
    offset_of: dict[int, int] = field(default_factory=dict)
    frontier: list[int] = field(default_factory=list)
    cap: int = 0
    max_nodes: int = sys.maxsize
    num_branches: int = 1

    def begin(self, pending: int, cap: int, max_nodes: int, num_branches: int) -> None:
        self.tokens, self.parents, self.depths, self.scores = [pending], [-1], [0], [0.0]
        self.laws, self.offset_of, self.frontier = {}, {}, [0]
        self.cap, self.max_nodes, self.num_branches = cap, max_nodes, num_branches

    def add(self, parent: int, token: int, score: float) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.scores.append(self.scores[parent] + score)
        return len(self.tokens) - 1

    def path(self, node: int) -> list[int]:
        """Nodes from below the root to ``node``."""
        nodes = []
        while node > 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def path_tokens(self, node: int) -> tuple[int, ...]:
        return tuple(self.tokens[i] for i in self.path(node))

    def fed_along(self, tokens: Iterable[int]) -> list[int]:
        """Columns, counted from the trunk, of the fed nodes along a path of tokens from the root."""
        children = {pair: node for node, pair in enumerate(zip(self.parents, self.tokens, strict=True)) if node}
        node, offsets = 0, []
        for token in tokens:
            node = children.get((node, token), -1)
            if node not in self.offset_of:
                break
            offsets.append(self.offset_of[node])
        return offsets


class GrowingDrafter(Drafter):
    """A drafter that asks a language model for the next tokens, all rows at once, one forward per level.

    Args:
      target_vocab_size: what the drafter's logits are cut or padded to.
      policy: decides before every token whether to go on.
      num_branches: siblings per node, and nodes that are expanded per level; 1 drafts chains.
      sample_method: "probabilistic" draws from the processed law of the drafter, "greedy" takes its argmax.
      acceptance: the rule of the engine. Under "match" the draws share the target's noise; otherwise they come from
        a stream of their own, the tree carries their law, and only first draws are expanded.
      max_nodes: limit of a draft, root included; None for what depth and branches amount to.
    """

    model: CausalLM
    _cache: KVCache

    def __init__(
        self,
        *,
        target_vocab_size: int,
        policy: LengthPolicy,
        num_branches: int = 1,
        sample_method: str = "probabilistic",
        acceptance: str = "match",
        max_nodes: int | None = None,
    ) -> None:
        if num_branches < 1:
            raise ConfigError(f"num_draft_branches is {num_branches}; it must be 1 or more")
        self.policy = policy
        self.num_branches = num_branches
        self._max_nodes = max_nodes or sys.maxsize
        self._is_greedy = sample_method == "greedy"
        self._shares_noise = RULES[acceptance].shares_noise
        self._vocab_size = target_vocab_size
        self._drafts: dict[int, Draft] = {}

    @abstractmethod
    def _first_logits(self, rows: Seq[Sequence], drafts: Seq[Draft]) -> torch.Tensor:
        """Make row i of the cache hold exactly the tokens of ``rows[i]``; logits (B, 1, V) after the last of them."""

    # -- propose -----------------------------------------------------------------------------------------------

    def propose(self, rows: Seq[Sequence], budgets: Seq[Budget]) -> list[DraftTree]:
        drafts = [self._drafts[row.id] for row in rows]
        for row, draft, budget in zip(rows, drafts, budgets, strict=True):
            allowed, cap = Budget.of(budget), min(self.policy.begin(row), budget, self._reach(len(row.token_ids)))
            nodes, branches = allowed.max_nodes(self._max_nodes), allowed.width(self.num_branches)
            draft.begin(row.pending, cap, nodes, branches)
        drafting = self._rows_to_feed(rows, drafts)
        if drafting:
            self._draft(drafting)
        return [self._tree(draft) for draft in drafts]

    def _rows_to_feed(self, rows: Seq[Sequence], drafts: Seq[Draft]) -> list[Sequence]:
        """The rows that the forwards of this step run over."""
        return [row for row, draft in zip(rows, drafts, strict=True) if draft.cap > 0]

    def _reach(self, length: int) -> int:
        """How many tokens can be drafted after ``length`` tokens: the last is never fed; 0 or less for none."""
        context = self.model.context_length
        return sys.maxsize if context is None else context - length + 1

    def _draft(self, rows: Seq[Sequence]) -> None:
        """Grow the drafts of these rows level by level."""
        drafts = [self._drafts[row.id] for row in rows]
        self._extend(rows, drafts, self._first_logits(rows, drafts), 0)
        for level in range(1, max(draft.cap for draft in drafts)):
            for row, draft in zip(rows, drafts, strict=True):
                if not (self._is_open(draft, level) and self.policy.go_on(row, level)):
                    draft.frontier = []
            if not any(draft.frontier for draft in drafts):
                break
            self._extend(rows, drafts, self._expand(drafts), level)

    def _is_open(self, draft: Draft, level: int) -> bool:
        return bool(draft.frontier) and level < draft.cap and self._room(draft) > 0

    def _expand(self, drafts: Seq[Draft]) -> torch.Tensor:
        """Feed the frontier of every row; logits (B, F, V). Rows with a smaller frontier are padded."""
        width = max(1, *(len(draft.frontier) for draft in drafts))
        num_fed = self._cache.lengths[drafts[0].slot] - drafts[0].trunk
        for draft in drafts:
            draft.offset_of.update(zip(draft.frontier, range(num_fed, num_fed + width), strict=False))
        fed = [[draft.tokens[node] for node in draft.frontier] for draft in drafts]
        tokens = self._known([row + [0] * (width - len(row)) for row in fed])
        counts = tuple(map(len, fed))
        if self.num_branches == 1:
            depths = torch.tensor([[0 if count else -1 - num_fed] for count in counts])
            nodes = lm.Nodes(tokens, depths, counts)
        else:
            nodes = lm.Nodes(tokens, *self._shape(drafts, num_fed, width), num_fed=num_fed)
        logits = self.model.forward(nodes, self._cache)
        self._cache.commit([range(width)] * len(drafts))
        return logits

    @staticmethod
    def _shape(drafts: Seq[Draft], num_fed: int, width: int) -> tuple[torch.Tensor, tuple[int, ...], torch.Tensor]:
        """Depths (B, S + F), counts and ancestors (B, F, S + F) of a frontier after S fed columns.

        Padding has depth -1, the position of the pending token: the next one may lie outside of the context.
        """
        depths = torch.full((len(drafts), num_fed + width), -1, dtype=torch.long)
        ancestors = torch.zeros((len(drafts), width, num_fed + width), dtype=torch.bool)
        for i, draft in enumerate(drafts):
            for node, offset in draft.offset_of.items():
                depths[i, offset] = draft.depths[node] - 1  # the pending token is part of the trunk by now
            for j, node in enumerate(draft.frontier):
                ancestors[i, j, [draft.offset_of[above] for above in draft.path(node)]] = True
            for j in range(len(draft.frontier), width):
                ancestors[i, j, num_fed + j] = True
        return depths, tuple(len(draft.frontier) for draft in drafts), ancestors

    def _extend(self, rows: Seq[Sequence], drafts: Seq[Draft], logits: torch.Tensor, level: int) -> None:
        """Add the children of the frontier, and make the next frontier of them."""
        growing = self._growing(rows, drafts, logits, level)
        picks = [_Pick(rows[i], drafts[i], node, i, j) for i in growing for j, node in enumerate(drafts[i].frontier)]
        for draft in drafts:
            draft.frontier = []
        for sampled in (False, True):
            group = [pick for pick in picks if self._is_sampled(pick.row) == sampled]
            if group:
                self._grow(sampled)(group, self._fit(self._picked(logits, group)))

    def _growing(self, rows: Seq[Sequence], drafts: Seq[Draft], logits: torch.Tensor, level: int) -> list[int]:
        """Rows that get another level. The policy sees the law at the best node of the frontier, which is its first."""
        growing = [i for i, draft in enumerate(drafts) if self._is_open(draft, level)]
        laws: Seq[torch.Tensor | None] = [None] * len(growing)
        if growing and self.policy.wants_log_probs(level):
            paths = [drafts[i].path_tokens(drafts[i].frontier[0]) for i in growing]
            laws = list(sampling.log_probs(self._fit(logits[growing, 0]), [rows[i].law for i in growing], paths))
        return [i for i, law in zip(growing, laws, strict=True) if self.policy.keep_drafting(rows[i], level, law)]

    def _grow(self, sampled: bool) -> Callable[[Seq[_Pick], torch.Tensor], None]:
        """The function that gives children to the nodes of rows of one kind."""
        if sampled:
            return self._grow_sampled
        return self._grow_chains if self.num_branches == 1 else self._grow_matched

    @staticmethod
    def _picked(logits: torch.Tensor, picks: Seq[_Pick]) -> torch.Tensor:
        """Logits (M, V) of the picked nodes, without a copy where these are all."""
        if len(picks) == logits.shape[0] * logits.shape[1]:
            return logits.flatten(0, 1)
        return logits[[pick.row_index for pick in picks], [pick.column for pick in picks]]

    def _room(self, draft: Draft) -> int:
        """How many nodes the next level may have."""
        return min(draft.num_branches, draft.max_nodes - len(draft.tokens))

    def _is_sampled(self, row: Sequence) -> bool:
        """Whether the children of this row's nodes are draws from a law that the acceptance rule asks for."""
        return not (self._shares_noise or self._is_greedy or row.law.is_greedy)

    def _grow_matched(self, picks: Seq[_Pick], logits: torch.Tensor) -> None:
        """Children by the target's own noise, or the likeliest; the best paths of every row are kept and expanded."""
        candidates: dict[int, list[tuple[float, _Pick, int, float]]] = {}
        for pick, children in zip(picks, self._children(picks, logits), strict=True):
            for token, score in children:
                total = pick.draft.scores[pick.node] + score
                candidates.setdefault(pick.row_index, []).append((total, pick, token, score))
        for row_candidates in candidates.values():
            row_candidates.sort(key=lambda candidate: -candidate[0])
            for _, pick, token, score in row_candidates[: self._room(row_candidates[0][1].draft)]:
                pick.draft.frontier.append(pick.draft.add(pick.node, token, score))

    def _grow_chains(self, picks: Seq[_Pick], logits: torch.Tensor) -> None:
        """One child per node: by the target's own noise, or the likeliest."""
        laws, paths, positions = _context(picks)
        if self._is_greedy:
            tokens = sampling.argmax(sampling.log_probs(logits, laws, paths))
        else:
            tokens = sampling.choose(logits, laws, paths, positions)
        for pick, token in zip(picks, tokens.tolist(), strict=True):
            if token >= 0:
                pick.draft.frontier.append(pick.draft.add(pick.node, token, 0.0))

    def _children(self, picks: Seq[_Pick], logits: torch.Tensor) -> list[list[tuple[int, float]]]:
        """(token, score) of the children of every picked node, best first."""
        laws, paths, positions = _context(picks)
        if self._is_greedy:
            best = sampling.log_probs(logits, laws, paths).topk(self.num_branches, dim=-1)
            tokens, scores = best.indices, (best.values - best.values[:, :1]).double()
        else:
            tokens, scores = sampling.choose_siblings(logits, laws, paths, positions, self.num_branches)
        return [
            [(token, score) for token, score in zip(*columns, strict=True) if token >= 0 and score > float("-inf")]
            for columns in zip(tokens.tolist(), scores.tolist(), strict=True)
        ]

    def _grow_sampled(self, picks: Seq[_Pick], logits: torch.Tensor) -> None:
        """Draw children from the drafter's own law, without replacement, from a stream that the target never uses.

        None of them may be dropped for its value, so all stay and the first draw is the one that is expanded.
        """
        owners, paths, _ = _context(picks)
        laws = sampling.log_probs(logits, owners, paths)
        for pick, path, law in zip(picks, paths, laws, strict=True):
            own = noise.KeyedNoise(pick.row.seed, pick.row.num_steps, len(pick.row.token_ids))
            probs = law.exp()
            tokens = own.draft(len(path), probs, self._room(pick.draft))
            children = [pick.draft.add(pick.node, token, 0.0) for token in tokens]
            pick.draft.frontier = children[:1]
            pick.draft.laws[pick.node] = probs

    def _known(self, rows: Seq[Seq[int]]) -> torch.Tensor:
        """Rows of equal length as int64, the tokens that the drafter does not know replaced in the same way."""
        last = self.model.vocab_size - 1
        return torch.tensor([[min(token, last) for token in row] for row in rows])

    def _fit(self, logits: torch.Tensor) -> torch.Tensor:
        """(M, V of the drafter) -> (M, V of the target): padding tokens are cut off or impossible."""
        return lm.fit_vocabulary(logits, self._vocab_size)

    def _tree(self, draft: Draft) -> DraftTree:
        probs = None
        if draft.laws:
            blank = torch.zeros_like(next(iter(draft.laws.values())))
            probs = torch.stack([draft.laws.get(node, blank) for node in range(max(draft.laws) + 1)])
        return DraftTree(tuple(draft.tokens), tuple(draft.parents), probs=probs, source=self.name)


@dataclass(frozen=True)
class _Pick:
    """A frontier node that is about to get children, and where its logits lie: row and column."""

    row: Sequence
    draft: Draft
    node: int
    row_index: int
    column: int


def _context(picks: Seq[_Pick]) -> tuple[list[sampling.SamplingLaw], list[tuple[int, ...]], list[int]]:
    """Laws and paths of the picked nodes, and the positions of the tokens that follow them."""
    paths = [pick.draft.path_tokens(pick.node) for pick in picks]
    positions = [len(pick.row.token_ids) + len(path) for pick, path in zip(picks, paths, strict=True)]
    return [pick.row.law for pick in picks], paths, positions
