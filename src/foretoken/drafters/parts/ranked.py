"""Fills static trees level by level with whatever can say what follows a node: heads over the target's features."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from foretoken.config.acceptance import RULES
from foretoken.drafters.parts.candidates import Candidates, Places
from foretoken.drafters.parts.rank_tree import RankTree
from foretoken.drafters.parts.treeshape import TreeShape
from foretoken.engine.drafter import Budget
from foretoken.engine.sequence import Sequence
from foretoken.lazy import Lazy
from foretoken.tree import DraftTree

if TYPE_CHECKING:
    import torch

    from foretoken.heads.vocabulary import DraftVocabulary
    from foretoken.law import noise
else:
    torch = Lazy("torch")
    noise = Lazy("foretoken.law.noise")

UNKNOWN = -1


@dataclass(eq=False)
class RankedDraft:
    """A static tree that is being filled for one row.

    Args:
      row: whose text goes on.
      shape: what of the tree its budget allows.

    Attributes:
      tokens: of the nodes, -1 where there is none yet, or none at all.
      laws: by node, the law (V,) that its children were drawn from, where the acceptance rule needs it.
    """

    row: Sequence
    shape: TreeShape
    tokens: list[int] = field(default_factory=list)
    laws: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tokens = [self.row.pending] + [UNKNOWN] * (len(self.shape.parents) - 1)

    @property
    def depth(self) -> int:
        """Levels below the root."""
        return len(self.shape.ends) - 1

    def level(self, depth: int) -> range:
        """The nodes of one depth."""
        return range(self.shape.ends[depth - 1] if depth else 0, self.shape.ends[depth])

    def parents_at(self, depth: int) -> dict[int, list[int]]:
        """The nodes of one depth that are known and have children, and these, best rank first."""
        children: dict[int, list[int]] = {}
        for node in self.level(depth + 1) if depth < self.depth else ():
            parent = self.shape.parents[node]
            if self.tokens[parent] != UNKNOWN:
                children.setdefault(parent, []).append(node)
        return children

    @property
    def widths(self) -> list[int]:
        """The most children of a node, by depth."""
        ranks = self.shape.ranks
        return [1 + max(ranks[node] for node in self.level(depth)) for depth in range(1, self.depth + 1)]

    def path_tokens(self, node: int) -> tuple[int, ...]:
        """Draft tokens from below the root to a node."""
        tokens = []
        while node > 0:
            tokens.append(self.tokens[node])
            node = self.shape.parents[node]
        return tuple(reversed(tokens))

    def tree(self, source: str) -> DraftTree:
        """What is known of it; a node without a token takes its descendants along."""
        known = [node for node, token in enumerate(self.tokens) if token != UNKNOWN]
        index = {node: i for i, node in enumerate(known)} | {-1: -1}
        probs = None
        if self.laws:
            blank = torch.zeros_like(next(iter(self.laws.values())))
            probs = torch.stack([self.laws.get(node, blank) for node in known if node <= max(self.laws)])
        return DraftTree(
            tuple(self.tokens[node] for node in known),
            tuple(index[self.shape.parents[node]] for node in known),
            probs=probs,
            source=source,
        )


@dataclass(frozen=True)
class Pick:
    """A node that is about to get children.

    Args:
      index: of its draft among those that are filled.
      children: its own, best rank first.
    """

    draft: RankedDraft
    index: int
    node: int
    children: list[int]


class LevelExpander(Protocol):
    """Says what follows the nodes of one level of static trees."""

    def level(self, depth: int, picks: Seq[Pick]) -> torch.Tensor:
        """Logits (M, V) after the picked nodes."""
        ...


class RankedGrowth:
    """How static trees are filled: the r-th child of a node is the r-th best successor that an expander knows of.

    Args:
      tree: whose most valuable nodes within the budget of a row are filled.
      target_vocab_size: V, to which logits are cut or padded.
      max_depth: levels below the root at most.
      max_nodes: root included; None for all of the tree.
      sample_method: "probabilistic" draws siblings, "greedy" takes the likeliest ones.
      vocabulary: tokens that the columns of the expander's logits stand for, where these are not all.
      acceptance: the rule of the engine. Under "match" siblings are the Gumbel-top-k of the expander's law with the
        noise of the target, so the best one is what the target would draw from that law; under rules that need a law
        they are draws from a stream of their own, in draw order, none of them dropped; under others the likeliest.

    Source: Medusa (Cai et al. 2024, arXiv:2401.10774) for static trees; Gumbel-top-k (Kool et al. 2019,
    arXiv:1903.06059) for siblings.
    """

    def __init__(
        self,
        tree: RankTree,
        *,
        target_vocab_size: int,
        max_depth: int,
        max_nodes: int | None = None,
        sample_method: str = "probabilistic",
        acceptance: str = "match",
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        rule = RULES[acceptance]
        self.tree = tree
        self.takes_trees = True
        self._max_depth = max_depth
        self._max_nodes = max_nodes
        is_greedy = sample_method == "greedy" or not (rule.shares_noise or rule.needs_law)
        self._needs_law = rule.needs_law and not is_greedy
        self._candidates = Candidates(target_vocab_size, vocabulary, is_greedy=is_greedy)
        self._shapes: dict[tuple[int, int, bool], TreeShape] = {}

    def use(self, tree: RankTree) -> None:
        """Fill another tree from now on, all of it."""
        self.tree, self._max_nodes, self._shapes = tree, None, {}

    def ranked(self, logits: torch.Tensor, places: Places, k: int) -> list[list[int]]:
        """The k best successors of nodes, best first, as they would fill a tree."""
        found = self._candidates.best(logits, places, k, as_chances=False)
        return [[token for token, _ in scored] for scored in found]

    def begin(self, row: Sequence, budget: Budget) -> RankedDraft:
        """A draft of which nothing but the root is known."""
        allowed = Budget.of(budget)
        key = (
            min(allowed.depth, self._max_depth, self.tree.depth),
            min(allowed.max_nodes(self._max_nodes), len(self.tree)),
            allowed.chains_only or not self.takes_trees,
        )
        if key not in self._shapes:
            self._shapes[key] = self.tree.within(Budget(*key))
        return RankedDraft(row, self._shapes[key])

    def fill(self, drafts: Seq[RankedDraft], expander: LevelExpander) -> None:
        """Give the nodes of all drafts their tokens, one call of the expander per level."""
        for depth in range(max((draft.depth for draft in drafts), default=0)):
            picks = [
                Pick(draft, i, node, children)
                for i, draft in enumerate(drafts)
                for node, children in draft.parents_at(depth).items()
            ]
            if not picks:
                return
            paths = [pick.draft.path_tokens(pick.node) for pick in picks]
            widths = [len(pick.children) for pick in picks]
            wanted = [_Wanted(*each) for each in zip(picks, paths, widths, strict=True)]
            for pick, tokens in zip(picks, self._successors(wanted, expander.level(depth, picks)), strict=True):
                _give(pick, tokens)

    def fill_at_once(self, drafts: Seq[RankedDraft], logits: torch.Tensor) -> None:
        """Give the nodes of all drafts their tokens, where what follows a node depends on its depth alone.

        All nodes of a level have the same candidates; of draws, too, since only one of them can be reached, by choices
        that the draws have no part in. What processors look at is the text without the draft.

        Args:
          logits: (B, D, V) after the nodes of depth 0, 1, ... of every draft.
        """
        wanted = [
            _Wanted(Pick(draft, i, draft.level(depth)[0], []), (), draft.widths[depth], depth)
            for i, draft in enumerate(drafts)
            for depth in range(draft.depth)
        ]
        is_whole = len(wanted) == logits.shape[0] * logits.shape[1]
        rows = logits.flatten(0, 1) if is_whole else logits[[w.pick.index for w in wanted], [w.depth for w in wanted]]
        found = dict(zip(((w.pick.index, w.depth) for w in wanted), self._successors(wanted, rows), strict=True))
        for i, draft in enumerate(drafts):
            for depth in range(draft.depth):
                law = draft.laws.get(draft.level(depth)[0])
                for node, children in draft.parents_at(depth).items():
                    _give(Pick(draft, i, node, children), found[i, depth])
                    if law is not None:
                        draft.laws[node] = law

    def _successors(self, wanted: Seq[_Wanted], logits: torch.Tensor) -> list[list[int]]:
        """Tokens after every node, the best or the first drawn one first."""
        found: dict[int, list[int]] = {}
        for is_sampled in (False, True):
            some = [i for i, one in enumerate(wanted) if self._is_sampled(one.pick.draft.row) == is_sampled]
            if some:
                values = logits if len(some) == len(wanted) else logits[some]
                of_some = (self._drawn if is_sampled else self._best)([wanted[i] for i in some], values)
                found |= dict(zip(some, of_some, strict=True))
        return [found[i] for i in range(len(wanted))]

    def _is_sampled(self, row: Sequence) -> bool:
        """Whether the children of this row's nodes are draws from a law that the acceptance rule asks for."""
        return self._needs_law and not row.law.is_greedy

    def _best(self, wanted: Seq[_Wanted], logits: torch.Tensor) -> list[list[int]]:
        """Under the noise of the target, or by the law of the expander alone."""
        return self.ranked(logits, _places(wanted), max(one.width for one in wanted))

    def _drawn(self, wanted: Seq[_Wanted], logits: torch.Tensor) -> list[list[int]]:
        """Draws without replacement from the law of the expander, which the acceptance rule is told."""
        found = []
        for one, law in zip(wanted, self._candidates.whole(logits, _places(wanted)), strict=True):
            row, node, probs = one.pick.draft.row, one.pick.node, law.exp()
            own = noise.KeyedNoise(row.seed, row.num_steps, len(row.token_ids))
            found.append(own.draft(one.at_depth, probs, one.width, node))
            one.pick.draft.laws[node] = probs
        return found


@dataclass(frozen=True)
class _Wanted:
    """Successors that are asked for.

    Args:
      path: draft tokens up to the node, as far as they are known.
      width: how many.
      depth: of the node, where its path is not known.
    """

    pick: Pick
    path: tuple[int, ...]
    width: int
    depth: int = -1

    @property
    def at_depth(self) -> int:
        return len(self.path) if self.depth < 0 else self.depth


def _give(pick: Pick, tokens: Seq[int]) -> None:
    """Give the children of a node the best of these tokens; those that are left over stay unknown."""
    for child, token in zip(pick.children, tokens, strict=False):
        pick.draft.tokens[child] = token


def _places(wanted: Seq[_Wanted]) -> Places:
    rows = [one.pick.draft.row for one in wanted]
    positions = [len(row.token_ids) + one.at_depth for row, one in zip(rows, wanted, strict=True)]
    return Places([row.law for row in rows], [one.path for one in wanted], positions)
