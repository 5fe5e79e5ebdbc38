"""Several drafters as one: their trees merged, or the first of them that knows something; and the keys of such."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from foredraft.config.drafting import DraftOptions, ModelOptions
from foredraft.config.options import anything, option
from foredraft.config.speculative import SpeculativeConfig
from foredraft.engine.drafter import Drafter, DraftSize, StepResult, WrappingDrafter, listens, own_result
from foredraft.engine.row import Row
from foredraft.errors import ConfigError
from foredraft.tree import DraftPlan, DraftTree

HANDED_ON = ("model", "revision", "dtype", "num_speculative_tokens")
"""Keys that are passed on to those of the parts that know them."""
NUM_BINS = 10
PRIOR_WEIGHT = 8.0  # observations that a drafter's own estimate, or the default, is worth
DEFAULT_RATE = 0.5  # of a node whose drafter says nothing
DEEPEST = 16


@dataclass(frozen=True, kw_only=True)
class CompositeOptions(DraftOptions, ModelOptions):
    """Drafters, each with keys of its own; a model or length that is given beside them is passed on to them."""

    drafters: Any = option(anything("list of names, mappings or configs"), help="what is combined, most trusted first")

    def check(self) -> None:
        """Make configs of the drafters.

        Raises: ConfigError for fewer than two, for a rule other than "match", and for what a drafter does not take.
        """
        super().check()
        name = self.method
        if isinstance(self.drafters, (str, Mapping)) or not isinstance(self.drafters, Sequence):
            raise ConfigError(f"method {name!r} needs drafters, a list of two or more; got {self.drafters!r}")
        handed_on = {key: getattr(self, key) for key in HANDED_ON if getattr(self, key) not in (None, 0)}
        parts = tuple(_part(part, handed_on) for part in self.drafters)
        rules = [self.rule, *(part.rule for part in parts)]
        other = sorted({rule.name for rule in rules if rule.needs_probs or not rule.is_lossless})
        if other:
            raise ConfigError(
                f"method {name!r} is exact under rejection_sample_method='match' only; it got {', '.join(other)}"
            )
        if len(parts) < 2 or any(part.method == "none" for part in parts):
            names = ", ".join(part.method for part in parts)
            raise ConfigError(f"method {name!r} combines two or more drafters; got {names or 'none'}")
        object.__setattr__(self, "drafters", parts)
        object.__setattr__(self, "num_speculative_tokens", max(part.num_speculative_tokens for part in parts))


def _part(value: Any, handed_on: Mapping[str, Any]) -> SpeculativeConfig:
    """The config of one drafter of several, with those keys of the whole that its method knows and it was not given."""
    if isinstance(value, SpeculativeConfig):
        return value
    given = {"method": value} if isinstance(value, str) else value
    if not isinstance(given, Mapping):
        raise ConfigError(f"drafters holds {value!r}; every one is a method's name, a mapping or a config")
    known = SpeculativeConfig.parse(given).definition.keys
    return SpeculativeConfig.parse({**{name: item for name, item in handed_on.items() if name in known}, **given})


class CompositeDrafter(WrappingDrafter):
    """Asks several drafters, and tells each the outcome of its own proposals.

    A part sees a step as if it had proposed those of its nodes that were verified: its tree is cut to them, the
    accepted path ends where its tree does, and features of nodes are those of its own. Features of the text are those
    of all that was committed, whoever proposed it.

    Where some parts are free and others are not, there are two ways to draft, with the free ones alone or with all, of
    which measured time chooses.

    Args:
      parts: two or more drafters, most trusted first.

    Raises: ConfigError for fewer than two.
    """

    sign = "+"  # between the names of parts

    def __init__(self, parts: Sequence[Drafter]) -> None:
        if len(parts) < 2:
            raise ConfigError(f"{self.name} combines drafters but got {len(parts)}; give two or more")
        super().__init__(parts)
        self._calibrations = [Calibration() for _ in parts]
        self._ways = self._ways_with(tuple(place for place, part in enumerate(self.parts) if part.facts.is_free))
        titles = tuple(self.sign.join(self.parts[place].name for place in way) for way in self._ways)
        self.facts = replace(self.facts, arms=titles if len(titles) > 1 else (), arm=len(titles) - 1)

    def _ways_with(self, free: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Places of the parts that draft together, way by way; the last one is taken where nobody chooses."""
        everything = tuple(range(len(self.parts)))
        return [free, everything] if 0 < len(free) < len(everything) else [everything]

    def propose(self, rows: Sequence[Row], budgets: Sequence[DraftSize]) -> list[DraftTree]:
        by_part: list[list[DraftTree]] = []
        chosen = getattr(budgets[0], "arm", None) if budgets else None
        way = self._ways[self.facts.arm if chosen is None else chosen]
        if chosen is not None:
            for budget in budgets:
                budget.arm = None  # composites among the parts choose for themselves
        for place, part in enumerate(self.parts):
            is_asked = place in way
            allowed = self._budgets(place, by_part, budgets) if is_asked else [DraftSize(0)] * len(budgets)
            by_part.append(part.propose(rows, allowed))
        proposed = [list(trees) for trees in zip(*by_part, strict=True)]
        for row, trees in zip(rows, proposed, strict=True):
            row.state[self] = trees
        return [self._combined(trees).planned(_last_plan(trees)) for trees in proposed]

    def _budgets(
        self, place: int, by_part: Sequence[Sequence[DraftTree]], budgets: Sequence[DraftSize]
    ) -> Sequence[DraftSize]:
        """What a part may draft for every row, by what the parts before it have proposed."""
        return budgets

    def _lacking(
        self, by_part: Sequence[Sequence[DraftTree]], budgets: Sequence[DraftSize], enough: float
    ) -> list[DraftSize]:
        """The budgets of rows for which no part so far has promised so many accepted tokens, nothing for the others."""
        has_enough = [False] * len(budgets)
        for calibration, trees in zip(self._calibrations, by_part, strict=False):
            for row, tree in enumerate(trees):
                if tree.num_draft_tokens and sum(calibration.scores(tree)[1:]) >= enough:
                    has_enough[row] = True
        return [DraftSize(0) if found else budget for found, budget in zip(has_enough, budgets, strict=True)]

    @abstractmethod
    def _combined(self, trees: Sequence[DraftTree]) -> DraftTree:
        """One tree for a row, of the trees of the parts."""

    def observe(self, rows: Sequence[Row], results: Sequence[StepResult]) -> None:
        proposed: list[list[DraftTree]] = [row.state[self] for row in rows]
        outcomes = []
        for place, part in enumerate(self.parts):
            own = [own_result(trees[place], result) for trees, result in zip(proposed, results, strict=True)]
            for result in own:
                if len(result.tree) > 1:
                    self._calibrations[place].observe(result.tree, result.path)
            if listens(part):
                part.observe(rows, own)
            outcomes.append(own)
        self._compare(outcomes)

    def _compare(self, outcomes: Sequence[Sequence[StepResult]]) -> None:
        """What became of the proposals of every part, row by row."""


