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

    def level(self, depth: int, picks: Seq[Pick]) -> tuple[torch.Tensor, Seq[int]]:
        """Logits (M, V), and for every pick which of the M rows are its own; several may share one."""
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
    arXiv:1903.06059) for siblings. Deviation: nodes that share a row of logits share their candidates, with the history
    of the first of them.
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
            logits, rows = expander.level(depth, picks)
            self._add(picks, logits, rows)

    def _add(self, picks: Seq[Pick], logits: torch.Tensor, rows: Seq[int]) -> None:
        """Give children to picked nodes; those of one row of logits get the same candidates."""
        groups: dict[int, list[Pick]] = {}
        for pick, row in zip(picks, rows, strict=True):
            groups.setdefault(row, []).append(pick)
        for is_sampled in (False, True):
            some = [row for row, group in groups.items() if self._is_sampled(group[0].draft.row) == is_sampled]
            if not some:
                continue
            values = logits if some == list(range(len(logits))) else logits[some]
            several = [groups[row] for row in some]
            found = (self._drawn if is_sampled else self._best)(several, values)
            for group, tokens in zip(several, found, strict=True):
                for pick in group:
                    for child, token in zip(pick.children, tokens, strict=False):
                        pick.draft.tokens[child] = token

    def _is_sampled(self, row: Sequence) -> bool:
        """Whether the children of this row's nodes are draws from a law that the acceptance rule asks for."""
        return self._needs_law and not row.law.is_greedy

    def _best(self, groups: Seq[Seq[Pick]], logits: torch.Tensor) -> list[list[int]]:
        """The best successors of every group: under the noise of the target, or by the law of the expander alone."""
        return self.ranked(logits, _places(groups), max(map(_width, groups)))

    def _drawn(self, groups: Seq[Seq[Pick]], logits: torch.Tensor) -> list[list[int]]:
        """Draws without replacement from the law of the expander, which the acceptance rule is told.

        Nodes that share a row share the draws: only one of them can be reached, by choices that these draws have no
        part in.
        """
        places = _places(groups)
        found = []
        for group, path, law in zip(groups, places.paths, self._candidates.whole(logits, places), strict=True):
            row, probs = group[0].draft.row, law.exp()
            own = noise.KeyedNoise(row.seed, row.num_steps, len(row.token_ids))
            found.append(own.draft(len(path), probs, _width(group), group[0].node))
            for pick in group:
                pick.draft.laws[pick.node] = probs
        return found


def _width(group: Seq[Pick]) -> int:
    """The most children that a node of a group has."""
    return max(len(pick.children) for pick in group)


def _places(groups: Seq[Seq[Pick]]) -> Places:
    """Of the first node of every group."""
    firsts = [group[0] for group in groups]
    paths = [pick.draft.path_tokens(pick.node) for pick in firsts]
    positions = [len(pick.draft.row.token_ids) + len(path) for pick, path in zip(firsts, paths, strict=True)]
    return Places([pick.draft.row.law for pick in firsts], paths, positions)