def _last_plan(trees: Sequence[DraftTree]) -> DraftPlan | None:
    """The plan of the last part whose policy has made one."""
    plans = (tree.plan for tree in reversed(trees))
    return next((plan for plan in plans if plan is not None and plan.cause == "policy"), None)


class Calibration:
    """Turns what a drafter thinks of its nodes into how often such nodes are accepted.

    A node's rate is the chance that it is accepted once its parent was; nodes are alike when they have the same depth
    (up to 16) and their rate as the drafter states it falls into the same tenth. Until there is experience the stated
    rate holds, a half where there is none.
    """

    def __init__(self) -> None:
        self._tried: dict[tuple[int, int], float] = {}
        self._accepted: dict[tuple[int, int], float] = {}

    def scores(self, tree: DraftTree) -> tuple[float, ...]:
        """Estimated chance of every node to be accepted, the root's 1; never more than its parent's."""
        scores = [1.0]
        for node in range(1, len(tree)):
            scores.append(scores[tree.parents[node]] * self._rate(tree, node))
        return tuple(scores)

    def observe(self, tree: DraftTree, path: Sequence[int]) -> None:
        """Learn from a draft of which ``path``, root first, was accepted: its nodes and their siblings were tried."""
        accepted = set(path)
        for parent in path:
            for node in tree.children[parent]:
                kind = self._kind(tree, node)
                self._tried[kind] = self._tried.get(kind, 0.0) + 1.0
                self._accepted[kind] = self._accepted.get(kind, 0.0) + (node in accepted)

    def _rate(self, tree: DraftTree, node: int) -> float:
        kind = self._kind(tree, node)
        prior = PRIOR_WEIGHT * self._stated(tree, node)
        return (self._accepted.get(kind, 0.0) + prior) / (self._tried.get(kind, 0.0) + PRIOR_WEIGHT)

    def _kind(self, tree: DraftTree, node: int) -> tuple[int, int]:
        bin_ = min(int(self._stated(tree, node) * NUM_BINS), NUM_BINS - 1) if tree.scores is not None else -1
        return min(tree.depths[node], DEEPEST), bin_

    @staticmethod
    def _stated(tree: DraftTree, node: int) -> float:
        """The drafter's own estimate for a node, given its parent."""
        if tree.scores is None:
            return DEFAULT_RATE
        above = tree.scores[tree.parents[node]]
        return min(1.0, max(0.0, tree.scores[node] / above)) if above > 0.0 else 0.0
